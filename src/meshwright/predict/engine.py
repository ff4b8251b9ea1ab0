"""The planner's job for a recipe in this engine: the bytes it keeps and sends."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

from meshwright.families import finetuned_table, low_precision_misfits, parameter_table
from meshwright.families.adapters import adapter_misfit
from meshwright.families.quantized import split_misfit
from meshwright.predict.blueprint import Blueprint, blueprint
from meshwright.predict.job import MESHWRIGHT, QUANTIZED, Job, Stack, adapter_parameters
from meshwright.predict.layouts import SearchLimits
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FinetuneSpec
from meshwright.spec.fit import batch_misfits, find_misfits, foreign_misfits, fp8_gather_misfits, quantized_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.low_precision import DELAYED, KERNELS
from meshwright.spec.model import ModelSpec
from meshwright.spec.plugins import said_of
from meshwright.spec.precision import BF16
from meshwright.spec.run import Run
from meshwright.spec.training import OptimizerName, TrainingSpec

MOMENT_BYTES = {"adamw_8bit": 2 * (1 + 4 / 256)}
"""Bytes of both moments of a parameter, by optimizer; every other built-in optimizer stores two numbers, in
`optimizer.state_dtype`."""
STATES = 2
"""Numbers that a plugged-in optimizer keeps per parameter, unless its class says (`states = 1`)."""
MOST_DEVICES, MOST_SEQUENCES = 2**20, 2**24
"""Devices of a cluster and sequences of a step that a search ends for."""
LayoutCheck = Callable[[LayoutSpec], list[str]]
"""The reasons why a layout is refused, one sentence each; empty if it runs."""
ON_CPU = replace(MESHWRIGHT, context_bytes=0.45e9, chunk_bytes=2**26, wide_bytes=2**22, communicator_bytes=0.0)
"""The engine on a CPU: a Python process with torch and gloo, and smaller chunks of logits."""


@dataclass(frozen=True)
class Processor:
    """The kind of device that ranks compute on."""

    kind: Literal["cpu", "gpu"] = "gpu"
    fp8: bool = True
    """Whether a GPU multiplies fp8."""

    @classmethod
    def of(cls, cluster: ClusterSpec) -> "Processor":
        """The devices of a cluster."""
        return cls("cpu" if cluster.device == "cpu" else "gpu", "fp8" in cluster.tflops)


GPU = Processor()


@dataclass(frozen=True)
class Case:
    """A recipe to plan on a cluster."""

    run: Run
    spec: ModelSpec
    cluster: ClusterSpec
    base: Job
    """The recipe as a job, whose layout a search replaces."""
    limits: SearchLimits

    def job(self, run: Run) -> Job:
        """Another recipe as the job, with the same model and batch."""
        base = self.base
        return engine_job(
            run,
            base.model,
            global_batch=base.global_batch,
            micro_batch=base.micro_batch,
            processor=Processor.of(self.cluster),
            layout=base.layout,
        )

    def check(self, run: Run) -> LayoutCheck:
        """The engine's check of layouts for another recipe of the model."""
        return layout_check(run, self.spec, Processor.of(self.cluster).kind)


def make_case(
    run: Run, spec: ModelSpec, cluster: ClusterSpec, limits: SearchLimits, model: Blueprint | None = None
) -> Case:
    """A recipe to plan on a cluster; `model`: the blueprint of `spec`, if it is known.

    Raises `UserError` for a cluster or a batch that is too large to search.
    """
    if cluster.devices > MOST_DEVICES:
        raise UserError(f"cluster {cluster.name} has {cluster.devices:,} devices; plan supports {MOST_DEVICES:,}")
    if run.sequences_per_step() > MOST_SEQUENCES:
        raise UserError(f"{run.sequences_per_step():,} sequences a step; plan supports {MOST_SEQUENCES:,}")
    if "offload" in run.layout.model_fields_set and run.layout.offload == "none":  # said, not only the default
        limits = replace(limits, offload=False)
    size = 1 if run.training.micro_batch == "auto" else run.training.micro_batch
    # Any layout of several ranks: the search replaces it, and one rank alone keeps other copies (engine_stack).
    several = LayoutSpec(dp_replicate=2) if cluster.devices > 1 else LayoutSpec()
    base = engine_job(
        run,
        model or blueprint(spec),
        global_batch=run.sequences_per_step(),
        micro_batch=size,
        processor=Processor.of(cluster),
        layout=several,
    )
    return Case(run, spec, cluster, base, limits)


def engine_job(
    run: Run,
    model: Blueprint,
    *,
    global_batch: int,
    micro_batch: int,
    processor: Processor = GPU,
    layout: LayoutSpec | None = None,
) -> Job:
    """The recipe as a job; `layout` replaces the recipe's."""
    layout = layout or run.layout
    training = run.training
    return Job(
        model=model,
        sequence=run.data.sequence_length,
        global_batch=global_batch,
        micro_batch=micro_batch,
        layout=layout,
        recompute=training.recompute,
        precision=training.dtypes,
        stack=engine_stack(training, alone=layout.alone, processor=processor),
        **method_fields(run.finetune, model),
    )


