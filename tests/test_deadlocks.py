"""NCCL's rules for all ranks of a job: records of a few ranks become those of all, and faults are found."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.models.moe import Router
from meshwright.rehearse.deadlocks import classes, differences, prove, records_of_all
from meshwright.rehearse.nccl import RankEvent, RankRecord, check
from meshwright.rehearse.record import record
from meshwright.rehearse.world import rehearse
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.layouts import EXPERT_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.evaluate import evaluate
from test_rehearse import evenly
from tiny import tiny_run

TIED = {"tied": True, "accumulation": 3}
JOBS: dict[str, tuple[LayoutSpec, dict[str, Any]]] = {
    "pp-zero-2-tp": (LAYOUTS["pp-zero-2-tp"], TIED),
    "zero-3-tp-wide": (LAYOUTS["zero-3-tp-wide"], {"accumulation": 3}),
    "cp-ring-tp": (LAYOUTS["cp-ring-tp"], {"accumulation": 4}),
    "zero-3-tp-ep": (EXPERT_PARALLEL["zero-3-tp-ep"], {"family": "qwen3_moe", "accumulation": 3}),
    "pp-zero-3-ep": (EXPERT_PARALLEL["pp-zero-3-ep"], {"family": "mixtral", "accumulation": 3}),
    "pp-cp-tp": (LAYOUTS["pp-cp-tp"], {"accumulation": 3}),
    "hybrid-3": (LAYOUTS["hybrid-3"], {"accumulation": 3, "precision": "bf16"}),
    "1f1b": (LayoutSpec(pp=3, dp_replicate=2), TIED | {"num_layers": 3}),
    "interleaved": (LayoutSpec(pp=2, dp_shard=2, schedule="interleaved-1f1b"), TIED | {"num_layers": 4}),
    "zero bubble": (LayoutSpec(pp=2, dp_shard=2, zero=1, schedule="zbv"), {"num_layers": 4, "accumulation": 3}),
    "pipedream": (LayoutSpec(pp=2, dp_replicate=2, schedule="pipedream-2bw"), TIED),
}


def recorded(run: ResolvedRun) -> RankRecord:
    """What this rank does in two steps and an evaluation."""
    trainer = build_here(run)
    passes = trainer.train_step.passes
    with pytest.MonkeyPatch.context() as patch, loader_for(trainer) as loader, record(trainer.meshes) as recorder:
        patch.setattr(Router, "_choose", evenly)
        for step in (1, 2):
            trainer.train_step(step, loader.microbatches(step - 1))
            recorder.synchronize()
        trainer.train_step.finish(2)
        evaluate(passes, loader.microbatches(0), trainer.device, repeats_loss=trainer.train_step.repeats_loss)
    return recorder.record


def without_place(event: RankEvent) -> RankEvent:
    """A synchronisation, which the tests themselves ask for."""
    return replace(event, place="") if event.what == "synchronize" else event


@pytest.mark.slow
@pytest.mark.every(4)
@pytest.mark.parametrize("name", JOBS)
def test_every_rank_does_what_its_class_does(ranks: RankPool, name: str) -> None:
    """The records that the first ranks of the classes make, without data, equal those of all real ranks."""
    layout, options = JOBS[name]
    run = tiny_run(layout, **options)
    divided = classes(run)
    reports = rehearse(run, [members[0] for members in divided], on_gpu=False, kind="record")
    by_symmetry = records_of_all(divided, reports)
    real = ranks.run(layout.world_size, recorded, run)
    for rank, (ours, theirs) in enumerate(zip(by_symmetry, real, strict=True)):
        assert list(map(without_place, ours.events)) == list(map(without_place, theirs.events)), f"rank {rank}"
        assert {group: ours.groups[group] for group in theirs.groups} == theirs.groups, f"rank {rank}"
    assert check(by_symmetry) == check(by_symmetry, pairs=False) == []


def test_classes() -> None:
    """A stage; its ranks whose part of the vocabulary, 50, is shorter; a tied embedding's shorter shards."""
    run = tiny_run(LayoutSpec(dp_shard=2, pp=2))
    assert classes(run) == [[0, 1], [2, 3]]
    assert classes(tiny_run(LayoutSpec(tp=4, dp_replicate=2))) == [[0, 1, 2, 4, 5, 6], [3, 7]]
    assert classes(tiny_run(LayoutSpec(cp=2, tp=2, dp_shard=2))) == [list(range(8))]
    assert classes(tiny_run(LayoutSpec(pp=2, dp_shard=3), tied=True)) == [[0, 1], [2], [3, 4], [5]]


def report(rank: int, *places: str) -> dict[str, Any]:
    """Of a rank that sums a number at these places."""
    events = [{"what": "all-reduce", "place": place, "group": "world", "size": ["float32", 4]} for place in places]
    return {"rank": rank, "events": events, "groups": {"world": [[0, 1, 2, 3]]}}


def test_recorded_ranks_are_compared_with_their_class() -> None:
    together, alike = [[0, 1], [2, 3]], [report(0, "a:1"), report(1, "a:1"), report(2, "b:1", "b:2")]
    assert differences(together, alike) == []
    assert differences(together, [*alike, report(3, "b:1")]) == [
        "operation 2 is all-reduce at b:2 (4 numbers) on rank 2 and missing on rank 3, but these ranks should do the "
        "same"
    ]
    records = records_of_all(together, [*alike, report(3, "b:1")])
    assert [len(one.events) for one in records] == [1, 1, 2, 1]
    assert check(records_of_all(together, alike)) == [
        "rank 2 waits for rank 0: all-reduce at b:2 (world of ranks 0, 1, 2, 3)",
        "rank 0 has ended",
    ]


