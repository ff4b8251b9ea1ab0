"""The one page that says in which order a single-device model becomes a parallel one."""

from meshwright.models import Decoder
from meshwright.parallel.compile import apply_compile
from meshwright.parallel.context import apply_context_parallel
from meshwright.parallel.data import apply_data_parallel
from meshwright.parallel.expert import apply_expert_parallel
from meshwright.parallel.mesh import Meshes
from meshwright.parallel.precision import build_fsdp_policy
from meshwright.parallel.recompute import apply_recompute, hide_sharding
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.spec.fit import context_method
from meshwright.spec.run import Run


def apply_parallelism(model: Decoder, run: Run, meshes: Meshes | None) -> None:
    """Change `model` (on the meta device) in place into what this rank runs; `meshes` is None for one process alone.

    Context and expert parallelism replace attention and experts inside the blocks, so they come before what wraps
    these; data parallelism comes last, for it shards whatever the others made.
    """
    if meshes is not None:
        apply_tensor_parallel(model, meshes.state["tp"])
    if meshes is not None and run.layout.cp > 1:
        apply_context_parallel(
            model, meshes.batch["cp"], context_method(run.layout, model.spec, run.data.sequence_length)[0]
        )
    if meshes is not None:
        apply_expert_parallel(model, meshes)
    apply_recompute(model.layers, run.training.recompute)
    if run.training.compile:
        apply_compile(model.layers)
    if meshes is not None:
        apply_data_parallel(model, meshes, run.layout, build_fsdp_policy(run.training))
        hide_sharding(model.layers)
