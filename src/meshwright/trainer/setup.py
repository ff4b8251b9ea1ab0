"""The one place that builds everything a rank needs to train, in the order in which it has to happen."""

import functools
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.families import finetuned_table, state_table
from meshwright.finetune import apply_finetune
from meshwright.models import build_model, named_tensors
from meshwright.models.foreign import ForeignDecoder
from meshwright.models.preference import PreferenceLoss
from meshwright.optim.build import Optimizers, build_optimizers
from meshwright.parallel import Meshes, Passes, apply_parallelism, build_meshes, materialize
from meshwright.parallel.context import sequence_places
from meshwright.parallel.data import release_gathered
from meshwright.parallel.materialize import RowSource
from meshwright.parallel.passes import evaluating
from meshwright.parallel.precision import MasterWeights, compute_dtype, stored_dtype
from meshwright.plan.machine import Machine, find_machine
from meshwright.spec.fit import context_method
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import Parameter
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.device import choose_device, keep_freed_memory, peak_flops, use_deterministic_kernels
from meshwright.trainer.launch import Worker, join_group, threads_per_rank
from meshwright.trainer.step import TrainStep
from meshwright.trainer.weights import base_of, run_weights


@dataclass
class Trainer:
    """One rank of a run, ready to train."""

    resolved: ResolvedRun
    worker: Worker
    device: torch.device
    meshes: Meshes | None
    table: tuple[Parameter, ...]
    """Of the whole model."""
    model: nn.Module
    """This rank's part."""
    parameters: dict[str, torch.Tensor]
    """What the optimizer updates and checkpoints keep: what trains, in full precision, as sharded on this rank."""
    masters: MasterWeights | None
    optimizers: Optimizers
    train_step: TrainStep
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens seen by the model."""
    skipped: int = 0
    """Steps skipped because they were not finite, or outliers."""
    spikes: int = 0
    """Outliers among them."""
    rewinds: int = 0
    """How often the run went back to its last checkpoint."""
    passed_over: int = 0
    """Global batches that rewinds left out of the data's order."""
    data: list[dict[str, Any]] = field(default_factory=list)
    """On the first rank what is trained on (`Corpus.identity`), which checkpoints keep for continuations to compare."""

    @functools.cached_property
    def base(self) -> dict[str, str] | None:
        """What checkpoints of a fine-tuned run refer to and do not hold; None where they hold everything."""
        return base_of(self.resolved)

    @functools.cached_property
    def machine(self) -> Machine:
        """The devices of this machine."""
        return find_machine(self.resolved.run.device)

    @functools.cached_property
    def peak(self) -> tuple[float, str]:
        """FLOP/s that MFU is measured against, and where the figure comes from."""
        return peak_flops(self.device, self.machine, self.resolved.run.training.precision)

    @property
    def memory_bytes(self) -> int:
        """Memory that this rank can count on."""
        return self.machine.memory_per_rank(self.worker.local_world_size)

    @property
    def data_rank(self) -> int:
        """This rank's place among those that read different data."""
        return 0 if self.meshes is None else self.meshes.data_rank

    @property
    def places(self) -> np.ndarray | None:
        """The places in every sample whose tokens this rank holds; None for all."""
        return self.places_of(self.resolved.run.data.sequence_length)

    def places_of(self, length: int) -> np.ndarray | None:
        """The same in rows of another length, a multiple of 2 cp."""
        layout = self.resolved.run.layout
        if self.meshes is None or layout.cp == 1:
            return None
        rank = self.meshes.rank_along("cp")
        method, _ = context_method(layout, self.resolved.model, self.resolved.run.data.sequence_length)
        return sequence_places(method, degree=layout.cp, rank=rank, length=length)


def find_place(run: Run, worker: Worker) -> tuple[torch.device, Meshes | None]:
    """This rank's device, and the meshes of all ranks where there are several; joins the process group. Collective."""
    device = choose_device(find_machine(run.device), worker.local_rank)
    if device.type == "cpu":
        torch.set_num_threads(threads_per_rank(worker.local_world_size))
        keep_freed_memory()
    if worker.world_size == 1 and not has_group(run.layout):
        return device, None
    join_group(worker, run, device)
    return device, build_meshes(run.layout, device.type)


def has_group(layout: LayoutSpec) -> bool:
    """Whether a layout needs a process group: a single process does only where FSDP2 offloads for it."""
    return layout.world_size > 1 or layout.offload != "none"


def build_trainer(resolved: ResolvedRun, worker: Worker, device: torch.device, meshes: Meshes | None) -> Trainer:
    """Build this rank's part of a run; every rank of the layout must call it."""
    if resolved.run.training.deterministic:
        use_deterministic_kernels()
    passes = build_parallel_model(resolved, meshes)
    trainer = give_state(passes, resolved, worker, device, meshes, run_weights(resolved))
    if isinstance(passes.model, ForeignDecoder) and _reads_documents(resolved.run):
        with evaluating(passes.model):
            passes.model.check_documents()
        release_gathered(passes.model)
    return trainer


def _reads_documents(run: Run) -> bool:
    """Whether rows hold documents that are to be kept apart."""
    return run.data.separate_documents or run.training.preference is not None


def build_parallel_model(resolved: ResolvedRun, meshes: Meshes | None) -> Passes:
    """This rank's part of the model, on the meta device, and what takes microbatches through it; collective."""
    model = build_model(resolved.model, device="meta", dtype=stored_dtype(resolved.run.training))
    if resolved.run.finetune is not None:
        apply_finetune(model, resolved.run.finetune, compute_dtype(resolved.run.training))
    preference = resolved.run.training.preference
    if preference is not None:
        model.preference = PreferenceLoss(beta=preference.beta, label_smoothing=preference.label_smoothing)
    return apply_parallelism(model, resolved, meshes)


def give_state(
    passes: Passes,
    resolved: ResolvedRun,
    worker: Worker,
    device: torch.device,
    meshes: Meshes | None,
    weights: RowSource | None,
) -> Trainer:
    """Give a parallel model its weights (None: memory for them, unfilled) and all that trains it."""
    run, training = resolved.run, resolved.run.training
    model, table = passes.model, finetuned_table(resolved.model, run.finetune)
    names = named_tensors(model).keys()
    here, state = ([row for row in rows if row.name in names] for rows in (table, state_table(resolved.model)))
    weights_device = torch.device("cpu") if run.layout.offload == "cpu" else device
    materialize(model, (*here, *state), weights, weights_device)

    masters = None
    if meshes is None and training.precision in ("bf16", "fp16"):
        masters = MasterWeights(model, training)
    torch.manual_seed(
        training.seed * 2**20 + worker.rank // run.layout.tp
    )  # of dropout; ranks of tp see the same tokens
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters: dict[str, torch.Tensor] = masters.parameters if masters else {**trained}
    optimizers = build_optimizers(training.optimizer, [row for row in here if row.trained], parameters)
    return Trainer(
        resolved=resolved,
        worker=worker,
        device=device,
        meshes=meshes,
        table=table,
        model=model,
        parameters=parameters,
        masters=masters,
        optimizers=optimizers,
        train_step=TrainStep(
            run,
            passes,
            parameters,
            optimizers,
            masters,
            device,
            repeats_loss=meshes is not None and meshes.repeats_loss,
        ),
    )


def describe_environment(trainer: Trainer) -> dict[str, Any]:
    """What `env.json` keeps: versions, device and the figures that others are measured against."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "world_size": trainer.worker.world_size,
        "peak_flops": trainer.peak[0],
        "peak_flops_source": trainer.peak[1],
    }


def write_json(path: Path, value: Any) -> None:
    """Write a readable JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")
