"""The check that replicated weights are equal on all ranks."""

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from meshwright import torch_internals
from meshwright.callbacks import Callback, Training
from meshwright.callbacks.callback import Record
from meshwright.comm.objects import from_first, gather, world_size
from meshwright.launch.status import ReplicasDifferError

Part = tuple[str, tuple[int, ...]]
"""A tensor's name and the offset of a rank's part in it."""

AT_ONCE = 2**22
"""Elements that are hashed at once, which bounds the memory."""


class ReplicaGuard(Callback):
    """Compares replicas every `guards.replicas_every` steps (0: never)."""

    def on_step(self, training: Training, record: Record) -> None:
        every = training.run.guards.replicas_every
        if every and training.step % every == 0:
            check_replicas(training.parameters)


def check_replicas(parameters: Mapping[str, torch.Tensor]) -> None:
    """Compare the parts that several ranks hold, under any layout; raises `ReplicasDifferError` on all ranks.

    Collective.
    """
    if fault := replica_fault(parameters):
        raise ReplicasDifferError(f"{fault}; a device or link is faulty, or the ranks run different code")


def replica_fault(parameters: Mapping[str, torch.Tensor]) -> str | None:
    """The first part that differs between its ranks, or None. Collective."""
    if world_size() == 1:
        return None
    everyone = gather({_part(name, tensor): checksum(tensor) for name, tensor in parameters.items()})
    return from_first(_first_difference(everyone) if everyone is not None else None)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit hash of a rank's part that depends on every bit and its position: sum of (2 i + 1) x_i modulo 2**64."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous().view(-1)
    bits = local.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, bits.numel(), AT_ONCE):
        piece = bits[start : start + AT_ONCE].to(torch.int64)
        places = torch.arange(start, start + piece.numel(), device=piece.device)
        total += (piece * (2 * places + 1)).sum()
    return int(total)


def _part(name: str, tensor: torch.Tensor) -> Part:
    if not isinstance(tensor, DTensor):
        return name, (0,) * tensor.dim()
    _, offset = torch_internals.local_part(tensor)
    return name, offset


def _first_difference(everyone: Iterable[dict[Part, int]]) -> str | None:
    holders: dict[Part, dict[int, list[int]]] = {}
    for rank, sums in enumerate(everyone):
        for part, value in sums.items():
            holders.setdefault(part, {}).setdefault(value, []).append(rank)
    differing = {part: sorted(ranks_of.values(), key=len) for part, ranks_of in holders.items() if len(ranks_of) > 1}
    if not differing:
        return None
    (name, _), groups = next(iter(differing.items()))
    names = len({name for name, _ in differing})
    more = f" (and {names - 1} more)" if names > 1 else ""
    few, many = ("ranks " * (len(group) > 1) + ", ".join(map(str, group)) for group in (groups[0], groups[-1]))
    few = few if len(groups[0]) > 1 else f"rank {few}"
    many = many if len(groups[-1]) > 1 else f"rank {many}"
    return f"replicas differ: {name}{more} on {few} differs from {many}"
