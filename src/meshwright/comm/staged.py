"""Process groups whose messages go through host memory, so that several ranks can share one accelerator.

NCCL refuses two ranks on one GPU, and gloo sends only some kinds of messages from a GPU's memory. A `StagedGroup`
copies tensors to the host, lets gloo send the copies, and copies back what arrived. It is slow, and exact: a layout of
eight ranks can be proved on one GPU. A collective has ended when it returns, a message between two ranks when it has
been waited for.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.devices import ACCELERATORS
from meshwright.torch_internals import finished_work, leaves, serve_by_gloo, tree_map

STAGED = "staged"
"""The backend's name for torch."""


class StagedMessage:
    """A message between two ranks, in transit through host memory."""

    def __init__(self, work: dist.Work, copies: Sequence[torch.Tensor], into: Sequence[torch.Tensor] = ()) -> None:
        self._work, self._copies, self._into = work, copies, into

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has been sent, or is in its tensor."""
        self._work.wait()
        for tensor, copy in zip(self._into, self._copies, strict=False):
            tensor.copy_(copy)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()


def _collective(name: str) -> Callable[..., dist.Work]:
    """gloo's collective of this name on copies in host memory. Its first argument has the tensors that it writes."""

    def run(group: "StagedGroup", written: Any, *arguments: Any, **options: Any) -> dist.Work:
        copies, *others = tree_map(_to_host, [written, *arguments])
        getattr(group.gloo, name)(copies, *others, **options).wait()
        for tensor, copy in zip(leaves(written), leaves(copies), strict=True):
            tensor.copy_(copy)
        return finished_work(written)

    return run


def _one_by_one(name: str) -> Callable[..., dist.Work]:
    """A collective on several tensors: the group's collective of this name on each."""

    def run(group: "StagedGroup", written: Sequence[Any], read: Sequence[Any], *options: Any) -> dist.Work:
        for one, other in zip(written, read, strict=True):
            getattr(group, name)(one, other, *options)
        return finished_work(written)

    return run


def _message(name: str) -> Callable[..., Any]:
    """gloo's message of this name, between two ranks, by copies in host memory."""

    def run(group: "StagedGroup", tensors: Sequence[torch.Tensor], rank: int, tag: int) -> StagedMessage:
        copies = [_to_host(tensor) for tensor in tensors]
        return StagedMessage(getattr(group.gloo, name)(copies, rank, tag), copies, tensors if name == "recv" else ())

    return run


def _meeting(group: "StagedGroup", opts: Any = None) -> dist.Work:
    group.gloo.barrier().wait()
    return finished_work([])


def _to_host(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


class StagedGroup(dist.ProcessGroup):
    """A gloo group for tensors on any device. Torch calls the collectives by name; releases before 2.13 know some by
    another."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  (torch has this form, its stub another)
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        serve_by_gloo(self, self.gloo)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """The backend's name."""
        return STAGED

    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    reduce = _collective("reduce")
    broadcast = _collective("broadcast")
    gather = _collective("gather")
    scatter = _collective("scatter")
    allgather = _collective("allgather")
    reduce_scatter = _collective("reduce_scatter")
    alltoall = _collective("alltoall")
    all_gather_single = _allgather_base = _collective("_allgather_base")
    reduce_scatter_single = _reduce_scatter_base = _collective("_reduce_scatter_base")
    all_to_all_single = alltoall_base = _collective("alltoall_base")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _one_by_one("all_gather_single")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _one_by_one("reduce_scatter_single")

    send = _message("send")
    recv = _message("recv")
    barrier: Any = _meeting


SEVERAL = [kind for kind, there in ACCELERATORS.items() if there.backend]
dist.Backend.register_backend(STAGED, StagedGroup, devices=["cpu", *SEVERAL])
