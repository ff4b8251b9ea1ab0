"""A run that stops and continues is the run that never stopped: bits on the same layout, float tolerance on others."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import manifest as manifest_module
from meshwright.checkpoint.manifest import CheckpointError, latest_checkpoint, list_checkpoints
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, largest_difference, loader_for, whole_of_all
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.state import restore, state_tensors, state_values
from tiny import STRATEGIES, tiny_run

STEPS = 6
Trajectory = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


def trajectory(run: ResolvedRun, root: Path, *, save_every: int = 0, resume: bool = False) -> Trajectory:
    """(loss, gradient norm) of every step made here, and the weights after the last. Collective."""
    trainer = build_here(run)
    writer = CheckpointWriter(root, run.run.checkpoint)
    if resume:
        restore(trainer, latest_checkpoint(root))
    seen = []
    with loader_for(trainer) as loader:
        while trainer.step < STEPS:
            trainer.step += 1
            result = trainer.train_step(trainer.step, loader.microbatches(trainer.step - 1))
            trainer.tokens += run.tokens_per_step
            seen.append((result.loss, result.gnorm))
            if save_every and trainer.step % save_every == 0:
                trainer.train_step.finish(trainer.step)
                writer.begin(trainer.step, state_tensors(trainer), state_values(trainer))
                outcome = writer.finish()
                assert outcome is not None
                if outcome.problem:
                    raise CheckpointError(outcome.problem)
    trainer.train_step.finish(trainer.step)
    return seen, whole_of_all(trainer, trainer.parameters)


def tiny(strategy: str, **options: Any) -> ResolvedRun:
    options = {"lr_schedule": {"name": "cosine", "warmup": 2}, "steps": STEPS} | options
    run = tiny_run(LAYOUTS[strategy], **options)
    checkpoint = CheckpointSpec(keep_last=STEPS)
    return run.model_copy(update={"run": run.run.model_copy(update={"checkpoint": checkpoint})})


def run_on(ranks: RankPool, run: ResolvedRun, *args: Any, **kwargs: Any) -> Trajectory:
    return ranks.run(run.run.layout.world_size, call_trajectory, run, args, kwargs)[0]


def call_trajectory(run: ResolvedRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trajectory:
    return trajectory(run, *args, **kwargs)


def keep_until(root: Path, step: int) -> None:
    """Pretend that the run was stopped right after saving `step`."""
    for checkpoint in list_checkpoints(root):
        if checkpoint.name > manifest_module.checkpoint_name(step):
            manifest_module.shutil.rmtree(checkpoint)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "zero-3-tp"])
def test_same_layout_continues_bit_for_bit(ranks: RankPool, tmp_path: Path, strategy: str, precision: str) -> None:
    run = tiny(strategy, precision=precision)
    losses, weights = run_on(ranks, run, tmp_path, save_every=1)
    for stop in (5, 3, 1) if precision == "fp32" else (3,):
        keep_until(tmp_path, stop)
        again, weights_again = run_on(ranks, run, tmp_path, resume=True)
        assert again == losses[stop:]
        assert all(torch.equal(weights_again[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("optimizer", "tied"), [("adamw", False), ("muon", True)])
def test_any_layout_continues_what_any_other_saved(ranks: RankPool, tmp_path: Path, optimizer: str, tied: bool) -> None:
    """In float64 a few steps amplify a summation order's 1e-16 by far less than the 1e-10 allowed here. Every saver
    meets every second loader, and every loader every second saver."""
    options = {"optimizer": {"name": optimizer, "lr": 1e-2, "eps": 0.1}, "tied": tied}
    loaders = [*STRATEGIES, "tp-wide", "zero-3-tp-uneven", "zero-3-tp-wide", "cp-all-gather-tp", "pp", "pp-zero-2-tp"]
    for turn, saver in enumerate(("single", "pp-zero-2-tp", "zero-3-uneven", "hybrid-3", "zero-3-tp", "pp")):
        root = tmp_path / saver
        losses, weights = run_on(ranks, tiny(saver, **options), root, save_every=3)
        keep_until(root, 3)
        for loader in loaders[turn % 2 :: 2]:
            again, weights_again = run_on(ranks, tiny(loader, **options), root, resume=True)
            assert again == [pytest.approx(step, rel=1e-10) for step in losses[3:]]
            assert largest_difference(weights_again, weights)[0] < 1e-10


def test_retention_and_latest(tmp_path: Path) -> None:
    run = tiny("single")
    run = run.model_copy(update={"run": run.run.model_copy(update={"checkpoint": CheckpointSpec(keep_last=2)})})
    trajectory(run, tmp_path, save_every=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000005", "step-00000006"]
    assert (tmp_path / "latest").read_text() == "step-00000006\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000005", "step-00000006"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_every_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    trajectory(tiny("single"), tmp_path, save_every=3)
    checkpoint = latest_checkpoint(tmp_path)
    files = sorted(checkpoint.iterdir())
    assert {".metadata", "manifest.json", "trainer.json", "__0_0.distcp"} == {path.name for path in files}
    for path in files:
        if path.name == "manifest.json" and damage == "flip":
            continue  # a manifest that still parses says what it says; a wrong sum in it shows at the file it names
        content = path.read_bytes()
        middle = len(content) // 2
        if damage == "flip":
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        elif damage == "truncate":
            path.write_bytes(content[:middle])
        else:
            path.unlink()
        with pytest.raises(CheckpointError, match=rf"{path.name}.*--resume step-00000003"):
            verify_checkpoint(checkpoint)
        path.write_bytes(content)
    verify_checkpoint(checkpoint)


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    trajectory(tiny("single"), tmp_path, save_every=6)
    (latest_checkpoint(tmp_path) / "__7_0.distcp").write_text("left by another run")
    with pytest.raises(CheckpointError, match=r"__7_0\.distcp: not part of this checkpoint"):
        verify_checkpoint(latest_checkpoint(tmp_path))


class _Command:
    """What a crafted pickle runs when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code from a checkpoint ran",))


def test_metadata_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trajectory(tiny("single"), tmp_path, save_every=6)
    checkpoint = latest_checkpoint(tmp_path)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Command()))
    content = json.loads((checkpoint / "manifest.json").read_text())
    content["files"][".metadata"] = manifest_module.describe_file(checkpoint / ".metadata")
    (checkpoint / "manifest.json").write_text(json.dumps(content))  # whoever plants a pickle mends the sum as well
    with pytest.raises(CheckpointError, match=r"builtins\.print"):
        trajectory(tiny("single"), tmp_path, resume=True)
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "training.seed=0, this run says 1"),
        ({"family": "qwen3"}, "holds no model.layers.0.attention.q_norm.weight"),
        ({"optimizer": {"name": "muon"}}, "momentum_buffer"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    trajectory(tiny("single"), tmp_path, save_every=6)
    with pytest.raises(CheckpointError, match=message):
        trajectory(tiny("single", **options), tmp_path, resume=True)


def test_layout_of_the_saver_is_kept(tmp_path: Path) -> None:
    trajectory(tiny("single"), tmp_path, save_every=6)
    saved = verify_checkpoint(latest_checkpoint(tmp_path))
    assert saved["layout"] == LayoutSpec().model_dump()
    assert saved["tokens"] == STEPS * 12 * 16
