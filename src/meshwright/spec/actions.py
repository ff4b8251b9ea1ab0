"""Pipeline schedules as data: the ordered actions of every rank, and the rules of legal orders.

An action is one pass of a microbatch through a stage: F is the forward pass, B the whole backward pass. B may be split
into I, the gradient of the stage's input, which the previous stage waits for, and W, the gradients of its weights,
which no other stage needs (Qi et al., "Zero Bubble Pipeline Parallelism", 2024).
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from meshwright.spec.errors import UserError
from meshwright.spec.files import regular

Kind = Literal["F", "B", "I", "W"]


class ScheduleError(UserError):
    """The error for a schedule that cannot be generated or cannot run."""


class Action(NamedTuple):
    """One action of a stage on a microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def needs(self) -> tuple[tuple["Action", ...], ...]:
        """The prerequisites: one action of each group must come first. The caller, which knows the number of stages,
        drops groups of stages after the last one."""
        kind, stage, microbatch = self
        if kind == "F":
            return ((Action("F", stage - 1, microbatch),),) if stage else ()
        if kind == "W":
            return ((Action("I", stage, microbatch),),)
        later = (Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch))
        return (Action("F", stage, microbatch),), later


@dataclass(frozen=True)
class Schedule:
    """The order of every rank's actions; legal by construction."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    """Every rank's actions."""
    evaluation: bool = False
    """Whether the schedule has forward passes only."""

    def __post_init__(self) -> None:
        _check_once(self)
        _ = self.order  # raises for a deadlock

    @cached_property
    def order(self) -> tuple[tuple[int, Action], ...]:
        """All actions as (rank, action), in an order in which one process could run them, close to that in time."""
        return _in_order(self)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage."""
        rank_of = {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}
        return tuple(rank_of[stage] for stage in sorted(rank_of))

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.placement)

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches in a step."""
        return 1 + max(action.microbatch for actions in self.ranks for action in actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage, place in enumerate(self.placement) if place == rank)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward pass is split into I and W."""
        return any(action.kind == "W" for actions in self.ranks for action in actions)

    def needs(self, action: Action) -> tuple[tuple[Action, ...], ...]:
        """The prerequisites of `action`: one action of each group must come first."""
        return tuple(group for group in action.needs if group[0].stage < self.num_stages)

    def csv(self) -> str:
        """The schedule in the CSV format of `read_schedule`: a line per rank, a cell per action, such as 0F3."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)


def read_schedule(path: Path) -> Schedule:
    """The custom schedule in a file: a line per rank, a cell per action (`0F3`: stage 0, forward, microbatch 3).

    Empty cells are ignored. This is the format of torch's pipelining runtime, without its communication. Raises
    `ScheduleError` with line and cell.
    """
    try:
        rows = [row for row in csv.reader(regular(path).read_text().splitlines()) if row]
    except OSError as error:
        raise ScheduleError(f"schedule {path}: {error.strerror}") from error
    ranks = tuple(
        tuple(
            _parse(cell.strip(), f"{path}:{line}, cell {column}") for column, cell in enumerate(row, 1) if cell.strip()
        )
        for line, row in enumerate(rows, 1)
    )
    if not all(ranks):
        raise ScheduleError(f"schedule {path}: every rank needs a line of actions such as 0F0")
    return Schedule(str(path), ranks)


def _parse(cell: str, where: str) -> Action:
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", cell)
    if match is None:
        raise ScheduleError(
            f"{where}: {cell!r} is not an action; an action is stage, F, B, I or W, microbatch, as in 0F3"
        )
    stage, kind, microbatch = match.groups()
    return Action(kind, int(stage), int(microbatch))  # type: ignore[arg-type]


