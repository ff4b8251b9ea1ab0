"""Sweeps: their trials, what they report, and that they go on where they were."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from journals import at, step, write_run
from meshwright.cli.main import main
from meshwright.cli.sweep import plan_trials, split_values
from meshwright.spec.recipe import load_recipe

RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4}
data: {sources: [text.txt], sequence_length: 32, tokenizer_vocab: 300}
training: {steps: 20, global_batch: 8, micro_batch: 8, evaluation: {every: 10}}
device: cpu
"""
LR = "training.optimizer.lr"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("\n".join(f"{n} and {n + 1} and" for n in range(6000)))
    return tmp_path / "run.yaml"


def test_every_mix_is_a_trial() -> None:
    trials = plan_trials([f"{LR}=1e-3,1e-2", "training.steps=5", "model.hidden=32,64"], None, 0)
    assert [trial.settings for trial in trials] == [
        (f"{LR}={lr}", "training.steps=5", f"model.hidden={hidden}") for lr in ("1e-3", "1e-2") for hidden in (32, 64)
    ]
    assert trials[3].name == "004-lr=1e-2-steps=5-hidden=64"
    assert split_values("[a,b],{c: 1, d: 2},e") == ["[a,b]", "{c: 1, d: 2}", "e"]


def test_random_trials_are_the_same_for_a_seed_and_spread_over_their_range() -> None:
    words = [f"{LR}=1e-5..1e-1", "training.clip=0.5..1.5", "model.hidden=32,64"]
    trials = plan_trials(words, 400, 7)
    assert trials == plan_trials(words, 400, 7) != plan_trials(words, 400, 8)
    rates, clips, hidden = zip(
        *([setting.split("=")[1] for setting in trial.settings] for trial in trials), strict=True
    )
    below = sum(float(rate) < 1e-3 for rate in rates)  # half of a logarithmic range; 400 draws: 200 ± 10
    assert 160 < below < 240
    assert 160 < sum(float(clip) < 1 for clip in clips) < 240
    assert all(0.5 <= float(clip) <= 1.5 for clip in clips)
    assert 160 < hidden.count("32") < 240


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([LR], "is not a setting with values"),
        ([f"{LR}=1e-5..1e-2"], "a range needs --random N"),
        (["--random", "3", f"{LR}=1..1"], "a range goes from a number to a greater one"),
        (["--random", "3", f"{LR}=1e..2"], "a range goes from a number to a greater one"),
        (["--random", "0", f"{LR}=1,2"], "must be a number of runs, at least 1"),
        ([f"{LR}=1e-3,oops"], f"{LR}=oops: 'oops' is not allowed"),
        (["training.optimizer.lrr=1,2"], "did you mean 'lr'"),
        (["run_dir=a,b"], "a sweep names its runs' folders itself; give --dir"),
    ],
)
def test_mistakes_end_before_the_first_run(
    recipe: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recipe.parent / "sweep"
    assert main(["sweep", str(recipe), *words, "--dir", str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not folder.exists()


def test_finished_runs_are_ranked_and_not_trained_again(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By their last held-out loss; the best one's recipe is the recipe with its settings."""
    folder, words = recipe.parent / "sweep", [f"{LR}=0.01,0.02"]
    folder.mkdir()
    about = {"recipe": str(recipe.resolve()), "words": words, "random": None, "seed": None}
    (folder / "sweep.json").write_text(json.dumps(about))
    first, second = (folder / trial.name for trial in plan_trials(words, None, 0))
    write_run(first)
    records = [
        at("start", 0, 2000.0, world_size=1),
        step(1, 2001.0),
        at("evaluation", 1, 2002.0, loss=0.5),
        at("end", 1, 2003.0),
    ]
    write_run(second, records, lr=0.02)
    best = recipe.with_name("best.yaml")
    command = ["sweep", str(recipe), *words, "--dir", str(folder), "--write", str(best)]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["0.5000", "finished", f"{LR}=0.02"],
        ["3.3000", "finished", f"{LR}=0.01"],
    ]
    assert lines[-1] == f"best   {second}: {LR}=0.02; {best} written"
    assert load_recipe(best) == load_recipe(recipe, [f"{LR}=0.02"])
    assert "002-lr=0.02" in (folder / "sweep.html").read_text()
    assert main(command) == 2
    assert "best.yaml already exists" in capsys.readouterr().err
    assert main(["sweep", str(recipe), f"{LR}=0.01,0.03", "--dir", str(folder)]) == 2
    assert "is of another sweep" in capsys.readouterr().err
    assert main(["sweep", str(recipe), *words, "--dir", str(recipe.parent)]) == 2
    assert "is not empty; give another --dir" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_goes_on_and_outlives_a_run_that_fails(recipe: Path) -> None:
    """Stopped in its first run, then repeated: that run continues, the next fails, the last one trains."""
    folder = recipe.parent / "sweep"
    command = [
        sys.executable,
        "-P",
        "-m",
        "meshwright",
        "sweep",
        str(recipe),
        f"{LR}=1e-2,1e30,1e-3",
        "--dir",
        str(folder),
    ]
    command += ["checkpoint.every=2", "training.steps=40", "--json"]
    journal = folder / "001-lr=1e-2-every=2-steps=40" / "metrics.jsonl"
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (journal.is_file() and '"checkpoint"' in journal.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # to the sweep alone, as schedulers do: it stops its run
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75
    assert b"stopped before the sweep was complete" in err
    assert json.loads(out)["trials"][0]["state"] == "stopped"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    trials = {trial["name"][:3]: trial for trial in json.loads(done.stdout)["trials"]}
    assert [trials[name]["state"] == "finished" for name in ("001", "002", "003")] == [True, False, True]
    assert trials["001"]["value"] < trials["003"]["value"]
    starts = [record for record in map(json.loads, journal.read_text().splitlines()) if record["kind"] == "start"]
    assert len(starts) == 2, "it was continued"
    assert starts[1]["step"] > 0
    assert "002-lr=1e30-every=2-steps=40.log" in done.stderr
