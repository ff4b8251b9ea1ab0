"""Continuous verification: a step of a run in progress, compared with one process under every layout, and its
verdicts."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from meshwright.callbacks import Callback, Training
from meshwright.launch.status import FINAL, VerificationError
from meshwright.models.head import Head
from meshwright.prove.replay import Replay, verdict
from meshwright.spec.errors import UserError
from meshwright.spec.guards import GuardSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import TrainingSpec
from meshwright.testing.equivalence import build_here, whole
from meshwright.testing.ranks import RankPool
from meshwright.trainer import verification
from meshwright.trainer.corpus import corpus_of
from meshwright.trainer.loop import build_loader
from meshwright.trainer.metrics import read_journal
from meshwright.trainer.plugins import Plugins
from meshwright.trainer.snapshot import write_after, write_before
from meshwright.trainer.step import TrainStep
from meshwright.trainer.verification import VerifyGuard
from sessions import train
from tiny import tiny_run

REAL = {"optimizer": {"name": "adamw", "lr": 1e-2}}
"""As in real runs, with an epsilon that smooths nothing."""
STEPS, DRIFTS = 6, 4

Plant = Callable[[], Any]


def on_texts(folder: Path, layout: LayoutSpec, guards: dict[str, Any] | None = None, **options: Any) -> ResolvedRun:
    """The tiny run on a text, which another process can read too."""
    (folder / "text.txt").write_text("".join(chr(97 + (7 * i * i + i // 5) % 26) for i in range(3000)))
    resolved = tiny_run(layout, **{**REAL, "precision": "fp32", "steps": STEPS, **options})
    data = {"sources": (str(folder / "text.txt"),), "tokenizer_vocab": 280, "cache_dir": str(folder / "cache")}
    update = {
        "data": type(resolved.run.data).model_validate({**resolved.run.data.model_dump(exclude_unset=True), **data}),
        "guards": GuardSpec.model_validate(guards or {}),
        "run_dir": str(folder / "run"),
    }
    model = resolved.model.model_copy(update={"vocab": 280})
    return resolved.model_copy(update={"run": resolved.run.model_copy(update=update), "model": model})


def last_head_gradient_large() -> Any:
    """The head's input gradient is 1 % too large."""
    loss = Head.loss
    return mock.patch.object(Head, "loss", lambda self, x, labels: loss(self, 1.01 * x - 0.01 * x.detach(), labels))


@contextlib.contextmanager
def one_rank_forgets() -> Iterator[None]:
    """Rank 1 omits its part of the update of one matrix."""
    update = TrainStep.update

    def forget(self: TrainStep, step: int, gnorm: float) -> None:
        name = "layers.1.feed_forward.w2.weight"
        kept = {n: p.detach().clone() for n, p in self.store.parameters.items() if n == name and dist.get_rank() == 1}
        update(self, step, gnorm)
        with torch.no_grad():
            for n, before in kept.items():
                self.store.parameters[n].copy_(before)

    with mock.patch.object(TrainStep, "update", forget):
        yield


def second_step(run: ResolvedRun, folder: Path, plant: Plant) -> None:
    """Two steps of a run; the second is saved. Collective."""
    trainer = build_here(run)
    with build_loader(trainer, corpus_of(run)) as loader:
        for step in (1, 2):
            if step == 2:
                write_before(folder, trainer)
            trainer.step = step
            with plant() if step == 2 else contextlib.nullcontext():
                result = trainer.train_step(step, loader.microbatches(step - 1))
    write_after(folder, trainer, {"loss": result.loss, "gnorm": result.gnorm or 0.0})


def judged(ranks: RankPool, tmp_path: Path, layout: LayoutSpec, plant: Plant, options: Any) -> dict[str, Any]:
    run = on_texts(tmp_path, layout, **options)
    corpus_of(run)
    ranks.run(layout.world_size, second_step, run, tmp_path / "step", plant)
    replay = Replay(run, tmp_path / "step")
    replay.compute()
    return verdict(replay, 0.0)


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (LayoutSpec(dp_replicate=2), {"precision": "bf16"}),
        (LayoutSpec(dp_shard=2), {"accumulation": 2}),
        (LayoutSpec(tp=2), {"precision": "bf16", "family": "gpt2"}),
        (LayoutSpec(cp=2), {"precision": "fp64"}),
        (LayoutSpec(pp=2), {"tied": True}),
        (LayoutSpec(dp_shard=2, ep=2), {"family": "mixtral"}),
        (LayoutSpec(dp_shard=2), {"finetune": {"method": "lora", "rank": 3}}),
        (LayoutSpec(dp_shard=2, offload="cpu"), {"optimizer": {"name": "muon"}, "precision": "fp16"}),
    ],
)
def test_right_layouts_are_verified(ranks: RankPool, tmp_path: Path, layout: LayoutSpec, options: Any) -> None:
    found = judged(ranks, tmp_path, layout, contextlib.nullcontext, options)
    assert found["equal"], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "layout", "options", "first", "wrong"),
    [
        (last_head_gradient_large, LayoutSpec(tp=2), {"clip": None}, "norm.weight.exp_avg", [0, 1]),
        (one_rank_forgets, LayoutSpec(dp_replicate=2), {"precision": "bf16"}, "layers.1.feed_forward.w2.weight", [1]),
        (one_rank_forgets, LayoutSpec(dp_shard=2), {}, "layers.1.feed_forward.w2.weight", [1]),
    ],
)
def test_a_wrong_step_is_named(
    ranks: RankPool, tmp_path: Path, plant: Plant, layout: LayoutSpec, options: Any, first: str, wrong: list[int]
) -> None:
    found = judged(ranks, tmp_path, layout, plant, options)
    assert not found["equal"]
    assert (found["first"], found["ranks"]) == (first, wrong), found


