"""The timeline of a schedule: time, bubble, activations in flight, and a picture."""

from dataclasses import dataclass
from itertools import accumulate

from meshwright.spec.actions import Action, Schedule

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Seconds, or any other unit, that one microbatch takes on each stage."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    """A whole backward pass B takes the sum of both."""
    transfer: float = 0.0
    """Time from the end of an action until a stage on another rank has its result; ranks compute meanwhile."""

    @classmethod
    def equal(cls, stages: int, *, transfer: float = 0.0) -> "StageCosts":
        """Forward pass and either part of the backward pass take 1 on every stage, as in the schedules' papers."""
        ones = (1.0,) * stages
        return cls(forward=ones, backward_input=ones, backward_weight=ones, transfer=transfer)

    def of(self, action: Action) -> float:
        """The duration of an action."""
        if action.kind == "F":
            return self.forward[action.stage]
        weight = 0.0 if action.kind == "I" else self.backward_weight[action.stage]
        return weight + (0.0 if action.kind == "W" else self.backward_input[action.stage])


@dataclass(frozen=True)
class TimedAction:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time: the result of `simulate`."""

    schedule: Schedule
    ranks: tuple[tuple[TimedAction, ...], ...]

    @property
    def duration(self) -> float:
        """Time from the first action's start to the last one's end, over all ranks."""
        return max(spans[-1].end for spans in self.ranks)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The idle share of each rank's step, 0 to 1."""
        busy = (sum(span.end - span.start for span in spans) for spans in self.ranks)
        return tuple(1 - some / self.duration for some in busy)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time."""
        return sum(self.bubbles) / len(self.ranks)

    def picture(self) -> str:
        """Two lines per rank, a column per unit of time: the microbatch (0-9, a-z) above its action. F, B, I and W
        belong to the rank's first stage, lower-case letters to its later stages; dots are the bubble."""
        lines = []
        for rank, spans in enumerate(self.ranks):
            width = round(self.duration)
            above, below = [" "] * width, ["."] * width
            first = self.schedule.stages_of(rank)[0]
            for action, start, end in ((span.action, span.start, span.end) for span in spans):
                for column in range(round(start), round(end)):
                    above[column] = DIGITS[action.microbatch % len(DIGITS)]
                    below[column] = action.kind if action.stage == first else action.kind.lower()
            lines += [f"rank {rank:<3}{''.join(above)}".rstrip(), f"        {''.join(below)}"]
        return "\n".join(lines)


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """The timeline in which every action runs as early as its rank's order and its prerequisites allow."""
    free = [0.0] * len(schedule.ranks)
    end: dict[Action, float] = {}
    spans: list[list[TimedAction]] = [[] for _ in schedule.ranks]
    for rank, action in schedule.order:
        start = free[rank]
        for group in schedule.needs(action):
            for needed in group:
                if needed in end:
                    away = schedule.placement[needed.stage] != rank
                    start = max(start, end[needed] + (costs.transfer if away else 0.0))
        free[rank] = end[action] = start + costs.of(action)
        spans[rank].append(TimedAction(action, start, free[rank]))
    return Timeline(schedule, tuple(map(tuple, spans)))


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of microbatches begun and not finished on each rank, counted for each of its stages."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return tuple(max(accumulate(change[action.kind] for action in actions)) for actions in schedule.ranks)
