"""State has a home: a store fetches it bucket by bucket, and its home changes no bit of the training."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.optim.adamw import ShardedAdamW
from meshwright.optim.build import Rows, build_optimizers, decayed_groups
from meshwright.optim.muon import Muon
from meshwright.optim.schedule import lr_factor
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import Precision
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import LrScheduleSpec, OptimizerSpec
from meshwright.state import Bucket, HostStore, MasterWeights, StateStore, choose_store
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.trainer import setup
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import restore, state_tensors, state_values
from tiny import tiny_run

Tensors = dict[str, dict[str, torch.Tensor]]


class FileStore(MasterWeights):
    """Optimizer state mapped from files, in memory one block at a time; the next block's is read ahead."""

    folder: Path

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.log: list[str] = []
        self.ahead: dict[int, Tensors] = {}
        for bucket in self.buckets:
            for name, state in bucket.state.items():
                state |= {key: self.mapped(f"{name}.{key}", tensor) for key, tensor in state.items()}

    def mapped(self, name: str, value: torch.Tensor) -> torch.Tensor:
        size = value.numel()
        file = torch.from_file(str(self.folder / name), shared=True, size=size, dtype=value.dtype)
        return file.view(value.shape).copy_(value)

    def cut(self, rows: Rows) -> Iterator[Rows]:
        for _, part in groupby(rows, lambda row: row.name.split(".")[1] if row.name.startswith("layers.") else ""):
            yield tuple(part)

    def fetch(self, bucket: Bucket) -> None:
        self.log.append(f"fetch {bucket.index}")
        self.homes = {name: dict(state) for name, state in bucket.state.items()}
        for name, here in (self.ahead.pop(bucket.index, None) or self.read(bucket)).items():
            bucket.state[name].update(here)
        if bucket.index + 1 < len(self.buckets):
            self.ahead[bucket.index + 1] = self.read(self.buckets[bucket.index + 1])

    def read(self, bucket: Bucket) -> Tensors:
        return {name: {key: file.clone() for key, file in state.items()} for name, state in bucket.state.items()}

    def put(self, bucket: Bucket) -> None:
        super().put(bucket)
        for name, homes in self.homes.items():
            state = bucket.state[name]
            state |= {key: homes[key].copy_(here) for key, here in state.items()}
        self.log.append(f"put {bucket.index}")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Builds trainers whose optimizer state is in files of the folder."""
    monkeypatch.setattr(FileStore, "folder", tmp_path, raising=False)

    def build(run: ResolvedRun) -> Trainer:
        with monkeypatch.context() as inside:
            inside.setattr(setup, "choose_store", lambda *_, **__: FileStore)
            return build_here(run)

    return build


def train(trainer: Trainer, *steps: int) -> None:
    with loader_for(trainer) as loader:
        for trainer.step in steps:
            trainer.train_step(trainer.step, loader.microbatches(trainer.step - 1))


def assert_same(ours: Trainer, theirs: Trainer) -> None:
    """Masters, optimizer state and the model's copies, bit for bit."""
    expected = state_tensors(theirs)
    for name, tensor in state_tensors(ours).items():
        assert torch.equal(tensor, expected[name]), name
    assert all(map(torch.equal, ours.store.copies.values(), theirs.store.copies.values()))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
def test_state_in_files_changes_no_bit(files, tmp_path: Path, optimizer: str) -> None:
    run = tiny_run(LayoutSpec(), precision="bf16", optimizer={"name": optimizer}, clip=0.1, width=64)
    alone, stored = build_here(run), files(run)
    assert (len(alone.store.buckets), len(stored.store.buckets)) == (1, 4)
    train(alone, 1, 2)
    stored.store.log.clear()
    train(stored, 1, 2)
    assert_same(stored, alone)
    assert stored.store.log == [
        f"{verb} {bucket}" for _ in range(2) for bucket in range(4) for verb in ("fetch", "put")
    ]
    for name, state in stored.store.buckets[1].state.items():
        for key, tensor in state.items():
            found = np.fromfile(tmp_path / f"{name}.{key}", tensor.numpy().dtype)
            assert np.array_equal(found, tensor.numpy().ravel()), "the file has what the checkpoint reads"


@pytest.mark.parametrize("from_files", [True, False])
def test_checkpoints_are_the_same_wherever_state_lives(files, tmp_path: Path, from_files: bool) -> None:
    run = tiny_run(LayoutSpec(), precision="bf16", steps=3)
    alone, stored = build_here(run), files(run)
    first, second = (stored, alone) if from_files else (alone, stored)
    train(first, 1, 2)
    writer = CheckpointWriter(tmp_path / "checkpoints", CheckpointSpec())
    writer.begin(2, state_tensors(first), state_values(first))
    outcome = writer.finish()
    assert outcome is not None
    assert outcome.path is not None, outcome.problem
    train(second, 1)  # elsewhere
    restore(second, outcome.path)
    assert_same(second, first)
    train(first, 3)
    train(second, 3)
    assert_same(second, first)


@pytest.mark.parametrize(
    ("offload", "precision", "alone", "expected"),
    [
        ("none", "bf16", True, MasterWeights),
        ("none", "fp32", True, StateStore),
        ("none", "bf16", False, StateStore),
        ("cpu", "bf16", False, HostStore),
        ("cpu", "fp64", False, HostStore),
    ],
)
def test_who_keeps_a_runs_state(offload: str, precision: str, alone: bool, expected: type[StateStore]) -> None:
    layout = LayoutSpec.model_validate({"offload": offload})
    assert choose_store(layout, Precision.of(precision), alone=alone) is expected


def test_a_users_builder_takes_the_place_of_the_name() -> None:
    trainer = build_here(tiny_run(LayoutSpec()))
    rows, parameters = [row for row in trainer.table if row.trained], trainer.parameters

    def muon_for_everything_square(spec: OptimizerSpec, rows: Rows, parameters) -> list[torch.optim.Optimizer]:
        square = tuple(row for row in rows if len(row.shape) == 2 and row.shape[0] == row.shape[1])
        others = tuple(row for row in rows if row not in square)
        adamw = ShardedAdamW(decayed_groups(spec, others, parameters), lr=spec.lr, betas=spec.betas, eps=spec.eps)
        return [adamw, Muon([parameters[row.name] for row in square], lr=spec.muon_lr)]

    found = build_optimizers(OptimizerSpec(), rows, parameters, muon_for_everything_square).optimizers
    assert {type(optimizer) for optimizer in found} == {ShardedAdamW, Muon}
    with pytest.raises(UserError, match="SGD does not define its initial state"):
        build_optimizers(OptimizerSpec(), rows, parameters, lambda *_: [torch.optim.SGD(parameters.values())])


def test_a_users_schedule_begins_behind_warm_up() -> None:
    schedule = LrScheduleSpec(warmup=4)
    factors = [lr_factor(schedule, step, 10, lambda _, step, steps: 1 / step) for step in (2, 4, 5)]
    assert factors == [0.5, 0.25, 0.2]
