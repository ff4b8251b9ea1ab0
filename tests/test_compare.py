"""The comparison: turns, rows that explain missing results, and engines that train the same as ours."""

import importlib.util
import json
import os
import re
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from meshwright.cli.main import main
from meshwright.data.mixture import training_samples
from meshwright.data.tokenizer import load_tokenizer
from meshwright.engines.compare import Contestant, ContestRow, Pace, _Running, compare
from meshwright.engines.deepspeed import DeepSpeedEngine
from meshwright.engines.engine import Engine, explained
from meshwright.engines.layouts import layout_called
from meshwright.engines.page import comparison_page
from meshwright.engines.registry import ENGINES
from meshwright.engines.report import as_json, describe, markdown, text
from meshwright.launch.programs import NoStepError, ProgramError
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.corpus import corpus_of
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, tied_embeddings: true}
data: {sources: "*.txt", tokenizer_vocab: 300, sequence_length: 32, cache_dir: cache}
training: {steps: 12, global_batch: 8, micro_batch: 2, precision: fp32, lr_schedule: {warmup: 3}}
device: cpu
"""

PROGRAM = """\
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--inputs"), parser.add_argument("--journal"), parser.add_argument("--save-every")
parser.add_argument("--pause", type=int, nargs="*")
options = parser.parse_args()
first = os.environ.get("RANK", "0") == "0"
file = open(options.journal, "w") if first else open(os.devnull, "w")
def write(kind, **fields):
    print(json.dumps({"kind": kind, "time": time.time(), **fields}), file=file, flush=True)
group = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
ran = {"world_size": int(os.environ.get("WORLD_SIZE", 1)), "wrappers": ["Model"], "parameter": [], "dtype": [],
       "parameters": 10, "held": 10, "state": 10, "optimizer": "AdamW", "groups": [group]}
for step in range(1, 13):
    began = time.time()
    WHAT
    if step == 1:
        write("engine", **ran)
    write("step", step=step, loss=5.0 - step / 8 + SHIFT, gnorm=1.0, lr=1.0, tokens=step, mem=7,
          seconds=time.time() - began, began=began)
    if step in options.pause and not sys.stdin.readline():
        sys.exit(1)
