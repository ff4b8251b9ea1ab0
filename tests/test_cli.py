"""The command line: verbs, help without torch, exit statuses, presets that load back, `check`'s reports."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from jsonschema import Draft202012Validator

from meshwright.cli import doctor
from meshwright.cli.common import presets
from meshwright.cli.main import main
from meshwright.cli.parser import VERBS
from meshwright.families import PRESETS, resolve_model
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import load_recipe, parse_spec
from meshwright.spec.run import Run
from meshwright.spec.schema import recipe_schema
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4, vocab: 300}
data: {sources: "*.txt", tokenizer_vocab: 300, sequence_length: 16}
training: {steps: 4, global_batch: 8, lr_schedule: {warmup: 1}}
layout: {dp_shard: 2}
device: cpu
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a recipe and its text, to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 50)
    (tmp_path / "b.txt").write_text("a dog ran in the fog\n" * 50)
    return tmp_path


def loaded_modules(*words):
    """Modules in memory after one command line, run in a separate process."""
    code = "import sys, meshwright.cli.main as cli; cli.main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return found.stdout, set(found.stderr.split())


def test_help_names_every_verb_and_loads_nothing_heavy():
    text, modules = loaded_modules("--help")
    assert all(f"\n  {verb} " in text for verb in VERBS)
    assert not modules & {"torch", "pydantic", "yaml", "numpy", "tokenizers"}


@pytest.mark.every(2)
@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_an_example_and_never_loads_torch(verb):
    text, modules = loaded_modules(verb, "--help")
    assert text.startswith(f"usage: meshwright {verb} ")
    assert f"\n  meshwright {verb}" in text.split("example")[1]
    assert "torch" not in modules


def test_check_never_loads_torch(folder):
    text, modules = loaded_modules("check", "run.yaml")
    assert "no errors" in text
    assert "torch" not in modules


def test_version_and_bare_command(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("meshwright 0.")
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: meshwright VERB")


def test_every_preset_is_listed_with_what_it_is(capsys):
    assert main(["init"]) == 0
    text = capsys.readouterr().out
    for name, path in presets().items():
        title = path.read_text().splitlines()[0].removeprefix("# ")
        assert len(title) > 10
        assert f"{name} " in text
        assert title in text
    assert main(["init", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(presets())


@pytest.mark.parametrize("options", [[], ["--full"]], ids=["short", "full"])
@pytest.mark.parametrize("name", presets())
def test_a_printed_preset_is_the_same_run_with_its_settings_explained(name, options, capsys):
    assert main(["init", name, *options]) == 0
    text = capsys.readouterr().out
    run = load_recipe(presets()[name])
    assert parse_spec(text, Run) == run
    assert "Peak learning rate." in text
    assert ("Data-parallel copies" in text or "micro_batch: auto" in text) == bool(options)
    assert max(map(len, text.splitlines()[1:])) <= 110  # the first line names a file
    assert options or len(text.splitlines()) < 100
    schema = Draft202012Validator(recipe_schema())
    assert not list(schema.iter_errors(yaml.safe_load(text)))
    given = re.sub(r"(?<!\.)\b(\d)e-", r"\1.0e-", presets()[name].read_text())  # PyYAML reads YAML 1.1, editors 1.2
    assert not list(schema.iter_errors(yaml.safe_load(given)))


@pytest.mark.parametrize("words", [["--schema", "demo"], ["--schema", "--full"], ["--schema", "--json"], ["--full"]])
def test_options_of_init_that_do_not_go_together_are_refused(words, capsys):
    assert main(["init", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: --schema describes every recipe" if "--schema" in words else "error: --full needs a"
    )


def test_the_schema_takes_every_short_form_and_refuses_mistakes(capsys):
    assert main(["init", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for text in (
        "model: gpt2",
        "{model: gpt2, layout: auto, data: {sources: stdlib}}",
        "{model: gpt2, data: {sources: {path: a.jsonl, weight: 1}}, callbacks: [ema], layout: {dp_shard: 2}}",
        "{model: gpt2, data: {sources: [a.txt, {path: b.txt}]}, training: {evaluation: {tasks: [a.jsonl]}}}",
        "{model: {name: x}, finetune: {method: qlora, targets: [wq]}, training: {optimizer: {name: my.Own}}}",
    ):
        assert parse_spec(text, Run)
        assert not list(validator.iter_errors(yaml.safe_load(text))), text
    for text in (
        "{}",
        "{model: gpt2, layot: {dp_shard: 2}}",
        "{model: gpt2, layout: {dp_shard: two}}",
        "{model: gpt2, layout: aut}",
        "{model: gpt2, training: {steps: -1}}",
        "{model: gpt2, training: {precision: bf17}}",
        "{model: gpt2, finetune: {method: loraa}}",
    ):
        with pytest.raises(UserError):
            parse_spec(text, Run)
        assert list(validator.iter_errors(yaml.safe_load(text))), text
    explained = schema["$defs"]["OptimizerSpec"]["properties"]["lr"]["description"]
    assert explained.startswith("Peak learning rate.")


@pytest.mark.parametrize("name", presets())
def test_a_preset_can_be_resolved(name, tmp_path):
    run = load_recipe(presets()[name])
    resolved = resolve_run(run, base_dir=tmp_path)
    assert resolved.global_batch == resolved.micro_batch * resolved.accumulation * resolved.run.layout.data_parallel


def test_sizes_that_a_name_decides_stand_in_the_printed_recipe_as_comments(capsys, tmp_path):
    assert main(["init", "gpt2-124m", "model=gpt2-xl", "training.steps=5000", "--full"]) == 0
    text = capsys.readouterr().out
    model = resolve_model(PRESETS["gpt2-xl"], base_dir=tmp_path)
    assert f"# num_layers: {model.num_layers} " in text
    assert f"# head_dim: {model.head_dim} " in text
    assert "\n  steps: 5000 " in text


def test_a_check_reports_sizes_batch_data_and_a_sample(folder, capsys):
    assert main(["check", "run.yaml"]) == 0
    text = capsys.readouterr().out
    assert "ZeRO-3 x 2" in text
    assert "128 tokens a step = 2 ranks x 1 microbatch x 4 sequences x 16; 4 steps, 512 tokens" in text
    assert "2 files" in text
    assert "sample" not in text, "a corpus of text is not shown above the verdict"
    assert "no errors; train it with: meshwright train run.yaml" in text


def test_a_check_warns_of_a_recipe_without_data(folder, capsys):
    assert main(["check", "run.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    recipe = yaml.safe_load((folder / "run.yaml").read_text())
    del recipe["data"]["sources"]
    (folder / "bare.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["check", "bare.yaml", "data.sources=stdlib", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    main(["check", "bare.yaml", "--json"])
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("the recipe names no data, so it would train on the standard library of Python")


def test_a_check_warns_of_a_decay_longer_than_the_run(folder, capsys):
    """As with fewer steps than a preset has."""
    schedule = "training.lr_schedule={name: wsd, warmup: 2, decay: 40}"
    for steps, too_short in (("training.steps=41", True), ("training.steps=42", False)):
        main(["check", "run.yaml", schedule, steps, "--json"])
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert [text.split(",")[0] for text in warnings] == [
            "training.lr_schedule.decay=40 is longer than the 39 steps after the warm-up"
        ] * too_short
    main(["check", "run.yaml", "training.lr_schedule={name: wsd, warmup: 2}", "training.steps=4", "--json"])
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_a_check_warns_of_adapters_that_leave_the_experts_frozen(folder, capsys):
    """Most of such a model's parameters."""
    model = "model={family: qwen3_moe, hidden: 32, num_layers: 2, num_heads: 2, num_experts: 8, experts_per_token: 2}"
    words = ["check", "run.yaml", model, "model.weights=random", "layout={dp_shard: 1}", "--json"]
    expected = {
        "finetune={method: lora}": ["finetune: experts have no adapters, so 92% of the model's parameters stay as they "
                                    "are; finetune.train=[experts] trains them in full"],
        "finetune={method: lora, train: [experts]}": [],
        "finetune={method: full}": [],
    }  # fmt: skip
    for finetune, warnings in expected.items():
        main([*words, finetune])
        facts = json.loads(capsys.readouterr().out)
        assert (facts["problems"], facts["warnings"]) == ([], warnings), finetune


