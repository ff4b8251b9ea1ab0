"""NCCL's rules, checked on gloo: every layout keeps them, in whole runs too, and planted faults are found."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.callbacks import Callback, Training
from meshwright.callbacks.ema import EMA
from meshwright.callbacks.lr_finder import LRFinder
from meshwright.callbacks.noise_scale import GradientNoiseScale
from meshwright.checkpoint.manifest import list_checkpoints
from meshwright.comm import collectives, objects
from meshwright.rehearse.nccl import RankEvent, RankRecord, check
from meshwright.rehearse.record import Recorder, record
from meshwright.spec.guards import GuardSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import SampleSpec
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.layouts import CONTEXT_PARALLEL, EXPERT_PARALLEL, LAYOUTS, PIPELINE_SHARDED
from meshwright.testing.ranks import RankPool
from meshwright.trainer.replicas import ReplicaGuard
from meshwright.trainer.samples import SampleTexts
from sessions import tiny, train_on
from tiny import tiny_corpus, tiny_run
from tokens import token_file

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


def recorded_steps(run: ResolvedRun, documents: bool = False) -> RankRecord:
    """What this rank does in two steps."""
    trainer = build_here(run)
    with loader_for(trainer, documents=documents) as loader, record(trainer.meshes) as recorder:
        for step in (1, 2):
            trainer.train_step(step, loader.microbatches(step - 1))
            recorder.synchronize()
    return recorder.record


def assert_kept(records: list[RankRecord]) -> None:
    """By the communicators that NCCL makes, and by those of groups alone."""
    assert check(records) == []
    assert check(records, pairs=False) == []


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(6)
def test_a_layout_keeps_the_rules(ranks: RankPool, name: str) -> None:
    layout = ALL[name]
    run = tiny_run(layout, accumulation=microbatches(layout))
    assert_kept(ranks.run(layout.world_size, recorded_steps, run))


@pytest.mark.parametrize("name", EXPERT_PARALLEL)
@pytest.mark.every(6)
def test_expert_parallel_layouts_keep_the_rules(ranks: RankPool, name: str) -> None:
    layout = EXPERT_PARALLEL[name]
    run = tiny_run(layout, family="mixtral", accumulation=microbatches(layout))
    assert_kept(ranks.run(layout.world_size, recorded_steps, run))


TIED = [LayoutSpec(pp=3, dp_replicate=2), *(LAYOUTS[name] for name in ("pp", "pp-tp", "pp-zero-3", "pp-zero-2-tp"))]


@pytest.mark.parametrize("layout", TIED, ids=lambda layout: layout.strategy)
def test_tied_embeddings_keep_the_rules(ranks: RankPool, layout: LayoutSpec) -> None:
    """Whose two copies' gradients are exchanged. If both copies' ranks sent first, they would wait for ever; in a batch
    they would first wait for the stages between them to use the pipeline's communicator."""
    run = tiny_run(layout, tied=True, num_layers=max(2, layout.pp))
    assert_kept(ranks.run(layout.world_size, recorded_steps, run))


@pytest.mark.parametrize("name", ["ddp", "zero-3", "tp", "cp-ring-tp", "pp"])
def test_documents_keep_the_rules(ranks: RankPool, name: str) -> None:
    run = tiny_run(LAYOUTS[name], accumulation=microbatches(LAYOUTS[name]))
    assert_kept(ranks.run(LAYOUTS[name].world_size, recorded_steps, run, True))


# ---- whole runs

RUNS: dict[str, dict[str, Any]] = {
    "zero-3": {},
    "pp-tp": {"tied": True},
    "pp-zero-3-ep": {"family": "mixtral"},
    "hybrid-3-cp-tp": {},
    "pipedream": {"tied": True},
    "ddp": {"precision": "bf16"},
    "zero-2-tp": {"family": "qwen3_moe"},
    "pp-zero-bubble-ep": {"family": "mixtral"},
    "cp-ring-tp": {"finetune": {"method": "lora", "rank": 4}},
}
"""Layouts, each with further options."""


