"""NCCL's rules for all ranks of a job, from the records of a few (`rehearse.nccl`).

Ranks of one class do the same, each in its own process groups. A class is a pipeline stage, further divided only where
tensor-parallel ranks have parts of unequal shapes, or ranks shards of unequal shapes of a tied embedding whose
gradients two stages exchange: FSDP2 pads everything else. The first rank of each class is recorded, and the last rank
of the job, to compare it.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

from meshwright.families import finetuned_table
from meshwright.families.split import kept_shape, stage_copies
from meshwright.rehearse.nccl import RankEvent, RankRecord, check
from meshwright.rehearse.world import rehearse
from meshwright.spec.run import ResolvedRun

ASSUMED = (
    "ranks of one class do the same: those of a pipeline stage with parts of the same shapes",
    "every expert gets the same number of tokens; real routing changes the sizes of their exchanges, never the order",
    "collectives are waited for at once, which is stricter than FSDP2's overlap",
    "Python objects and counts of the host travel over gloo, everything else is on the device",
    "samples, checkpoints and callbacks are not recorded",
)
"""What the proof takes for granted."""


def prove(resolved: ResolvedRun, ranks: Sequence[int], *, on_gpu: bool, fp8: bool = True) -> dict[str, Any]:
    """The proof for all ranks, as JSON values: what would break, what was recorded, what is assumed. `ranks` are
    recorded too."""
    began, divided = time.perf_counter(), classes(resolved)
    chosen = sorted({*(ranks[0] for ranks in divided), resolved.run.layout.world_size - 1, *ranks})
    reports = rehearse(resolved, chosen, on_gpu=on_gpu, fp8=fp8, kind="record")
    recording, records = time.perf_counter(), records_of_all(divided, reports)
    findings = [*check(records), *differences(divided, reports)]
    bound = [] if findings else check(records, pairs=False)
    return {
        "layout": resolved.run.layout.model_dump(),
        "recorded": chosen,
        "classes": divided,
        "microbatches": reports[0]["microbatches"]["rehearsed"],
        "operations": sum(len(record.events) for record in records),
        "findings": findings,
        "bound": bound,
        "assumed": ASSUMED,
        "seconds": {"recording": recording - began, "checking": time.perf_counter() - recording},
    }


def classes(resolved: ResolvedRun) -> list[list[int]]:
    """The ranks of each class, in order."""
    layout, model = resolved.run.layout, resolved.model
    table = finetuned_table(model, resolved.run.finetune)
    copies = stage_copies(model) if layout.pp > 1 else ()

    @cache
    def shapes(tp_rank: int, shard_rank: int) -> tuple[tuple[int, ...], ...]:
        shard_of = ((row, shard_rank if row.name in copies else 0) for row in table)
        return tuple(kept_shape(row, model, layout, tp_rank=tp_rank, shard_rank=shard) for row, shard in shard_of)

    ranks_of: defaultdict[tuple[int, Any], list[int]] = defaultdict(list)
    for rank in range(layout.world_size):
        stage, shard_rank = rank // (layout.world_size // layout.pp), rank // layout.tp % layout.shard
        ranks_of[stage, shapes(rank % layout.tp, shard_rank if copies else 0)].append(rank)
    return list(ranks_of.values())


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


def records_of_all(groups_of: Sequence[Sequence[int]], reports: Sequence[dict[str, Any]]) -> list[RankRecord]:
    """The records of all ranks, given their `classes`: a rank's own, or what the first recorded rank of its class does
    becomes in the rank's process groups."""
    events = {report["rank"]: recorded(report) for report in reports}
    groups: defaultdict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, members_of in {name: of for report in reports for name, of in report["groups"].items()}.items():
        for members in map(tuple, members_of):
            for rank in members:
                groups[rank][name] = members
    standing = {rank: next(one for one in ranks if one in events) for ranks in groups_of for rank in ranks}
    return [RankRecord(events.get(rank, events[one]), groups[rank]) for rank, one in sorted(standing.items())]


def differences(groups_of: Sequence[Sequence[int]], reports: Sequence[dict[str, Any]]) -> list[str]:
    """Ranks that do not do what the first recorded rank of their class does: they contradict the symmetry."""
    events, contradictions = {report["rank"]: report["events"] for report in reports}, []
    for ranks in groups_of:
        first, *others = [rank for rank in ranks if rank in events]
        for other in others:
            ours, theirs = events[first], events[other]
            pairs = enumerate(zip([*ours, None], [*theirs, None], strict=False))
            index = next((index for index, (one, two) in pairs if one != two), -1)
            if index >= 0:
                what = [
                    f"{_shown(of[index : index + 1])} on rank {rank}" for of, rank in ((ours, first), (theirs, other))
                ]
                contradictions.append(
                    f"operation {index + 1} is {' and '.join(what)}, but these ranks should do the same"
                )
    return contradictions


def _shown(events: Sequence[dict[str, Any]]) -> str:
    if not events:
        return "missing"
    sizes = [event_of(events[0]).size, *(size for _, _, size in event_of(events[0]).peers)]
    return f"{events[0]['what']} at {events[0]['place']} ({sizes[-1][1]} numbers)"
