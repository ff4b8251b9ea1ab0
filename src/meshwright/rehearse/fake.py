"""A fake process group and tensors without data: one process acts as one rank of many."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright import torch_internals
from meshwright.models import loss, moe
from meshwright.spec.run import ResolvedRun
from meshwright.state import Tier


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be rank `rank` of `world_size` in a process group whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=torch_internals.fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


class FakeTensors(torch_internals.FakeTensors):
    """Every tensor made inside has a shape, a dtype and a device, but no numbers; one that is read as a number is 1.

    Meshes must be built outside: they compute with the numbers of ranks.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on shapes alone."""
        if func is torch_internals.LOCAL_SCALAR:
            return True if args[0].dtype == torch.bool else 1
        return super().dispatch(func, types, args, kwargs)


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let what depends on the kind of device be as on a GPU, although the fake tensors are CPU tensors.

    (Autograd with fake tensors of a device that is not there ends the process.)
    """
    budgets, norm = (dict(loss.CHUNK_BYTES), dict(loss.WIDE_BYTES)), F.rms_norm
    F.rms_norm = lambda x, shape, weight, eps: _FusedNorm.apply(x, weight)
    loss.CHUNK_BYTES["cpu"], loss.WIDE_BYTES["cpu"] = loss.CHUNK_BYTES["cuda"], loss.WIDE_BYTES["cuda"]
    try:
        yield
    finally:
        loss.CHUNK_BYTES.update(budgets[0])
        loss.WIDE_BYTES.update(budgets[1])
        F.rms_norm = norm


class _FusedNorm(torch.autograd.Function):
    """What a GPU's kernel for RMSNorm keeps: its input, and a number a row; on a CPU it is a chain of operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:2])


class _NoHome:
    """A bucket's home outside the memory that a rehearsal counts, of tensors without numbers."""

    moved, seconds = 0, 0.0

    def __init__(self, size: int, elsewhere: dict[int, torch.Tensor]) -> None:
        self.size, self._elsewhere = size, elsewhere

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        there = torch.empty(like.shape, dtype=like.dtype)
        self._elsewhere[id(there.untyped_storage())] = there
        return there

    def read(self, buffer: torch.Tensor) -> None:
        pass

    def write(self, buffer: torch.Tensor) -> None:
        pass

    def changed(self) -> None:
        pass

    def forget(self) -> None:
        pass


@contextlib.contextmanager
def no_files() -> Iterator[dict[int, torch.Tensor]]:
    """Let state that lives elsewhere take no room anywhere; yields what does, by the identity of its storage."""
    elsewhere: dict[int, torch.Tensor] = {}
    with (
        torch_internals.replaced(Tier, "prepare", lambda tier: None),
        torch_internals.replaced(Tier, "home", lambda tier, name, size: _NoHome(size, elsewhere)),
        torch_internals.replaced(Tier, "buffer", lambda tier, size: torch.empty(size, dtype=torch.uint8)),
    ):
        yield elsewhere


@contextlib.contextmanager
def even_routing(resolved: ResolvedRun) -> Iterator[None]:
    """Let every expert get equally many of a microbatch's rows: numbers that say otherwise do not exist."""
    layout, length = resolved.run.layout, resolved.run.data.sequence_length
    rows = resolved.micro_batch * length // (layout.cp * layout.tp) * resolved.model.experts_per_token

    def evenly(*counts: torch.Tensor) -> list[list[int]]:
        return [[rows // len(one) + (place < rows % len(one)) for place in range(len(one))] for one in counts]

    with torch_internals.replaced(moe, "read_counts", evenly):
        yield
