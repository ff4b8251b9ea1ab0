"""The one page that says in which order a single-device model becomes a parallel one."""

import functools

from meshwright.models import Decoder
from meshwright.parallel.compile import apply_compile
from meshwright.parallel.context import apply_context_parallel
from meshwright.parallel.data import (
    apply_data_parallel,
    hold_gradients,
    pass_inside,
    reduce_gradients,
    release_gathered,
    set_gradient_sync,
)
from meshwright.parallel.expert import apply_expert_parallel
from meshwright.parallel.mesh import Meshes
from meshwright.parallel.passes import Passes, WholeModel
from meshwright.parallel.pipedream import apply_pipedream
from meshwright.parallel.pipeline import Pipeline, apply_pipeline, plan_stages
from meshwright.parallel.precision import build_fsdp_policy, compute_dtype, reduce_dtype
from meshwright.parallel.recompute import apply_recompute, hide_sharding
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.parallel.weight_gradients import WeightGradients
from meshwright.spec.fit import context_method
from meshwright.spec.run import ResolvedRun


def apply_parallelism(model: Decoder, resolved: ResolvedRun, meshes: Meshes | None) -> Passes:
    """Change `model` (on the meta device) in place into what this rank runs; `meshes` is None for one process alone.

    The pipeline comes first, for the others then have less to do. Context and expert parallelism replace attention and
    experts inside the blocks, so they come before what wraps these; data parallelism comes last, for it shards whatever
    the others made.

    Returns what takes microbatches through the model.
    """
    run = resolved.run
    stages = plan_stages(resolved) if run.layout.pp > 1 else None
    weights = None
    pp, tp, cp = (None if meshes is None else meshes.axis(name) for name in ("pp", "tp", "cp"))
    if stages is not None and pp is not None:
        apply_pipeline(model, stages, pp.get_local_rank())
    if tp is not None:
        apply_tensor_parallel(model, tp)
    if stages is not None and stages.schedule.splits_backward:
        weights = WeightGradients(model)
    if cp is not None:
        method, _ = context_method(run.layout, model.spec, run.data.sequence_length)
        apply_context_parallel(model, cp, method)
    if meshes is not None:
        apply_expert_parallel(model, meshes)
    apply_recompute(model.layers, resolved.recompute)
    if run.training.compile:
        apply_compile(model.layers)
    if meshes is None:
        return WholeModel(model)
    if stages is not None and pp is not None and run.layout.asynchronous:
        dtypes = compute_dtype(run.training), reduce_dtype(run.training)
        axis = "shard" if meshes.axis("replicate") is None else "replicate"  # the former has one rank here
        return apply_pipedream(model, stages, pp.get_group(), meshes.state[axis], dtypes)
    apply_data_parallel(model, meshes, run.layout, build_fsdp_policy(run.training))
    hide_sharding(model.layers)
    sync = functools.partial(set_gradient_sync, run.layout)
    if stages is None or pp is None:
        return WholeModel(model, sync)
    return Pipeline(
        model,
        stages,
        pp.get_group(),
        dtype=compute_dtype(run.training),
        sequence_split=run.layout.tp,
        sync=sync,
        hold=functools.partial(hold_gradients, run.layout),
        reduce=functools.partial(reduce_gradients, model, run.layout),
        release=functools.partial(release_gathered, model),
        inside=functools.partial(pass_inside, model),
        weights=weights,
    )