"""


class Fake(Engine):
    """An engine without training: a few lines that write a journal."""

    name = "fake"
    about = "nothing"
    packages: ClassVar = {}

    def __init__(self, what: str = "time.sleep(0.01)", shift: float = 0.0) -> None:
        self.program = PROGRAM.replace("WHAT", what).replace("SHIFT", str(shift))

    def cannot(self, resolved: ResolvedRun) -> dict[str, str]:
        return {}

    def files(self, resolved: ResolvedRun) -> tuple[str, dict[str, str]]:
        return "fake.py", {"fake.py": "pass\n"}

    def measure(self, resolved: ResolvedRun, program: str) -> str:
        return self.program


class First(Fake):
    """The one that is measured."""

    name = "first"


class Second(Fake):
    """The one whose turn does not end."""

    name = "second"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a recipe and its text, to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "a.txt").write_text("".join(f"{n} cats sat on {n * n} mats\n" for n in range(400)))
    return tmp_path


def contest(
    folder: Path,
    *fakes: Engine,
    pace: Pace = Pace(2, 3, 2),  # noqa: B008
    patience: float = 20,
    said: list[str] | None = None,
) -> tuple[list[ContestRow], Path]:
    resolved = resolve_run(parse_spec(RECIPE, Run), base_dir=folder)
    entered = [
        Contestant(name=f"e{number}", engine=engine, resolved=resolved) for number, engine in enumerate(fakes, 1)
    ]
    out = folder / "out"
    return compare(entered, out, pace=pace, patience=patience, say=[].append if said is None else said.append), out


def journal(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]


def test_engines_take_turns_and_never_compute_at_once(folder):
    rows, out = contest(folder, Fake(), Fake(), pace=Pace(3, 2, 1))
    assert [row.error for row in rows] == [None, None]
    steps = [(r["began"], r["time"], name) for name in ("e1", "e2") for r in journal(out, name) if r["kind"] == "step"]
    steps.sort()
    assert [name for _, _, name in steps] == ["e1", "e2", *2 * ["e1"], *4 * ["e2"], *4 * ["e1"], *2 * ["e2"]]
    for (_, ended, _), (began, _, _) in pairwise(steps):
        assert ended <= began
    assert all([len(turn) for turn in row.turns] == [2, 2, 2] for row in rows)
    assert all(len(row.losses) == 7 for row in rows)


def test_a_program_that_waits_for_deepspeeds_operators_says_so_and_names_the_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    engine, error = DeepSpeedEngine(), NoStepError("no step within 9 s, so the program was ended: it printed nothing")
    assert str(explained(engine, error)).endswith("operators on first use; raise --patience")
    lock = tmp_path / ".cache" / "torch_extensions" / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert f"if no build is running, remove {lock}, left" in str(explained(engine, error))
    assert explained(Fake(), error) is error
    no_operator = ProgramError("rank 0 ended with status 1: RuntimeError: Unable to JIT load the async_io op")
    assert str(explained(engine, no_operator)).endswith("op; this operator needs libaio: apt install libaio-dev")
    assert explained(engine, ProgramError("rank 0 ended by SIGKILL")).args == ("rank 0 ended by SIGKILL",)


def test_the_time_in_which_a_program_compiles_does_not_count(folder, tmp_path):
    compiler = tmp_path / "cc1plus"
    shutil.copy(shutil.which("sleep"), compiler)
    wait = f"step == 3 and __import__('subprocess').run([{str(compiler)!r}, '3'])"
    rows, _ = contest(folder, Fake(wait), patience=1)
    assert rows[0].error is None


FAULTS = {
    "sys.exit('RuntimeError: no such thing')": "ended with status 1: RuntimeError: no such thing",
    "step < 4 or time.sleep(60)": "no step within 1 s",
    "step < 4 or os.kill(os.getpid(), 9)": "ended by SIGKILL",
    "ran['world_size'] = 4": "each process trained in a group of 4",
    "ran['optimizer'] = 'SGD'": "the recipe's optimizer is adamw, but the program's is SGD",
}


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.every(1)
def test_an_engine_that_fails_is_a_row_that_says_why_and_the_others_go_on(folder, what):
    rows, _ = contest(folder, Fake(), Fake(what), Fake(), patience=1)
    assert rows[0].error is None
    assert rows[2].error is None
    assert FAULTS[what] in (rows[1].error or "")
    found = as_json(rows)["engines"][1]
    assert found == {
        "name": "e2",
        "ratio": None,
        "tokens_per_second": None,
        "peak_bytes": None,
        "max_loss_difference": None,
        "error": rows[1].error,
    }


def test_an_interrupted_comparison_prints_what_it_has_measured(folder, monkeypatch, capsys):
    """Ctrl-C after the first engine's turn; the second has not had one."""

    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setitem(ENGINES, "first", First())
    monkeypatch.setitem(ENGINES, "second", Second())
    turn = _Running.take_turn
    monkeypatch.setattr(
        _Running, "take_turn", lambda one, n: (turn if one.row.engine == "first" else interrupted)(one, n)
    )
    words = ["compare", "run.yaml", "--engines", "first,second", "--turn", "3", "--rounds", "2", "--warm-up", "2"]
    assert main([*words, "--out", "out"]) == 130
    told = capsys.readouterr()
    assert "stopped before the comparison was complete" in told.err
    assert re.search(r"^first .* 1\.00", told.out, re.MULTILINE)
    assert re.search(r"second.*stopped before its first turn", told.out)
    assert "stopped before the last" in (folder / "out" / "compare.md").read_text()
    assert main([*words, "--out", "again", "--json"]) == 130
    rows = json.loads(capsys.readouterr().out)
    assert len(json.dumps(rows)) > 100
    assert main([*words[:3], "second", *words[4:], "--out", "third"]) == 130
    assert not capsys.readouterr().out


def test_an_engine_that_dies_at_its_end_keeps_its_right_results(folder):
    """gloo's threads may abort a process during an orderly teardown."""
    dies = "options.pause = [*options.pause[:2], 99]; import atexit; atexit.register(os.abort)"
    rows, _ = contest(folder, Fake(), Fake(dies), pace=Pace(2, 5, 2))
    assert [row.error for row in rows] == [None, None]
    assert rows[1].losses == rows[0].losses


