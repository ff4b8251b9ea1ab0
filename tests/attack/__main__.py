"""The standing attack: damage by users, disks, networks and strangers to a run, a server, a judge's client.

Every kind of attack is a table: what is attacked, by what is done to it. A round tries each cell once, in order; then
random cells follow, at random places and moments. A trial fails if the result differs without a message, if a refusal
does not name the fault, if a stack trace is shown, or if it does not end. A failure prints the seed that repeats it,
for --again.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import inf
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from attack.files import TARGETS, Damaged
from attack.good import make_good
from attack.inputs import data_files, data_trial, drawn_trials, recipe_trial, recipes
from attack.judged import Judged
from attack.machines import FAULTS, Disk, Network, faults, possible
from attack.planted import PLANTED, noticed
from attack.processes import Expected, SignalledJob, SignalledMachine, expect
from attack.report import cells_of, keep, show, summary, tables
from attack.served import ServedModel
from attack.trial import FAILURES, Kind, Trial, trial_of

SLOW: Mapping[str, float] = {
    "signalled job": 0.25,
    "one of two launchers": 0.1,
    "network of two machines": 0.05,
    "random recipes": 2,
}
"""Numbers of random trials of the slow kinds and of the widest kind, relative to the others'."""


class Attacks:
    """Every kind of attack by name, on one good folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.good = folder, make_good(folder)
        self._expected: Expected | None = None

    def expected(self) -> Expected:
        """The attacked job, undisturbed."""
        self._expected = self._expected or expect(self.good, self.place)
        return self._expected

    @property
    def place(self) -> Path:
        """The folder of this process's trials: kinds may run in parallel."""
        place = self.folder / str(os.getpid())
        place.mkdir(exist_ok=True)
        return place

    def tabular(self, name: str) -> Kind:
        """The kind of a name that has cells, for this process."""
        return next(kind for kind in self._tabular() if kind.name == name)

    def _tabular(self) -> list[Kind]:
        good, place = self.good, self.place
        kinds: list[Kind] = [Damaged(target, good, place) for target in TARGETS]
        kinds += [ServedModel(good, place), Judged(good, place)]
        kinds += [SignalledJob(good, place, self.expected), SignalledMachine(good, place, self.expected)]
        if not possible():
            kinds += [Disk(good, place), Network(good, place, self.expected)]
        return kinds

    def names(self) -> list[str]:
        """All kinds."""
        return [*(kind.name for kind in self._tabular()), *DRAWN]

    def trials(self, name: str, count: int, seed: int, deadline: float = inf) -> Iterator[Trial]:
        """Every cell of a kind once, then `count` random trials; of these, none begins after `deadline`."""
        if name in DRAWN:
            strategy, one = DRAWN[name]
            yield from drawn_trials(strategy(), partial(one, self.good, self.place), count, seed, deadline)
            return
        kind = self.tabular(name)
        cells = len(kind.cells())
        with contextlib.closing(kind) if isinstance(kind, ServedModel) else contextlib.nullcontext():
            for number in range(cells + count):
                if number >= cells and time.monotonic() > deadline:
                    return
                yield trial_of(kind, f"{name}/{seed}/{number}")

    def again(self, seed: str) -> Trial:
        """The trial of a seed, which begins with its kind: `network of two machines/0/3`."""
        return trial_of(self.tabular(seed.partition("/")[0]), seed)


DRAWN: Mapping[str, tuple[Callable, Callable]] = {
    "random recipes": (recipes, recipe_trial),
    "random records": (data_files, data_trial),
}
"""Kinds without cells."""


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="attack", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--trials",
        type=int,
        default=60,
        help="random ones of every kind, after all cells; fewer of slow kinds (default 60)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="kinds that are tried side by side (default 2)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1800,
        help="shared among the kinds; no random trial begins after that (default 1800)",
    )
    parser.add_argument("--again", default="", help="one trial, by the seed that its failure printed")
    parser.add_argument(
        "--planted", action="store_true", help=f"instead, whether a round notices planted faults: {', '.join(PLANTED)}"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add what was found to this file (docs/attack.json)")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="meshwright-attack-") as folder:
        attacks, began = Attacks(Path(folder)), time.monotonic()
        if arguments.planted:
            found = {name: list(noticed(attacks.tabular, name, arguments.seed)) for name in PLANTED}
            for name, trials in found.items():
                print(f"{name}: {len(trials)} trials of a round fail")
                print("".join(f"    {trial.fate}: {trial.done}\n" for trial in trials), end="")
            return int(not all(found.values()))
        if arguments.again:
            trials = [attacks.again(arguments.again)]
            show(trials[0])
        else:
            trials = campaign(
                attacks, arguments.trials, arguments.seed, arguments.only, arguments.jobs, arguments.seconds
            )
        if arguments.keep:
            command = f"--trials {arguments.trials} --seed {arguments.seed} --jobs {arguments.jobs}"
            command += f" --only '{arguments.only}'" if arguments.only else ""
            keep(arguments.keep, trials, command, time.monotonic() - began)
    print(f"\n{tables(cells_of(trials))}\n\n{summary(trials)}")
    return int(any(trial.fate in FAILURES for trial in trials))


def campaign(
    attacks: Attacks, count: int, seed: int, only: str = "", jobs: int = 1, seconds: float = 1800
) -> list[Trial]:
    """All kinds of attack whose name contains `only`, in parallel processes; each gets its share of the seconds."""
    if why := possible():
        print(f"no attacks by disks and networks: {why}")
    elif faults() != FAULTS:
        print("no slow and lossy links: this kernel has no netem")
    print(f"seed {seed}", flush=True)
    chosen = [name for name in attacks.names() if only in name]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        share = seconds * jobs / max(1, len(chosen))
        each = [pool.submit(attack, attacks, name, round(count * SLOW.get(name, 1)), seed, share) for name in chosen]
        return [trial for found in each for trial in found.result()]


def attack(attacks: Attacks, name: str, count: int, seed: int, seconds: float) -> list[Trial]:
    """A round of one kind, and `count` random trials, or as many as begin within `seconds`; failures are reported at
    once."""
    began = time.monotonic()
    trials = list(reported(attacks.trials(name, count, seed, began + seconds)))
    print(f"{name}: {len(trials)} in {time.monotonic() - began:.0f} s", flush=True)
    return trials


def reported(trials: Iterable[Trial]) -> Iterator[Trial]:
    """The trials; failures are shown."""
    for trial in trials:
        if trial.fate in FAILURES:
            show(trial)
        yield trial


if __name__ == "__main__":
    sys.exit(main())
