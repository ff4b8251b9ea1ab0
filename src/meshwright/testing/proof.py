"""`verify` on existing ranks, with a fault planted in the layout's processes but not in the reference's."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.prove import verify
from meshwright.prove.inputs import proof_weights
from meshwright.prove.verify import Proof, for_proof, prove_rank
from meshwright.spec.pieces import pieces_of
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
    own: ResolvedRun | None = None,
) -> Proof:
    """The proof of `verify` for a run with a fault planted under its layout."""
    resolved, own = for_proof(resolved), None if own is None else for_proof(own)

    def under_layout(trace: int) -> Proof:
        work = rank_proof, plant, resolved, folder, steps, trace, own
        return ranks.run(resolved.run.layout.world_size, *work)[0]

    return verify.prove(resolved, folder, steps, under_layout)


def rank_proof(
    plant: Plant, resolved: ResolvedRun, folder: Path, steps: int, trace: int, own: ResolvedRun | None
) -> Proof:
    """One rank's part, as in `meshwright.prove.worker`."""
    with plant(), pieces_of(shrunk=resolved.shrunk):
        trainer = build_here(resolved, weights=proof_weights(resolved))
        return prove_rank(trainer, folder, steps, trace, own)
