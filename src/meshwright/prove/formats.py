"""Number formats of a step in the recipe's own precision: facts that float64 hides and rounding covers.

1. Gradients are summed over microbatches and ranks in `training.reduce_dtype`. A sum of two bf16 numbers in fp32 has
   bits that bf16 lacks, so a tensor whose every number is a bf16 number was summed in bf16. And a step's gradient is
   the sum of its microbatches' gradients, each reduced by itself.
2. Routers choose in fp32, and masters are in `training.master_dtype`.
3. After an update, the low-precision copies that the model computes with are the masters, rounded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf, sqrt

import torch
from torch import nn

from meshwright.comm.objects import gather_everywhere
from meshwright.data.loader import HostBatch
from meshwright.families.split import is_experts
from meshwright.models.batch import to_device
from meshwright.models.dtypes import torch_dtype
from meshwright.models.moe import Router
from meshwright.optim import shards
from meshwright.prove.difference import Difference, largest_entry
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
    step, layout = trainer.train_step, trainer.resolved.run.layout
    narrow = [name for name, master in trainer.parameters.items() if master.dtype != torch_dtype(dtypes.master)]
    if wrong := _first(f"the master of {{}} is not in {dtypes.master}", narrow):
        return wrong
    with loader_for(trainer) as loader, _routed(trainer) as routers:
        if step.passes.late:  # the first step has no gradient
            step(1, loader.microbatches(0))
        microbatches = loader.microbatches(1)
        _, trained = step.gradients(microbatches)
        sums_wide = dtypes.reduce.bytes > dtypes.compute.bytes and layout.quantized_gradients == "none"
        if sums_wide and layout.data_parallel * len(microbatches) > 1:
            wrong = narrow_sum(trainer)
        if sums_wide and layout.pp == 1:
            wrong = wrong or _not_summed(trainer, microbatches, _scale(trainer) / trained)
    step.update(1, step.gradient_norm(), LARGE)
    step.store.zero_grad()
    return _first("the choice of {} was computed in " + str(dtypes.compute), routers) or wrong or _stale(trainer)


def _scale(trainer: Trainer) -> float:
    scaler = trainer.train_step.scaler
    return 1.0 if scaler is None else scaler.scale


@contextmanager
def _routed(trainer: Trainer) -> Iterator[list[str]]:
    """Lists the routers whose results are narrower than fp32, inside the context."""
    wrong, hooks = list[str](), []
    for name, module in trainer.model.named_modules():
        if isinstance(module, Router):

            def check(_module: nn.Module, _inputs: object, output: tuple[torch.Tensor, ...], name: str = name) -> None:
                if output[0].dtype.itemsize < torch.float32.itemsize:
                    wrong.append(name)

            hooks.append(module.register_forward_hook(check))
    try:
        yield wrong
    finally:
        for hook in hooks:
            hook.remove()


def _not_summed(trainer: Trainer, microbatches: Sequence[HostBatch], scale: float) -> Location | None:
    """The first gradient that is not the sum of its microbatches' gradients. Leaves the last one's in the store.

    They are reduced one by one. Sums in the reduction's dtype differ by its rounding; sums in a narrower dtype, by that
    one's. The allowance is between the two.
    """
    step, dtypes = trainer.train_step, trainer.resolved.run.training.dtypes
    together = {name: shards.local(gradient).clone() for name, gradient in gradients_of(trainer)}
    sums = {name: torch.zeros_like(gradient) for name, gradient in together.items()}
    largest, wrong = dict.fromkeys(together, 0.0), None
    for index, microbatch in enumerate(microbatches):
        step.store.zero_grad()
        step.passes.train([to_device(microbatch, trainer.device)], scale)
        if not index and trainer.resolved.run.layout.data_parallel > 1:
            wrong = narrow_sum(trainer)
        for name, gradient in gradients_of(trainer):
            sums[name] += shards.local(gradient)
            largest[name] = max(largest[name], largest_entry(shards.local(gradient)))
    share = sqrt(dtypes.reduce.epsilon * dtypes.compute.epsilon)
    names = [name for name in together if largest_entry(together[name] - sums[name]) > share * largest[name]]
    return wrong or _first(f"the gradient of {{}} is not the sum of its microbatches' in {dtypes.reduce}", names)


def narrow_sum(trainer: Trainer) -> Location | None:
    """The first gradient whose every number fits the compute dtype, although it is a sum of several."""
    run, own_rank = trainer.resolved.run, trainer.worker.rank
    narrow = torch_dtype(run.training.dtypes.compute)
    here: dict[str, tuple[int, int, float]] = {}
    # Expert parallelism brings rows of several ranks to one, whose product is their sum.
    alone = {row.name for row in trainer.table if is_experts(row)} if run.layout.ep > 1 else set[str]()
    for name, gradient in gradients_of(trainer):
        if name in alone:
            continue
        local = shards.local(gradient)
        wide = int((local.to(narrow).to(local.dtype) != local).sum())
        here[name] = int((local != 0).sum()), wide, largest_entry(local)
    ranks = gather_everywhere(here)
    largest = max((size for rank in ranks for *_, size in rank.values()), default=0.0)
    least = run.training.dtypes.compute.epsilon * largest  # a smaller gradient is all rounding, as a key bias's
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        counts, wide, sizes = zip(*(rank[name] for rank in ranks if name in rank), strict=True)
        if sum(counts) >= FEWEST and max(sizes) > least and not any(wide):
            return Location("formats", f"the gradient of {name} was summed in {narrow}", Difference(inf, 0.0, own_rank))
    return None


def _stale(trainer: Trainer) -> Location | None:
    """The first copy of a master that differs from it."""
    masters, copies = trainer.parameters, trainer.store.copies
    stale = (name for name, copy in copies.items() if not torch.equal(masters[name].detach().to(copy), copy.detach()))
    return _first("the copy of {} is not its master", list(stale))


def _first(what: str, names: list[str]) -> Location | None:
    """The first of all ranks' wrong tensors. Collective."""
    for rank, wrong in enumerate(gather_everywhere(names)):
        if wrong:
            return Location("formats", what.format(wrong[0]), Difference(inf, 0.0, rank), (rank,))
    return None
