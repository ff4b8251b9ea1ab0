"""Sweeps whose trials Optuna proposes, and sweeps as a scheduler's array."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from journals import at, step, write_run
from meshwright.cli.main import main
from meshwright.cli.sweep_tpe import corners, search

LR = "training.optimizer.lr"
RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4}
data: {sources: [text.txt], sequence_length: 32, tokenizer_vocab: 300}
training: {steps: 4, global_batch: 8, micro_batch: 8}
device: cpu
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("\n".join(f"{n} and {n + 1} and" for n in range(2000)))
    return tmp_path / "run.yaml"


def bowl(settings: tuple[str, ...]) -> float:
    """A loss with its least value at lr=0.01 and width 64."""
    rate, width = (float(setting.partition("=")[2]) for setting in settings)
    return abs(rate - 0.01) + (width != 64)


def test_tpe_finds_the_better_values_and_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra sweep")
    paths, choices = [LR, "model.hidden"], [(1e-4, 1.0), ["32", "64"]]
    seen: list[tuple[str, ...]] = []
    for settings, take in search(paths, choices, 30, 0, tmp_path):
        seen.append(settings)
        if len(seen) == 12:
            break  # killed while its trial runs
        take(bowl(settings) if len(seen) != 3 else None)
    again = search(paths, choices, 30, 0, tmp_path)
    repeated = []
    for settings, take in again:
        repeated.append(settings)
        take(bowl(settings))
    assert repeated[:12] == seen
    assert len(repeated) == 30
    uninterrupted = []
    (tmp_path / "other").mkdir()
    for number, (settings, take) in enumerate(search(paths, choices, 30, 0, tmp_path / "other"), 1):
        uninterrupted.append(settings)
        take(bowl(settings) if number != 3 else None)
    assert uninterrupted == repeated  # an interruption changes nothing
    assert min(map(bowl, repeated)) < 0.02
    assert sum(bowl(one) < 0.3 for one in repeated[15:]) > sum(bowl(one) < 0.3 for one in repeated[:15])


def test_mistakes_in_any_value_are_found_before_the_first_step() -> None:
    mixes = list(corners([["a", "b", "c"], (0.5, 2.0)]))
    assert {mix[0] for mix in mixes} == {"a", "b", "c"}
    assert {mix[1] for mix in mixes} == {"0.5", "2.0"}


def test_without_optuna_one_line_says_how_to_get_it(recipe, monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["sweep", str(recipe), "--tpe", "3", f"{LR}=1e-4..1e-2", "--dir", str(recipe.parent / "s")]) == 2
    assert capsys.readouterr().err == (
        "error: --tpe needs Optuna: pip install 'meshwright[sweep]'; --random needs nothing\n"
    )


@pytest.mark.parametrize("other", [["--random", "3"], ["--slurm"]])
def test_ways_that_do_not_go_together_are_refused(other, recipe, capsys) -> None:
    words = ["sweep", str(recipe), "--tpe", "3", *other, f"{LR}=1e-4..1e-2", "--dir", str(recipe.parent / "s")]
    assert main(words) == 2
    assert f"leave out --tpe or {other[0]}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_sweep_by_tpe_trains_and_does_not_train_again(recipe, capsys) -> None:
    pytest.importorskip("optuna", reason="the extra sweep")
    folder = recipe.parent / "sweep"
    words = ["sweep", str(recipe), "--tpe", "1", f"{LR}=1e-4..1e-2", "--dir", str(folder), "--json"]
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in first["trials"]] == ["finished"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == first
    assert not captured.err


@pytest.mark.slow
def test_the_tasks_of_an_array_train_the_trials_and_are_collected(recipe, capsys) -> None:
    folder = recipe.parent / "a sweep"  # a blank, which the script must quote
    words = ["sweep", str(recipe), "--slurm", f"{LR}=1e-3,1e-2", "--dir", str(folder)]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "submit it with: sbatch" in captured.err
    assert captured.out.count("not begun") == 2
    script = folder / "array.sh"
    assert "#SBATCH --array=1-2\n" in script.read_text()
    for task in ("1", "2"):
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": task, "SLURM_JOB_ID": "7"}
        subprocess.run(["bash", script], env=environment, check=True, cwd="/")
        assert (folder / f"00{task}-lr=1e-{4 - int(task)}.log").read_text().count("trained to step 4") == 1
    assert main([*words, "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert [one["state"] for one in trials] == ["finished", "finished"]
    wrong = subprocess.run(
        ["bash", script], env=os.environ | {"SLURM_ARRAY_TASK_ID": "3"}, capture_output=True, text=True
    )
    assert (wrong.returncode, wrong.stderr) == (2, "no trial 3\n")


def test_a_collected_array_names_the_best(recipe, capsys) -> None:
    folder = recipe.parent / "sweep"
    words = ["sweep", str(recipe), "--slurm", f"{LR}=0.01,0.02", "--dir", str(folder)]
    assert main(words) == 0
    write_run(folder / "001-lr=0.01")
    records = [at("start", 0, 0.0, world_size=1), step(1, 1.0), at("evaluation", 1, 2.0, loss=0.5), at("end", 1, 3.0)]
    write_run(folder / "002-lr=0.02", records, lr=0.02)
    capsys.readouterr()
    assert main(words) == 0
    assert f"best   {folder}/002-lr=0.02" in capsys.readouterr().out