class EachStep(Callback):
    """As on a GPU, where the loop waits for the device after each step."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_step(self, training: Training, record: dict[str, Any]) -> None:
        self.recorder.synchronize()


def recorded_run(run: ResolvedRun, root: Path, resume: Path | None) -> RankRecord:
    """What this rank does in a run with evaluations, samples, checkpoints, and callbacks that communicate."""
    trainer, corpus = build_here(run), corpus_of_documents()
    with record(trainer.meshes) as recorder:
        callbacks = [
            EachStep(recorder),
            ReplicaGuard(),
            SampleTexts(SampleSpec(prompts=("a", "b"), every=2, max_tokens=3), trainer, corpus),
            EMA(decay=0.6),
            *([] if run.run.layout.pp > 1 or resume else [GradientNoiseScale(every=2)]),
            *([] if run.run.layout.asynchronous or resume else [LRFinder(steps=3)]),
        ]
        train_on(trainer, root, callbacks, resume, corpus)
    return recorder.record


def corpus_of_documents() -> Any:
    """Random tokens in documents of seven, of which some are held out, and a tokenizer."""
    corpus = tiny_corpus(held_out=True)
    (stream,) = corpus.streams
    stream.train, stream.held_out = (
        token_file(file.tokens[:595], [7] * 85) for file in (stream.train, stream.held_out)
    )
    corpus.held_out = [stream.held_out]
    corpus.tokenizer = SimpleNamespace(encode_prompt=lambda text: [3, 4], eos_id=49, decode=str)
    return corpus


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("name", RUNS)
def test_whole_runs_keep_the_rules(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """From the first step, and from a checkpoint."""
    layout = LayoutSpec(pp=2, schedule="pipedream-2bw") if name == "pipedream" else (LAYOUTS | EXPERT_PARALLEL)[name]
    run = tiny(layout, evaluate=2, checkpoint={"every": 2}, accumulation=microbatches(layout), **RUNS[name])
    parts: dict[str, Any] = {"data": run.run.data.model_copy(update={"separate_documents": True})}
    parts["guards"] = GuardSpec(replicas_every=2)
    run = run.model_copy(update={"run": run.run.model_copy(update=parts)})
    first = ranks.run(layout.world_size, recorded_run, run, tmp_path / "a", None)
    *_, saved, _ = list_checkpoints(tmp_path / "a/checkpoints")  # step 4's is left out while step 2's is being written
    again = ranks.run(layout.world_size, recorded_run, run, tmp_path / "b", saved)
    for records in (first, again):
        assert_kept(records)
        kinds = {event.what.split()[0] for event in records[0].events if event.host}
        assert kinds == {"all-reduce", "all-gather", "gather", "scatter", "broadcast"}
    assert len(again[0].events) < len(first[0].events)


# ---- planted faults


def planted(fault: str) -> RankRecord:
    """What this rank of two does in a program with a fault; gloo survives those that it runs."""
    me = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    x, groups = torch.ones(4), dict[str, tuple[int, ...]](world=(0, 1), one=(0, 1), two=(0, 1))

    def event(group: str = "one", kind: str = "all-reduce", dtype: str = "float32", numbers: int = 4) -> RankEvent:
        return RankEvent(kind, f"model.py:{7 + me}", group, (dtype, numbers))

    with record(None) as recorder:
        match fault:
            case "none":
                collectives.all_reduce_(x, world)
                collectives.Swap(x, world, to=1 - me, source=1 - me).wait()
                objects.largest(me)
            case "both send first":
                sent = collectives.send(x, 1 - me, world)
                collectives.receive(torch.empty(4), 1 - me, world).wait()
                sent.wait()
            case "both send first, in their own code":
                work = dist.isend(x, 1 - me)
                dist.recv(torch.empty(4), 1 - me)
                assert work is not None
                work.wait()
    events = {
        "one skips": [event()] if me == 0 else [],
        "crossed": [event("one"), event("two")] if me == 0 else [event("two"), event("one")],
        "swapped": [event(kind=kind) for kind in (("all-reduce", "all-gather") if me == 0 else ("all-gather", "x"))],
        "sizes": [event(numbers=4 + me)],
        "dtypes": [event(dtype=("float32", "bfloat16")[me])],
        "roots": [event(kind=f"broadcast with root {me}")],
        "rows": [RankEvent("all-to-all", "a.py:1", "one", rows=[([1, 2], [1, 3]), ([2, 2], [2, 2])][me])],
        "message sizes": [
            RankEvent("send", f"a.py:{1 + me}", "one", peers=[(("send", "receive")[me], 1, ("float32", 4 + me))])
        ],
        "outlives a step": [
            RankEvent("send", "a.py:1", "one", peers=[("send", 1, ("float32", 1))]),
            RankEvent("synchronize", "a.py:2"),
            RankEvent("receive", "a.py:3", "one", peers=[("receive", 1, ("float32", 1))]),
        ],
    }
    return RankRecord(recorder.record.events + events.get(fault, []), groups)


FAULTS: dict[str, list[str]] = {
    "both send first": [
        f"rank {me}, at HERE:LINE, waits for rank {1 - me}: send to rank {1 - me} at HERE:LINE (world of ranks 0, 1)"
        for me in (0, 1)
    ],
    "both send first, in their own code": [
        f"rank {me}, at HERE:LINE, waits for rank {1 - me}: send to rank {1 - me} at HERE:LINE (world of ranks 0, 1)"
        for me in (0, 1)
    ],
    "one skips": ["rank 0 waits for rank 1: all-reduce at model.py:7 (one of ranks 0, 1)", "rank 1 has ended"],
    "crossed": [
        "rank 0 waits for rank 1: all-reduce at model.py:7 (one of ranks 0, 1)",
        "rank 1 waits for rank 0: all-reduce at model.py:8 (two of ranks 0, 1)",
    ],
    "swapped": [
        "rank 0 calls all-reduce of 4 x float32 at model.py:7, but rank 1 calls all-gather of 4 x float32 at "
        "model.py:8 (one of ranks 0, 1)"
    ],
    "sizes": [
        "rank 0 calls all-reduce of 4 x float32 at model.py:7, but rank 1 calls all-reduce of 5 x float32 at "
        "model.py:8 (one of ranks 0, 1)"
    ],
    "dtypes": [
        "rank 0 calls all-reduce of 4 x float32 at model.py:7, but rank 1 calls all-reduce of 4 x bfloat16 at "
        "model.py:8 (one of ranks 0, 1)"
    ],
    "roots": [
        "rank 0 calls broadcast with root 0 of 4 x float32 at model.py:7, but rank 1 calls broadcast with root 1 of "
        "4 x float32 at model.py:8 (one of ranks 0, 1)"
    ],
    "rows": ["rank 0 calls all-to-all at a.py:1: 3 rows for rank 1, which receives 2"],
    "message sizes": [
        "rank 1: receive from rank 0 at a.py:2, 5 x float32, but rank 0: send to rank 1 at a.py:1, 4 x float32"
    ],
    "outlives a step": [
        f"rank {me}, at a.py:2, waits for rank {1 - me}: send to rank {1 - me} at a.py:1 (one of ranks 0, 1)"
        for me in (0, 1)
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(ranks: RankPool, fault: str) -> None:
    assert_kept(ranks.run(2, planted, "none"))
    found = check(ranks.run(2, planted, fault))
    assert [re.sub(rf"{__file__}:\d+", "HERE:LINE", text) for text in found] == FAULTS[fault]