def method_fields(finetune: FinetuneSpec | None, model: Blueprint) -> dict[str, Any]:
    """A job's fields for adapters and frozen weights under a fine-tuning method. Adapters beside only some matrices are
    counted beside all."""
    if finetune is None or finetune.method == "full":
        return {"adapters": None, "adapter_rank": 0, "adapter_dropout": False, "frozen_bytes": None}
    if finetune.method == "ia3":
        factors = float(sum(block.numel // model.hidden for block in model.blocks))
        return {"adapters": factors, "adapter_rank": 0, "adapter_dropout": False, "frozen_bytes": None}
    return {
        "adapters": float(adapter_parameters(model, finetune.rank)),
        "adapter_rank": finetune.rank,
        "adapter_dropout": finetune.dropout > 0,
        "frozen_bytes": {"plain": None, "nf4": QUANTIZED, "int8": 1.0}[finetune.base],
    }


def engine_stack(training: TrainingSpec, *, alone: bool, processor: Processor = GPU) -> Stack:
    """The cost per parameter under a recipe's precision and optimizer; `alone`: without a mesh."""
    dtypes, recipe, on_gpu = training.dtypes, training.product_recipe, processor.kind == "gpu"
    return replace(
        MESHWRIGHT if on_gpu else ON_CPU,
        fused=training.compile,
        coded_inputs=_coded_inputs(training),
        emulated=recipe is not None and not (on_gpu and processor.fp8 and recipe in KERNELS),
        attention="unfused" if training.attention == "math" else MESHWRIGHT.attention,
        gradient_bytes=dtypes.gradient.bytes,
        reduce_bytes=dtypes.reduce.bytes,
        state_bytes=dtypes.master.bytes + _moment_bytes(training),
        # FSDP2 gathers a copy in the precision of computation; one process alone needs it in low precision only.
        weight_bytes=dtypes.store.bytes if dtypes.mixed or not alone else 0.0,
    )


def _coded_inputs(training: TrainingSpec) -> Literal["none", "inner", "all"]:
    """As in `Stack`; not assumed if some layers stay in bf16."""
    if not training.keeps_codes or training.low_precision.keep:
        return "none"
    return "inner" if training.product_recipe == DELAYED else "all"


def _moment_bytes(training: TrainingSpec) -> float:
    """Bytes that an optimizer keeps of each parameter beside the weight."""
    optimizer, dtypes = training.optimizer, training.dtypes
    if optimizer.name not in get_args(OptimizerName):
        return dtypes.state.bytes * said_of("optimizers", optimizer.name, "states", STATES)
    moment = BF16 if optimizer.state_dtype == BF16.name else dtypes.state
    compensation = BF16.bytes if optimizer.rounding == "kahan" else 0
    return MOMENT_BYTES.get(optimizer.name, 2 * moment.bytes) + compensation


def layout_check(run: Run, model: ModelSpec, device: Literal["cpu", "gpu"]) -> LayoutCheck:
    """A function that returns why the engine refuses a layout for a recipe's model, sequences, fine-tuning and
    optimizer. The planner applies it to every candidate, and recipe resolution to the recipe's own layout."""
    table = finetuned_table(model, run.finetune) if run.finetune else ()
    split = cache(lambda tp: split_misfit(table, model, tp))
    adapted = tuple(row for row in table if row.adapter)
    narrow, length = run.training.product_recipe is not None, run.data.sequence_length
    whole = parameter_table(model) if narrow else ()

    def check(layout: LayoutSpec) -> list[str]:
        pages = device == "gpu" and layout.world_size == 1 and layout.offload == "none"
        if run.training.optimizer.name == "paged_adamw" and not pages:
            return [
                "training.optimizer.name=paged_adamw needs one process on an NVIDIA GPU; adamw_8bit needs little "
                "memory everywhere, and layout.offload=cpu no GPU memory"
            ]
        if device == "gpu" and layout.alone and layout.tiers.parameters == "disk":
            return [
                "layout.offload.parameters=disk: one process on a GPU cannot compute with weights on disk; use "
                "parameters=host, or several processes (dp_shard)"
            ]
        refusals = split(layout.tp), adapter_misfit(adapted, layout)
        misfits = [
            *find_misfits(layout, model, length),
            *(foreign_misfits(run, layout, model.foreign) if model.foreign is not None else ()),
            *(misfit for misfit in refusals if misfit),
            *quantized_misfits(layout, run.finetune),
            *fp8_gather_misfits(layout, run.training, run.finetune),
        ]
        if misfits or not narrow:
            return misfits
        return low_precision_misfits(run.training, whole, model, run.finetune, layout, length)

    return check


def refusal(job: Job, check: LayoutCheck) -> str | None:
    """Why the engine cannot run the layout; None if it can."""
    if problem := job.layout.problem:
        return problem
    return next(iter(check(job.layout) or batch_misfits(job.layout, job.global_batch)), None)


def passes(check: LayoutCheck) -> Callable[[Job], bool]:
    """A function that says whether the engine can run a job's layout."""
    return lambda job: refusal(job, check) is None
