"""A run's reactions to faulty steps, diverging replicas and failing disks, and its starting point."""

import io
import math
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.distributed.tensor import DTensor

from meshwright.checkpoint import writer as writer_module
from meshwright.checkpoint.manifest import CheckpointError, list_checkpoints
from meshwright.launch.signals import StopRequest
from meshwright.launch.status import ReplicasDifferError, UnsavedError
from meshwright.optim.spikes import ENOUGH, WINDOW, SpikeGuard
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.errors import UserError
from meshwright.spec.guards import GuardSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import build_here, loader_for, whole
from meshwright.testing.ranks import RankPool
from meshwright.trainer import saver as saver_module
from meshwright.trainer.display import Display
from meshwright.trainer.loop import train_loop
from meshwright.trainer.metrics import MetricsJournal, read_journal, stepped_since
from meshwright.trainer.replicas import ReplicaGuard, check_replicas, checksum
from meshwright.trainer.run import read_result
from meshwright.trainer.session import Outputs, Session
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import begin, restore
from meshwright.trainer.step import NonFiniteError
from tiny import STRATEGIES, tiny_corpus, tiny_run

STEPS = 8


def tiny(
    strategy: str = "single", *, asynchronous: bool = False, guards: dict[str, Any] | None = None, **training: Any
) -> ResolvedRun:
    non_finite = training.pop("non_finite", "raise")  # rewind is refused if no checkpoints are saved
    run = tiny_run(STRATEGIES[strategy], steps=STEPS, **training)
    parts: dict[str, Any] = {"training": run.run.training.model_copy(update={"non_finite": non_finite})}
    parts |= {
        "checkpoint": CheckpointSpec(every=3, keep_last=9, asynchronous=asynchronous),
        "guards": GuardSpec(**guards or {}),
    }
    return run.model_copy(update={"run": run.run.model_copy(update=parts)})


def train(trainer: Trainer, root: Path) -> str:
    """Train to the last step on random tokens; returns the messages. Collective."""
    first, said = trainer.worker.rank == 0, io.StringIO()
    display = Display(steps=STEPS, memory_bytes=1, device="cpu", enabled=first, stream=said)
    root.mkdir(exist_ok=True, parents=True)
    with MetricsJournal(root / "metrics.jsonl") if first else nullcontext() as journal:
        stop = StopRequest(raises=True)
        train_loop(Session(trainer, tiny_corpus(), Outputs(root, display, journal), stop, [ReplicaGuard()]))
    return said.getvalue()


def poisoned(trainer: Trainer, batches: set[int]) -> Trainer:
    """A trainer whose loss is NaN on these batches of the data's order, counted from 0."""
    really = trainer.train_step.accumulate

    def accumulate(microbatches: Any) -> tuple[torch.Tensor, int]:
        loss_sum, trained = really(microbatches)
        bad = trainer.step - 1 + trainer.passed_over in batches
        return loss_sum * (math.nan if bad else 1), trained

    trainer.train_step.accumulate = accumulate
    return trainer


def rewound(run: ResolvedRun, root: Path) -> tuple[list[int], int, bool]:
    """Batches 4 and 7 are bad: the steps and rewinds, and whether a run over only the good ones ends at these
    weights."""
    trainer = poisoned(build_here(run), {4, 7})
    said = train(trainer, root / "a")
    assert trainer.worker.rank or "step 5: loss nan" in said
    assert trainer.worker.rank or "skipping the 2 batches since then (rewind 1 of 3)" in said
    weights = {name: whole(tensor) for name, tensor in trainer.parameters.items()}
    # Checkpoints at 3 and 6. Batches 0 1 2 | 3 4(bad) | 5 6 -> step 5, 7(bad) is step 6: back to 3 | 8 9 10 11 12
    other = build_here(run)
    restore(other, list_checkpoints(root / "a" / "checkpoints")[0])
    other.passed_over = 5
    train(other, root / "b")
    same = all(torch.equal(whole(tensor), weights[name]) for name, tensor in other.parameters.items())
    steps = [record["step"] for record in read_journal(root / "a" / "metrics.jsonl") if record["kind"] == "step"]
    return steps, trainer.rewinds, same and trainer.passed_over == 5


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "zero-3"])
def test_a_rewind_goes_back_and_passes_over(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    run = tiny(strategy, non_finite="rewind")
    for steps, rewinds, same in ranks.run(run.run.layout.world_size, rewound, run, tmp_path):
        assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 4, 5, 6, 7, 8]
        assert rewinds == 2
        assert same


@pytest.mark.slow
def test_rewinds_are_bounded(tmp_path: Path) -> None:
    run = tiny(non_finite="rewind", guards={"max_rewinds": 2})
    with pytest.raises(NonFiniteError, match=r"after 2 rewinds \(guards.max_rewinds\)"):
        train(poisoned(build_here(run), set(range(3, 99))), tmp_path)
    with pytest.raises(NonFiniteError, match="no checkpoint to return to"):
        train(poisoned(build_here(run), {0}), tmp_path / "checkpoints")
    with pytest.raises(ValidationError, match=r"none is saved; set checkpoint\.every=100"):
        Run.model_validate({"model": "gpt2-124m", "guards": {"spikes": "rewind"}})


