"""Recomputation of a step of a run in progress on one process, and comparison: `python -m meshwright.prove.replay`.

The run (`trainer/verification.py`) has written the step's initial state and each rank's results. The step is computed
once according to the recipe, and `RUNS` times more with random extra rounding (`rounding.py`), which measures how far
rounding moves each tensor; no bound is known for a real optimizer's step. In wide formats, sums in another order differ
by more than one rounding of their results, so the extra rounding is `WIDE` times coarser.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from typing import Any

import torch

from meshwright.data.loader import HostBatch
from meshwright.families.split import Arrangement, arrangements
from meshwright.launch.signals import end_with
from meshwright.launch.status import MISUSE
from meshwright.optim import shards
from meshwright.prove.difference import Difference
from meshwright.prove.reference import Reference, alone
from meshwright.prove.rounding import NUMBER, PartSums, judge, rounded_anew, worst_of
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import plugged_in
from meshwright.spec.run import ResolvedRun
from meshwright.storage.durable import write_durably
from meshwright.trainer.corpus import corpus_of
from meshwright.trainer.folder import RESOLVED, read_resolved
from meshwright.trainer.loop import build_loader
from meshwright.trainer.plugins import Plugins, read_plugins
from meshwright.trainer.reference import with_references
from meshwright.trainer.setup import RankContext, Trainer, build_trainer
from meshwright.trainer.snapshot import HeldTensor, file_of, read_index, read_values, restore_before, results
from meshwright.trainer.verification import VERDICT

RUNS, WIDE = 2, 32

SIZE = 4.0
"""Allowance of a rank's part, in root mean squares of the effect of rounding. It is twice a proof's, because a run has
very many tensors and steps, and a false alarm ends it."""

SQUARES = ("exp_avg_sq",)
"""Moments that are less informative about a gradient than others."""


@dataclass(frozen=True)
class Wrong:
    """A tensor that differs."""

    kind: str
    name: str
    difference: Difference
    ranks: tuple[int, ...]


class Replay:
    """The step on one process: its results, and the effect of rounding on them."""

    def __init__(self, resolved: ResolvedRun, folder: Path) -> None:
        run = resolved.run.model_copy(update={"device": "cpu"})
        self.resolved, self.folder = alone(resolved.model_copy(update={"run": run})), folder
        self.kept = Reference(folder / "replay")
        self.trainer = build_trainer(self.resolved, RankContext())
        self.arrangements = arrangements(self.trainer.table, resolved.model, resolved.run.layout.tp)
        values = read_values(folder)
        self.trainer.step = values["step"] + 1
        self.position = values["step"] + values["passed_over"]
        self.figures: dict[str, float] = {}
        """One process's figures of the step."""
        self.moved: dict[str, list[float]] = {}
        """The distance of each run with extra rounding: for loss and norm, and for every tensor as a factor."""

    def compute(self) -> None:
        """Compute the step, then recompute it with extra rounding."""
        corpus = with_references(self.trainer, corpus_of(self.resolved), Path(self.resolved.run.run_dir))
        with build_loader(self.trainer, corpus) as loader:
            microbatches = loader.microbatches(self.position)
        restore_before(self.folder, self.trainer)
        for kind, name, tensor in _whole(self.trainer, self.arrangements):
            self.kept.save(tensor, "before", kind, name)
        self.figures = self._step(microbatches)
        for kind, name, tensor in _whole(self.trainer, self.arrangements):
            self.kept.save(tensor, "expected", kind, name)
        for run in range(RUNS):
            restore_before(self.folder, self.trainer)
            with rounded_anew(self.trainer.model, self.epsilon, run):
                numbers = self._step(microbatches)
            for name, value in numbers.items():
                self.moved.setdefault(name, []).append(value - self.figures[name])
            for kind, name, tensor in _whole(self.trainer, self.arrangements):
                self._keep(kind, name, tensor, first=run == 0)

    @property
    def epsilon(self) -> float:
        """The precision of the extra rounding."""
        dtypes = self.resolved.run.training.dtypes
        return dtypes.compute.epsilon * (1 if dtypes.narrow else WIDE)

    def _step(self, microbatches: list[HostBatch]) -> dict[str, float]:
        make = self.trainer.train_step
        loss, trained = make.gradients(microbatches)
        gnorm = make.gradient_norm()
        make.update(self.trainer.step, gnorm)
        make.store.zero_grad()
        self.trained = trained
        return {"loss": loss, "gnorm": gnorm}

    def _keep(self, kind: str, name: str, tensor: torch.Tensor, *, first: bool) -> None:
        before, expected = (self.kept.tensor(when, kind, name).double() for when in ("before", "expected"))
        part = PartSums.of(tensor, expected, torch.zeros(()), before)
        square = (tensor.double() - expected).square() / RUNS
        self.kept.save(square if first else square + self.kept.tensor("square", kind, name), "square", kind, name)
        self.moved.setdefault(f"{kind} {name}", []).append(part.along / part.change if part.change else 0.0)

    def allowed(self, ours: dict[str, float]) -> dict[str, Difference]:
        """The run's loss and norm, compared with one process's."""
        typical, room = statistics.median(self.factors().values()), dict[str, float]()
        share = self.epsilon / sqrt(self.trained)
        for name, least in (("loss", share), ("gnorm", typical)):
            room[name] = NUMBER * max(_rms(self.moved[name]), least * abs(self.figures[name]))
        return {name: Difference(_apart(ours[name], self.figures[name]), room[name]) for name in room}

    def factors(self) -> dict[str, float]:
        """How far rounding moves each tensor as a whole. Two runs give a poor estimate, so it is at least the median
        over tensors."""
        own = {name: _rms(values) for name, values in self.moved.items() if " " in name}
        typical = statistics.median(own.values())
        return {name: max(value, typical) for name, value in own.items()}

    def wrong(self, held: list[HeldTensor]) -> list[Wrong]:
        """The tensors that differ, in the order of the backward pass, the most informative about gradients first."""
        parts: list[dict[str, PartSums]] = [{} for _ in range(1 + max(one.ranks[0] for one in held))]
        holders: dict[tuple[str, int], HeldTensor] = {}
        least: dict[str, float] = {}
        for one in held:
            key = f"{one.kind} {one.name}"
            ours = self.kept.read(file_of(self.folder, one))
            square, expected, before = (
                _part(self.kept.tensor(when, one.kind, one.name), one, ours)
                for when in ("square", "expected", "before")
            )
            parts[one.ranks[0]][key] = PartSums.of(ours, expected, square, before)
            holders[key, one.ranks[0]] = one
            least[key] = max(least.get(key, 0.0), self._least(one.kind, expected))
        differing = []
        for key, differences in judge(parts, self.factors(), size=SIZE, least=least).items():
            if different := [difference for difference in differences if not difference.equal]:
                ranks = {rank for difference in different for rank in holders[key, difference.rank].ranks}
                kind, _, name = key.partition(" ")
                differing.append(Wrong(kind, name, worst_of(different), tuple(sorted(ranks))))
        order = {row.name: place for place, row in enumerate(self.trainer.table)}
        return sorted(differing, key=lambda one: _rank_of(one, order))

    def _least(self, kind: str, expected: torch.Tensor) -> float:
        """The rounding of a stored number. A router's bias moves up or down by a fixed amount, and a single token may
        decide which."""
        model, dtypes = self.resolved.model, self.resolved.run.training.dtypes
        stored = dtypes.master.epsilon * expected.double().square().mean().sqrt().item() if expected.numel() else 0.0
        return max(stored, model.balance_rate or 0.0) if kind == "state" else stored


