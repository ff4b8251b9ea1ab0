"""Every collective on tensors, with its gradient. No other file of this package calls `torch.distributed` for tensors.

| function | result on rank r of N | gradient |
|---|---|---|
| `all_gather(x, group, dim)` | the ranks' x, concatenated along dim | `reduce_scatter` |
| `reduce_scatter(x, group, dim)` | part r of N along dim of the sum of the ranks' x | `all_gather` |
| `all_to_all(x, group)` | entry r of every rank's x, which has N entries in dim 0 | `all_to_all` |
| `all_to_all_rows(x, received, sent, group)` | the same for runs of rows of any length | `all_to_all_rows` |
| `all_reduce(x, group)` | the sum of the ranks' x | the identity |
| `entered(x, group)` | x, which all ranks have | `all_reduce` |
| `maximum(x, group)` | the element-wise maximum of the ranks' x | none |
| `all_reduce_(x, group, op)` | the sum, or the maximum, in place | none |
| `send`, `receive`, `exchange`, `Swap`, `hop` | messages between two ranks, both ways, round a ring | none |

If every rank computes the same loss from a sum, the sum's gradient is the identity (g of Megatron-LM, Shoeybi et al.,
2019).

FSDP2 gathers weights and reduces gradients itself, and DTensor redistributes tensors itself; `parallel/traffic.py`
counts these together with the collectives of this file. Quantized FSDP2 collectives are in `parallel/quantized.py`,
which sends bytes with the functions here. Python objects are sent by `objects.py`. Stores, and the barriers at a run's
start and end, are in `launch/`.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.distributed as dist

from meshwright.torch_internals import functional_collectives as functional


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """The ranks' parts of a tensor, in order along `dim`; backward, the sum of the gradients, scattered."""
    return _AllGather.apply(x, group.size(), group.group_name, dim)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """This rank's part along `dim` of the sum over ranks; backward, the whole gradient. N must divide the dim."""
    return _ReduceScatter.apply(x, group.size(), group.group_name, dim)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, group: str, dim: int) -> torch.Tensor:
        ctx.arguments = size, group, dim
        return _gather(x, size, group, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        return _scatter_sum(grad_outputs[0], *ctx.arguments), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, group: str, dim: int) -> torch.Tensor:
        ctx.arguments = size, group, dim
        return _scatter_sum(x, size, group, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        return _gather(grad_outputs[0], *ctx.arguments), None, None, None


def _gather(x: torch.Tensor, size: int, group: str, dim: int) -> torch.Tensor:
    """Waits at once, like all collectives here, so that the result is a plain tensor."""
    parts = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), size, group))
    return parts.unflatten(0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1) if dim else parts


def _scatter_sum(x: torch.Tensor, size: int, group: str, dim: int) -> torch.Tensor:
    parts = x.unflatten(dim, (size, -1)).movedim(dim, 0).flatten(0, 1) if dim else x
    return functional.wait_tensor(functional.reduce_scatter_tensor(parts.contiguous(), "sum", size, group))


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends entry n of dim 0 to rank n, and replaces it by rank n's entry. Cannot be compiled."""
    return _AllToAll.apply(x, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        return all_to_all(grad_outputs[0], ctx.group), None


def all_to_all_rows(x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """`sent[n]` rows for rank n, in rank order, exchanged for `received[n]` rows of it; backward, gradients go back."""
    return _AllToAllRows.apply(x, received, sent, group.group_name)


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
        ctx.arguments = received, sent, group
        return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), received, sent, group))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        received, sent, group = ctx.arguments
        return _AllToAllRows.apply(grad_outputs[0], sent, received, group), None, None, None


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks; backward, the identity."""
    return _AllReduce.apply(x, group.group_name)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        return grad_outputs[0], None


def entered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`x`, which all ranks have, where each begins to compute a part (f of Megatron-LM); backward, the sum over
    ranks."""
    return _Entered.apply(x, group.group_name)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        return functional.wait_tensor(functional.all_reduce(grad_outputs[0].contiguous(), "sum", ctx.group)), None


@torch.no_grad()
def maximum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The element-wise maximum over ranks; no gradient."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "max", group.group_name))


def all_reduce_(
    x: torch.Tensor, group: dist.ProcessGroup | None = None, op: Literal["sum", "max"] = "sum"
) -> torch.Tensor:
    """Replace `x` in place by its sum, or maximum, over ranks, and return it; no gradient.

    Without a group: over all ranks of the run; does nothing if one process trains alone.
    """
    if group is not None or dist.is_initialized():
        dist.all_reduce(x, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=group)
    return x


WAITS: ContextVar[Callable[[torch.Tensor], None] | None] = ContextVar("WAITS", default=None)
"""Called with the tensor of each message that is waited for. While something listens, every message is waited for."""


class Message:
    """A tensor in transit from one rank to another."""

    def __init__(self, tensor: torch.Tensor, work: dist.Work | None, group: dist.ProcessGroup) -> None:
        assert work is not None
        self.tensor, self._work = tensor, work
        self._travels = dist.get_backend(group) != "fake"

    def wait(self) -> torch.Tensor:
        """The tensor, after it has arrived or been sent."""
        if (observe := WAITS.get()) is not None:
            observe(self.tensor)
        self._work.wait()
        return self.tensor

    def has_gone(self) -> bool:
        """Whether the sender no longer needs the tensor. Torch's backend `fake`, which rehearsals use, sends nothing
        and completes nothing: its messages count as sent at once."""
        return WAITS.get() is None and (not self._travels or self._work.is_completed())


def send(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Message:
    """Start sending a contiguous tensor to a rank of `group`, counted within the group."""
    return Message(tensor, dist.isend(tensor, dist.get_global_rank(group, rank), group=group), group)


def receive(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Message:
    """Start receiving into `tensor` from a rank of `group`, counted within the group."""
    return Message(tensor, dist.irecv(tensor, dist.get_global_rank(group, rank), group=group), group)


def exchange(tensor: torch.Tensor, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor of another rank of `group`, of the same shape, in exchange for this rank's contiguous one.

    The lower rank sends first: NCCL runs what two ranks send each other in order, so if both send first, neither
    receives. In a batch, as in `Swap`, both would first wait until the other ranks of `group` use it too.
    """
    received = torch.empty_like(tensor)
    steps = [(send, tensor), (receive, received)]
    messages = [step(part, rank, group) for step, part in (steps if group.rank() < rank else reversed(steps))]
    for message in messages:
        message.wait()
    return received


class Swap:
    """A contiguous tensor in transit to one rank of `group` while another one's, of the same shape, arrives.

    Both belong to one batch. All ranks of `group` must make one, because its first use makes a communicator of all.
    """

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, *, to: int, source: int) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.sent, self.received = tensor, torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, ranks[to], group),
            dist.P2POp(dist.irecv, self.received, ranks[source], group),
        ]
        self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> torch.Tensor:
        """The tensor that has arrived."""
        if (observe := WAITS.get()) is not None:
            observe(self.received)
        for work in self.works:
            work.wait()
        return self.received


def hop(tensor: torch.Tensor, group: dist.ProcessGroup) -> Swap:
    """Send a contiguous tensor to the next rank of a ring, and receive the previous rank's."""
    here, size = group.rank(), group.size()
    return Swap(tensor, group, to=(here + 1) % size, source=(here - 1) % size)