def test_figures_are_medians_of_the_timed_steps_and_differences_the_largest_of_all():
    first = ContestRow(
        name="a", engine="a", strategy="", tokens_per_step=100, losses=[3.0, 2.0, 1.0], gnorms=[1.0, 1.0, 1.0]
    )
    second = ContestRow(
        name="b", engine="b", strategy="", tokens_per_step=100, losses=[3.0, 2.5, 1.1], gnorms=[1.0, 1.0, 0.7]
    )
    first.turns, second.turns = [[1.0, 1.0], [1.0, 9.0]], [[2.0, 2.0], [0.5, 2.0]]
    assert first.tokens_per_second == 100
    assert second.tokens_per_second == 50
    ratio = second.ratio_to(first)
    assert ratio is not None
    assert ratio == (0.5, 0.5, 4.0)
    assert second.difference_from(first) == 0.5
    assert second.difference_from(first, "gnorms") == pytest.approx(0.3)
    assert [row["ratio"] for row in as_json([first, second])["engines"]] == [1.0, 0.5]


def test_where_the_first_is_not_measured_the_next_is_the_reference():
    broken = ContestRow(name="a", engine="a", strategy="", error="no")
    others = [
        ContestRow(name=name, engine=name, strategy="", tokens_per_step=8, losses=[1.0], turns=[[1.0]]) for name in "bc"
    ]
    others[1].losses, others[1].turns = [1.5], [[4.0]]
    found = as_json([broken, *others])["engines"]
    assert [row["ratio"] for row in found] == [None, 1.0, 0.25]
    assert [row["max_loss_difference"] for row in found] == [None, 0.0, 0.5]


def test_a_comparison_names_the_versions_of_each_python(tmp_path):
    run = resolve_run(parse_spec(RECIPE, Run), base_dir=tmp_path)
    other, broken = tmp_path / "python", tmp_path / "none"
    other.write_text('#!/bin/sh\necho \'{"torch": "9.9"}\'\n')
    other.chmod(0o755)
    entered = [
        Contestant(name=name, engine=ENGINES[name], resolved=run, python=python)
        for name, python in (("bare", other), ("deepspeed", broken))
    ]
    versions = describe(Pace(), "", entered)["versions"]
    assert versions.startswith(f"torch {torch.__version__.split('+')[0]}")
    assert versions.endswith("; bare with torch 9.9")


def test_reports_show_every_engine_and_need_no_other_file(folder):
    rows, _ = contest(folder, Fake(), Fake(shift=0.25), Fake("sys.exit('<b>broken</b>')"))
    about = describe(Pace(2, 3, 2), "meshwright compare run.yaml")
    page, paper, terminal = comparison_page(rows, about), markdown(rows, about), text(rows)
    for row in rows:
        assert row.name in page
        assert row.name in paper
        assert row.name in terminal
    assert "2.5e-01" in paper
    assert "2.5e-01" in terminal
    assert "<b>broken</b>" not in page
    assert page.count("<polyline") == 3
    assert "src=" not in page
    assert "href=" not in page


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "Every engine trained the same tokens in the same order"),
        (["layout.dp_replicate=2"], "Every engine trained the same tokens in the same order"),
        (
            ["data.sequence_length=16", "training.optimizer.lr=0.1", "model.hidden=64"],
            "The recipes differ in model.hidden, data.sequence_length, training.optimizer; ",
        ),
    ],
)
def test_reports_say_what_was_the_same(overrides: list[str], said: str, tmp_path: Path) -> None:
    runs = [resolve_run(parse_spec(RECIPE, Run, words), base_dir=tmp_path) for words in ([], overrides)]
    entered = [Contestant(name=str(number), engine=Fake(), resolved=run) for number, run in enumerate(runs)]
    about = describe(Pace(), "", entered)
    rows = [ContestRow(name=one.name, engine="e1", strategy="", error="ended") for one in entered]
    for report in (markdown(rows, about), comparison_page(rows, about)):
        assert said in report
        assert report.count(said) == 1


def test_where_every_engine_fails_no_round_begins(folder):
    said: list[str] = []
    rows, _ = contest(folder, Fake("step < 3 or sys.exit('broken')"), said=said)
    assert [line.split(":")[0] for line in said] == [
        "preparing tokens and initial weights for every engine",
        *2 * ["e1"],
        "round 1 of 2",
        "e1",
    ]
    assert "Losses" not in markdown(rows, {})
    assert "Losses" not in comparison_page(rows, {})