class Drift(Callback):
    """From step `DRIFTS` on, every step adds a little to a norm, on all ranks or on the last one only."""

    def __init__(self, everywhere: bool) -> None:
        self.everywhere = everywhere

    def on_start(self, training: Training) -> None:
        train_step = training.trainer.train_step  # type: ignore[attr-defined]
        update = train_step.update

        def drift(step: int, gnorm: float) -> None:
            update(step, gnorm)
            if step >= DRIFTS and (self.everywhere or training.rank == training.world_size - 1):
                with torch.no_grad():
                    train_step.store.parameters["norm.weight"].add_(1e-3)

        train_step.update = drift


def verified(
    run: ResolvedRun, root: Path, drift: Drift | None = None, guarded: bool = True
) -> tuple[str, dict[str, torch.Tensor]]:
    """Train; the reason for the run's end, and the weights. Collective."""
    callbacks: list[Callback] = [drift] if drift else []
    built: list[Any] = []

    def build(run: ResolvedRun) -> Any:
        built.append(build_here(run))
        if guarded:
            callbacks.append(VerifyGuard(built[0], Plugins()))
        return built[0]

    why = ""
    with mock.patch("sessions.build_here", build):
        try:
            train(run, root, callbacks, corpus=corpus_of(run))
        except VerificationError as error:
            why = str(error)
    return why, {name: whole(tensor) for name, tensor in built[0].parameters.items()}


def journal(root: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_journal(root / "metrics.jsonl") if record["kind"] == kind]


@pytest.mark.exhaustive
def test_a_drift_ends_the_run_and_the_guard_changes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """A separate process recomputes step 5; the drift begins at step 4."""
    run = on_texts(tmp_path, LayoutSpec(dp_replicate=2), {"verify_every": 5})
    corpus_of(run)
    unguarded = ranks.run(2, verified, run, tmp_path / "without", None, False)
    guarded = ranks.run(2, verified, run, tmp_path / "run")
    for (why, ours), (_, theirs) in zip(guarded, unguarded, strict=True):
        assert not why
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [[record["loss"] for record in journal(tmp_path / where, "step")] for where in ("run", "without")]
    assert losses[0] == losses[1]
    assert [(r["step"], r["equal"]) for r in journal(tmp_path / "run", "verification")] == [(5, True)]
    for why, _ in ranks.run(2, verified, run, tmp_path / "run", Drift(everywhere=True)):
        assert why.startswith("step 5 differs: loss ")
        assert re.search(r"; 1 of \d+ tensors differ; first norm\.weight on ranks 0, 1, by", why), why
    assert [r["equal"] for r in journal(tmp_path / "run", "verification")] == [True, False]


def test_replicas_that_have_drifted_apart_are_told_before_the_step(ranks: RankPool, tmp_path: Path) -> None:
    run = on_texts(tmp_path, LayoutSpec(dp_replicate=2), {"verify_every": 6})
    corpus_of(run)
    for why, _ in ranks.run(2, verified, run, tmp_path / "run", Drift(everywhere=False)):
        assert why.startswith("step 6 differs: its initial weights are wrong: replicas differ: ")
        assert "norm.weight on rank" in why


def test_what_cannot_be_verified_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for parts, words in (
        ({"layout": {"pp": 2, "schedule": "pipedream-2bw"}}, r"schedule=pipedream-2bw steps differ .* by design"),
        ({"training": TrainingSpec().model_copy(update={"precision": "fp8"})}, "cannot compute fp8 products"),
    ):
        with pytest.raises(ValidationError, match=words):
            Run.model_validate({"model": "gpt2-124m", "guards": {"verify_every": 5}, **parts})
    run = on_texts(tmp_path, LayoutSpec(), {"verify_every": 3})
    monkeypatch.setattr(verification, "field_of", lambda file, name: 100)
    with pytest.raises(UserError, match=r"verify_every: one process needs .* rank 0's machine has 0\.0 GiB of memory"):
        VerifyGuard(build_here(run), Plugins())


def test_a_warning_goes_on_and_a_broken_check_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that should recompute the step fails."""
    monkeypatch.setattr(verification, "PROGRAM", "meshwright.no_such_module")
    run = on_texts(tmp_path, LayoutSpec(), {"verify_every": 4, "on_difference": "warn"})
    why, _ = verified(run, tmp_path / "run")
    assert not why
    (record,) = journal(tmp_path / "run", "verification")
    assert record["step"] == 4
    assert "it could not be recomputed:" in record["text"]
    assert "no_such_module" in record["text"]
    assert len(journal(tmp_path / "run", "step")) == STEPS
    assert VerificationError.status in FINAL