def _in_order(schedule: Schedule) -> tuple[tuple[int, Action], ...]:
    """`Schedule.order`: in each round, every rank that is ready runs one action. Raises `ScheduleError` for a
    deadlock."""
    todo = [list(reversed(actions)) for actions in schedule.ranks]
    needs = [schedule.needs(actions[-1]) if actions else () for actions in todo]
    done: set[Action] = set()
    order: list[tuple[int, Action]] = []
    while any(todo):
        turn = [
            (rank, actions[-1])
            for rank, actions in enumerate(todo)
            if actions and not any(done.isdisjoint(group) for group in needs[rank])
        ]
        if not turn:
            rank, action = next((rank, actions[-1]) for rank, actions in enumerate(todo) if actions)
            missing = next(group for group in schedule.needs(action) if not done.intersection(group))
            raise ScheduleError(
                f"schedule {schedule.name}: rank {rank} deadlocks at {action}: it waits for "
                f"{' or '.join(map(str, missing))}, which comes later or never"
            )
        for rank, action in turn:
            todo[rank].pop()
            done.add(action)
            needs[rank] = schedule.needs(todo[rank][-1]) if todo[rank] else ()
        order += turn
    return tuple(order)


def _check_once(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every stage is on one rank, with one forward and one backward pass per
    microbatch."""
    places = {(action.stage, rank) for rank, actions in enumerate(schedule.ranks) for action in actions}
    where = Counter(stage for stage, _ in places)
    stages = 1 + max(where, default=0)
    for stage in range(stages):
        if where[stage] != 1:
            raise ScheduleError(f"schedule {schedule.name}: stage {stage} is on {where[stage]} ranks, not on one")
    times = Counter(action for actions in schedule.ranks for action in actions)
    for stage in range(stages):
        for microbatch in range(schedule.num_microbatches):
            forward, whole, inputs, weights = (times[Action(kind, stage, microbatch)] for kind in ("F", "B", "I", "W"))
            backward = ((0, 0, 0),) if schedule.evaluation else ((1, 0, 0), (0, 1, 1))
            if forward != 1 or (whole, inputs, weights) not in backward:
                raise ScheduleError(
                    f"schedule {schedule.name}: stage {stage}, microbatch {microbatch} has {forward} F, {whole} B, "
                    f"{inputs} I, {weights} W; it needs one F, and one B or one I and one W"
                )


class Transfer(NamedTuple):
    """The transfer of a result to another rank: an output goes forward, an input's gradient backward."""

    forward: bool
    stage: int
    """Stage that computed the result."""
    microbatch: int
    source: int
    target: int
    """Sending and receiving rank."""


Program = tuple[Action | Transfer, ...]
"""The actions and transfers of one rank, in order."""


def with_transfers(schedule: Schedule) -> tuple[Program, ...]:
    """Every rank's actions with its sends and receives.

    All ranks follow one global order, so any two ranks have their common transfers in the same order. They cannot
    deadlock, even if messages between two ranks must be received in the order of sending. A receive may start at its
    position in the list; the action that needs the result comes later.
    """
    return add_transfers(schedule, schedule.order)


def add_transfers(schedule: Schedule, order: Iterable[tuple[int, Action]]) -> tuple[Program, ...]:
    """Every rank's actions in `order`, with the transfers of their results."""
    program: list[list[Action | Transfer]] = [[] for _ in schedule.ranks]
    for rank, action in order:
        program[rank].append(action)
        forward = action.kind == "F"
        receiver = action.stage + (1 if forward else -1)
        if action.kind == "W" or not 0 <= receiver < schedule.num_stages:
            continue
        target = schedule.placement[receiver]
        if target != rank:
            transfer = Transfer(forward, action.stage, action.microbatch, rank, target)
            program[rank].append(transfer)
            program[target].append(transfer)
    return tuple(map(tuple, program))


def forward_only(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """A schedule of forward passes only, for evaluation: a rank runs all microbatches through one stage, then the
    next."""
    ranks = tuple(
        tuple(
            Action("F", stage, microbatch)
            for stage, place in enumerate(placement)
            if place == rank
            for microbatch in range(microbatches)
        )
        for rank in range(1 + max(placement))
    )
    return Schedule("evaluation", ranks, evaluation=True)
