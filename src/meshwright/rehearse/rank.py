"""The rehearsal of one rank: its part of the run for one step, with memory and traffic; or what it sends.

python -m meshwright.rehearse.rank --resolved FILE --rank R [--record] [--on-gpu] [--without-fp8] [--timeline]

It prints JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from meshwright.checkpoint.dcp import ArrangedPart
from meshwright.data.loader import HostBatch, Loader
from meshwright.data.packing import ConcatenatedSamples
from meshwright.devices import CPU
from meshwright.launch.launcher import Worker
from meshwright.parallel import Meshes, build_meshes
from meshwright.parallel.error_feedback import ERRORS
from meshwright.parallel.ledger import Ledger, Storages
from meshwright.parallel.timeline import RecordingLedger
from meshwright.parallel.traffic import Traffic
from meshwright.rehearse.fake import FakeTensors, UncountedTier, budgets_of_gpu, fake_rank, fill_slots
from meshwright.rehearse.record import group_ranks, record
from meshwright.rehearse.shorten import Observed, continued, enough_microbatches, set_microbatches
from meshwright.rehearse.world import OFFLOADED
from meshwright.spec.batch import Pairs
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun
from meshwright.torch_internals import local_tensor, passing_tensors
from meshwright.trainer.evaluate import evaluate
from meshwright.trainer.folder import read_resolved
from meshwright.trainer.setup import RankContext, Trainer, build_parallel_model, give_state, has_group
from meshwright.trainer.state import gradient_errors, state_tensors

LASTING = "model.", "optimizer.", ERRORS
"""The beginnings of the names of state on the device."""
"""The device of fake tensors: autograd crashes if one is on a missing device."""


def rehearse_rank(
    resolved: ResolvedRun, rank: int, *, on_gpu: bool, fp8: bool = True, timeline: bool = False
) -> dict[str, Any]:
    """Memory and traffic of rank `rank` in one step of training, as JSON values; sizes in bytes.

    `on_gpu`: choose chunk sizes as on a GPU; `fp8`: whether that GPU multiplies fp8. This is exactly the training
    program, but without data. Of many identical microbatches only some run (`rehearse.shorten`); their traffic and
    operations are extrapolated linearly. `timeline`: report the memory of the last step that runs, allocation by
    allocation. A process can be only one rank, because torch caches shapes by mesh.
    """
    began, counts, runs = time.perf_counter(), enough_microbatches(resolved), []
    with _fake_trainer(resolved, rank, on_gpu=on_gpu, fp8=fp8) as (trainer, elsewhere):
        saved = state_tensors(trainer)  # creates the optimizer's state, as in a resumed run
        lasting = _storages(trainer)
        ledger = _ledger(trainer, lasting, elsewhere, timeline=timeline)
        ledger.watch(_local(tensor for name, tensor in saved.items() if name.startswith(LASTING)))
        ledger.watch(_local(_frozen(trainer)))
        at_rest = ledger.by_kind()
        for step, count in enumerate(counts, start=1):
            set_microbatches(trainer.train_step.passes, resolved, count)
            traffic = Traffic(trainer.meshes)
            ledger.begin()
            with ledger, traffic:
                trainer.train_step(step, _microbatches(trainer, count))
            runs.append(Observed.of(traffic, ledger.flops, ledger.peak))
        plan, place = _save_plan(saved, coordinator=rank == 0), _place(trainer.meshes)
    whole = continued(runs, counts, resolved.accumulation)
    offloads = on_gpu and resolved.run.layout.tiers.parameters == "host"
    drawn = {"timeline": ledger.report()} if isinstance(ledger, RecordingLedger) else {}
    return drawn | {
        "rank": rank,
        "place": place,
        "parameters": sum(tensor.numel() for tensor in _local([*trainer.parameters.values(), *_frozen(trainer)])),
        "at_rest": at_rest,
        "host": sum(at_rest.get(kind, 0) for kind in OFFLOADED) if offloads else 0,
        "peak": whole.peak,
        "peak_by_kind": ledger.peak_by_kind,
        "peak_phase": ledger.peak_phase,
        "flops": whole.flops,
        "traffic": [
            {"kind": kind, "axis": axis, "calls": calls, "bytes": size}
            for (kind, axis), (calls, size) in sorted(whole.traffic.items())
        ],
        "microbatches": {"in_a_step": resolved.accumulation, "rehearsed": sum(counts)},
        "checkpoint": {"pieces": len(plan.items), "bytes": _plan_bytes(plan)},
        "seconds": time.perf_counter() - began,
    }


def _ledger(trainer: Trainer, lasting: Storages, elsewhere: dict[int, torch.Tensor], *, timeline: bool) -> Ledger:
    def kinds() -> Storages:
        return lasting | _passing_storages(trainer)

    if not timeline:
        return Ledger(kinds, elsewhere, trainer.model)
    return RecordingLedger(kinds, trainer.model, tensor_names=lambda: _tensor_names(trainer), elsewhere=elsewhere)


def _tensor_names(trainer: Trainer) -> Storages:
    """The names of the storages that belong to a parameter."""
    names: Storages = {}
    for name, parameter in [*trainer.model.named_parameters(), *trainer.parameters.items()]:
        names |= _named(name, [parameter]) | _named(f"gradient of {name}", [parameter.grad])
    for name, parameter in trainer.parameters.items():
        for key, state in trainer.optimizers.state_of(parameter).items():
            names |= _named(f"{key} of {name}", [state])
    return names


@contextmanager
def _fake_trainer(
    resolved: ResolvedRun, rank: int, *, on_gpu: bool, fp8: bool
) -> Iterator[tuple[Trainer, dict[int, torch.Tensor]]]:
    """A trainer without data, as rank `rank`; and the tensors that it keeps elsewhere (`UncountedTier`)."""
    world_size, elsewhere = resolved.run.layout.world_size, dict[int, torch.Tensor]()
    with fake_rank(rank, world_size):
        meshes = build_meshes(resolved.run.layout, CPU.type) if has_group(resolved.run.layout) else None
        passes = build_parallel_model(resolved, meshes)
        with FakeTensors(), budgets_of_gpu() if on_gpu else nullcontext():
            here = RankContext(Worker(rank=rank, world_size=world_size), CPU, meshes)
            make_tier = partial(UncountedTier, tensors=elsewhere)
            trainer = give_state(passes, resolved, here, weights=None, make_tier=make_tier)
            fill_slots(trainer.model, resolved, on_gpu=on_gpu, fp8=fp8)
            yield trainer, elsewhere


def record_rank(resolved: ResolvedRun, rank: int, *, on_gpu: bool, fp8: bool = True) -> dict[str, Any]:
    """What rank `rank` sends in two steps and an evaluation, and the process groups of all ranks, as JSON values.

    See `rehearse_rank`, whose numbers of microbatches these steps have.
    """
    began, counts = time.perf_counter(), enough_microbatches(resolved)
    with _fake_trainer(resolved, rank, on_gpu=on_gpu, fp8=fp8) as (trainer, _), record(trainer.meshes) as recorder:
        for step, count in ((1, counts[0]), (2, counts[-1])):
            set_microbatches(trainer.train_step.passes, resolved, count)
            trainer.train_step(step, _microbatches(trainer, count))
            recorder.synchronize()
        trainer.train_step.finish(step)
        held_out = _microbatches(trainer, count)
        evaluate(trainer.train_step.passes, held_out, trainer.device, repeats_loss=trainer.train_step.repeats_loss)
    groups = group_ranks(trainer.meshes, resolved.run.layout.world_size)
    return {
        "rank": rank,
        "events": [asdict(event) for event in recorder.record.events],
        "groups": {name: groups[name] for name in recorder.record.groups},
        "microbatches": {"in_a_step": resolved.accumulation, "rehearsed": list(counts)},
        "seconds": time.perf_counter() - began,
    }


def _microbatches(trainer: Trainer, count: int) -> list[HostBatch]:
    """The first `count` of this rank's microbatches of a step, every token trained on."""
    resolved, length = trainer.resolved, trainer.resolved.run.data.sequence_length
    samples = ConcatenatedSamples(np.zeros(length + 1, np.uint16), length)
    with Loader.of_run(samples, resolved, trainer.data_rank, trainer.places) as loader:
        batches = loader.microbatches(0)[:count]
    if not trainer.train_step.passes.objective.needs_pairs:
        return batches
    pairs = (Pairs(np.zeros_like(batch.tokens), np.zeros((len(batch.tokens), 1))) for batch in batches)
    return [replace(batch, pairs=of_batch) for batch, of_batch in zip(batches, pairs, strict=True)]


