"""Steps of an asynchronous pipeline, cut from an endless stream of microbatches.

A synchronous pipeline is empty between two steps; filling and emptying it is the bubble. An asynchronous one (Narayanan
et al., "PipeDream", 2019; "Memory-Efficient Pipeline-Parallel DNN Training", 2021: PipeDream-2BW) begins the next
step's forward passes before this step's last backward passes. In a step of M microbatches, rank r of P therefore runs M
forward passes, the backward passes of the P - 1 - r microbatches left by the previous step, and the backward passes of
all but the last P - 1 - r of its own.
"""

from dataclasses import dataclass

from meshwright.spec.actions import Action, Program, Schedule, add_transfers
from meshwright.spec.schedule import build_schedule
from meshwright.spec.timeline import StageCosts, simulate


@dataclass(frozen=True)
class ActionStream:
    """The actions and transfers of all ranks in a step: `fill[rank]` and so on.

    Microbatches 0 to M - 1 belong to the previous step, M to 2 M - 1 to the step itself; the first step has no previous
    one and uses 0 to M - 1.
    """

    fill: tuple[Program, ...]
    """The first step."""
    steady: tuple[Program, ...]
    """Every further step."""
    drain: tuple[Program, ...]
    """The actions after the last step: backward passes of microbatches 0 to M - 1."""


def cut_stream(schedule: Schedule) -> ActionStream:
    """The parts of a stream whose every step is `schedule`, a published schedule."""
    size = schedule.num_microbatches
    two = two_steps(schedule)
    part = {}
    for actions in two.ranks:
        second = actions.index(Action("F", actions[0].stage, size))
        part |= dict.fromkeys(actions[:second], 0)
        part |= dict.fromkeys(actions[second : second + 2 * size], 1)
        part |= dict.fromkeys(actions[second + 2 * size :], 2)
    order = two.order
    fill, steady, drain = (
        add_transfers(two, [(rank, action) for rank, action in order if part[action] == index]) for index in range(3)
    )
    renumbered = (tuple(item._replace(microbatch=item.microbatch - size) for item in program) for program in drain)
    return ActionStream(fill, steady, tuple(renumbered))


def two_steps(schedule: Schedule) -> Schedule:
    """Two steps of a stream, from an empty pipeline to an empty one."""
    return build_schedule(schedule.name, ranks=len(schedule.ranks), microbatches=2 * schedule.num_microbatches)


def steady_seconds(schedule: Schedule, costs: StageCosts) -> float:
    """The duration of a step between other steps."""
    alone, both = (simulate(one, costs) for one in (schedule, two_steps(schedule)))
    return both.duration - alone.duration


def steady_bubble(schedule: Schedule, costs: StageCosts) -> float:
    """The idle share of the ranks' time in such a step; ranks wait only for slower stages."""
    busy = sum(costs.of(action) for actions in schedule.ranks for action in actions)
    return 1 - busy / steady_seconds(schedule, costs) / len(schedule.ranks)
