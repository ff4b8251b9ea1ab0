"""The one place that proves a recipe's layout equal to one process, or says where it first differs."""

import pickle
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.prove.compare import StepComparison, compare_steps
from meshwright.prove.locate import Location, locate
from meshwright.prove.reference import Reference, trace_reference, train_reference
from meshwright.prove.tolerance import SMOOTHING, derive_tolerance
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.launch import Nodes, find_worker, start_workers
from meshwright.trainer.signals import StopRequest
from meshwright.trainer.status import STOPPED, TrainingStopped

RESOLVED, PROOF = "resolved.yaml", "proof.pickle"


class LayoutFailed(RuntimeError):  # noqa: N818  (it names what happened, not a kind of error)
    """The layout's processes ended before they had compared anything; their messages have been printed."""


@dataclass(frozen=True)
class Proof:
    """What was compared, and where the first difference is."""

    comparisons: list[StepComparison]
    relative: float
    """The largest relative difference that rounding explains."""
    location: Location | None = None

    @property
    def equal(self) -> bool:
        """Whether the layout computed what one process computes."""
        return all(comparison.equal for comparison in self.comparisons)

    def as_data(self) -> dict[str, Any]:
        """For machines."""
        return {"equal": self.equal, **asdict(self)}


def verify(resolved: ResolvedRun, *, steps: int) -> Proof:
    """Train `steps` steps on one process and under the layout, from the same weights on the same data, and compare.

    Both on this machine's CPUs. Raises `LayoutFailed` where the layout's processes fail, and `TrainingStopped`, a
    `KeyboardInterrupt`, where a signal ended it.
    """
    if find_worker() is not None:
        raise ValueError("verify starts the layout's processes itself; run it without torchrun or srun")
    resolved = for_proof(resolved)
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as name:
        folder = Path(name)
        with StopRequest(raises=True):
            reference = train_reference(resolved, folder, steps)
        proof = _under_layout(resolved, folder, steps, trace=0)
        if not proof.equal:
            step = proof.comparisons[-1].step
            with StopRequest(raises=True):
                trace_reference(resolved, reference, step)
            proof = _under_layout(resolved, folder, steps, trace=step)
    return proof


def for_proof(resolved: ResolvedRun) -> ResolvedRun:
    """The run as it is proved: on CPUs, its optimizer a smooth function of the gradient."""
    training = resolved.run.training
    optimizer = training.optimizer.model_copy(update={"eps": max(SMOOTHING, training.optimizer.eps)})
    run = resolved.run.model_copy(
        update={"device": "cpu", "training": training.model_copy(update={"optimizer": optimizer})}
    )
    return resolved.model_copy(update={"run": run})


def prove_rank(trainer: Any, folder: Path, steps: int, trace: int) -> Proof:
    """One rank's part; the result is the same on every rank. `trace` is the step to locate a difference in, or 0."""
    reference, tolerance = Reference(folder), derive_tolerance(trainer.resolved)
    comparisons = compare_steps(trainer, reference, steps, tolerance)
    location = None
    if trace and not comparisons[-1].equal:
        location = locate(trainer, reference, comparisons[-1], tolerance)
    return Proof(comparisons, tolerance.relative, location)


def _under_layout(resolved: ResolvedRun, folder: Path, steps: int, *, trace: int) -> Proof:
    (folder / RESOLVED).write_text(dump_recipe(resolved, expanded=True))
    arguments = ["--resolved", str(folder / RESOLVED), "--folder", str(folder), "--steps", str(steps)]
    with StopRequest(raises=True) as stop:
        words = [*arguments, "--trace", str(trace)]
        status = start_workers(resolved.run, Nodes(), words, stop, run_dir=None, module="meshwright.prove.worker")
    if status == STOPPED:
        raise TrainingStopped(status)
    if status:
        raise LayoutFailed
    return pickle.loads((folder / PROOF).read_bytes())
