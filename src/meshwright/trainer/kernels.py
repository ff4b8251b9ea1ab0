"""The kernels that a run computes by on a CPU: measured before its first step, the same on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.comm.objects import from_first, rank
from meshwright.devices import on_cpu
from meshwright.models.dtypes import torch_dtype
from meshwright.models.kernel_choice import MeasuredKernels, Shapes, kept, using
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.setup import RankContext


@contextmanager
def measured_kernels(resolved: ResolvedRun, place: RankContext) -> Iterator[MeasuredKernels | None]:
    """Inside, this rank computes by the faster kernels; None if nothing is chosen. Collective.

    The first rank measures, because ranks with other kernels than its would round what they all compute otherwise.
    """
    if not on_cpu(place.device) or resolved.run.training.deterministic:
        yield None
        return
    measured = kept(shapes_of(resolved), Path(resolved.run.data.cache_dir)) if rank() == 0 else None
    choice = from_first(measured)
    with using(choice.kernels):
        yield choice if choice.milliseconds else None


def shapes_of(resolved: ResolvedRun) -> Shapes:
    """The sizes that each rank computes with."""
    model, layout, length = resolved.model, resolved.run.layout, resolved.run.data.sequence_length
    shared = max(1, model.num_kv_heads // layout.tp)
    return Shapes(
        tokens=resolved.micro_batch * length // layout.cp,
        into=model.hidden,
        out=max(1, model.ffn // layout.tp),
        heads=resolved.micro_batch * max(shared, model.num_heads // layout.tp // shared * shared),
        shared=resolved.micro_batch * shared,
        length=length,
        width=model.head_dim,
        dtype=torch_dtype(resolved.run.training.dtypes.compute),
    )
