"""Generators of pipeline schedules: the order of stages and microbatches on every rank.

| name                    | stages per rank | source                                                                   |
|-------------------------|-----------------|--------------------------------------------------------------------------|
| afab                    | 1               | Huang et al., "GPipe", 2019: all forward, all backward                   |
| 1f1b                    | 1               | Narayanan et al., "Memory-Efficient Pipeline-Parallel Training", 2021    |
| interleaved-1f1b        | any             | Narayanan et al., "Efficient Large-Scale Language Model Training", 2021  |
| looped-bfs              | any             | Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2023                 |
| interleaved-zero-bubble | any             | Qi et al., "Zero Bubble Pipeline Parallelism", 2024: ZB-H1, interleaved  |
| zbv                     | 2               | Qi et al., 2024, section 6: ZB-V                                         |
| dualpipev               | 2               | DeepSeek-AI, "DeepSeek-V3", 2024: DualPipe, cut in half                  |
| pipedream-2bw           | 1               | Narayanan et al., 2021: 1F1B that never empties, gradients a step late   |

`spec/timeline.py` computes time, bubble and memory of a schedule.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, assert_never

from meshwright.spec.actions import Action, Kind, Schedule, ScheduleError, read_schedule

NEAREST = 4096
"""Limit of the search for a legal number of microbatches."""


class RankAction(NamedTuple):
    """An action in a rank's own order: its kind, the index of one of the rank's stages, and the microbatch."""

    kind: Kind
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class ScheduleKind:
    """A published schedule."""

    generate: Callable[[int, int, int, int], Iterable[RankAction]]
    """(rank, ranks, stages per rank, microbatches) -> the rank's actions"""
    stages_per_rank: int
    """Usual number of stages."""
    fixed: bool = False
    """Whether no other number of stages per rank is possible."""
    shape: Literal["loop", "v"] = "loop"
    """loop: stages go from the first rank to the last, repeatedly. v: from the first rank to the last and back."""
    fewest: Callable[[int, int], int] = lambda ranks, chunks: ranks
    """(ranks, stages per rank) -> the smallest possible number of microbatches."""
    rounds: bool = False
    """Whether microbatches run in rounds of equal size, about as many in each as there are ranks."""
    asynchronous: bool = False
    """Whether the last backward passes of a step run in the next step (`spec/stream.py`), so that gradients are one
    step late and training differs from one process."""

    def problem(self, ranks: int, chunks: int, microbatches: int) -> str | None:
        """The reason why this number of microbatches is impossible; None if it is possible."""
        fewest = self.fewest(ranks, chunks)
        if microbatches < fewest:
            return f"needs at least {fewest}"
        if self.rounds and chunks > 1 and microbatches % _rounds(ranks, microbatches):
            return f"runs them in {_rounds(ranks, microbatches)} rounds of equal size, at least {ranks} each"
        return None