def test_six_sigma_over_128_steps() -> None:
    guard, draw = SpikeGuard(), random.Random(0)
    assert not any(guard.is_spike(draw.gauss(3, 0.1), draw.gauss(1, 0.1)) for _ in range(WINDOW))
    state = guard.state()
    assert not guard.is_spike(3.5, 1.0)  # 5 sigma
    guard.load(state)
    assert guard.is_spike(3.7, 1.0)
    guard.load(state)
    assert guard.is_spike(3.0, 1.7)
    assert not guard.is_spike(1.0, 0.1)  # a lower value is no spike
    young = SpikeGuard()
    assert not any(young.is_spike(1000.0 * (step == ENOUGH - 1), 1.0) for step in range(ENOUGH))


def test_a_spike_is_skipped_counted_and_survives_a_resume(tmp_path: Path) -> None:
    trainer = build_here(tiny(guards={"spikes": "skip"}))
    guard = trainer.train_step.spikes
    assert guard is not None
    guard.load([[4.5 + 0.001 * (i % 2) for i in range(100)], [1.0 + i % 2 for i in range(100)]])
    before = {name: tensor.clone() for name, tensor in trainer.parameters.items()}
    really = trainer.train_step.accumulate

    def outlier(batches: Any) -> tuple[torch.Tensor, int]:
        loss_sum, trained = really(batches)
        return torch.full_like(loss_sum, 99.0 * trained), trained

    trainer.train_step.accumulate = outlier
    with loader_for(trainer) as loader:
        result = trainer.train_step(1, loader.microbatches(0))
    assert (result.skipped, result.spike, result.rewind) == (True, True, False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.parameters.items())
    assert result.loss == 99
    trainer.train_step.accumulate = really
    said = train(trainer, tmp_path)
    again = build_here(tiny(guards={"spikes": "skip"}))
    restore(again, list_checkpoints(tmp_path / "checkpoints")[-1])
    assert again.train_step.spikes is not None
    assert again.train_step.spikes.state() == guard.state()
    assert (again.skipped, again.spikes) == (trainer.skipped, trainer.spikes)
    assert ("spikes" in said) == bool(trainer.spikes)


# ---- replicas


def drift(run: ResolvedRun, bad_rank: int) -> str:
    """Flip one bit of one weight on one rank. Collective."""
    trainer = build_here(run)
    check_replicas(trainer.parameters)
    if trainer.worker.rank == bad_rank:
        weight = trainer.parameters["layers.1.attention.wo.weight"].detach()
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        local.view(-1).view(torch.int64)[3] ^= 1
    try:
        check_replicas(trainer.parameters)
    except ReplicasDifferError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize(
    ("layout", "bad_rank", "message"),
    [
        (LayoutSpec(dp_replicate=4), 2, "layers.1.attention.wo.weight on rank 2 differs from ranks 0, 1, 3"),
        (STRATEGIES["hybrid-3"], 1, "layers.1.attention.wo.weight on rank"),
        (STRATEGIES["zero-3"], 1, "equal"),  # no other rank holds this part
    ],
)
def test_one_flipped_bit_on_one_replica_is_found(
    ranks: RankPool, layout: LayoutSpec, bad_rank: int, message: str
) -> None:
    for answer in ranks.run(4, drift, tiny_run(layout), bad_rank):
        assert message in answer


def test_every_bit_and_its_place_count() -> None:
    x = torch.randn(1000, dtype=torch.float32)
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(x.flip(0))
    y = x.clone()
    y.view(torch.int32)[7] ^= 1
    assert checksum(x) != checksum(y)
    assert checksum(torch.zeros(0)) == 0
    assert checksum(x.bfloat16()) != checksum(x.flip(0).bfloat16())


# ---- disks


def test_a_full_or_slow_disk_never_stops_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = writer_module.write_shards

    def full_at_first(folder: Path, *args: Any) -> Any:
        if "step-00000003" in str(folder):
            raise OSError(28, "No space left on device")
        return really(folder, *args)

    monkeypatch.setattr(writer_module, "write_shards", full_at_first)
    trainer = build_here(tiny())
    said = train(trainer, tmp_path)
    assert (
        f"warning: step 3 is not saved: rank 0: No space left on device ({tmp_path / 'checkpoints'}); training" in said
    )
    assert trainer.step == STEPS
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")][-1] == "step-00000008"
    missed = [record for record in read_journal(tmp_path / "metrics.jsonl") if record["kind"] == "checkpoint_missed"]
    assert [(record["step"], record["missed"]) for record in missed] == [(3, 1)]


def test_a_checkpoint_is_left_out_while_the_one_before_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module.Saver, "busy", property(lambda self: not self.writer.idle))  # never ready
    said = train(build_here(tiny(asynchronous=True)), tmp_path)
    assert "warning: step 6 is not saved: the previous one is still being written" in said
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000003", "step-00000008"]


