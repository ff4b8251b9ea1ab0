"""Number formats of a step in the recipe's own precision: facts that float64 hides and rounding covers.

1. Gradients are summed over microbatches and ranks in `training.reduce_dtype`. A sum of two bf16 numbers in fp32 has
   bits that bf16 lacks, so a tensor whose every number is a bf16 number was summed in bf16.
2. After an update, the low-precision copies that the model computes with are the masters, rounded.
"""

from math import inf

import torch

from meshwright.comm.objects import gather_everywhere
from meshwright.families.split import is_experts
from meshwright.models.dtypes import torch_dtype
from meshwright.optim import shards
from meshwright.prove.difference import Difference
from meshwright.prove.locate import Location
from meshwright.prove.reference import gradients_of, loader_for
from meshwright.trainer.setup import Trainer

FEWEST = 32
"""Numbers other than zero, over all ranks, from which a tensor is judged: one sum of two may fit by chance."""

LARGE = 100.0
"""Factor of the learning rate, so that an update changes low-precision weights."""


def compare_formats(trainer: Trainer) -> Location | None:
    """Make a step, and return the first tensor in a wrong format; None for full precision. Collective."""
    dtypes = trainer.resolved.run.training.dtypes
    if not dtypes.narrow:
        return None
    step = trainer.train_step
    with loader_for(trainer) as loader:
        if step.passes.late:  # the first step has no gradient
            step(1, loader.microbatches(0))
        wrong, microbatches = None, loader.microbatches(1)
        ranks, pp = trainer.resolved.run.layout.data_parallel, trainer.resolved.run.layout.pp
        if ranks > 1 and pp == 1:  # one microbatch: a sum over ranks alone
            step.gradients(microbatches[:1])
            wrong = _rounded(trainer)
            step.store.zero_grad()
        step.gradients(microbatches)
        if ranks * len(microbatches) > 1:
            wrong = wrong or _rounded(trainer)
    step.update(1, step.gradient_norm(), LARGE)
    step.store.zero_grad()
    return wrong or _stale(trainer)


def _rounded(trainer: Trainer) -> Location | None:
    """The first gradient whose every number fits the compute dtype, although it is a sum of several."""
    run, rank = trainer.resolved.run, trainer.worker.rank
    dtypes, narrow = run.training.dtypes, torch_dtype(run.training.dtypes.compute)
    if dtypes.reduce.bytes <= dtypes.compute.bytes or run.layout.quantized_gradients != "none":
        return None
    here: dict[str, tuple[int, int]] = {}
    # Expert parallelism brings rows of several ranks to one, whose product is their sum.
    alone = {row.name for row in trainer.table if is_experts(row)} if run.layout.ep > 1 else set[str]()
    for name, gradient in gradients_of(trainer):
        if name in alone:
            continue
        local = shards.local(gradient)
        here[name] = int((local != 0).sum()), int((local.to(narrow).to(local.dtype) != local).sum())
    ranks = gather_everywhere(here)
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        counts = [rank[name] for rank in ranks if name in rank]
        if sum(count for count, _ in counts) >= FEWEST and not any(wide for _, wide in counts):
            return Location("formats", f"the gradient of {name} was summed in {narrow}", Difference(inf, 0.0, rank))
    return None


def _stale(trainer: Trainer) -> Location | None:
    """The first copy of a master that differs from it."""
    masters = trainer.parameters
    wrong = [
        name
        for name, copy in trainer.store.copies.items()
        if not torch.equal(masters[name].detach().to(copy), copy.detach())
    ]
    for rank, names in enumerate(gather_everywhere(wrong)):
        if names:
            return Location("formats", f"the copy of {names[0]} is not its master", Difference(inf, 0.0, rank), (rank,))
    return None
