"""The order in which a single-device model becomes a parallel one."""

from torch.distributed.fsdp import OffloadPolicy

from meshwright.models import Decoder
from meshwright.models.attention_kernels import use_kernel
from meshwright.models.dtypes import torch_dtype
from meshwright.models.foreign import ForeignDecoder
from meshwright.objectives import Objective
from meshwright.parallel.compile import apply_compile
from meshwright.parallel.context import apply_context_parallel
from meshwright.parallel.data import ShardedGradients, apply_data_parallel
from meshwright.parallel.expert import apply_expert_parallel
from meshwright.parallel.foreign import apply_foreign_tensor_parallel
from meshwright.parallel.low_precision import apply_low_precision
from meshwright.parallel.mesh import Meshes
from meshwright.parallel.offload import apply_activation_offload
from meshwright.parallel.passes import Passes, WholeModel
from meshwright.parallel.pipedream import Pipedream
from meshwright.parallel.pipeline import Link, Pipeline, apply_pipeline, plan_stages
from meshwright.parallel.recompute import apply_recompute, hide_sharding
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.parallel.weight_gradients import WeightGradients
from meshwright.spec.fit import context_method
from meshwright.spec.run import ResolvedRun


def apply_parallelism(
    model: Decoder, resolved: ResolvedRun, meshes: Meshes | None, objective: Objective, offload: OffloadPolicy
) -> Passes:
    """Turn `model` (on the meta device) in place into this rank's model; `meshes` is None for a single process.
    `offload` sets for FSDP2 where weights and gradients live (`state/`).

    The pipeline comes first, so that the others have less to do. Each strategy then fills its slots: the ops of linear
    layers and embeddings (`models/slots.py` fixes their order, whichever comes first), the cores of attention, and the
    dispatch of experts. Low-precision products also learn which ranks share a layer. Wrappers of whole blocks come
    next: recomputation, compilation, activation offload. Data parallelism comes last and shards the result. Returns the
    forward and backward passes for `objective`.
    """
    run, precision = resolved.run, resolved.run.training.dtypes
    stages = plan_stages(resolved) if run.layout.pp > 1 else None
    weights = None
    pp, tp, cp = (None if meshes is None else meshes.axis(name) for name in ("pp", "tp", "cp"))
    if stages is not None and pp is not None:
        apply_pipeline(model, stages, pp.get_local_rank())
    if tp is not None and isinstance(model, ForeignDecoder):
        apply_foreign_tensor_parallel(model, tp)
    elif tp is not None:
        apply_tensor_parallel(model, tp)
    apply_low_precision(model, run.training, meshes)
    if stages is not None and stages.schedule.splits_backward:
        weights = WeightGradients(model)
    use_kernel(model, run.training.attention)
    if cp is not None:
        method, _ = context_method(run.layout, model.spec, run.data.sequence_length)
        apply_context_parallel(model, cp, method)
    if meshes is not None:
        apply_expert_parallel(model, meshes)
    apply_recompute(model.layers, resolved.recompute)
    if run.training.compile:
        apply_compile(model, run.training.compile_mode, run.training.compile_scope)
    if run.layout.tiers.activations == "host":
        apply_activation_offload(model.layers)
    if meshes is None:
        return WholeModel(model, objective)
    link = None if pp is None else Link(pp.get_group(), torch_dtype(precision.compute), run.layout.tp)
    if stages is not None and link is not None and run.layout.asynchronous:
        axis = "shard" if meshes.axis("replicate") is None else "replicate"  # the former has one rank here
        reduce_dtype = torch_dtype(precision.reduce)
        return Pipedream(model, objective, stages, link, meshes.state[axis], reduce_dtype)
    apply_data_parallel(model, meshes, run.layout, precision, offload)
    hide_sharding(model.layers)
    sync = ShardedGradients(model, run.layout)
    if stages is None or link is None:
        return WholeModel(model, objective, sync)
    return Pipeline(model, objective, stages, link, sync, weights)
