"""Meshwright from Python: the public functions, the folder of a recipe, and errors as Python code meets them."""

import io
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import meshwright
from meshwright import Run, UserError, evaluate, generate, load_recipe, plan, runs, train, view
from meshwright.cli.main import main
from meshwright.cli.python import for_python
from meshwright.launch.status import TrainingStopped
from meshwright.spec.problems import RecipeError
from meshwright.trainer import display

RECIPE = """\
model: {family: llama, hidden: 64, num_layers: 2, num_heads: 2}
data: {sources: "texts/*.txt", sequence_length: 32, tokenizer_vocab: 300, held_out: 0.2, cache_dir: cache}
training: {steps: 2, global_batch: 2, micro_batch: 1}
device: cpu
"""
SMALL = ["data.sequence_length=1024", "training.global_batch=8"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe in `p/`, whose texts are beside it, and its run in `runs/small`."""
    place = tmp_path_factory.mktemp("python")
    texts = place / "p/texts"
    texts.mkdir(parents=True)
    (texts / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    (place / "p/run.yaml").write_text(RECIPE)
    before = Path.cwd()
    os.chdir(place)
    try:
        run = load_recipe("p/run.yaml", ["run_dir=runs/small"])
        os.chdir(texts)  # the recipe knows its folder, wherever the process goes
        train(run.model_copy(update={"run_dir": str(place / "runs/small")}))
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def test_public_names_are_listed_and_load_torch_only_where_it_is_needed() -> None:
    names = {"Run", "evaluate", "generate", "load_recipe", "plan", "runs", "train", "view", "UserError"}
    assert names <= set(dir(meshwright))
    code = (
        "import sys, meshwright\n"
        "from meshwright import plan, runs, view, load_recipe, Run\n"
        "import meshwright.predict.text, meshwright.planner.page\n"
        "assert callable(meshwright.plan) and 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- the functions


def test_a_plan_is_text_page_and_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = plan("gpt2", SMALL, cluster="8xa100", methods=False)
    assert main(["plan", "gpt2", *SMALL, "--cluster", "8xa100", "--no-methods"]) == 0
    assert f"{result}\n" == capsys.readouterr().out
    assert result._repr_html_().startswith("<iframe srcdoc=")
    assert result.facts["chosen"]["text"] == result.layout
    assert result.run.cluster == "8xa100"
    assert result.run.layout.world_size == 8
    assert "bytes" in result.explain("memory") or "GB" in result.explain("memory")
    assert "<html" in result.save("plan.html").read_text()
    both = plan("gpt2", SMALL, cluster=["8xa100", "2xt4"], methods=False)
    with pytest.raises(UserError, match="layout is for one cluster"):
        _ = both.layout
    assert len(both.facts["clusters"]) == 2


def test_a_planned_recipe_keeps_its_folder(here: Path) -> None:
    result = plan(load_recipe("p/run.yaml"), cluster="2xh100", methods=False)
    assert result.run.file.folder == (here / "p").resolve()


def test_one_override_needs_no_list(here: Path) -> None:
    assert load_recipe("p/run.yaml", "training.steps=7").training.steps == 7
    words = "training.global_batch=64"
    result = plan("gpt2", words, cluster="8xa100", methods=False)
    assert str(result) == str(plan("gpt2", [words], cluster="8xa100", methods=False))


def test_generation_and_evaluation_equal_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = generate("runs/small", "the quick", max_tokens=4, temperature=0)
    assert generate("runs/small", ["the quick", "a"], max_tokens=4, temperature=0)[0] == text
    assert main(["generate", "runs/small", "--prompt", "the quick", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"the quick{text}\n"
    measured = evaluate("runs/small")
    assert not isinstance(measured, list)
    assert main(["eval", "runs/small"]) == 0
    assert f"loss {measured.loss:.4f} nats/token" in capsys.readouterr().out


def test_runs_are_listed(here: Path) -> None:
    (only,) = runs()
    assert (only["name"], only["state"], only["step"]) == ("small", "finished", 2)
    assert runs("runs/small") == [only]


def test_tasks_are_asked(here: Path) -> None:
    Path("q.jsonl").write_text('{"question": "the quick", "choices": [" brown", " zzz"], "answer": 0}\n')
    (result,) = evaluate("runs/small", tasks="q.jsonl")  # pyright: ignore[reportGeneralTypeIssues]
    assert result.num_questions == 1


# ---- the recipe's folder


def test_a_recipe_read_from_a_file_finds_its_data(place: Path) -> None:
    assert (place / "runs/small/checkpoints").is_dir()
    assert not (place / "p/texts/runs").exists()


def test_where_a_recipe_was_read_is_no_part_of_it(here: Path) -> None:
    run = load_recipe("p/run.yaml")
    assert run == load_recipe(here / "p/run.yaml")
    assert pickle.loads(pickle.dumps(run)).file.folder == (here / "p").resolve()
    assert run.model_copy(update={"device": "auto"}).file.path == Path("p/run.yaml")
    assert Run(model="gpt2").file.path is None


# ---- errors


ERRORS: dict[str, tuple[Any, list[str]]] = {
    "another run is there": (
        lambda: train("p/run.yaml"),
        ["continue it with resume=True, or choose another run_dir"],
    ),
    "no checkpoint": (
        lambda: train(load_recipe("p/run.yaml", ["run_dir=runs/new"]), resume=True),
        ["start without resume=True"],
    ),
    "a typing error": (
        lambda: train("p/rum.yaml"),
        ["p/rum.yaml: no such file or directory; did you mean 'run.yaml'?"],
    ),
    "a preset": (lambda: train("demo"), ["'demo' is a preset, not a file"]),
    "another system's file": (lambda: plan("ds.json"), ["meshwright import"]),
    "an invalid line": (
        lambda: load_recipe("bad.yaml"),
        ["bad.yaml:3: training.stepz: unknown key; did you mean 'steps'?"],
    ),
    "a bad margin": (lambda: plan("gpt2", margin=2), ["margin=2 is not allowed: must be at least 0 and below 1"]),
    "no text": (lambda: evaluate("hf"), ["hf: no such directory; give a run directory"]),
    "a Run": (
        lambda: Run(model="gpt2", training={"stepz": 3, "global_batch": 0}),
        [
            "training.stepz: unknown key; did you mean 'steps'?",
            "training.global_batch: 0 is not allowed: must be at least 1",
        ],
    ),
    "a Run that does not fit": (
        lambda: train(Run(model="gpt2", layout={"tp": 5}, run_dir="runs/tp")),
        ["layout.tp"],
    ),
    "sampling": (lambda: generate("runs/small", "a", temperature=-1), ["temperature=-1 is not allowed"]),
    "a system message": (lambda: generate("runs/small", "a", system="b"), ["system needs chat=True"]),
    "questions": (lambda: evaluate("runs/small", shots=3), ["shots only applies to tasks"]),
    "no runs": (lambda: runs("p"), ["p: contains no run"]),
    "nothing to view": (lambda: view(), ["view needs a run directory"]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_the_command_line_in_python_s_words(here: Path, name: str) -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2}')
    Path("bad.yaml").write_text("model: gpt2\ntraining:\n  stepz: 3\n")
    if not Path("runs/run").exists():
        Path("runs/run").symlink_to("small")
    call, words = ERRORS[name]
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    for word in words:
        assert word in text
    assert "--" not in text.split("meshwright ")[0]
    assert "pydantic" not in text
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_errors_about_a_setting_name_its_line(here: Path) -> None:
    for recipe in ("p/run.yaml", load_recipe("p/run.yaml")):
        with pytest.raises(UserError, match=r"^p/run\.yaml:3: training\.") as caught:
            for_python(_refuses)(recipe)
        assert [frame.name for frame in traceback.extract_tb(caught.tb)][1:] == ["call"]


def _refuses(recipe: Any) -> None:
    raise UserError("training.steps: no; leave --recipe out")


def test_a_notebook_shows_one_line(here: Path) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell(colors="nocolor")
    kept, sys.stdout = sys.stdout, io.StringIO()
    try:
        shell.run_cell("from meshwright import plan; plan('gpt2', margin=2)")
        shown = sys.stdout.getvalue()
    finally:
        sys.stdout = kept
        interactive.InteractiveShell.clear_instance()
    assert shown.strip() == ("UserError: margin=2 is not allowed: must be at least 0 and below 1 (default 0.1)")


def test_how_to_go_on_after_a_stop() -> None:
    def stopped(*, resume: bool = False) -> None:
        raise TrainingStopped(75, "stopped; continue with --resume (newest checkpoint: step-00000004)")

    with pytest.raises(TrainingStopped, match=r"^stopped; continue with resume=True \(newest"):
        for_python(stopped)()


# ---- a notebook's bar


def test_workers_do_not_print_the_steps_that_a_notebook_shows(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda bundle, raw: shown.append(bundle["text/plain"]))

    def show(bundle: dict[str, str], **_: Any) -> SimpleNamespace:
        shown.append(bundle["text/plain"])
        return handle

    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    ipython.display = SimpleNamespace(display=show)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    monkeypatch.setattr(display, "FOLLOW_SECONDS", 0.01)
    train(load_recipe("p/run.yaml", ["run_dir=runs/two", "layout.dp_shard=2"]))
    printed = capfd.readouterr().out
    assert shown[-1].startswith("step 2/2")
    assert "parameters" in printed
    assert "step 2/2" not in printed


def test_a_recipe_s_problems_are_a_list() -> None:
    with pytest.raises(RecipeError) as caught:
        Run(model="gpt2", layout={"dp_shard": -1}, device="gpu")
    assert len(caught.value.problems) == 2