@pytest.mark.exhaustive
def test_a_thousand_ranks() -> None:
    """Of four stages, whose embedding's two copies have shards of 4 and of 2 rows."""
    many = tiny_run(LayoutSpec(pp=4), num_layers=4, accumulation=4, tied=True, width=128)
    layout = LayoutSpec(pp=4, tp=4, dp_shard=64, zero=1)
    run = many.run.model_copy(update={"layout": layout})
    facts = prove(many.model_copy(update={"run": run, "global_batch": 64 * many.global_batch}), (), on_gpu=True)
    assert facts["findings"] == facts["bound"] == []
    assert sum(map(len, facts["classes"])) == 1024
    assert facts["operations"] > 1024 * 150


MINE = """
import torch
import torch.distributed as dist
from meshwright.objectives import NextToken


class Mine(NextToken):
    def __init__(self, fault):
        self.fault = fault

    def sums(self, hidden_BTD, head, batch):
        x, y, rank = torch.ones(4), torch.ones(8), dist.get_rank()
        if self.fault == "skips" and rank == 0:
            dist.all_reduce(x)
        if self.fault == "swapped" and rank == 0:
            dist.all_reduce(x)
        if self.fault == "swapped":
            dist.all_gather_into_tensor(y, x)
        if self.fault == "swapped" and rank == 1:
            dist.all_reduce(x)
        if self.fault == "sends first":
            sent = dist.isend(x, 1 - rank)
            dist.recv(x, 1 - rank)
            sent.wait()
        if self.fault == "own group":
            dist.all_reduce(x, group=dist.new_group([rank]))
        return super().sums(hidden_BTD, head, batch)
"""
RECIPE = """
model: {family: llama, hidden: 32, num_layers: 1, num_heads: 4, vocab: 64}
data: {sequence_length: 16}
training: {global_batch: 4, micro_batch: 1, objective: {name: mine, options: {fault: FAULT}}}
layout: {dp_shard: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an installed objective."""
    (tmp_path / "mine.py").write_text(MINE)
    installed = tmp_path / "mine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[meshwright.objectives]\nmine = mine:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def found_by_the_verb(folder: Path, fault: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Its JSON; the exit status tells whether there are findings."""
    (folder / "run.yaml").write_text(RECIPE.replace("FAULT", fault))
    status = main(["rehearse", str(folder / "run.yaml"), "--deadlocks", "--cluster", "8xh100", "--json", *words])
    facts = json.loads(capsys.readouterr().out)
    assert status == bool(facts["findings"])
    return facts


LINES = {"SUM": 14, "SUM_AGAIN": 16, "GATHER": 18, "SEND": 22}
FOUND = {
    "skips": [
        "rank 1 calls all-gather of 4128 x bfloat16 at parallel/passes.py:LINE, but rank 0 calls all-reduce of 4 x "
        "float32 at SUM (world of ranks 0, 1)"
    ],
    "swapped": [
        "rank 1 calls all-gather of 8 x float32 at GATHER, but rank 0 calls all-reduce of 4 x float32 at SUM_AGAIN "
        "(world of ranks 0, 1)"
    ],
    "sends first": [
        "rank 0, at SEND, waits for rank 1: send to rank 1 at SEND (world of ranks 0, 1)",
        "rank 1, at SEND, waits for rank 0: send to rank 0 at SEND (world of ranks 0, 1)",
    ],
}


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("fault", FOUND)
def test_the_verb_finds_planted_faults(folder: Path, capsys: pytest.CaptureFixture[str], fault: str) -> None:
    """With the ranks and the lines of the user's own code."""
    facts = found_by_the_verb(folder, fault, capsys)
    assert [shown(text, folder) for text in facts["findings"]][: len(FOUND[fault])] == FOUND[fault]
    assert ("these ranks should do the same" in facts["findings"][-1]) == (fault != "sends first")


def shown(finding: str, folder: Path) -> str:
    """With names for the lines of `MINE`, without those of this package."""
    for name, line in LINES.items():
        finding = re.sub(rf"{folder / 'mine.py'}:{line}\b", name, finding)
    return re.sub(r"\.py:\d+", ".py:LINE", finding)


@pytest.mark.exhaustive
def test_a_group_outside_the_layout_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text(RECIPE.replace("FAULT", "own group"))
    assert main(["rehearse", str(folder / "run.yaml"), "--deadlocks", "--cluster", "8xh100"]) == 2
    assert re.search(r"rank \d would fail: /.*/mine\.py:26: sends in a process group", capsys.readouterr().err)


@pytest.mark.slow
def test_the_verb_proves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = found_by_the_verb(folder, "none", capsys, "--world", "4", "--ranks", "2")
    assert (facts["recorded"], facts["classes"], facts["bound"]) == ([0, 2, 3], [[0, 1, 2, 3]], [])
    assert facts["operations"] > 50
    assert main(["rehearse", str(folder / "run.yaml"), "--deadlocks", "--cluster", "8xh100"]) == 0
    assert "proven: NCCL's rules hold on every rank" in capsys.readouterr().out


def test_no_memory_is_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.yaml").write_text(RECIPE.replace("FAULT", "none"))
    assert main(["rehearse", str(folder / "run.yaml"), "--deadlocks", "--memory", "8"]) == 2
    assert "--memory: is not compared with --deadlocks" in capsys.readouterr().err
