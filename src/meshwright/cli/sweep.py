"""The verb `sweep`: trains a recipe with several values of its settings, one run after another, and names the best."""

import argparse
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from meshwright.cli.common import stoppable, whole_number
from meshwright.cli.output import add_json_argument, print_result
from meshwright.cli.sweep_array import write_array
from meshwright.cli.sweep_tpe import Choices, corners, is_wide, require_optuna, search
from meshwright.launch.status import TrainingStopped
from meshwright.pages.runs import read_run
from meshwright.pages.view import RunsPage
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe, load_recipe
from meshwright.storage.durable import write_durably
from meshwright.storage.journal import JOURNAL

FOLDER, RECORD, PAGE = Path("runs/sweep"), "sweep.json", "sweep.html"
RANGE = re.compile(r"([-+.\deE]+)\.\.([-+.\deE]+)")
LAST_PART = 0.1
"""Part of a run's steps whose mean loss counts, if it has no held-out loss."""
EPILOG = """\
The best run has the least held-out loss at its end, or the least mean loss over its last tenth if nothing is held
out. The same command goes on with a sweep that was interrupted.

examples:
  meshwright sweep run.yaml training.optimizer.lr=1e-4,3e-4,1e-3 training.steps=200
  meshwright sweep run.yaml --random 12 training.optimizer.lr=1e-5..1e-2 training.global_batch=32,64
  meshwright sweep run.yaml --tpe 20 training.optimizer.lr=1e-5..1e-2 training.optimizer.weight_decay=0.0..0.3
  meshwright sweep run.yaml --slurm training.optimizer.lr=1e-4,3e-4 && sbatch --gpus=8 runs/sweep/array.sh

exit status: 0 all runs finished, 1 some did not, 2 invalid command line, 75 stopped by a signal, 130 by Ctrl-C
"""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: the settings that it has, as the command line takes them."""

    number: int
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its folder: `003-lr=0.001-global_batch=64`."""
        return re.sub(r"[^\w.=+-]+", "_", "-".join((f"{self.number:03d}", *map(_last_part, self.settings))))[:100]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `sweep`."""
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="recipe file (YAML)")
    parser.add_argument(
        "overrides",
        metavar="a.b=c,d,e",
        nargs="+",
        help="a setting with its values, separated by commas; with --random or --tpe also a range, 1e-5..1e-2; a "
        "setting with one value applies to all runs",
    )
    number = whole_number("a number of runs, at least 1", least=1)
    parser.add_argument("--random", metavar="N", type=number, help="N runs with values drawn at random, not every mix")
    parser.add_argument(
        "--tpe", metavar="N", type=number, help="N runs with values that Optuna chooses from the results so far (TPE)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of --random and --tpe (default 0)")
    parser.add_argument(
        "--slurm",
        action="store_true",
        help="train nothing here: write an array job, and report its runs when the command is repeated",
    )
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, default=FOLDER, help=f"folder of the runs (default {FOLDER})"
    )
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the recipe of the best run")
    add_json_argument(parser)
    parser.epilog = EPILOG


def run(arguments: argparse.Namespace) -> int:
    """Train every trial that is not finished, and report."""
    if arguments.write and arguments.write.exists():
        raise UserError(f"{arguments.write} already exists; give another --write, or remove it")
    if arguments.tpe and (arguments.random or arguments.slurm):
        other = "--random" if arguments.random else "--slurm, whose tasks start at once"
        raise UserError(f"--tpe chooses each run after those before it; leave out --tpe or {other}")
    trials = _checked(arguments)
    _remember(arguments)
    stopped = None
    if arguments.slurm:
        commands = {trial.name: _command(arguments, trial) for trial in trials}
        script = write_array(arguments.dir, commands)
        print(f"submit it with: sbatch {script}; then repeat this command to see the runs", file=sys.stderr)
    else:
        try:
            with stoppable("the sweep"):
                trials = _train_all(arguments, trials)
        except TrainingStopped as stop:
            stopped = stop.status
    results = [_result(arguments.dir / trial.name, trial) for trial in trials]
    ranked = sorted(results, key=lambda result: math.inf if result["value"] is None else result["value"])
    best = ranked[0] if ranked and ranked[0]["value"] is not None else None
    shown = [line for line in (_page(arguments.dir, results), _best(arguments, best)) if line]
    print_result(arguments, {"trials": ranked, "best": best}, [*_table(ranked), "", *shown])
    if stopped is not None:
        return stopped
    return int(not arguments.slurm and any(result["state"] != "finished" for result in results))


def _checked(arguments: argparse.Namespace) -> list[Trial]:
    """The trials, none for --tpe. Raises `UserError` for every mistake before the first step."""
    if arguments.tpe:
        require_optuna()
        choices = [_choices(word) for word in arguments.overrides]
        trials = [_trial(number, arguments.overrides, mix) for number, mix in enumerate(corners(choices), 1)]
    else:
        trials = plan_trials(arguments.overrides, arguments.random, arguments.seed)
    if any(setting.startswith("run_dir=") for setting in trials[0].settings):
        raise UserError("run_dir: a sweep names its runs' folders itself; give --dir")
    for trial in trials:
        load_recipe(arguments.recipe, trial.settings)
    return [] if arguments.tpe else trials


def _train_all(arguments: argparse.Namespace, trials: list[Trial]) -> list[Trial]:
    """Train every trial that is not finished; returns them."""
    if not arguments.tpe:
        for trial in trials:
            _train(arguments, trial, len(trials))
        return trials
    choices = [_choices(word) for word in arguments.overrides]
    paths = [word.partition("=")[0] for word in arguments.overrides]
    for number, (settings, take) in enumerate(
        search(paths, choices, arguments.tpe, arguments.seed, arguments.dir), start=1
    ):
        trial = Trial(number, settings)
        trials.append(trial)
        _train(arguments, trial, arguments.tpe)
        take(_result(arguments.dir / trial.name, trial)["value"])
    return trials


def _trial(number: int, words: Sequence[str], mix: Sequence[str]) -> Trial:
    paths = (word.partition("=")[0] for word in words)
    return Trial(number, tuple(f"{path}={value}" for path, value in zip(paths, mix, strict=True)))


def plan_trials(words: Sequence[str], count: int | None, seed: int) -> list[Trial]:
    """Every mix of the values, or `count` random ones. Raises `UserError` for a word that is no setting, or a range
    that is not drawn from."""
    choices = [_choices(word) for word in words]
    if count is None:
        if ranged := next(
            (word for word, values in zip(words, choices, strict=True) if isinstance(values, tuple)), None
        ):
            raise UserError(f"{ranged}: a range needs --random N or --tpe N; or give its values, separated by commas")
        mixes: Iterator[tuple[str, ...]] = product(*(values for values in choices if isinstance(values, list)))
    else:
        drawn = random.Random(seed)
        mixes = (tuple(_draw(values, drawn) for values in choices) for _ in range(count))
    return [_trial(number, words, mix) for number, mix in enumerate(mixes, 1)]


def _choices(word: str) -> Choices:
    """A setting's values, or the ends of its range."""
    path, equals, text = word.partition("=")
    if not path or not equals:
        raise UserError(f"{word!r} is not a setting with values, as in training.optimizer.lr=1e-4,3e-4")
    if match := RANGE.fullmatch(text):
        try:
            least, most = float(match[1]), float(match[2])
        except ValueError:
            least, most = 1.0, 0.0
        if not -math.inf < least < most < math.inf:
            raise UserError(f"{word}: a range goes from a number to a greater one, as in 1e-5..1e-2")
        return least, most
    return split_values(text)


