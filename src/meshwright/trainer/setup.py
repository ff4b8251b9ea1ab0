"""Builds, in order, all objects that a rank needs to train."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.callbacks import Callback
from meshwright.comm.objects import gather_everywhere
from meshwright.devices import CPU
from meshwright.families import finetuned_table, low_precision_state, state_table
from meshwright.families.split import Arrangement, arrangements
from meshwright.finetune import apply_finetune
from meshwright.launch.launcher import Worker, join_group, threads_per_rank
from meshwright.launch.memory import memory_for_files
from meshwright.machine import Machine, find_machine
from meshwright.models import build_model, named_tensors
from meshwright.models.attention_kernels import AttentionNeeds, check_kernel
from meshwright.models.batch import TensorBatch
from meshwright.models.dtypes import torch_dtype
from meshwright.models.foreign import ForeignDecoder
from meshwright.models.kernel_choice import MeasuredKernels
from meshwright.objectives import Objective, build_objective
from meshwright.optim.build import Optimizers
from meshwright.parallel import Meshes, Passes, apply_parallelism, build_meshes
from meshwright.parallel.context import sequence_places
from meshwright.parallel.data import release_gathered
from meshwright.parallel.materialize import RowSource, fill
from meshwright.parallel.quantized import error_feedback
from meshwright.spec.errors import UserError
from meshwright.spec.fit import context_method
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import Parameter
from meshwright.spec.run import ResolvedRun, Run
from meshwright.state import StateStore, Tier, choose_store
from meshwright.trainer.device import (
    check_own_gpu,
    choose_device,
    keep_freed_memory,
    peak_flops,
    use_deterministic_kernels,
)
from meshwright.trainer.step import TrainStep
from meshwright.trainer.weights import base_of, run_weights

OFFLOAD = "offload"
"""Folder in run_dir for state on disk."""


@dataclass(frozen=True)
class RankContext:
    """Where one rank runs; by default the only process, on a CPU."""

    worker: Worker = field(default_factory=Worker)
    device: torch.device = CPU
    meshes: Meshes | None = None
    """None: without a process group."""


@dataclass
class Trainer:
    """One rank of a run, ready to train."""

    resolved: ResolvedRun
    worker: Worker
    device: torch.device
    meshes: Meshes | None
    table: tuple[Parameter, ...]
    """The parameters of the whole model."""
    model: nn.Module
    """This rank's part."""
    store: StateStore
    """This rank's shards of the trained parameters, in full precision, and of the optimizer's state."""
    train_step: TrainStep
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens seen by the model."""
    skipped: int = 0
    """Steps skipped because they were not finite, or outliers."""
    spikes: int = 0
    """The outliers among them."""
    rewinds: int = 0
    """How often the run went back to its last checkpoint."""
    passed_over: int = 0
    """Global batches that rewinds skipped."""
    data: list[dict[str, Any]] = field(default_factory=list)
    """On the first rank, the identity of the data (`Corpus.identity`); checkpoints store it for resumed runs."""
    origin: dict[str, Any] = field(default_factory=dict)
    """On the first rank, the run's origin (`trainer/origin.py`), which checkpoints keep."""
    kernels: MeasuredKernels | None = None
    """The kernels that were measured and are in use; None: the fixed ones."""
    process_bytes: int = 0
    """Memory that the process held before the model was built."""
    callbacks: dict[str, Callback] = field(default_factory=dict)
    """Callbacks whose state is saved in checkpoints, by their names there."""

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that the optimizer updates and checkpoints store."""
        return self.store.parameters

    @property
    def optimizers(self) -> Optimizers:
        """The optimizers of the parameters."""
        return self.store.optimizers

    @functools.cached_property
    def base(self) -> dict[str, str] | None:
        """The base that checkpoints of a fine-tuned run refer to; None if they hold everything."""
        return base_of(self.resolved)

    @functools.cached_property
    def arrangements(self) -> dict[str, Arrangement]:
        """Of the parameters that ranks store in another order."""
        return arrangements(self.table, self.resolved.model, self.resolved.run.layout.tp)

    @functools.cached_property
    def machine(self) -> Machine:
        """The devices of this machine."""
        return find_machine(self.resolved.run.device)

    @functools.cached_property
    def peak(self) -> tuple[float, str]:
        """The FLOP/s that MFU is measured against, and the origin of the figure."""
        return peak_flops(self.device, self.machine, self.resolved.run.training.dtypes)

    @property
    def memory_bytes(self) -> int:
        """Memory available to this rank."""
        return self.machine.memory_per_rank(self.worker.local_world_size)

    @property
    def data_rank(self) -> int:
        """This rank's index among the ranks that read different data."""
        return 0 if self.meshes is None else self.meshes.data_rank

    @property
    def places(self) -> np.ndarray | None:
        """The positions of every sample whose tokens this rank holds; None for all."""
        return self.places_of(self.resolved.run.data.sequence_length)

    def places_of(self, length: int) -> np.ndarray | None:
        """`places` for rows of another length, a multiple of 2 cp."""
        layout = self.resolved.run.layout
        if self.meshes is None or layout.cp == 1:
            return None
        rank = self.meshes.rank_along("cp")
        method, _ = context_method(layout, self.resolved.model, self.resolved.run.data.sequence_length)
        return sequence_places(method, degree=layout.cp, rank=rank, length=length)


