"""Equivalence with one process: loss, every gradient, and every weight after one step; losses of many steps."""

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from meshwright.comm.objects import gather_everywhere
from meshwright.data.loader import Loader
from meshwright.data.packing import ConcatenatedSamples
from meshwright.devices import CPU
from meshwright.launch.launcher import Worker
from meshwright.models import draw_rows, named_state
from meshwright.objectives import Objective
from meshwright.optim import shards
from meshwright.parallel import Meshes, build_meshes
from meshwright.parallel.materialize import RowSource
from meshwright.prove.inputs import RandomSamples
from meshwright.spec.layout import AXES, LayoutSpec
from meshwright.spec.model import Parameter
from meshwright.spec.run import ResolvedRun
from meshwright.testing.poison import OperandCheck
from meshwright.trainer.setup import RankContext, Trainer, build_parallel_model, give_state
from meshwright.trainer.weights import run_weights


@dataclass
class Outcome:
    """The result of one optimizer step, as whole tensors on the CPU."""

    loss: float
    gnorm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    """Weights after the step, untrained state included."""


def build_here(
    resolved: ResolvedRun,
    objective: Objective | None = None,
    weights: RowSource | None = None,
    device: torch.device = CPU,
) -> Trainer:
    """A trainer for this rank of the current process group.

    Adapters are drawn as if they had been trained, because a zero adapter would hide its computation. `objective`,
    `weights`: default the recipe's.
    """
    distributed = dist.is_initialized()
    worker = Worker(rank=dist.get_rank(), world_size=dist.get_world_size()) if distributed else Worker()
    layout = resolved.run.layout
    degrees = {axis: getattr(layout, axis) for axis in (*AXES, "ep")}
    meshes = _meshes(device.type, sharded=layout.zero_stage > 0, **degrees) if distributed else None
    passes = build_parallel_model(resolved, meshes, objective)
    weights = weights or _with_lively_adapters(run_weights(resolved))
    return give_state(passes, resolved, RankContext(worker, device, meshes), weights)


def _with_lively_adapters(weights: RowSource) -> RowSource:
    def read(row: Parameter, start: int, stop: int) -> torch.Tensor:
        if not row.adapter or row.init == "uniform":
            return weights(row, start, stop)
        noise = draw_rows(replace(row, init="normal", init_std=0.2), 0, start, stop)
        return noise if row.init == "zeros" else noise + weights(row, start, stop)

    return read


@functools.cache
def _meshes(kind: str, *, sharded: bool, **degrees: int) -> Meshes:
    """One set of meshes per arrangement of ranks, because each costs gloo groups that exist until the process ends."""
    return build_meshes(LayoutSpec.model_validate({**degrees, "zero": 3 if sharded else 0}), kind)


def one_step(
    resolved: ResolvedRun, documents: bool = False, objective: Objective | None = None, device: torch.device = CPU
) -> Outcome | None:
    """Build the run and make its first step on random tokens; None on every rank but the first. Collective."""
    trainer = build_here(resolved, objective, device=device)
    step = trainer.train_step
    with OperandCheck(), loader_for(trainer, documents=documents) as loader:
        loss, _ = step.gradients(loader.microbatches(0))
    gnorm = step.gradient_norm()
    gradients = whole_of_all(trainer, {name: tensor.grad for name, tensor in trainer.parameters.items()})
    step.update(1, gnorm)
    weights = whole_of_all(trainer, trainer.parameters | named_state(trainer.model))
    return Outcome(loss, gnorm, gradients, weights) if trainer.worker.rank == 0 else None


def loader_for(trainer: Trainer, *, seed: int = 0, documents: bool = False) -> Loader:
    """This rank's microbatches of random samples."""
    resolved = trainer.resolved
    length = resolved.run.data.sequence_length
    pairs = trainer.train_step.passes.objective.needs_pairs
    samples = RandomSamples(
        vocab=resolved.model.vocab, sequence_length=length, seed=seed, documents=documents, pairs=pairs
    )
    return Loader.of_run(samples, resolved, trainer.data_rank, trainer.places)


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """A copy of the global tensor; collective for sharded ones."""
    assert tensor is not None, "a parameter has no gradient"
    return shards.whole(tensor.detach()).clone()


def _of_each(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    without = [name for name, tensor in tensors.items() if tensor is None]
    assert not without, f"no gradient: {without}"
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}


def whole_of_all(trainer: Trainer, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Copies of the global tensors of every pipeline stage, on the CPU; collective.

    If two stages have copies of one tensor, they must be equal bit for bit.
    """
    gathered = shards.wholes(_of_each(tensors)).items()
    here = {
        name: shards.in_order(tensor, trainer.arrangements.get(name)).to("cpu", copy=True) for name, tensor in gathered
    }
    stages = trainer.train_step.passes.stages
    if stages is None:
        return here
    everything: dict[str, torch.Tensor] = {}
    for name, tensor in (item for part in gather_everywhere(here, stages) for item in part.items()):
        assert torch.equal(everything.setdefault(name, tensor), tensor), f"copies of {name} differ"
    return everything


def largest_difference(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest absolute difference over all tensors, and the tensor's name; NaN counts as infinite."""
    assert ours.keys() == other.keys(), sorted(ours.keys() ^ other.keys())
    differences = {
        name: (ours[name].double() - other[name].double()).abs().max().nan_to_num(torch.inf) for name in ours
    }
    worst = max(differences, key=lambda name: differences[name])
    return differences[worst].item(), worst


def loss_curve(resolved: ResolvedRun, steps: int) -> list[float]:
    """Losses of the first steps on the bytes of a module of the standard library; collective."""
    trainer = build_here(resolved)
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
    samples = ConcatenatedSamples(text, resolved.run.data.sequence_length)
    with Loader.of_run(samples, resolved, trainer.data_rank, trainer.places) as loader:
        return [trainer.train_step(step, loader.microbatches(step - 1)).loss for step in range(1, steps + 1)]
