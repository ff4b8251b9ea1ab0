"""NCCL's rules, checked on gloo: every layout keeps them, and planted faults are found."""

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.layouts import CONTEXT_PARALLEL, EXPERT_PARALLEL, LAYOUTS, PIPELINE_SHARDED
from meshwright.testing.nccl_rules import RankEvent, check, record
from tiny import tiny_run

SCHEDULED = {
    f"{name.removesuffix('-every-schedule')} {schedule}": layout.model_copy(
        update={"schedule": schedule, "stages_per_rank": "auto" if schedule != "interleaved-zero-bubble" else 1}
    )
    for name, layout in PIPELINE_SHARDED.items()
    for schedule in ("afab", "1f1b", "interleaved-zero-bubble", "pipedream-2bw")
    if schedule != "pipedream-2bw" or layout.zero_stage == 0
}
METHODS = {
    f"{name.removesuffix('-every-method')} {method}": layout.model_copy(update={"cp_method": method})
    for name, layout in CONTEXT_PARALLEL.items()
    for method in ("ring", "all_gather", "ulysses")
    if method != "ulysses" or layout.cp <= 2
}
ALL = {**LAYOUTS, **METHODS, **SCHEDULED}


def microbatches(layout: LayoutSpec) -> int:
    """On each rank, in a step; a pipeline's own number."""
    return 1 if layout.pp > 1 else 2


def recorded_step(run: ResolvedRun, documents: bool = False) -> list[RankEvent]:
    """What this rank sends in two steps, and in an evaluation."""
    trainer = build_here(run)
    with loader_for(trainer, documents=documents) as loader, record() as events:
        for step in (1, 2):
            trainer.train_step(step, loader.microbatches(step - 1))
    return events


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(6)
def test_a_layout_keeps_the_rules(ranks, name: str) -> None:
    layout = ALL[name]
    run = tiny_run(layout, accumulation=microbatches(layout))
    assert check(ranks.run(layout.world_size, recorded_step, run)) == []


@pytest.mark.parametrize("name", EXPERT_PARALLEL)
@pytest.mark.every(6)
def test_expert_parallel_layouts_keep_the_rules(ranks, name: str) -> None:
    layout = EXPERT_PARALLEL[name]
    run = tiny_run(layout, family="mixtral", accumulation=microbatches(layout))
    assert check(ranks.run(layout.world_size, recorded_step, run)) == []


@pytest.mark.parametrize("name", ["pp", "pp-tp", "pp-zero-3", "pp-zero-2-tp"])
def test_tied_embeddings_keep_the_rules(ranks, name: str) -> None:
    """Whose two copies' gradients are exchanged: with one message each way, both sent first, that would hang."""
    run = tiny_run(LAYOUTS[name], tied=True)
    assert check(ranks.run(LAYOUTS[name].world_size, recorded_step, run)) == []


@pytest.mark.parametrize("name", ["ddp", "zero-3", "tp", "cp-ring-tp", "pp"])
def test_documents_keep_the_rules(ranks, name: str) -> None:
    run = tiny_run(LAYOUTS[name], accumulation=microbatches(LAYOUTS[name]))
    assert check(ranks.run(LAYOUTS[name].world_size, recorded_step, run, True)) == []


def planted(fault: str) -> list[RankEvent]:
    """What this rank of two sends in a program with a fault; gloo survives all of these."""
    me = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    other: list = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    x = torch.ones(4)
    with record() as events:
        match fault:
            case "none":
                collectives.all_reduce_(x, other[0])
                collectives.Swap(x, world, to=1 - me, source=1 - me).wait()
            case "both send first":
                sent = collectives.send(x, 1 - me, world)
                collectives.receive(torch.empty(4), 1 - me, world).wait()
                sent.wait()
            case "one skips":
                if me == 0:
                    events.append(RankEvent("all-reduce", "elsewhere", "one", (0, 1), ("torch.float32", 4)))
            case "crossed":
                for group in other if me == 0 else reversed(other):
                    events.append(RankEvent("all-reduce", "elsewhere", group.group_name, (0, 1), ("torch.float32", 4)))
            case "swapped":
                kinds = ["all-reduce", "all-gather"]
                for kind in kinds if me == 0 else reversed(kinds):
                    events.append(RankEvent(kind, "elsewhere", "one", (0, 1), ("torch.float32", 4)))
            case "sizes":
                events.append(RankEvent("all-reduce", "elsewhere", "one", (0, 1), ("torch.float32", 4 + me)))
            case "rows":
                rows = [([1, 2], [1, 3]), ([2, 2], [2, 2])][me]
                events.append(RankEvent("all-to-all", "elsewhere", "one", (0, 1), ("torch.float32", 0), rows=rows))
            case "dtypes":
                kind = ("torch.float32", "torch.bfloat16")[me]
                events.append(RankEvent("all-reduce", "elsewhere", "one", (0, 1), (kind, 4)))
    return events


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("both send first", "rank 0 waits at"),
        ("one skips", "rank 0 waits at all-reduce"),
        ("crossed", "rank 1 waits at all-reduce"),
        ("swapped", "rank 1: all-gather"),
        ("sizes", "of ('torch.float32', 5)"),
        ("dtypes", "of ('torch.bfloat16', 4)"),
        ("rows", "rank 0 sends 3 rows to rank 1, which receives 2"),
    ],
)
def test_a_planted_fault_is_found(ranks, fault: str, part: str) -> None:
    assert check(ranks.run(2, planted, "none")) == []
    assert any(part in text for text in check(ranks.run(2, planted, fault)))
