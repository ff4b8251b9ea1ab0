"""`verify` on existing ranks, with a fault planted in the layout's processes but not in the reference's."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.prove.reference import trace_reference, train_reference
from meshwright.prove.rounding import measure_rounding, trace_rounding
from meshwright.prove.verify import Proof, for_proof, prove_rank
from meshwright.prove.weights import proof_weights
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here
from meshwright.testing.ranks import RankPool

Plant = Callable[[], Any]
"""Makes a context that plants a fault; importable by its module's name, because ranks call it."""


def prove(
    ranks: RankPool,
    folder: Path,
    resolved: ResolvedRun,
    plant: Plant = contextlib.nullcontext,
    *,
    steps: int = 2,
    timeout: float = 120,
) -> Proof:
    """The proof of `verify` for a run with a fault planted under its layout; `timeout` in seconds."""
    resolved, world = for_proof(resolved), resolved.run.layout.world_size
    reference = train_reference(resolved, folder, steps)
    if resolved.run.training.dtypes.narrow:
        measure_rounding(resolved, reference, steps)
    proof = ranks.run(world, rank_proof, plant, resolved, folder, steps, 0, timeout=timeout)[0]
    if not proof.equal and proof.location is None:
        step = proof.comparisons[-1].step
        trace_reference(resolved, reference, step)
        if resolved.run.training.dtypes.narrow:
            trace_rounding(resolved, reference, step)
        proof = ranks.run(world, rank_proof, plant, resolved, folder, steps, step, timeout=timeout)[0]
    return proof


def rank_proof(plant: Plant, resolved: ResolvedRun, folder: Path, steps: int, trace: int) -> Proof:
    """One rank's part, as in `meshwright.prove.worker`."""
    with plant():
        trainer = build_here(resolved, weights=proof_weights(resolved))
        return prove_rank(trainer, folder, steps, trace)
