"""Several parts of a module computed side by side in one process, as ranks compute them.

Each part runs in a thread of its own and waits for the others where ranks communicate. All results are in one autograd
graph, in which every exchange has the gradient that it has between ranks, for each part's own loss.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

PATIENCE = 60
"""Seconds that a part waits for the others."""


class Meeting:
    """Where the parts exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def exchange(self, part: int, value: Any) -> list[Any]:
        """All parts' values, in order."""
        self._values[part] = value
        self.barrier.wait(PATIENCE)
        values = list(self._values)
        self.barrier.wait(PATIENCE)
        return values


class SideBySide:
    """A part's `Sharing` with the others in this process."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.size, self.rank = meeting, meeting.size, rank

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """`x`; backward, the sum of the parts' gradients."""
        others = [other for part, other in enumerate(self.meeting.exchange(self.rank, x)) if part != self.rank]
        return x + sum(other - other.detach() for other in others)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the parts; backward, this part's own gradient."""
        parts = self.meeting.exchange(self.rank, x)
        return sum(x if part == self.rank else other.detach() for part, other in enumerate(parts))  # pyright: ignore

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The parts along the last dim; backward, the sum of the parts' gradients."""
        return torch.cat(self.meeting.exchange(self.rank, x), -1)

    def __repr__(self) -> str:
        return f"part {self.rank} of {self.size}"


def side_by_side(size: int, run: Callable[[SideBySide], T]) -> list[T]:
    """The result of `run` for each part, in order. Raises the first part's own error."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def compute(part: int) -> None:
        try:
            results[part] = run(SideBySide(meeting, part))
        except threading.BrokenBarrierError:  # another part's error
            pass
        except Exception as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=compute, args=(part,), daemon=True) for part in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
