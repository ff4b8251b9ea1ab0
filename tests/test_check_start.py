"""`check` reports the same as `train` about a recipe: its base, its tokenizer, its objective, its targets."""

import re
from pathlib import Path

import pytest

from conversations import chat_tokenizer, lines
from meshwright import train
from meshwright.cli import check
from meshwright.cli.main import main
from meshwright.launch import forkserver
from meshwright.machine import Machine
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import load_recipe

TEXT = "\n".join(f"def add_{n}(x):\n    return x + {n}\n" for n in range(60))
BASE = """\
model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2, ffn: 24, max_positions: 32, vocab: 280}
data: {sources: text.txt, sequence_length: 16, tokenizer_vocab: 280, cache_dir: cache}
training: {steps: 1, global_batch: 2, precision: fp32, lr_schedule: {warmup: 0}, evaluation: {batches: 0}}
run_dir: runs/first
device: cpu
"""
TUNED = ["checkpoint.start_from=runs/first", "run_dir=runs/tuned", "finetune={method: lora, rank: 2}"]
OWN_TOKENIZER = "data.tokenizer=runs/first/tokenizer"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run, and text that the run has not seen."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "text.txt").write_text(TEXT)
    (folder / "other.txt").write_text(TEXT.replace("add", "subtract"))
    (folder / "run.yaml").write_text(BASE)
    (folder / "scales").mkdir()
    (folder / "scales" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(load_recipe("run.yaml"))
    return folder


REFUSED = {
    "another width": ([OWN_TOKENIZER, "model.hidden=24"], "has shape (280, 16), but this run's has (280, 24)"),
    "another tokenizer": (["data.sources=other.txt"], "set data.tokenizer=runs/first/tokenizer"),
    "no such base": (["checkpoint.start_from=runs/nowhere"], "is neither a checkpoint nor a run with one"),
    "no such adapter": (["finetune.start_from=nowhere"], "nowhere is not a peft adapter"),
    "another adapter": (["finetune.start_from=scales"], "scales has peft_type=IA3"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_its_base_is_refused_by_both(
    folder: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(["check", "run.yaml", *TUNED, *words]) == 1
    (problem,) = capsys.readouterr().err.splitlines()
    assert message in problem
    with pytest.raises(ValueError, match=re.escape(message)):
        train(load_recipe("run.yaml", [*TUNED, *words]))


@pytest.mark.parametrize("words", [[], ["data.sources=other.txt", OWN_TOKENIZER]], ids=["same data", "its tokenizer"])
def test_what_fits_its_base_is_right(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert main(["check", "run.yaml", *TUNED, *words]) == 0


def test_every_wrong_target_is_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["check", "run.yaml", *TUNED, "finetune.targets=[q_prj, wq, wz]"]) == 1
    (problem,) = capsys.readouterr().err.splitlines()
    assert problem.count("q_prj") == problem.count("'wz' matches no module") == 1


@pytest.mark.slow
def test_adapters_train_beside_random_weights_only_where_the_recipe_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = ["finetune={method: lora, rank: 2}", "run_dir=runs/alone"]
    assert main(["check", "run.yaml", *words]) == 1
    (problem,) = capsys.readouterr().err.splitlines()
    assert "finetune.method=lora: the frozen weights would be random" in problem
    with pytest.raises(UserError, match=r"or model\.weights=random if intended"):
        train(load_recipe("run.yaml", words))
    assert main(["check", "run.yaml", *words, "model.weights=random"]) == 0
    assert main(["rehearse", "run.yaml", *words]) == 0
    assert main(["check", "run.yaml", "finetune={method: full}", "run_dir=runs/alone"]) == 0


TOO_MUCH = {
    "memory": (
        ["model=llama-3-8b"],
        r"predicted to need 1\d\d of 16.0 GiB on each of 1 x cpu .*; what would be: .*'layout.offload={.*disk.*}' ",
    ),
    "time": (
        ["model=gpt2", "training.global_batch=400000"],
        r"predicted to take [\d,]+ s a step on 1 x cpu .*; .*more devices ",
    ),
}


@pytest.mark.parametrize(("words", "message"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_what_no_machine_does_is_warned_of(
    folder: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """More memory than exists, or hours per step: a warning with a remedy; with --strict, an error."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(check, "find_machine", lambda _: Machine("cpu", "cpu", 2, 16 * 2**30))
    command = ["check", "run.yaml", "run_dir=runs/large", "training.precision=bf16", *words]
    assert main(command) == 0
    told = capsys.readouterr()
    (warning,) = (line for line in told.err.splitlines() if line.startswith("warning: "))
    assert re.search(message, warning)
    assert "no errors, but see the warning" in told.out
    assert "no errors; train it with" not in told.out
    assert main([*command, "--strict"]) == 1
    assert main(["check", "run.yaml", "run_dir=runs/small", "--strict"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "precision=fp8 cluster=2xa100",
            r"precision=fp8 \(tensorwise\) has no kernel on 2 x A100.*instead of [\d.]+ s with",
        ),
        ("precision=nvfp4 cluster=2xb200", r"precision=nvfp4 has no kernel on 2 x B200"),
        ("precision=fp8 cluster=2xh100", ""),
    ],
)
def test_a_precision_that_a_gpu_emulates_is_warned_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    precision, cluster = words.split()
    sizes = ["model=gpt2", "run_dir=runs/emulated", "layout={dp_shard: 2}", "training.global_batch=8"]
    assert main(["check", "run.yaml", *sizes, f"training.{precision}", cluster]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == bool(message)
    assert re.search(message, "".join(warnings))


@pytest.mark.parametrize(("cluster", "emulated"), [("1xa100", True), ("1xh100", False)])
def test_a_rehearsal_is_told_of_gpus_without_fp8(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, emulated: bool
) -> None:
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> None:
        started.append(command)
        raise UserError("enough")

    monkeypatch.chdir(folder)
    monkeypatch.setattr(forkserver, "start", start)
    assert main(["rehearse", "run.yaml", "model=gpt2", "training.precision=fp8", "--cluster", cluster]) == 2
    assert ("--without-fp8" in started[0]) == emulated
    assert "--on-gpu" in started[0]


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    chat_tokenizer().save(tmp_path / "tokenizer")
    said = {"chosen": [{"role": "assistant", "content": "Blue."}], "rejected": [{"role": "assistant", "content": "No"}]}
    (tmp_path / "pairs.jsonl").write_text(lines(*({"prompt": f"Sky {n}?", **said} for n in range(9))))
    (tmp_path / "text.txt").write_text(TEXT)
    data = (
        "{sources: pairs.jsonl, tokenizer: tokenizer, sequence_length: 64, packing: best_fit, separate_documents: true}"
    )
    model = BASE.splitlines()[0].replace("280", "320").replace("max_positions: 32", "max_positions: 64")
    recipe = [model, f"data: {data}", *BASE.splitlines()[2:]]
    (tmp_path / "run.yaml").write_text("\n".join(recipe) + "\n")
    return tmp_path


def test_an_objective_that_the_data_cannot_serve_is_refused_by_both(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = ["data.chat={template: plain}"]
    for words, message in (
        (plain, "data source preferences contains preferences; train on them with training.preference={}"),
        (["training.preference={}", "data.sources=text.txt"], "but data source text has none"),
    ):
        assert main(["check", "run.yaml", *words]) == 1
        (problem,) = capsys.readouterr().err.splitlines()
        assert message in problem
        with pytest.raises(ValueError, match=re.escape(message)):
            train(load_recipe("run.yaml", words))


def test_the_sample_shown_holds_whole_pairs(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "training.preference={}", "data.chat={template: plain}"]) == 0
    text = capsys.readouterr().out
    assert text.count(", chosen: ") == text.count(", rejected: ") > 0
    assert text.index("- pair 1, chosen: ") < text.index("- pair 1, rejected: ")


@pytest.mark.parametrize(("behind", "told"), [("", True), ("{{ eos_token }}", False)])
def test_a_template_that_ends_no_turn_is_told(
    pairs: Path, behind: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (pairs / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}" + behind + "{% endfor %}")
    assert main(["check", "run.yaml", "training.preference={}", "data.chat={template: mine.jinja}"]) == 0
    assert ("mine.jinja has no special token after" in capsys.readouterr().out) == told