def find_place(run: Run, worker: Worker) -> RankContext:
    """The place of this process, which joins the process group of the run. Collective."""
    machine = find_machine(run.device)
    device = choose_device(machine, worker.local_rank)
    if device.type == "cpu":
        torch.set_num_threads(threads_per_rank(worker.local_world_size))
        keep_freed_memory()
    if worker.world_size == 1 and not has_group(run.layout):
        return RankContext(worker, device)
    join_group(worker, run, device, shared=machine.shared)
    if not machine.shared:
        check_own_gpu(device)
    return RankContext(worker, device, build_meshes(run.layout, device.type))


def has_group(layout: LayoutSpec) -> bool:
    """Whether a layout needs a process group: a single process needs one only if FSDP2 offloads for it."""
    return not layout.alone


def build_trainer(resolved: ResolvedRun, place: RankContext, weights: RowSource | None = None) -> Trainer:
    """Build this rank's part of a run; every rank of the layout must call it. `weights`: default the run's."""
    if resolved.run.training.deterministic:
        use_deterministic_kernels()
    for request in attention_needs(resolved, place.device):
        check_kernel(resolved.run.training.attention, request)
    passes = build_parallel_model(resolved, place.meshes)
    trainer = give_state(passes, resolved, place, weights or run_weights(resolved))
    if isinstance(passes.model, ForeignDecoder):
        documents = resolved.run.data.separate_documents or passes.objective.needs_pairs
        check_foreign(passes, passes.model, documents=documents, adapters=resolved.run.finetune is not None)
        release_gathered(passes.model)
    return trainer


def check_foreign(passes: Passes, model: ForeignDecoder, *, documents: bool, adapters: bool) -> None:
    """Raise `UserError` on every rank if a model that transformers computes cannot be trained. Collective."""

    def logits(batch: TensorBatch) -> torch.Tensor | None:
        with model.whole_rows():
            return next(iter(list(passes.read([batch], lambda logits_BTV, *_: logits_BTV))), None)

    checks = [model.acausal, *[model.skipped_adapters] * adapters, *[model.mixes_documents] * documents]
    for check in checks:
        error = check(logits)
        errors = [error] if passes.stages is None else gather_everywhere(error, passes.stages)
        if error := next(filter(None, errors), ""):
            raise UserError(error)


def attention_needs(resolved: ResolvedRun, device: torch.device) -> tuple[AttentionNeeds, ...]:
    """The run's requirements on its attention kernel on a device, for each window of its layers."""
    training, model = resolved.run.training, resolved.model
    documents = resolved.run.data.separate_documents or training.preference is not None
    dtype = torch_dtype(training.dtypes.compute)
    return tuple(AttentionNeeds(device, dtype, model.head_dim, documents, window) for window in model.windows)


def build_parallel_model(resolved: ResolvedRun, meshes: Meshes | None, objective: Objective | None = None) -> Passes:
    """This rank's part of the model on the meta device, in the `Passes` that run it; collective.

    `objective`: default the recipe's.
    """
    dtypes = resolved.run.training.dtypes
    model = build_model(resolved.model, device="meta", dtype=torch_dtype(dtypes.master))
    if resolved.run.finetune is not None:
        apply_finetune(model, resolved.run.finetune, torch_dtype(dtypes.store), resolved.run.training.seed)
    store = choose_store(resolved.run.layout, dtypes, alone=meshes is None)
    offload = store.offload_policy("cpu" if meshes is None else meshes.state.device_type)
    return apply_parallelism(model, resolved, meshes, objective or build_objective(resolved.run), offload)


def give_state(
    passes: Passes,
    resolved: ResolvedRun,
    place: RankContext,
    weights: RowSource | None,
    make_tier: Callable[..., Tier] = Tier,
) -> Trainer:
    """Give a parallel model its weights (None: allocated, unfilled), optimizers and state store.

    `make_tier`: makes the tier of a run with offloaded state; default: the real one.
    """
    run, training = resolved.run, resolved.run.training
    model, table = passes.model, finetuned_table(resolved.model, run.finetune)
    names = named_tensors(model).keys()
    kept = (*state_table(resolved.model), *low_precision_state(table, training))
    here, state = ([row for row in rows if row.name in names] for rows in (table, kept))
    device, meshes = place.device, place.meshes
    kind = choose_store(run.layout, training.dtypes, alone=meshes is None)
    tier = build_tier(resolved, place.worker, kind.home(device), make_tier)
    with torch.no_grad():
        kind.allocate(model, kind.home(device), tier)
    error_feedback(model).allocate(device)
    if weights is not None:
        fill(model, (*here, *state), weights, arrangements(table, resolved.model, run.layout.tp))
    store = kind(model, [row for row in here if row.trained], training, tier=tier)
    store.optimizers.check_layout(run.layout)
    return Trainer(
        resolved=resolved,
        worker=place.worker,
        device=device,
        meshes=meshes,
        table=table,
        model=model,
        store=store,
        train_step=TrainStep(run, passes, store, device, repeats_loss=meshes is not None and meshes.repeats_loss),
    )


def build_tier(
    resolved: ResolvedRun, worker: Worker, device: torch.device, make_tier: Callable[..., Tier]
) -> Tier | None:
    """The tier for the state of an optimizer that steps on `device`; None if the state stays on `device`."""
    run = resolved.run
    offload = run.layout.tiers
    if not offload.moves_state:
        return None
    given = offload.directory
    directory = Path(run.run_dir) / OFFLOAD if given is None else Path(resolved.base_dir) / given
    free = memory_for_files() // max(1, worker.local_world_size)
    tier = make_tier(offload, directory.absolute(), device, worker.rank, free)
    tier.prepare()
    return tier