@pytest.mark.slow
def test_the_last_save_tries_again_and_then_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = 0
    really = writer_module.write_shards

    def full(folder: Path, *args: Any) -> Any:
        nonlocal attempts
        if "step-00000008" in str(folder):
            attempts += 1
            if attempts < limit:
                raise OSError(30, "Read-only file system")
        return really(folder, *args)

    monkeypatch.setattr(writer_module, "write_shards", full)
    monkeypatch.setattr(saver_module, "LAST_PAUSE", 0.0)
    limit = 4
    train(build_here(tiny()), tmp_path / "mended")
    assert list_checkpoints(tmp_path / "mended" / "checkpoints")[-1].name == "step-00000008"
    attempts, limit = 0, 1000
    with pytest.raises(UnsavedError, match="of step 8 could not be written; the newest intact one is step-00000006"):
        train(build_here(tiny()), tmp_path / "full")
    assert attempts == saver_module.LAST_ATTEMPTS


# ---- other starting points


def test_resuming_by_name_the_newest_good_one_or_from_the_start(tmp_path: Path) -> None:
    train(build_here(tiny()), tmp_path)
    root = tmp_path / "checkpoints"
    trainer = build_here(tiny())
    assert f"continuing from {root}/step-00000003, step 3" in begin(trainer, root, "step-3")
    assert trainer.step == 3
    with pytest.raises(CheckpointError, match="no checkpoint step-7; it has step-00000003, step-00000006, step-0"):
        begin(trainer, root, "step-7")
    (root / "step-00000008" / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"trainer\.json: 2 bytes.*continue from it with --resume step-00000006"):
        begin(trainer, root, "newest")
    said = begin(trainer, root, "auto")
    assert "warning: skipped" in said
    assert trainer.step == 6
    assert "from here on every step, bit by bit" in said
    assert begin(build_here(tiny()), tmp_path / "nothing", "auto") == "starting from random weights"
    for path in list_checkpoints(root):
        (path / "trainer.json").write_text("{}")
    for which, words in (
        ("auto", r"all checkpoints are damaged \(.*step-00000003/trainer\.json: 2 b"),
        ("newest", "too"),
    ):
        with pytest.raises(
            CheckpointError, match=f"{words}.*; move the damaged checkpoints away and start without --resume"
        ):
            begin(trainer, root, which)


def test_what_has_changed_is_said(tmp_path: Path) -> None:
    train(build_here(tiny()), tmp_path)
    changed = tiny(accumulation=2, lr_schedule={"name": "linear", "warmup": 0}, clip=2.0)
    said = begin(build_here(changed), tmp_path / "checkpoints", "newest")
    assert "tolerance from here on, sums are computed in another order: micro_batch 12 -> 6" in said
    assert "training.clip 1.0 -> 2.0" in said
    assert "(learning rate of step 9: 0.001 instead of 0.01)" in said


def test_a_warm_start_takes_the_weights_alone(tmp_path: Path) -> None:
    first = build_here(tiny())
    train(first, tmp_path)
    run = tiny(optimizer={"name": "muon"}, seed=5)
    warm = run.run.checkpoint.model_copy(update={"start_from": "."})
    run = run.model_copy(update={"base_dir": str(tmp_path), "run": run.run.model_copy(update={"checkpoint": warm})})
    trainer = build_here(run)
    assert "starting from the weights of" in begin(trainer, tmp_path / "new", None)
    assert trainer.step == 0
    assert all(torch.equal(tensor, first.parameters[name]) for name, tensor in trainer.parameters.items())


def test_steps_that_are_left_out_are_bounded() -> None:
    """A diverged model is not trained to the last step with status 0."""
    run = tiny_run(STRATEGIES["single"], precision="fp32", non_finite="skip", steps=50)
    guards = run.run.guards.model_copy(update={"max_skipped": 3})
    trainer = build_here(run.model_copy(update={"run": run.run.model_copy(update={"guards": guards})}))
    next(iter(trainer.parameters.values())).detach().fill_(float("nan"))
    with loader_for(trainer) as loader:
        for step in (1, 2, 3):
            assert trainer.train_step(step, loader.microbatches(step)).skipped
        with pytest.raises(NonFiniteError, match=r"the last 4 steps were skipped .* guards\.max_skipped=3; lower"):
            trainer.train_step(4, loader.microbatches(4))


def test_a_damaged_line_of_the_journal_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = '{"kind": "step", "step": 1, "time": 5.0}'
    path.write_bytes(
        b"\n".join([good.encode(), b'{"kind": "st', b"\xff\xfe", b"[" * 100_000, b"7", good.encode(), b""])
    )
    assert read_journal(path) == [{"kind": "step", "step": 1, "time": 5.0}] * 2
    assert stepped_since(path, 4.0)
    assert not stepped_since(path, 6.0)


def test_a_run_directory_that_was_removed_or_damaged_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run: the folder was removed during the run"):
        read_result(tmp_path / "run")
    (tmp_path / "run/checkpoints/step-00000005").mkdir(parents=True)
    with pytest.raises(UserError, match=r"metrics\.jsonl contains no step: it was removed or damaged; step-00000005"):
        read_result(tmp_path / "run")
