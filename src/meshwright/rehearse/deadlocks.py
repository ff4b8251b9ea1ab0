"""NCCL's rules for all ranks of a job, from the records of a few (`rehearse.nccl`).

Ranks of one class do the same, each in its own process groups: those of a pipeline stage whose parts of every parameter
have the same shapes. Tensor-parallel, context-parallel, expert-parallel and data-parallel ranks are told apart by
nothing else. One rank of each class is recorded; others are recorded to compare them.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from meshwright.families import finetuned_table
from meshwright.families.split import kept_shape
from meshwright.rehearse.nccl import RankEvent, Record
from meshwright.spec.run import ResolvedRun


def classes(resolved: ResolvedRun) -> list[list[int]]:
    """The ranks of each class, in order."""
    layout, model = resolved.run.layout, resolved.model
    table = finetuned_table(model, resolved.run.finetune)
    parts = [
        tuple(kept_shape(row, model, layout, tp_rank=place, shard_rank=0) for row in table)
        for place in range(layout.tp)
    ]
    found: defaultdict[tuple[int, Any], list[int]] = defaultdict(list)
    for rank in range(layout.world_size):
        found[rank // (layout.world_size // layout.pp), parts[rank % layout.tp]].append(rank)
    return list(found.values())


def recorded(report: dict[str, Any]) -> list[RankEvent]:
    """The events of a report of `rehearse.rank.record_rank`."""
    return [event_of(event) for event in report["events"]]


def event_of(values: dict[str, Any]) -> RankEvent:
    """An event from its JSON values."""
    event = RankEvent(**values)
    event.size = (event.size[0], event.size[1])
    event.peers = [(kind, offset, (size[0], size[1])) for kind, offset, size in event.peers]
    event.rows = None if event.rows is None else (event.rows[0], event.rows[1])
    return event


def records_of_all(groups_of: Sequence[Sequence[int]], reports: Sequence[dict[str, Any]]) -> list[Record]:
    """The records of all ranks, given their `classes`: a rank's own, or what the first recorded rank of its class does
    becomes in the rank's process groups."""
    events = {report["rank"]: recorded(report) for report in reports}
    groups: defaultdict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, members_of in {name: of for report in reports for name, of in report["groups"].items()}.items():
        for members in map(tuple, members_of):
            for rank in members:
                groups[rank][name] = members
    standing = {rank: next(one for one in ranks if one in events) for ranks in groups_of for rank in ranks}
    return [Record(events.get(rank, events[one]), groups[rank]) for rank, one in sorted(standing.items())]


def differences(groups_of: Sequence[Sequence[int]], reports: Sequence[dict[str, Any]]) -> list[str]:
    """Ranks that do not do what the first recorded rank of their class does: they contradict the symmetry."""
    events, found = {report["rank"]: report["events"] for report in reports}, []
    for ranks in groups_of:
        first, *others = [rank for rank in ranks if rank in events]
        for other in others:
            ours, theirs = events[first], events[other]
            pairs = enumerate(zip([*ours, None], [*theirs, None], strict=False))
            index = next((index for index, (one, two) in pairs if one != two), None)
            if index is not None:
                what = [
                    f"{_shown(of[index : index + 1])} on rank {rank}" for of, rank in ((ours, first), (theirs, other))
                ]
                found.append(f"operation {index + 1} is {' and '.join(what)}, but these ranks should do the same")
    return found


def _shown(events: Sequence[dict[str, Any]]) -> str:
    return f"{events[0]['what']} at {events[0]['place']}" if events else "missing"
