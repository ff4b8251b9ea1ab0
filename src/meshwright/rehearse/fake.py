"""A fake process group and tensors without data: one process acts as one rank of many."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright import torch_internals
from meshwright.models import loss, moe
from meshwright.models.grouped_low_precision import GroupedLowPrecision
from meshwright.models.low_precision import LowPrecision
from meshwright.models.norm import RMSNorm
from meshwright.models.slots import Wrapped
from meshwright.parallel.expert import Exchange
from meshwright.parallel.offload import HostCopy, Offloaded
from meshwright.spec.low_precision import KERNELS
from meshwright.spec.run import ResolvedRun
from meshwright.state import Home, Tier


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Act as rank `rank` of `world_size` in a process group whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=torch_internals.fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


class FakeTensors(torch_internals.FakeTensors):
    """Every tensor made inside has a shape, a dtype and a device, but no data; a tensor that is read as a number is 1.

    Meshes must be built outside, because they compute with rank numbers.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on shapes alone."""
        if func is torch_internals.LOCAL_SCALAR:
            return True if args[0].dtype == torch.bool else 1
        return super().dispatch(func, types, args, kwargs)


@contextlib.contextmanager
def budgets_of_gpu() -> Iterator[None]:
    """Cut the loss into chunks as on a GPU, although the fake tensors are CPU tensors.

    (Autograd with fake tensors of a missing device crashes the process.)
    """
    token = loss.BUDGETS_OF.set("gpu")
    try:
        yield
    finally:
        loss.BUDGETS_OF.reset(token)


def fill_slots(model: nn.Module, resolved: ResolvedRun, *, on_gpu: bool, fp8: bool = True) -> None:
    """Fill a model's slots with versions that work without data; `on_gpu`, also with a norm that saves the same
    tensors as a GPU's kernel, and, if the GPU multiplies `fp8`, with its kernels for low precision."""
    layout, length = resolved.run.layout, resolved.run.data.sequence_length
    rows = resolved.micro_batch * length // (layout.cp * layout.tp) * resolved.model.experts_per_token
    for module in model.modules():
        if isinstance(module, moe.ExpertLinear):
            module.read_counts = EvenCounts(rows)
            module.product = module.product or grouped_product
        if isinstance(module, moe.MoE) and isinstance(module.dispatch, Exchange):
            module.dispatch.read_counts = EvenCounts(rows)
        for wrapper in module.wrappers if isinstance(module, Wrapped) else ():
            if isinstance(wrapper, Offloaded):
                wrapper.copy = UncountedCopy
        if on_gpu and isinstance(module, RMSNorm):
            module.kernel = FusedNorm()
        if on_gpu and fp8:
            for product in _low_precision(module):
                product.kernel = product.recipe.name in KERNELS


def grouped_product(
    x_MI: torch.Tensor, weight_EOI: torch.Tensor, rows: moe.Rows, read: Callable[..., list[list[int]]]
) -> torch.Tensor:
    """See `moe.GroupedProduct`: torch knows the shapes of its grouped kernel in bf16 alone."""
    matmul = moe.grouped_matmul if x_MI.dtype == torch.bfloat16 else moe.matmul_by_expert
    return matmul(x_MI, weight_EOI, rows.counts.sum(1), read)


def _low_precision(module: nn.Module) -> Sequence[LowPrecision]:
    """The products of a layer, or of each of its experts, in low precision."""
    product = getattr(module, "product", None)
    if isinstance(product, GroupedLowPrecision):
        return product.products
    return (product,) if isinstance(product, LowPrecision) else ()


class UncountedCopy(HostCopy):
    """A saved tensor's copy outside the counted memory; only tensors that are fetched count."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device, self._back = tensor.device, None
        self._like = tensor.shape, tensor.stride(), tensor.dtype

    def fetch(self) -> None:
        """See `HostCopy`; as on a GPU."""
        if self._back is None:
            shape, stride, dtype = self._like
            self._back = torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def back(self) -> torch.Tensor:
        self.fetch()
        assert self._back is not None
        return self._back


class EvenCounts:
    """Every expert gets an equal share of a microbatch's `rows`, because there is no data for routing."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, *counts: torch.Tensor) -> list[list[int]]:
        """Rows of each expert: all rows shared evenly."""
        return [[self.rows // len(one) + (n < self.rows % len(one)) for n in range(len(one))] for one in counts]


class FusedNorm:
    """Saves the same tensors as a GPU's kernel for RMSNorm."""

    def __call__(
        self, x: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor, eps: float | None
    ) -> torch.Tensor:
        """The norm, by the fake kernel."""
        return _FusedNorm.apply(x, weight)


class _FusedNorm(torch.autograd.Function):
    """Saves the tensors that a GPU's RMSNorm kernel saves: its input, and a number per row. On a CPU, RMSNorm is a
    chain of operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:2])


@dataclass(frozen=True)
class UncountedTier(Tier):
    """A tier outside the counted memory; its tensors have no data."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    """The tensors in its homes, by the id of their storage."""

    @property
    def cache_room(self) -> int:
        """None: this machine's memory says nothing about the rehearsed one's."""
        return 0

    def prepare(self) -> None:
        """Does nothing: no file will be written."""

    def home(self, name: str, size: int) -> Home:
        """A home without bytes."""
        return _NoHome(self.tensors)

    def buffer(self, size: int) -> torch.Tensor:
        """A buffer in the counted memory."""
        return torch.empty(size, dtype=torch.uint8)


class _NoHome(Home):
    """A bucket's home outside the counted memory, of tensors without data."""

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        there = torch.empty(like.shape, dtype=like.dtype)
        self._tensors[id(there.untyped_storage())] = there
        return there

    def read(self, buffer: torch.Tensor) -> None:
        pass

    def write(self, buffer: torch.Tensor) -> None:
        pass

    def fill(self, offset: int, tensor: torch.Tensor) -> None:
        pass
