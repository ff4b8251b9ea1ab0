"""Sizes of the pieces into which a rank cuts its work. A proof makes them small, so that a small model has several."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class PieceSizes:
    """What is processed together, at most."""

    block: int = 256
    """Consecutive values of a tensor's shard that share a scale in a quantized collective: fewer values round less,
    and need more scales."""
    bucket: int = 2**20
    """Parameters of a rank that are stepped together where the optimizer's state lives elsewhere: with this many, fp32
    masters, moments and gradients are 16 MiB. Three buckets are in memory at once: one is stepped, one is read, one is
    written."""


PIECES: ContextVar[PieceSizes] = ContextVar("PIECES", default=PieceSizes())  # noqa: B039  (it is frozen)
"""The sizes in use."""

SHRUNK = PieceSizes(block=8, bucket=2**10)
"""Those of a shrunk run."""


@contextmanager
def pieces_of(*, shrunk: bool) -> Iterator[None]:
    """Inside, the sizes of a shrunk run, or the usual ones."""
    before = PIECES.set(SHRUNK if shrunk else PieceSizes())
    try:
        yield
    finally:
        PIECES.reset(before)
