"""`plan` without a recipe, for several clusters, and for devices that train differently or not at all."""

import json
import re
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.predict.layouts import SearchLimits
from meshwright.predict.recipe import plan_recipe
from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import Run

LONG = ["data.sequence_length=1048576", "model.max_positions=1048576", "training.global_batch=8"]


def run(*overrides: str, model: str = "llama-3.2-1b", tmp_path: Path) -> Run:
    (tmp_path / "run.yaml").write_text(f"model: {{name: {model}}}\n")
    return load_recipe(tmp_path / "run.yaml", overrides)


def printed(capsys: pytest.CaptureFixture, *words: str, status: int = 0) -> str:
    assert main(["plan", *words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_a_models_name_is_planned_as_its_recipe_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(tmp_path=tmp_path)
    words = ["data.sequence_length=2048", "--cluster", "8xh100", "--no-methods"]
    named = printed(capsys, "llama-3.2-1b", *words)
    assert named == printed(capsys, str(tmp_path / "run.yaml"), *words)
    assert named.startswith("llama-3.2-1b: 1.24B parameters; 64 x 2048 tokens a step\n8 x H100")
    assert "methods, each in" not in named
    assert "methods, each in" in printed(capsys, "llama-3.2-1b", *words[:-1])


def test_a_hugging_face_directory_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "rms_norm_eps": 1e-5}
    config |= {"max_position_embeddings": 2048, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert printed(capsys, str(tmp_path), "model.weights=random", "--cluster", "1xa100").startswith(f"{tmp_path}: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope"], "nope: no recipe of this name, nor a model: .* there are gpt2, "),
        (["llama-3.1-8x"], "did you mean 'llama-3.1-8b'"),
        (["nope.yaml"], "nope.yaml: no such file"),
        (["gpt2", "trainin.steps=3"], "trainin"),
        (
            ["gpt2", "data.sequence_length=4096"],
            "1024 positions; use data.sequence_length=1024",
        ),
        (["gpt2", "--cluster", "8xh100", "--cluster", "8xa100", "--explain", "time"], "--explain is for one cluster"),
    ],
)
def test_what_cannot_be_planned_says_what_can(words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert re.search(message, printed(capsys, *words, status=2))


def test_clusters_are_compared_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ("8xh100", "16xa100", "1xt4")
    several = ["llama-3-8b", *(word for name in names for word in ("--cluster", name))]
    lines = printed(capsys, *several).splitlines()
    assert [line[:6] for line in lines if line[:1].strip()] == ["8 x H1", "16 x A", "1 x T4", "cost o"]
    assert "no layout that this version supports fits" in next(line for line in lines if line.startswith("1 x T4"))
    plans = json.loads(printed(capsys, *several, "--json"))["clusters"]
    for name, facts in zip(names[:2], plans, strict=False):
        alone, _ = plan_recipe(run(model="llama-3-8b", tmp_path=tmp_path), base_dir=tmp_path, cluster=name)
        assert alone.chosen
        assert facts["chosen"]["step_time"]["value"] == pytest.approx(alone.chosen.time.total, rel=1e-7)  # rounded


def test_devices_that_train_otherwise_are_named(capsys: pytest.CaptureFixture) -> None:
    """Figures of devices that need another PyTorch, and of those without products in bf16."""
    words = ["llama-3.2-1b", "--no-methods", "--cluster"]
    assert "this version trains on CPUs and GPUs" in printed(capsys, *words, "8xtpu-v5p")
    assert "this version trains on" not in printed(capsys, *words, "8xh100")
    slow = printed(capsys, *words, "8xv100")
    assert (found := re.search(r"^bf16 +V100.* with training.precision=fp16: ([\d.]+) s a step", slow, re.MULTILINE))
    half = printed(capsys, *words, "8xv100", "training.precision=fp16")
    assert not re.search("^bf16", half, re.MULTILINE)
    assert float(found[1]) < float(re.findall(r"^\* +([\d.]+) s", slow, re.MULTILINE)[0])
    assert "price unknown: set price_per_hour" in printed(capsys, *words, "8xt4")


def test_hours_are_hours(capsys: pytest.CaptureFixture) -> None:
    shown = printed(capsys, "llama-3.1-8b", "--no-methods", "--cluster", "8xh100", *LONG)
    assert re.search(r"^\* +1\.\d+ h \(1\.\d+-2\.\d+\)", shown, re.MULTILINE)
    assert "e+0" not in shown


def test_a_choice_never_exceeds_the_device(tmp_path: Path) -> None:
    """A million tokens need activations in host memory, which costs little time."""
    long = run(*LONG, model="llama-3.1-8b", tmp_path=tmp_path)
    plan, facts = plan_recipe(long, base_dir=tmp_path, cluster="8xh100", limits=SearchLimits(methods=False))
    assert plan.chosen
    assert plan.chosen.verdict == "fits"
    assert facts["chosen"]["change"] == "activations"
    for candidate in (*plan.searched.ranked, *plan.searched.strategies.values()):
        assert (candidate.memory.total <= candidate.capacity) == (candidate.verdict != "does not fit")


def test_a_recipe_that_forbids_offloading_is_planned_without(tmp_path: Path) -> None:
    small = ["training.global_batch=8", "data.sequence_length=512"]
    free, _ = plan_recipe(run(*small, model="llama-3-8b", tmp_path=tmp_path), base_dir=tmp_path, cluster="2xa100-40g")
    assert free.chosen
    assert free.chosen.job.layout.offload != "none"
    forbidden = run(*small, "layout.offload=none", model="llama-3-8b", tmp_path=tmp_path)
    plan, _ = plan_recipe(forbidden, base_dir=tmp_path, cluster="2xa100-40g")
    assert plan.chosen is None
    assert {candidate.job.layout.offload for candidate in plan.searched.strategies.values()} == {"none"}


def test_a_written_plan_names_its_cluster(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    printed(capsys, "gpt2", "--no-methods", "--cluster", "4x3090", "--write", str(tmp_path / "plan.yaml"))
    assert load_recipe(tmp_path / "plan.yaml").cluster == "4x3090"
    again = printed(capsys, str(tmp_path / "plan.yaml"), "--no-methods")
    assert "4 x RTX 3090" in again
