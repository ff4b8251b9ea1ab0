"""The standing attack: random damage by users, disks, networks and strangers to a run.

Each trial damages a copy of a good folder, or a running job, and checks the outcome. A trial fails if the result
differs without a message, if a refusal does not name the fault, if a stack trace is shown, or if it does not end. A
failure prints the seed that repeats it, for --again.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import inf
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from attack.files import TARGETS, damage_trial
from attack.good import make_good
from attack.inputs import data_files, data_trial, drawn_trials, recipe_trial, recipes
from attack.machines import FAULTS, disk_trial, faults, network_trial, possible
from attack.processes import Expected, expect, signal_trial
from attack.trial import FAILURES, Trial

ROOT = Path(__file__).parents[2]
FATES = ("survived", "named", "as written", *FAILURES)
PER_KIND: Mapping[str, float] = {"killed job": 0.25, "stopped rank": 0.05, "network": 0.05, "random recipes": 2}
"""Numbers of trials of the slow kinds and of the widest kind, relative to the others'."""


class Attacks:
    """Every kind of attack by name, on one good folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.good = folder, make_good(folder)
        self._expected: Expected | None = None

    @property
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

    def trial(self, seed: str) -> Trial:
        """The trial of a seed, which begins with its kind: `network/0/3/cut`."""
        kind = seed.split("/", 1)[0]
        for target in TARGETS:
            if target.attack == kind:
                return damage_trial(self.good, self.place, target, seed)
        if kind == "full or read-only disk":
            return disk_trial(self.good, self.place, seed)
        if kind == "network":
            return network_trial(self.good, self.place, self.expected, seed)
        return signal_trial(self.good, self.place, self.expected, seed)

    def kinds(self, deadline: float = inf) -> dict[str, Callable[[int, int], Iterable[Trial]]]:
        """For each kind, a function that makes trials from a count and a seed; none begins after `deadline`."""
        drawn = {
            "random recipes": (recipes(), recipe_trial),
            "random records": (data_files(), data_trial),
        }
        found: dict[str, Callable[[int, int], Iterable[Trial]]] = {
            target.attack: partial(self._each, target.attack, deadline) for target in TARGETS
        }
        for kind, (strategy, one) in drawn.items():
            found[kind] = partial(self._drawn, strategy, one, deadline)
        found |= {kind: partial(self._each, kind, deadline) for kind in ("killed job", "stopped rank")}
        if not possible():
            found |= {kind: partial(self._each, kind, deadline) for kind in ("full or read-only disk", "network")}
        return found

    def _each(self, kind: str, deadline: float, count: int, seed: int) -> Iterator[Trial]:
        kinds_of_fault = faults() if kind == "network" else ()
        if kind == "network" and kinds_of_fault != FAULTS:
            print("no slow and lossy links: this kernel has no netem", flush=True)
        for number in range(count):
            if time.monotonic() > deadline:
                return
            fault = f"/{kinds_of_fault[number % len(kinds_of_fault)]}" if kinds_of_fault else ""
            yield self.trial(f"{kind}/{seed}/{number}{fault}")

    def _drawn(self, strategy, one, deadline: float, count: int, seed: int) -> Iterable[Trial]:
        return drawn_trials(strategy, partial(one, self.good, self.place), count, seed, deadline)


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="attack", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=120, help="of every kind; fewer of slow ones (default 120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="kinds that are tried side by side (default 2)")
    parser.add_argument(
        "--seconds", type=float, default=1800, help="shared among the kinds; no trial begins after that (default 1800)"
    )
    parser.add_argument("--again", default="", help="one trial, by the seed that its failure printed")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="add what was found to this JSON file (docs/attack.json)"
    )
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="meshwright-attack-") as folder:
        attacks = Attacks(Path(folder))
        if arguments.again:
            trials = [attacks.trial(arguments.again)]
            report(trials[0])
        else:
            began = time.monotonic()
            trials = campaign(
                attacks, arguments.trials, arguments.seed, arguments.only, arguments.jobs, arguments.seconds
            )
            if arguments.keep:
                keep(arguments.keep, trials, arguments, time.monotonic() - began)
    print(table(trials))
    return int(any(trial.fate in FAILURES for trial in trials))


def campaign(
    attacks: Attacks, count: int, seed: int, only: str = "", jobs: int = 1, seconds: float = 1800
) -> list[Trial]:
    """All kinds of attack whose name contains `only`, in parallel processes; each gets its share of the seconds."""
    if why := possible():
        print(f"no attacks by disks and networks: {why}")
    print(f"seed {seed}", flush=True)
    chosen = [(kind, max(1, round(count * PER_KIND.get(kind, 1)))) for kind in attacks.kinds() if only in kind]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        share = seconds * jobs / max(1, len(chosen))
        each = [pool.submit(attack, attacks, kind, number, seed, share) for kind, number in chosen]
        return [trial for found in each for trial in found.result()]


def attack(attacks: Attacks, kind: str, count: int, seed: int, seconds: float) -> list[Trial]:
    """`count` trials of one kind, or as many as begin within `seconds`; failures are reported at once."""
    began, trials = time.monotonic(), []
    for trial in attacks.kinds(time.monotonic() + seconds)[kind](count, seed):
        trials.append(trial)
        if trial.fate in FAILURES:
            report(trial)
    print(f"{kind}: {len(trials)} in {time.monotonic() - began:.0f} s", flush=True)
    return trials


def keep(file: Path, trials: Sequence[Trial], arguments: argparse.Namespace, seconds: float) -> None:
    """Add one campaign to those that `docs/make_security_md.py` shows."""
    known = json.loads(file.read_text()) if file.exists() else []
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {kind: Counter(trial.fate for trial in trials if trial.attack == kind) for kind in kinds_of(trials)}
    command = f"--trials {arguments.trials} --seed {arguments.seed} --jobs {arguments.jobs}"
    if arguments.only:
        command += f" --only '{arguments.only}'"
    about = {
        "date": time.strftime("%F"),
        "commit": commit.stdout.strip(),
        "command": command,
        "seconds": round(seconds),
    }
    file.write_text(json.dumps([*known, {**about, "found": found}], indent=1) + "\n")


def kinds_of(trials: Sequence[Trial]) -> list[str]:
    """The kinds, in order."""
    return list(dict.fromkeys(trial.attack for trial in trials))


def report(trial: Trial) -> None:
    """One trial, with the end of its output."""
    said = "".join(f"\n    {line}" for line in trial.said.splitlines()[-20:])
    print(f"{trial.fate}: {trial.done}  (--again '{trial.seed}'){said}", flush=True)


def table(trials: Sequence[Trial]) -> str:
    """Kinds by fates, as Markdown."""
    lines = [("attack", "tried", *FATES), ("---",) + ("---:",) * (len(FATES) + 1)]
    for kind, count in [
        *((kind, Counter(trial.fate for trial in trials if trial.attack == kind)) for kind in kinds_of(trials)),
        ("all", Counter(trial.fate for trial in trials)),
    ]:
        lines.append((kind, str(count.total()), *(str(count[fate]) for fate in FATES)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
