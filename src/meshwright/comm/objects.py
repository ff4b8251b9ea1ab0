"""Exchange of Python objects and numbers between ranks; a single process exchanges them with itself.

Objects are pickled, and unpickling runs code. So each message is signed (HMAC-SHA256) with a secret of the run, which
`launch/meeting.py` gives every rank, and only a message with a valid signature is read. torch's own exchange
(`all_gather_object` and related functions) reads any message.
"""

import hmac
import pickle
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.spec.errors import UserError

T = TypeVar("T")

DIGEST = "sha256"
DIGEST_BYTES = 32

_secret = b""


def sign_with(secret: bytes) -> None:
    """Sign all messages of this process with `secret`, and read no others; every rank has the same secret."""
    global _secret
    _secret = secret


def signing_secret() -> bytes:
    """The key with which this process signs."""
    return _secret


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any] | None:
    """`value` of every rank, in rank order, on rank 0; None on other ranks. Collective."""
    if not dist.is_initialized():
        return [value]
    message = _signed(value)
    lengths = _lengths(message, None)
    padded = _padded(message, max(lengths))
    received = [torch.empty_like(padded) for _ in lengths] if rank() == 0 else None
    dist.gather(padded, received)
    return None if received is None else [_read(one[:length]) for one, length in zip(received, lengths, strict=True)]


def gather_everywhere(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`value` of every rank of `group`, or of all ranks, in rank order, on each of them. Collective."""
    if not dist.is_initialized():
        return [value]
    message = _signed(value)
    lengths = _lengths(message, group)
    padded = _padded(message, max(lengths))
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return [_read(one[:length]) for one, length in zip(received, lengths, strict=True)]


def scatter(values: Sequence[Any] | None) -> Any:
    """This rank's item of rank 0's list. Collective."""
    if not dist.is_initialized():
        assert values is not None
        return values[0]
    messages = [_signed(value) for value in values] if rank() == 0 and values is not None else []
    lengths = torch.tensor([message.numel() for message in messages] or [0] * world_size())
    dist.broadcast(lengths, 0)
    longest, mine = int(lengths.max()), int(lengths[rank()])
    received = torch.empty(longest, dtype=torch.uint8)
    dist.scatter(received, [_padded(message, longest) for message in messages] or None)
    return _read(received[:mine])


def from_first(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's object, on every rank of `group`, or on all ranks. Collective."""
    if not dist.is_initialized():
        return value
    message = _signed(value) if rank() == 0 else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor(message.numel())
    dist.broadcast(length, 0, group=group)
    received = message if rank() == 0 else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(received, 0, group=group)
    return value if rank() == 0 else _read(received)


def largest(*values: int) -> tuple[int, ...]:
    """The maximum of each number over all ranks: through host memory, on GPUs too. Collective."""
    return _reduced(values, "max")


def total(*values: int) -> tuple[int, ...]:
    """The sum of each number over all ranks, likewise. Collective."""
    return _reduced(values, "sum")


def _reduced(values: Sequence[int], op: Literal["sum", "max"]) -> tuple[int, ...]:
    return tuple(collectives.all_reduce_(torch.tensor(values, dtype=torch.int64), op=op).tolist())


def _signed(value: Any) -> torch.Tensor:
    """An object as a message: the signature, then the pickle; bytes."""
    pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(bytearray(hmac.digest(_secret, pickled, DIGEST) + pickled), dtype=torch.uint8)


def _read(message: torch.Tensor) -> Any:
    """The object of a message; raises `UserError` without unpickling if the signature is wrong."""
    content = message.numpy().tobytes()
    signature, pickled = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(_secret, pickled, DIGEST)):
        raise UserError(
            "a message between ranks is not signed with this run's secret and was rejected: run_dir is not the same "
            "folder on all machines, or another program sends to this rank (docs/security.md)"
        )
    return pickle.loads(pickled)


def _padded(message: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(message, (0, length - message.numel()))


def _lengths(message: torch.Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """The number of bytes that every rank of a group is about to send."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([message.numel()]), group=group)
    return [int(length) for length in lengths]