def build_schedule(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The published schedule `name` for `ranks` pipeline ranks, or the schedule in a file, if `name` ends in `.csv`.

    `stages_per_rank`: None means the schedule's usual number. Raises `ScheduleError`, which names the nearest legal
    number.
    """
    if name.endswith(".csv"):
        return _own_schedule(Path(name), ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    kind = schedule_kind(name)
    chunks = stages_per_rank or kind.stages_per_rank
    if kind.fixed and chunks != kind.stages_per_rank:
        raise ScheduleError(f"schedule {name} has {kind.stages_per_rank} stage(s) per rank, not {chunks}")
    problem = kind.problem(ranks, chunks, microbatches)
    if problem:
        raise ScheduleError(
            f"schedule {name} with {ranks} ranks of {chunks} stage(s) and {microbatches} microbatches: it {problem}; "
            f"the nearest number that works is {nearest_microbatches(name, ranks, microbatches, chunks)}"
        )

    def stage(rank: int, chunk: int) -> int:
        match kind.shape:
            case "v":
                return 2 * ranks - 1 - rank if chunk else rank
            case "loop":
                return chunk * ranks + rank
            case _:
                assert_never(kind.shape)

    return Schedule(
        name,
        tuple(
            tuple(Action(k, stage(rank, chunk), m) for k, chunk, m in kind.generate(rank, ranks, chunks, microbatches))
            for rank in range(ranks)
        ),
    )


def schedule_kind(name: str) -> ScheduleKind:
    """The published schedule of this name; raises `ScheduleError`."""
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; known are {', '.join(SCHEDULES)}, or the name of a .csv file")
    return SCHEDULES[name]


def is_asynchronous(name: str) -> bool:
    """Whether gradients are one step late; never for custom schedules."""
    return name in SCHEDULES and SCHEDULES[name].asynchronous


def nearest_microbatches(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> int:
    """The legal number of microbatches of a published schedule that is nearest to `microbatches`."""
    kind = schedule_kind(name)
    chunks = stages_per_rank or kind.stages_per_rank
    around = (microbatches + sign * away for away in range(NEAREST) for sign in (1, -1))
    return next(m for m in around if m > 0 and kind.problem(ranks, chunks, m) is None)


def _own_schedule(path: Path, *, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    schedule = read_schedule(path)
    for what, requested, given in (
        ("pipeline ranks", ranks, len(schedule.ranks)),
        ("microbatches", microbatches, schedule.num_microbatches),
        ("stages", stages_per_rank and stages_per_rank * ranks, schedule.num_stages),
    ):
        if requested and requested != given:
            raise ScheduleError(f"schedule {path} is for {given} {what}, the run has {requested}")
    return schedule


# Generators of the published schedules. Each yields one rank's actions.


def _rounds(ranks: int, microbatches: int) -> int:
    return max(1, microbatches // ranks)


def _alternating(
    rank: int, ranks: int, chunks: int, microbatches: int, *, ahead: int, split: bool = False
) -> Iterator[RankAction]:
    """Forward passes that fill the pipeline, then alternating forward and backward passes, then the remaining backward
    passes.

    A rank takes a round of microbatches through all its stages before the next round. It starts the backward passes
    `ahead` forward passes earlier than the previous rank. With `split`, rank r runs each W r backward passes after its
    I, so that all ranks hold as many microbatches as in 1F1B (ZB-H1).
    """
    size = microbatches // _rounds(ranks, microbatches) if chunks > 1 else microbatches
    rounds = [range(start, start + size) for start in range(0, microbatches, size)]
    forward = [(chunk, m) for some in rounds for chunk in range(chunks) for m in some]
    backward = [(chunk, m) for some in rounds for chunk in reversed(range(chunks)) for m in some]
    first = min((chunks - 1) * size + ahead * (ranks - 1 - rank), len(forward))
    yield from (RankAction("F", *which) for which in forward[:first])
    for i, which in enumerate(backward):
        if first + i < len(forward):
            yield RankAction("F", *forward[first + i])
        yield RankAction("I" if split else "B", *which)
        if split and i >= rank:
            yield RankAction("W", *backward[i - rank])
    if split:
        yield from (RankAction("W", *which) for which in backward[max(0, len(backward) - rank) :])


def _afab(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[RankAction]:
    yield from (RankAction("F", 0, m) for m in range(microbatches))
    yield from (RankAction("B", 0, m) for m in range(microbatches))


def _looped_bfs(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[RankAction]:
    for chunk in range(chunks):
        yield from (RankAction("F", chunk, m) for m in range(microbatches))
    for chunk in reversed(range(chunks)):
        yield from (RankAction("B", chunk, m) for m in reversed(range(microbatches)))


class _Counted:
    """A generator of steps that counts the microbatches itself; a W belongs to the longest-waiting I."""

    def __init__(self) -> None:
        self._next: Counter[tuple[str, int]] = Counter()
        self._waiting: list[tuple[int, int]] = []

    def __call__(self, kinds: str, chunk: int) -> Iterator[RankAction]:
        """One step of each of the `kinds` (F, B, I) for the stage `chunk`."""
        for kind in kinds:
            key = ("F" if kind == "F" else "B", chunk)
            microbatch = self._next[key]
            self._next[key] += 1
            if kind == "I":
                self._waiting.append((chunk, microbatch))
            yield RankAction(kind, chunk, microbatch)  # type: ignore[arg-type]

    def weights(self, chunk: int | None = None) -> Iterator[RankAction]:
        """The oldest pending W, of the stage `chunk` or of any; nothing if none is pending."""
        for place, (of, microbatch) in enumerate(self._waiting):
            if chunk in (None, of):
                del self._waiting[place]
                yield RankAction("W", of, microbatch)
                return


def _zbv(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[RankAction]:
    """ZB-V, generated for enough microbatches to fill the pipeline; surplus microbatches are left out."""
    return (step for step in _full_zbv(rank, ranks, max(2 * ranks - 1, microbatches)) if step.microbatch < microbatches)


def _full_zbv(rank: int, ranks: int, microbatches: int) -> Iterator[RankAction]:
    do = _Counted()
    yield from do("F" * (2 * (ranks - rank) - 1), 0)
    for _ in range(rank):
        yield from do("F", 1)
        yield from do("F", 0)
    for _ in range(ranks - rank):
        yield from do("FI", 1)
        yield from do.weights(1)
    begun = 2 * ranks - 1 - rank  # forward passes of the first stage so far; the second has `ranks`
    for i in range(microbatches - ranks):
        if begun + i < microbatches:
            yield from do("F", 0)
        yield from do("I", 0)
        yield from do.weights(0)
        yield from do("FI", 1)
        yield from do.weights(1)
    for _ in range(rank):
        yield from do("I", 0)
        yield from do("I", 1)
    for _ in range(ranks - rank):
        yield from do("I", 0)
        yield from do.weights(0)
    for chunk in (1, 0):
        for _ in range(rank):
            yield from do.weights(chunk)


def _dualpipev(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[RankAction]:
    """DualPipeV as in DeepSeek's published code, but overlapped pairs of a forward and a backward pass run one by
    one."""
    do, after = _Counted(), ranks - 1 - rank
    yield from do("F" * (2 * after), 0)
    for _ in range(rank + 1):
        yield from do("F", 0)
        yield from do("F", 1)
    for _ in range(after):
        yield from do("I", 1)
        yield from do.weights()
        yield from do("F", 1)
    for _ in range(microbatches - 2 * ranks + rank + 1):
        yield from do("F", 0)
        yield from do("B", 1)
        yield from do("F", 1)
        yield from do("B", 0)
    for _ in range(after):
        yield from do("B", 1)
        yield from do("F", 1)
        yield from do("B", 0)
    split_from = 2 * ((rank + 1) // 2) + (rank + 1) % 2  # the second half of these backward passes is split
    for i in range(2 * (rank + 1)):
        yield from do("I" if i >= split_from else "B", 1 - i % 2)
    for _ in range(after):
        yield from do.weights()
        yield from do("I", 0)
    for _ in range(rank + 1):
        yield from do.weights()


SCHEDULES: dict[str, ScheduleKind] = {
    "afab": ScheduleKind(_afab, 1, fixed=True),
    "1f1b": ScheduleKind(partial(_alternating, ahead=1), 1, fixed=True),
    "interleaved-1f1b": ScheduleKind(partial(_alternating, ahead=2), 2, rounds=True),
    "looped-bfs": ScheduleKind(_looped_bfs, 2),
    "interleaved-zero-bubble": ScheduleKind(partial(_alternating, ahead=1, split=True), 2, rounds=True),
    "zbv": ScheduleKind(_zbv, 2, fixed=True, shape="v"),
    "dualpipev": ScheduleKind(_dualpipev, 2, fixed=True, shape="v", fewest=operator.mul),
    "pipedream-2bw": ScheduleKind(partial(_alternating, ahead=1), 1, fixed=True, asynchronous=True),
}
"""The published schedules by name."""