def _whole(trainer: Trainer, stored: Mapping[str, Arrangement]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """One process's results, in the order in which ranks store them."""
    for kind, name, tensor, _ in results(trainer):
        arrangement = stored.get(name) or stored.get(name.rpartition(".")[0])
        yield kind, name, shards.arranged(tensor, arrangement) if tensor.dim() else tensor


def _part(whole: torch.Tensor, held: HeldTensor, ours: torch.Tensor) -> torch.Tensor:
    for dim, begin in enumerate(held.begin):
        whole = whole.narrow(dim, begin, ours.shape[dim])
    return whole


def _rank_of(wrong: Wrong, order: dict[str, int]) -> tuple[int, int]:
    """Sort key of a tensor among those that differ."""
    name, _, key = wrong.name.rpartition(".") if wrong.kind == "moments" else (wrong.name, "", "")
    what = 0 if wrong.kind == "moments" and key not in SQUARES else 1 if wrong.kind == "weights" else 2
    return what, -order.get(name, 0)


def _rms(values: list[float]) -> float:
    return sqrt(sum(value * value for value in values) / len(values))


def _apart(ours: float, theirs: float) -> float:
    by = abs(ours - theirs)
    return by if by == by else inf


def verdict(replay: Replay, seconds: float) -> dict[str, Any]:
    """The report of the step, for `metrics.jsonl` and for users."""
    held, ours = read_index(replay.folder)
    numbers, wrong = replay.allowed(ours), replay.wrong(held)
    equal = not wrong and all(number.equal for number in numbers.values())
    names = {"loss": "loss", "gnorm": "gradient norm"}
    sentences = [
        f"{names[name]} {ours[name]:.6g}, {'within' if number.equal else 'not within'} {number.allowed:.1e} of one "
        f"process's {replay.figures[name]:.6g}"
        for name, number in numbers.items()
    ]
    tensors = len({(one.kind, one.name) for one in held})
    sentences.append(f"{len(wrong)} of {tensors} tensors differ" if wrong else f"{tensors} of {tensors} tensors equal")
    if wrong:
        sentences.append(f"first {_describe(wrong[0])}")
    return {
        "equal": equal,
        "text": "; ".join([*sentences, f"{seconds:.0f} s"]),
        "first": wrong[0].name if wrong else None if equal else next(n for n, one in numbers.items() if not one.equal),
        "ranks": list(wrong[0].ranks) if wrong else [],
        "seconds": round(seconds, 1),
    }


def _describe(wrong: Wrong) -> str:
    difference, several = wrong.difference, len(wrong.ranks) > 1
    what = {"weights": "", "state": "the buffer ", "moments": "the optimizer's "}[wrong.kind]
    factor = "" if difference.factor is None else f", {difference.factor:.4g} times the correct change"
    ranks = f"rank{'s' * several} {', '.join(map(str, wrong.ranks))}"
    return f"{what}{wrong.name} on {ranks}, by {difference.by:.1e} of {difference.allowed:.1e} allowed{factor}"


def main() -> int:
    """Recompute the step in a folder, and write the verdict next to it."""
    parser = argparse.ArgumentParser(prog="meshwright.prove.replay", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the run's record of the step")
    parser.add_argument("--plugins", type=Path, help="objects that Python code passed to train")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    arguments = parser.parse_args()
    end_with(arguments.parent)
    began = time.monotonic()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    try:
        resolved = read_resolved(arguments.folder / RESOLVED)
        plugins = read_plugins(arguments.plugins) if arguments.plugins else Plugins()
        with plugged_in(plugins.objects()):
            replay = Replay(resolved, arguments.folder)
            replay.compute()
    except UserError as error:
        print(error)
        return MISUSE
    report = verdict(replay, time.monotonic() - began)
    write_durably(arguments.folder / VERDICT, json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
