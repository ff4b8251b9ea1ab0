"""A resumed run equals the run that never stopped: bit for bit on the same layout, within float tolerance on others."""

import itertools
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.checkpoint import manifest as manifest_module
from meshwright.checkpoint.manifest import CheckpointError, checkpoint_name, latest_checkpoint
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, largest_difference, loader_for, whole_of_all
from meshwright.testing.layouts import EXPERT_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import describe_restored, restore, state_tensors, state_values
from tiny import STRATEGIES, tiny_run

STEPS = 4
STOPS = range(1, STEPS)


@dataclass
class Trajectory:
    """One rank's record of a run from some step to its last."""

    losses: list[tuple[float, float]]
    """Loss and gradient norm of every step."""
    batches: list[np.ndarray]
    """This rank's inputs of every step, [sequences, tokens]."""
    weights: dict[str, torch.Tensor]
    """After the last step, whole; state that is not trained included."""


def trajectory(
    trainer: Trainer, writer: CheckpointWriter | None = None, saves: Sequence[int] = (), last: int = STEPS
) -> Trajectory:
    """Train from the trainer's step to the last; `writer` saves at these steps. Collective."""
    losses, batches = [], []
    with loader_for(trainer) as loader:
        while trainer.step < last:
            microbatches = list(loader.microbatches(trainer.step))
            trainer.step += 1
            result = trainer.train_step(trainer.step, microbatches)
            trainer.tokens += trainer.resolved.tokens_per_step
            losses.append((result.loss, result.gnorm))
            batches.append(np.concatenate([microbatch.tokens for microbatch in microbatches]))
            if writer is not None and trainer.step in saves:
                trainer.train_step.finish(trainer.step)
                writer.begin(trainer.step, state_tensors(trainer), state_values(trainer))
                outcome = writer.finish()
                assert outcome is not None
                assert outcome.problem is None, outcome.problem
    trainer.train_step.finish(trainer.step)
    buffers = dict(trainer.model.named_buffers())
    return Trajectory(losses, batches, whole_of_all(trainer, trainer.parameters | buffers))


def uninterrupted(run: ResolvedRun, root: Path, saves: Sequence[int] = STOPS) -> Trajectory:
    """From the first step to the last, saved at these steps. Collective."""
    return trajectory(build_here(run), CheckpointWriter(root, CheckpointSpec(keep_last=STEPS)), saves)


def resumed(run: ResolvedRun, root: Path, stops: Sequence[int]) -> list[Trajectory]:
    """Resumed from each of these steps: first by a new trainer, then by one with a different state. Collective."""
    trainer, found = build_here(run), []
    for stop in stops:
        restore(trainer, root / checkpoint_name(stop))
        assert trainer.step == stop
        found.append(trajectory(trainer))
    return found


def leg(run: ResolvedRun, saved: Path | None, root: Path, last: int) -> Trajectory:
    """Resumed from a checkpoint, or started, up to step `last`, and saved there. Collective."""
    trainer = build_here(run)
    if saved is not None:
        restore(trainer, saved)
    return trajectory(trainer, CheckpointWriter(root, CheckpointSpec(keep_last=1)), [last], last)


def tiny(strategy: str, **options: Any) -> ResolvedRun:
    options = {"lr_schedule": {"name": "cosine", "warmup": 2}, "steps": STEPS} | options
    return tiny_run((LAYOUTS | EXPERT_PARALLEL)[strategy], **options)


def on_ranks(ranks: RankPool, function: Callable[..., Any], run: ResolvedRun, *args: Any) -> list[Any]:
    return ranks.run(run.run.layout.world_size, function, run, *args)


def differences(run: ResolvedRun, root: Path, stops: Sequence[int] = STOPS) -> list[str]:
    """Stop at these steps and resume on the same layout: the tensors that differ in any bit from an uninterrupted
    run."""
    whole = uninterrupted(run, root, stops)
    found = []
    for stop, again in zip(stops, resumed(run, root, stops), strict=True):
        if again.losses != whole.losses[stop:]:
            found.append(f"losses from step {stop}")
        if not all(map(np.array_equal, again.batches, whole.batches[stop:])):
            found.append(f"batches from step {stop}")
        if not all(torch.equal(again.weights[name], whole.weights[name]) for name in whole.weights):
            found.append(f"weights from step {stop}")
    return found


RESUMED = [*STRATEGIES, "zero-3-tp"]
SAME = list(zip(RESUMED, itertools.cycle(("fp32", "bf16", "fp32", "fp16")), strict=False))


@pytest.mark.every(5)
@pytest.mark.parametrize(("strategy", "precision"), SAME)
def test_same_layout_continues_bit_for_bit(ranks: RankPool, tmp_path: Path, strategy: str, precision: str) -> None:
    stops = STOPS if strategy in ("single", "zero-3") else [2]
    assert not any(on_ranks(ranks, differences, tiny(strategy, precision=precision), tmp_path, stops))