@pytest.mark.parametrize("verb", ["check", "train", "plan"])
def test_a_file_of_another_system_is_named_with_what_to_do(folder, capsys, verb):
    (folder / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    (folder / "fit.py").write_text("import lightning as L\nL.Trainer(devices=8).fit(model)\n")
    more = ["--cluster", "8xh100"] if verb == "plan" else []
    assert main([verb, "ds.json", *more]) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: ds.json: not a recipe, but a file of DeepSpeed; convert it first: "
        "meshwright import ds.json --write run.yaml\n"
    )
    assert main([verb, "fit.py", *more]) == 2
    error = capsys.readouterr().err
    assert error == (
        "error: fit.py: not a recipe, but a program of Lightning; see what can be done: meshwright import fit.py\n"
    )
    assert main(["import", "fit.py"]) == 2
    assert "a program of Lightning, which is configured in code, and no code is run" in capsys.readouterr().err
    assert main(["import", "run.yaml"]) == 2
    assert capsys.readouterr().err == "error: run.yaml: a recipe already; check it: meshwright check run.yaml\n"
    (folder / "mine.yaml").write_text("model: gpt2\nlayout: {dp_shrd: 2}\n")
    main([verb, "mine.yaml", *more])
    assert "mine.yaml:2: layout.dp_shrd: unknown key" in capsys.readouterr().err, "a recipe with mistakes is a recipe"


