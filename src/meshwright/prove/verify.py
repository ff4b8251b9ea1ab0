"""The proof that a recipe's layout equals one process, or the first difference."""

import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

from meshwright.launch.launcher import Nodes, find_worker, start_workers
from meshwright.launch.signals import StopRequest
from meshwright.launch.status import STOPPED, TrainingStopped
from meshwright.launch.supervise import RestartPolicy
from meshwright.optim.build import OPTIMIZERS
from meshwright.prove.compare import StepComparison, compare_start, compare_steps
from meshwright.prove.formats import compare_formats
from meshwright.prove.inputs import proof_weights
from meshwright.prove.locate import Location, locate, locate_start
from meshwright.prove.reference import (
    Reference,
    build_alone,
    gradients_of,
    load_weights,
    loader_for,
    trace_reference,
    train_reference,
    widened,
)
from meshwright.prove.rounding import measure_rounding, trace_rounding
from meshwright.prove.tolerance import CLIP, SMOOTHING, derive_tolerance
from meshwright.prove.whole_results import WholeComparison, compare_own, compare_whole, locate_whole, record_whole
from meshwright.spec.errors import UserError
from meshwright.spec.guards import GuardSpec
from meshwright.spec.pieces import pieces_of
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import OptimizerSpec
from meshwright.storage.scratch import scratch_folder
from meshwright.trainer.setup import RankContext, Trainer, build_trainer

RESOLVED, OWN, PROOF = "resolved.yaml", "own.yaml", "proof.pickle"
"""Files in a proof's folder: the run, the run in the recipe's own precision, the result."""


class LayoutFailed(RuntimeError):  # noqa: N818  (it names what happened, not a kind of error)
    """The layout's processes ended before any comparison; their messages have been printed."""


@dataclass(frozen=True)
class PrecisionCost:
    """A step in low precision, compared with the same step from the same weights without it."""

    step: int
    beside: str
    """The dtype of the step without low precision, and how its weights are gathered."""
    loss: float
    """The loss without low precision."""
    gradients: float
    """Norm of the difference of all gradients, over the norm of all gradients without low precision."""
    worst: str
    """The parameter whose gradient differs most relative to its norm."""
    worst_by: float


@dataclass(frozen=True)
class Proof:
    """The comparisons, and the location of the first difference."""

    comparisons: list[StepComparison]
    relative: float
    """The largest relative difference that rounding explains, by the bound on a single number."""
    whole: list[WholeComparison] = field(default_factory=list)
    """The whole steps after them (`prove/whole.py`), up to the first that differs."""
    measured: bool = False
    """Whether the verdict compares with rounding as measured on one process, because the bound is wide in bf16 or fp16
    (`prove/rounding.py`)."""
    location: Location | None = None
    cost: PrecisionCost | None = None
    """The effect of low precision on the last step, if the run uses it."""

    @property
    def equal(self) -> bool:
        """Whether the layout computed what one process computes."""
        return self.location is None and all(comparison.equal for comparison in self.comparisons)

    def as_data(self) -> dict[str, Any]:
        """The proof as plain data."""
        return {"equal": self.equal, **asdict(self)}


def verify(resolved: ResolvedRun, *, steps: int, own: ResolvedRun | None = None, device: str = "cpu") -> Proof:
    """Train `steps` steps on one process and under the layout, from the same weights on the same data, and compare.

    The process runs on this machine's CPUs, the layout on `device`, a word of the recipe's. `own`: the run in the
    recipe's own precision, whose number formats are checked; by default `resolved`. Raises `LayoutFailed` if the
    layout's processes fail, and `TrainingStopped`, a `KeyboardInterrupt`, if a signal ended it.
    """
    if find_worker() is not None:
        raise UserError("verify starts the layout's processes; run it without torchrun or srun")
    resolved, own = for_proof(resolved, device), None if own is None else for_proof(own, device)
    with scratch_folder("verify") as folder:
        for name, run in ((RESOLVED, resolved), (OWN, own)):
            if run is not None:
                (folder / name).write_text(dump_recipe(run, expanded=True))
        return prove(resolved, folder, steps, lambda trace: _under_layout(resolved, folder, steps, trace=trace))


def prove(resolved: ResolvedRun, folder: Path, steps: int, under_layout: Callable[[int], Proof]) -> Proof:
    """The proof of a run `for_proof`. `under_layout(trace)` calls `prove_rank` on the layout's ranks."""
    single = single_steps(resolved, steps)
    with StopRequest(raises=True), pieces_of(shrunk=resolved.shrunk):
        trainer = build_alone(resolved)
        reference = train_reference(trainer, resolved.run.layout, folder, single)
        record_whole(trainer, resolved.run.layout, reference, single, derive_tolerance(resolved))
        if resolved.run.training.dtypes.narrow:
            measure_rounding(resolved, reference, single)
        cost = measure_cost(resolved, reference, single) if single else None
    proof = under_layout(0)
    if not proof.equal and proof.location is None:
        step = proof.comparisons[-1].step
        with StopRequest(raises=True), pieces_of(shrunk=resolved.shrunk):
            trace_reference(resolved, reference, step)
            if resolved.run.training.dtypes.narrow:
                trace_rounding(resolved, reference, step)
        proof = under_layout(step)
    return replace(proof, cost=cost)