def test_a_comparison_longer_than_the_recipe_is_refused(folder, capsys):
    assert main(["compare", "run.yaml", "--rounds", "5", "--engines", "meshwright"]) == 2
    assert not list(Path("runs").glob("compare*"))
    assert "set training.steps=23" in capsys.readouterr().err


BAD = {
    ("compare",): "needs a recipe|required",
    ("compare", "a.b=c"): "compare needs a recipe",
    ("compare", "run.yaml", "--engines", "meshwrigt"): "unknown engine 'meshwrigt'.*did you mean 'meshwright'",
    ("compare", "run.yaml", "--layouts", "zero9"): "unknown layout 'zero9'",
    ("compare", "run.yaml", "--layouts", "tp3"): "tp=3",
    ("compare", "run.yaml", "run.yaml"): "twice",
    ("compare", "run.yaml", "--python", "bare=/no/such"): "/no/such does not exist",
    ("compare", "run.yaml", "--out", "."): "already exists",
    ("compare", "run.yaml", "--rounds", "0"): "at least 1",
    ("compare", "nowhere.yaml"): "no such file",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_command_lines_are_one_sentence(folder, capsys, words):
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert re.search(BAD[words], error), error


def test_a_run_is_handed_over_with_all_that_its_program_needs(folder, capsys):
    """Every sample of every step is where the program looks for it, and the folder can be moved: nothing in it names
    another place."""
    words = ["export", "run.yaml", "--engine", "deepspeed", "--program", "there"]
    assert main(words) == 0
    assert "run_deepspeed_standalone.py" in capsys.readouterr().out
    there = (folder / "there").rename(folder / "moved")
    names = {path.name for path in there.iterdir()}
    assert names == {"run_deepspeed_standalone.py", "ds_config.json", "start", "data", "left-out.md"}
    resolved = resolve_run(parse_spec(RECIPE, Run), base_dir=folder)
    (file,) = json.loads((there / "data" / "tokens.json").read_text())
    tokens = np.memmap(there / "data" / file["path"], dtype=file["dtype"], mode="r")
    order = np.load(there / "data" / "order.npy")
    samples = training_samples(corpus_of(resolved), resolved.run.data)
    assert len(order) == 12 * 8
    texts = [path.read_text() for path in there.rglob("*") if path.suffix in (".py", ".json", ".md")]
    assert not [text for text in texts if str(folder) in text]
    assert load_tokenizer(there / "start").vocab_size == corpus_of(resolved).tokenizer.vocab_size
    assert (there / "left-out.md").read_text().endswith("Nothing.\n")
    (folder / "there").mkdir()
    for position, (_, first) in enumerate(order):
        sample = samples.sample(position, 0)
        assert (tokens[first : first + 32] == sample.inputs).all()
        assert (tokens[first + 1 : first + 33] == sample.labels).all()
    assert main(words) == 2
    assert "there already exists" in capsys.readouterr().err
    assert main(["export", "run.yaml", "--engine", "bare", "--hf", "x"]) == 2
    assert main(["export", "nowhere", "--engine", "bare", "--program", "x"]) == 2
    assert "neither a run directory nor a recipe" in capsys.readouterr().err


TOLERANCE = 2e-5
"""For a loss of about 6 in fp32: a few dozen roundings, in an order that differs between engines."""


def losses_of(names: str, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    """The rows of a comparison of ten steps, by name."""
    shape = ["--rounds", "2", "--turn", "4", "--warm-up", "2", "--json", "--out", "out", "--patience", "120"]
    status = main(["compare", "run.yaml", "--engines", names, *shape, *words])
    written = capsys.readouterr()
    assert written.out, written.err
    rows = json.loads(written.out)
    assert set(rows) == {"engines"}
    assert status == (1 if any(row["error"] for row in rows["engines"]) else 0)  # each is named
    return {row.pop("name"): row for row in rows["engines"]}


def installed(engine: str) -> bool:
    return all(importlib.util.find_spec(module) for module in ENGINES[engine].packages)


@pytest.mark.exhaustive
def test_an_engine_trains_what_ours_trains(folder, capsys):
    """The engine that starts fastest; `make test-engines` runs all others, and two ranks."""
    rows = losses_of("meshwright,bare", folder, capsys)
    assert rows["bare"]["error"] is None, rows["bare"]["error"]
    assert rows["bare"]["max_loss_difference"] <= TOLERANCE


@pytest.mark.engines
def test_every_engine_trains_what_ours_trains_on_one_process(folder, capsys):
    """GPT-2, whose loss the Trainer scales wrongly by default."""
    model = "model={family: gpt2, hidden: 32, num_layers: 2, num_heads: 4, max_positions: 32}"
    rows = losses_of(",".join(ENGINES), folder, capsys, model)
    assert list(rows) == list(ENGINES)
    for name, row in rows.items():
        if name in (
            "megatron",
            "litgpt",
            "nanogpt",
        ):  # these have no GPT-2, this no folder: tests/test_engines_train.py
            assert ("supports only llama" in row["error"]) or ("git clone" in row["error"])
            continue
        if name in ("peft", "trl"):  # tests/test_engines_tuning.py
            assert ("peft trains adapters" in row["error"]) or ("trl's rows have one more token" in row["error"])
            continue
        if not installed(name):
            assert "pip install 'meshwright[" in row["error"]
            continue
        assert row["error"] is None, (name, row["error"])
        assert row["max_loss_difference"] <= TOLERANCE, name
        assert row["peak_bytes"] > 2**26
        assert row["tokens_per_second"] > 0
    details = json.loads(Path("out/compare.json").read_text())
    assert all(len(row["losses"]) == 10 and row["losses"][0] > row["losses"][-1] for row in details["engines"][:3])


TWO_RANKS = {
    "meshwright": "zero2",
    "bare": "zero1",
    "bare sharded": "zero3",
    "hf_trainer": "ddp",
    "hf_trainer sharded": "zero3",
    "accelerate": "ddp",
    "fabric": "ddp",
    "fabric sharded": "zero3",
    "deepspeed": "zero1",
    "deepspeed sharded": "zero3",
}
"""Name of a row -> the layout in which its engine trains."""


@pytest.mark.engines
def test_every_engine_trains_what_ours_trains_on_two_ranks(folder):
    """Llama with gradient accumulation; each engine has read back that it was split as requested."""
    run = parse_spec(RECIPE, Run)
    entered = [
        Contestant(name=name, engine=ENGINES[name.split()[0]], resolved=in_layout(run, layout, folder))
        for name, layout in TWO_RANKS.items()
        if installed(name.split()[0])
    ]
    rows = compare(entered, folder / "out", pace=Pace(2, 4, 2), patience=120, say=lambda line: None)
    for row, layout in zip(rows, [TWO_RANKS[row.name] for row in rows], strict=True):
        assert row.error is None, (row.name, row.error)
        for what in ("losses", "gnorms"):
            difference = row.difference_from(rows[0], what)
            assert difference is not None
            assert difference <= TOLERANCE, (row.name, what)
        assert row.ran["world_size"] == 2
        assert row.ran["parameters"] == rows[0].ran["parameters"]
        whole = row.ran["parameters"]
        assert (row.ran["held"] < 0.6 * whole) == (layout in ("zero2", "zero3"))
        assert (row.ran["state"] < 0.6 * whole) == (layout != "ddp")
    assert len(rows[0].losses) == 10
    assert rows[0].losses[0] > rows[0].losses[-1]


def in_layout(run: Run, layout: str, folder: Path) -> ResolvedRun:
    return resolve_run(run.model_copy(update={"layout": layout_called(layout)}), base_dir=folder)


@pytest.mark.engines
def test_a_fallback_in_silence_is_a_row_that_says_so(folder):
    """Accelerate's FSDP plug-in on a CPU: rc 0, no error, and DistributedDataParallel."""

    class Believing(type(ENGINES["accelerate"])):
        def cannot(self, resolved: ResolvedRun) -> dict[str, str]:
            return {}

        def files(self, resolved: ResolvedRun) -> tuple[str, dict[str, str]]:
            name, files = super().files(resolved)
            plugin = "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), cpu="
            text = files[name].replace("cpu=DEVICE", f"{plugin}DEVICE", 1)
            text = text.replace("import Accelerator\n", "import Accelerator, FullyShardedDataParallelPlugin\n")
            return name, {name: text}

    run = in_layout(parse_spec(RECIPE, Run), "zero3", folder)
    entered = [Contestant(name="accelerate", engine=Believing(), resolved=run)]
    (row,) = compare(entered, folder / "out", pace=Pace(1, 1, 1), patience=120, say=lambda line: None)
    assert "the layout is ZeRO-3 x 2, but a rank holds" in (row.error or "")
    assert "DistributedDataParallel" in (row.error or "")