def split_values(text: str) -> list[str]:
    """Values between commas; commas inside brackets and braces belong to a value."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return values


def _draw(values: Choices, drawn: random.Random) -> str:
    if isinstance(values, list):
        return drawn.choice(values)
    least, most = values
    if is_wide(least, most):
        return f"{math.exp(drawn.uniform(math.log(least), math.log(most))):.4g}"
    return f"{drawn.uniform(least, most):.4g}"


def _last_part(setting: str) -> str:
    """`training.optimizer.lr=0.1` as `lr=0.1`."""
    path, _, value = setting.partition("=")
    return f"{path.rpartition('.')[2]}={value}"


def _remember(arguments: argparse.Namespace) -> None:
    """Write what the sweep is into its folder. Raises `UserError` if another one is there."""
    about = {"recipe": str(arguments.recipe.resolve()), "words": arguments.overrides, "random": arguments.random}
    about["seed"] = arguments.seed if arguments.random or arguments.tpe else None
    about |= {"tpe": arguments.tpe} if arguments.tpe else {}
    path = arguments.dir / RECORD
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != about:
            raise UserError(f"{path} is of another sweep; give another --dir, or repeat its command to go on with it")
        return
    if arguments.dir.is_dir() and any(arguments.dir.iterdir()):
        raise UserError(f"{arguments.dir} is not empty; give another --dir")
    arguments.dir.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(about, indent=1).encode())


def _train(arguments: argparse.Namespace, trial: Trial, trials: int) -> None:
    """Train one trial to its end in a process of its own, or go on with it; what it prints goes to a file beside it."""
    run_dir = (arguments.dir / trial.name).resolve()
    if _result(run_dir, trial)["state"] == "finished":
        return
    print(f"{trial.number} of {trials}: {' '.join(trial.settings)}", file=sys.stderr, flush=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir.parent / f"{trial.name}.log").open("ab") as log:
        process = subprocess.Popen(
            _command(arguments, trial), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        status = process.wait()
    except TrainingStopped:
        process.terminate()  # it saves a checkpoint
        process.wait()
        raise
    if status:
        print(f"  failed with exit status {status}; see {run_dir}.log", file=sys.stderr, flush=True)


def _command(arguments: argparse.Namespace, trial: Trial) -> list[str]:
    """The command that trains a trial, or goes on with it."""
    run_dir = json.dumps(str((arguments.dir / trial.name).resolve()))
    words = ["train", str(arguments.recipe.resolve()), *trial.settings, f"run_dir={run_dir}", "--resume", "auto"]
    return [sys.executable, "-P", "-m", "meshwright", *words]


def _result(run_dir: Path, trial: Trial) -> dict[str, Any]:
    """A trial's state and its figure: the held-out loss at the end, else the mean loss of the last steps; None before
    it is finished."""
    result = {
        "name": trial.name,
        "settings": list(trial.settings),
        "state": "not begun",
        "value": None,
        "held_out": False,
    }
    if not (run_dir / JOURNAL).is_file():
        return result | ({"state": "failed"} if run_dir.with_name(f"{run_dir.name}.log").exists() else {})
    read = read_run(run_dir, trial.name)
    losses = [value for value in read["tables"].get("step", {}).get("loss", ()) if value is not None]
    held_out = [value for value in read["tables"].get("evaluation", {}).get("loss", ()) if value is not None]
    result |= {"state": read["state"], "held_out": bool(held_out)}
    if read["state"] == "finished" and losses:
        last = losses[-max(1, round(LAST_PART * len(losses))) :]
        result["value"] = held_out[-1] if held_out else sum(last) / len(last)
    return result


def _table(ranked: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The trials, the best first."""
    yield f"{'held-out loss' if any(one['held_out'] for one in ranked) else 'loss':>13}  {'state':<12}  settings"
    for one in ranked:
        value = "-" if one["value"] is None else f"{one['value']:.4f}"
        yield f"{value:>13}  {one['state']:<12}  {' '.join(one['settings'])}"


def _page(folder: Path, results: Sequence[dict[str, Any]]) -> str:
    """Write the page of all runs that have begun; the line that names it."""
    begun = [folder / one["name"] for one in results if (folder / one["name"] / JOURNAL).is_file()]
    if not begun:
        return ""
    try:
        RunsPage(begun).save(folder / PAGE)
    except UserError as error:  # the plotting library is an extra
        return f"no page: {error}"
    return f"page   {folder / PAGE}"


def _best(arguments: argparse.Namespace, best: dict[str, Any] | None) -> str:
    """Write the recipe of the best run where that is wanted; the line that names the run."""
    if best is None:
        return "best   none: no run has finished"
    if arguments.write:
        recipe = load_recipe(arguments.recipe, best["settings"])
        arguments.write.write_text(dump_recipe(recipe), encoding="utf-8")
    written = f"; {arguments.write} written" if arguments.write else ""
    return f"best   {arguments.dir / best['name']}: {' '.join(best['settings'])}{written}"