def test_a_checkpoint_that_does_not_say_what_it_was_trained_on_claims_nothing_of_the_data() -> None:
    trainer = build_here(tiny("single"))
    old = {key: value for key, value in state_values(trainer).items() if key != "data"}
    assert "unknown   whether the data are the same" in describe_restored(trainer, old)
    assert "unknown" not in describe_restored(trainer, state_values(trainer))


ROUNDS = {
    "data parallelism": tuple(STRATEGIES),
    "llama": ("single", "pp-zero-2-tp", "zero-3-tp", "cp-all-gather-tp", "zero-3-uneven", "pp"),
    "muon-tied": ("single", "pp-tp", "hybrid-3-cp-tp", "zero-2", "pp-ddp"),
    "deepseek_v3": ("single", "zero-3-ep", "tp-ep", "pp-zero-bubble-ep"),
}


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.parametrize("case", ROUNDS)
def test_any_layout_continues_what_any_other_saved(ranks: RankPool, tmp_path: Path, case: str) -> None:
    """A relay: each layout resumes the previous one's save, trains a step, and saves. In float64 a few steps amplify a
    summation order's 1e-16 by far less than the 1e-10 allowed here."""
    names = ROUNDS[case]
    options: dict[str, Any] = {"steps": len(names) + 1, "family": case if case == "deepseek_v3" else "llama"}
    if case == "muon-tied":
        options |= {"optimizer": {"name": "muon", "lr": 1e-2, "eps": 0.1}, "tied": True}
    alone = on_ranks(ranks, leg, tiny("single", **options), None, tmp_path / "alone", len(names) + 1)[0]
    saved = None
    for step, name in enumerate((*names, names[0]), start=1):
        root = tmp_path / f"{step}-{name}"
        parts = on_ranks(ranks, leg, tiny(name, **options), saved, root, step)
        assert parts[0].losses == [pytest.approx(alone.losses[step - 1], rel=1e-10)], name
        if case == "data parallelism":
            assert np.array_equal(np.concatenate([part.batches[0] for part in parts]), alone.batches[step - 1])
        saved = root / checkpoint_name(step)
    assert largest_difference(parts[0].weights, alone.weights)[0] < 1e-10


# ---- one process: which parts of a checkpoint are trusted


def save_once(root: Path, *steps: int, **options: Any) -> None:
    """Checkpoints of a new run at these steps."""
    trainer, writer = build_here(tiny("single", **options)), CheckpointWriter(root, CheckpointSpec(keep_last=9))
    for step in steps:
        trainer.step = step
        writer.begin(trainer.step, state_tensors(trainer), state_values(trainer))
        outcome = writer.finish()
        assert outcome is not None
        assert outcome.problem is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_every_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    save_once(tmp_path, 3, 6)
    checkpoint = latest_checkpoint(tmp_path)
    files = sorted(checkpoint.iterdir())
    assert {".metadata", "manifest.json", "trainer.json", "__0_0.distcp"} == {path.name for path in files}
    for path in files:
        if path.name == "manifest.json" and damage == "flip":
            continue  # a manifest may still parse; a wrong sum in it shows at its file
        content = path.read_bytes()
        middle = len(content) // 2
        if damage == "flip":
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        elif damage == "truncate":
            path.write_bytes(content[:middle])
        else:
            path.unlink()
        with pytest.raises(CheckpointError, match=rf"{path.name}.*--resume step-00000003"):
            verify_checkpoint(checkpoint, to_resume=True)
        with pytest.raises(
            CheckpointError, match=rf"{path.name}.*; {tmp_path}/step-00000003 is intact: use that instead$"
        ):
            verify_checkpoint(checkpoint)
        path.write_bytes(content)
    verify_checkpoint(checkpoint)


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    save_once(tmp_path, 6)
    (latest_checkpoint(tmp_path) / "__7_0.distcp").write_text("left by another run")
    with pytest.raises(CheckpointError, match=r"__7_0\.distcp: is not part of this checkpoint"):
        verify_checkpoint(latest_checkpoint(tmp_path))


class _Command:
    """The code that a crafted pickle runs when loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code from a checkpoint ran",))


def test_metadata_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_once(tmp_path, 6)
    checkpoint = latest_checkpoint(tmp_path)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Command()))
    content = json.loads((checkpoint / "manifest.json").read_text())
    content["files"][".metadata"] = manifest_module.describe_file(checkpoint / ".metadata")
    (checkpoint / "manifest.json").write_text(json.dumps(content))  # an attacker corrects the sum too
    with pytest.raises(CheckpointError, match=r"builtins\.print"):
        restore(build_here(tiny("single")), checkpoint)
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "training.seed=0, not 1"),
        ({"family": "qwen3"}, "has no model.layers.0.attention.q_norm.weight"),
        ({"optimizer": {"name": "muon"}}, "momentum_buffer"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    save_once(tmp_path, 6)
    with pytest.raises(CheckpointError, match=message):
        restore(build_here(tiny("single", **options)), latest_checkpoint(tmp_path))


def test_layout_of_the_saver_is_kept(tmp_path: Path) -> None:
    save_once(tmp_path, 6)
    saved = verify_checkpoint(latest_checkpoint(tmp_path))
    assert saved["layout"] == LayoutSpec().model_dump()
    assert saved["step"] == 6