def _local(tensors: Iterable[torch.Tensor | ArrangedPart]) -> list[torch.Tensor]:
    return [local_tensor(tensor.tensor if isinstance(tensor, ArrangedPart) else tensor) for tensor in tensors]


def _named(kind: str, tensors: Iterable[torch.Tensor | None]) -> Storages:
    return {id(local.untyped_storage()): kind for local in _local(tensor for tensor in tensors if tensor is not None)}


def _storages(trainer: Trainer) -> Storages:
    """The storages that persist from step to step."""
    stored = list(trainer.parameters.values())
    states = (state for tensor in stored for state in trainer.optimizers.state_of(tensor).values())
    errors = _named("gradients", gradient_errors(trainer).values())
    return errors | _named("optimizer", states) | _named("weights", [*stored, *_frozen(trainer)])


def _frozen(trainer: Trainer) -> list[torch.Tensor]:
    """The parameters that fine-tuning freezes."""
    return [parameter for parameter in trainer.model.parameters() if not parameter.requires_grad]


def _passing_storages(trainer: Trainer) -> Storages:
    """The transient storages with their current kinds: weights gathered by FSDP2, the copies that an asynchronous
    pipeline computes with, and gradients."""
    storages = _named("optimizer", trainer.store.in_hand)
    storages |= _named("gradients", (tensor.grad for tensor in trainer.parameters.values()))
    for kind, tensors in trainer.train_step.passes.working_copies().items():
        storages |= _named(kind, tensors)
    for module in trainer.model.modules():
        weights, gradients = passing_tensors(module)
        storages |= _named("gathered weights", weights) | _named("gradients", gradients)
    return storages


def _place(meshes: Meshes | None) -> dict[str, int]:
    """This rank's coordinates on every axis of more than one rank."""
    places: dict[str, int] = {}
    for view in meshes.views() if meshes else ():
        for index, axis in enumerate(view.mesh_dim_names or ()):
            if view.size(index) > 1:
                places.setdefault(axis, view.get_local_rank(index))
    return places


def _save_plan(tensors: dict[str, torch.Tensor], *, coordinator: bool) -> SavePlan:
    """The parts that this rank would write, before ranks deduplicate shared tensors."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=coordinator)  # type: ignore[arg-type]
    return planner.create_local_plan()


def _plan_bytes(plan: SavePlan) -> int:
    written = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    return sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in written)


def main() -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolved", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--on-gpu", action="store_true")
    parser.add_argument("--without-fp8", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kind = {"on_gpu": arguments.on_gpu, "fp8": not arguments.without_fp8}
    function = record_rank if arguments.record else partial(rehearse_rank, timeline=arguments.timeline)
    try:
        json.dump(function(read_resolved(arguments.resolved), arguments.rank, **kind), sys.stdout)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