def test_an_import_names_what_no_file_gives(folder, capsys):
    """Other data, random weights or another tokenizer would be another job."""
    (folder / "ds.json").write_text('{"train_batch_size": 8}')
    assert main(["import", "ds.json", "--model", "llama-3.2-1b"]) == 0
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert "assumed: no file names data" in text
        assert "assumed: llama-3.2-1b is a published size without weights: they are random" in text
        assert "assumed: no file names a tokenizer" in text
    (folder / "axolotl.yml").write_text(
        "base_model: /models/mine\ndatasets:\n- {path: mine.jsonl, type: chat_template}\nsequence_len: 512\n"
    )
    assert main(["import", "axolotl.yml"]) == 0
    assert "names" not in "".join(capsys.readouterr().err.partition("assumed: no file")[1:])


def test_a_check_tells_the_traffic_of_a_step(folder, capsys):
    """ZeRO-3 scatters every gradient once, in fp32; the formulas have their own tests."""
    assert main(["check", "run.yaml", "training.precision=fp32", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    sent = {(entry["kind"], entry["axis"]): entry["bytes"] for entry in facts["traffic"]}
    assert sent["reduce-scatter", "shard"] == 4 * facts["model"]["parameters"]
    assert main(["check", "run.yaml", "training.precision=fp32"]) == 0
    text = capsys.readouterr().out
    assert "traffic    of the first rank in a step\n" in text
    assert "           all-gather over shard: " in text
    assert main(["check", "run.yaml", "layout.dp_shard=1", "--json"]) == 0
    assert "traffic" not in json.loads(capsys.readouterr().out)


def test_a_check_says_where_traffic_is_not_predicted(folder, capsys):
    assert main(["check", "run.yaml", "layout={tp: 2}", "training.precision=fp8"]) == 0
    assert "traffic    traffic is not predicted for tensorwise scales" in capsys.readouterr().out


def test_a_check_for_machines(folder, capsys):
    assert main(["check", "run.yaml", "--json", "training.steps=7"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is True
    assert facts["problems"] == []
    assert facts["batch"]["tokens_per_step"] == 128
    assert facts["batch"]["steps"] == 7
    # Embedding and head, 300 x 32 each; a block has 2 norms, 4 matrices of attention and 3 of feed-forward.
    ffn = facts["model"]["ffn"]
    assert facts["model"]["parameters"] == 2 * 300 * 32 + 2 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * ffn) + 32
    assert facts["data"]["files"] == 2
    assert facts["tokenizer"] == {"vocab": 300, "trained": True}


def test_a_check_reports_problems_of_all_rooms_at_once(folder, capsys):
    words = ["check", "run.yaml", "training.global_batch=7", "data.sources=nowhere/*.txt"]
    assert main(words) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert errors[0].startswith("error: training.global_batch=7 sequences cannot be split over 2 data-parallel ranks")
    assert errors[1].startswith("error: data source nowhere/*.txt matches no file")
    assert main([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [f"error: {problem}" for problem in found["problems"]] == errors


def test_a_check_of_a_recipe_that_cannot_be_read_is_a_finding_with_every_line(folder, capsys):
    """Readable parts are checked at once; a missing setting in an unreadable section is not a problem."""
    training = "training:\n  steps: 0\n  optimzer: x\n  global_batch: 7\n"
    (folder / "run.yaml").write_text(
        f"model: gpt2\n{training}layout: {{tp: 5, dp_shard: 2}}\ndata: {{sources: nowhere}}\n"
    )
    assert main(["check", "run.yaml"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [error.split(": ")[1] for error in errors[:3]] == ["run.yaml:3", "run.yaml:4", "run.yaml:6"]
    assert [error.split(" ")[1:5] for error in errors[3:]] == [["run.yaml:7:", "data", "source", "nowhere"]]


def test_what_is_wrong_only_deep_in_the_corpus_is_found(folder, capsys):
    (folder / "z.txt").write_bytes(b"x" * 100 + b"\xff")
    assert main(["check", "run.yaml"]) == 1
    assert "z.txt: is not UTF-8 at byte 100" in capsys.readouterr().err


MISUSES = {
    ("chek", "run.yaml"): "unknown verb 'chek'; did you mean 'check'?",
    ("frobnicate",): "unknown verb 'frobnicate'; see 'meshwright --help'",
    ("--verion",): "unknown option '--verion'; did you mean '--version'?",
    ("check",): "the following arguments are required: RECIPE; see 'meshwright check --help'",
    ("check", "nowhere.yaml"): "nowhere.yaml: no such file or directory",
    ("check", "."): ". is a folder, not a file",
    (
        "check",
        "demo",
    ): "'demo' is a preset, not a file; save it first: meshwright init demo > demo.yaml",
    ("check", "run.yaml", "--jsn"): "unknown option '--jsn'; did you mean '--json'?",
    ("init", "dmo"): "unknown preset 'dmo'; did you mean 'demo'?",
    (
        "init",
        "gpt2",
    ): "'gpt2' is a model, not a preset; use it in any recipe, as in meshwright init gpt2-124m model=gpt2",
    ("init", "demo", "model.family=lama"): "model.family 'lama' is unknown; did you mean 'llama'?",
    ("doctor", "now"): "unexpected 'now'; see 'meshwright doctor --help'",
}


@pytest.mark.parametrize(("words", "message"), MISUSES.items(), ids=[" ".join(words) for words in MISUSES])
def test_misuse_is_one_line_and_status_2(words, message, folder, capsys):
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"error: {message}\n"


@pytest.mark.parametrize("words", [["check", "nowhere.yaml", "--debug"], ["--debug", "check", "nowhere.yaml"]])
def test_debug_shows_the_trace_and_still_the_line(words, folder, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("error: nowhere.yaml: no such file or directory\n")


def test_an_interrupted_command_says_so_by_status_130(folder, monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        found = subprocess.run(
            [sys.executable, "-m", "meshwright", "init", "demo"],
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert found.stderr == ""
    assert found.returncode == 141


def test_doctor_reports_this_machine_as_ready(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is True
    found = {finding["name"]: finding for finding in report["findings"]}
    assert found["torch"]["state"] == "ok"
    assert found["cpu"]["detail"].split()[0] == str(len(os.sched_getaffinity(0)))
    assert "gloo" in found["distributed"]["detail"]


def test_doctor_says_that_python_s_headers_are_missing(monkeypatch, tmp_path):
    """Without them Triton cannot compile its launcher, although there is a compiler."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    assert doctor._compiler().state == "optional"
    assert "Python.h" in doctor._compiler().detail
    (tmp_path / "Python.h").touch()
    assert doctor._compiler().state == "ok"


def test_doctor_names_what_is_missing_and_the_fix(monkeypatch, capsys):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["torch>=99,<100", "no-such-package>=1"])
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "is outside >=99,<100\n" in text
    assert "-> pip install 'no-such-package>=1'" in text
    assert "not ready: torch, no-such-package missing" in text


@pytest.mark.parametrize(
    ("version", "bounds", "inside"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11", False),
        ("6.0.3", ">=6.0", True),
        ("1.0", "", True),
    ],
)
def test_doctor_compares_versions_as_numbers(version, bounds, inside):
    assert doctor._satisfies(version, bounds) is inside