def single_steps(resolved: ResolvedRun, steps: int) -> int:
    """The number of steps that are compared one by one; none if each needs the step before."""
    return 0 if resolved.run.layout.asynchronous else steps


def for_proof(resolved: ResolvedRun, device: str = "cpu") -> ResolvedRun:
    """The run in the form that is proved: on `device`, its optimizer a smooth function of the gradient, every step
    clipped if the recipe clips at all. AdamW replaces a user's own optimizer, whose smoothness is unknown. bf16 weights
    and moments become fp32: their rounding is not smooth either, and is the same on every layout. A step that is not
    finite is skipped."""
    training = resolved.run.training.with_wide_state()
    ours = training.optimizer if training.optimizer.name in OPTIMIZERS else OptimizerSpec(lr=training.optimizer.lr)
    optimizer = ours.model_copy(update={"eps": max(SMOOTHING, ours.eps)})
    clip = None if training.clip is None else min(CLIP, training.clip)
    training = training.model_copy(update={"optimizer": optimizer, "clip": clip, "non_finite": "skip"})
    update = {"device": device, "training": training, "guards": GuardSpec()}
    return resolved.model_copy(update={"run": resolved.run.model_copy(update=update)})


def measure_cost(resolved: ResolvedRun, reference: Reference, step: int) -> PrecisionCost | None:
    """The effect of low precision and of quantized gathers on a step of the reference; None if the run has neither."""
    training = resolved.run.training
    if training.product_recipe is None and resolved.run.layout.quantized_weights == "none":
        return None
    plain = training.without_low_precision()
    run = resolved.run.model_copy(update={"training": plain})
    trainer = build_alone(resolved.model_copy(update={"run": run}))
    load_weights(trainer, reference, step - 1)
    with loader_for(trainer) as loader:
        loss, _ = trainer.train_step.gradients(loader.microbatches(step - 1))
    difference, length, worst, worst_by = 0.0, 0.0, "", 0.0
    for name, gradient in gradients_of(trainer):
        by, size = (gradient - reference.gradient(step, name)).norm().item(), gradient.norm().item()
        difference, length = difference + by * by, length + size * size
        if size and by / size >= worst_by:
            worst, worst_by = name, by / size
    gathers = " with unquantized weights" if resolved.run.layout.quantized_weights == "int8" else ""
    beside = f"{plain.precision}{gathers}"
    return PrecisionCost(step, beside, loss, sqrt(difference / length) if length else 0.0, worst, worst_by)


def prove_rank(trainer: Trainer, folder: Path, steps: int, trace: int, own: ResolvedRun | None = None) -> Proof:
    """One rank's part; the result is the same on every rank. `trace` is the step to locate a difference in, or 0; `own`
    as in `verify`."""
    reference, tolerance = Reference(folder, trainer.arrangements), derive_tolerance(trainer.resolved)
    widened(trainer)
    steps = single_steps(trainer.resolved, steps)
    proof = Proof([], tolerance.relative, measured=tolerance.statistical)
    start = locate_start(compare_start(trainer, reference))
    if start is not None:
        return replace(proof, location=start)
    proof = replace(proof, comparisons=compare_steps(trainer, reference, steps, tolerance))
    if not proof.equal:
        located = locate(trainer, reference, proof.comparisons[-1], tolerance) if trace else None
        return replace(proof, location=located)
    whole = compare_whole(trainer, reference, steps, tolerance)
    proof = replace(proof, whole=whole, location=locate_whole(whole))
    if proof.equal:
        place = RankContext(trainer.worker, trainer.device, trainer.meshes)
        checked = trainer if own is None else build_trainer(own, place, proof_weights(own))
        wrong = None if own is None else compare_own(checked, reference, steps)
        proof = replace(proof, location=compare_formats(checked) or wrong)
    return proof


def _under_layout(resolved: ResolvedRun, folder: Path, steps: int, *, trace: int) -> Proof:
    arguments = ["--folder", str(folder), "--steps", str(steps)]
    with StopRequest(raises=True) as stop:
        words = ["meshwright.prove.worker", *arguments, "--trace", str(trace)]
        status = start_workers(resolved.run, Nodes(), words, stop, RestartPolicy(run_dir=None))
    if status == STOPPED:
        raise TrainingStopped(status)
    if status:
        raise LayoutFailed
    return pickle.loads((folder / PROOF).read_bytes())
