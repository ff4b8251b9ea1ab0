"""The proof that a recipe's layout equals one process, or the first difference."""

import pickle
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.launch.launcher import Nodes, find_worker, start_workers
from meshwright.launch.signals import StopRequest
from meshwright.launch.status import STOPPED, TrainingStopped
from meshwright.launch.supervise import RestartPolicy
from meshwright.optim.build import OPTIMIZERS
from meshwright.prove.compare import StepComparison, compare_start, compare_steps
from meshwright.prove.cost import Cost, measure_cost
from meshwright.prove.locate import Location, locate, locate_start
from meshwright.prove.reference import Reference, trace_reference, train_reference
from meshwright.prove.rounding import measure_rounding, trace_rounding
from meshwright.prove.tolerance import CLIP, SMOOTHING, derive_tolerance
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import OptimizerSpec
from meshwright.storage.scratch import scratch_folder

RESOLVED, PROOF = "resolved.yaml", "proof.pickle"


class LayoutFailed(RuntimeError):  # noqa: N818  (it names what happened, not a kind of error)
    """The layout's processes ended before any comparison; their messages have been printed."""


@dataclass(frozen=True)
class Proof:
    """The comparisons, and the location of the first difference."""

    comparisons: list[StepComparison]
    relative: float
    """The largest relative difference that rounding explains, by the bound on a single number."""
    measured: bool = False
    """Whether the verdict compares with rounding as measured on one process, because the bound is wide in bf16 or fp16
    (`prove/rounding.py`)."""
    location: Location | None = None
    cost: Cost | None = None
    """The effect of low precision on the last step, if the run uses it."""

    @property
    def equal(self) -> bool:
        """Whether the layout computed what one process computes."""
        wrong_start = self.location is not None and self.location.phase == "start"
        return not wrong_start and all(comparison.equal for comparison in self.comparisons)

    def as_data(self) -> dict[str, Any]:
        """The proof as plain data."""
        return {"equal": self.equal, **asdict(self)}


def verify(resolved: ResolvedRun, *, steps: int) -> Proof:
    """Train `steps` steps on one process and under the layout, from the same weights on the same data, and compare.

    Both run on this machine's CPUs. Raises `LayoutFailed` if the layout's processes fail, and `TrainingStopped`, a
    `KeyboardInterrupt`, if a signal ended it.
    """
    if find_worker() is not None:
        raise UserError("verify starts the layout's processes; run it without torchrun or srun")
    resolved = for_proof(resolved)
    with scratch_folder("verify") as folder:
        with StopRequest(raises=True):
            reference = train_reference(resolved, folder, steps)
            if resolved.run.training.dtypes.narrow:
                measure_rounding(resolved, reference, steps)
            cost = measure_cost(resolved, reference, steps)
        proof = _under_layout(resolved, folder, steps, trace=0)
        if not proof.equal and proof.location is None:
            step = proof.comparisons[-1].step
            with StopRequest(raises=True):
                trace_reference(resolved, reference, step)
                if resolved.run.training.dtypes.narrow:
                    trace_rounding(resolved, reference, step)
            proof = _under_layout(resolved, folder, steps, trace=step)
    return replace(proof, cost=cost, measured=resolved.run.training.dtypes.narrow)


def for_proof(resolved: ResolvedRun) -> ResolvedRun:
    """The run in the form that is proved: on CPUs, its optimizer a smooth function of the gradient, every step clipped
    if the recipe clips at all. AdamW replaces a user's own optimizer, whose smoothness is unknown. bf16 weights and
    moments become fp32: their rounding is not smooth either, and is the same on every layout."""
    training = resolved.run.training.with_wide_state()
    ours = training.optimizer if training.optimizer.name in OPTIMIZERS else OptimizerSpec(lr=training.optimizer.lr)
    optimizer = ours.model_copy(update={"eps": max(SMOOTHING, ours.eps)})
    clip = None if training.clip is None else min(CLIP, training.clip)
    training = training.model_copy(update={"optimizer": optimizer, "clip": clip})
    return resolved.model_copy(update={"run": resolved.run.model_copy(update={"device": "cpu", "training": training})})


def prove_rank(trainer: Any, folder: Path, steps: int, trace: int) -> Proof:
    """One rank's part; the result is the same on every rank. `trace` is the step to locate a difference in, or 0."""
    reference, tolerance = Reference(folder), derive_tolerance(trainer.resolved)
    start = locate_start(compare_start(trainer, reference))
    if start is not None:
        return Proof([], tolerance.relative, location=start)
    comparisons = compare_steps(trainer, reference, steps, tolerance)
    location = None
    if trace and not comparisons[-1].equal:
        location = locate(trainer, reference, comparisons[-1], tolerance)
    return Proof(comparisons, tolerance.relative, location=location)


def _under_layout(resolved: ResolvedRun, folder: Path, steps: int, *, trace: int) -> Proof:
    (folder / RESOLVED).write_text(dump_recipe(resolved, expanded=True))
    arguments = ["--resolved", str(folder / RESOLVED), "--folder", str(folder), "--steps", str(steps)]
    with StopRequest(raises=True) as stop:
        words = ["meshwright.prove.worker", *arguments, "--trace", str(trace)]
        status = start_workers(resolved.run, Nodes(), words, stop, RestartPolicy(run_dir=None))
    if status == STOPPED:
        raise TrainingStopped(status)
    if status:
        raise LayoutFailed
    return pickle.loads((folder / PROOF).read_bytes())
