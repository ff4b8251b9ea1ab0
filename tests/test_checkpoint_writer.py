"""Saving during training: the state at `begin` is saved, whatever happens later on disk or in memory."""

import json
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.checkpoint import writer as writer_module
from meshwright.checkpoint.dcp import held_tensors, load_tensors
from meshwright.checkpoint.manifest import checkpoint_name, list_checkpoints
from meshwright.checkpoint.verify import newest_good_checkpoint, verify_checkpoint
from meshwright.checkpoint.writer import CheckpointWriter, SaveOutcome
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.storage.sync import sync
from meshwright.testing.faults import before_file_operations, run_in_fork
from meshwright.testing.kills import storm
from meshwright.testing.ranks import RankPool


def save(writer: CheckpointWriter, step: int, tensors: dict[str, torch.Tensor], **values: Any) -> SaveOutcome:
    writer.begin(step, tensors, {"step": step, **values})
    outcome = writer.finish()
    assert outcome is not None
    return outcome


def saved(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint's values for `tensors`."""
    verify_checkpoint(checkpoint)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(checkpoint, found)
    return found


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_saved_is_the_state_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    really = writer_module.write_shards
    monkeypatch.setattr(writer_module, "write_shards", lambda *args: gate.wait(60) and really(*args))
    tensors = {"a": torch.arange(6.0), "b": torch.tensor(1.0)}
    writer = CheckpointWriter(tmp_path, CheckpointSpec())
    writer.begin(1, tensors, {"step": 1})
    assert writer.busy
    assert not writer.idle
    for tensor in tensors.values():
        tensor.mul_(-1)  # training continues
    gate.set()
    outcome = writer.finish()
    assert outcome is not None
    assert outcome.path == tmp_path / checkpoint_name(1)
    assert outcome.bytes == sum(path.stat().st_size for path in outcome.path.iterdir() if path.name != "manifest.json")
    assert saved(outcome.path, tensors)["a"].tolist() == [0, 1, 2, 3, 4, 5]
    tensors["a"].fill_(7)
    buffers = {name: buffer.data_ptr() for name, buffer in writer._buffers.items()}
    assert saved(save(writer, 2, tensors).path or Path(), tensors)["a"].unique().tolist() == [7]
    assert {name: buffer.data_ptr() for name, buffer in writer._buffers.items()} == buffers  # used again


def test_the_folder_of_an_unfinished_save_cannot_be_guessed_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write beside it cannot put a link there first."""
    suffixes, really = list[str](), writer_module.write_shards

    def look(folder: Path, *args: Any) -> Any:
        suffixes.append(folder.name.rpartition("-")[2])
        return really(folder, *args)

    monkeypatch.setattr(writer_module, "write_shards", look)
    writer = CheckpointWriter(tmp_path, CheckpointSpec())
    for step in (1, 2, 3):
        save(writer, step, {"a": torch.ones(2)})
    assert len(set(suffixes)) == 3


def test_stages_follow_one_another_between_steps(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointSpec())
    assert writer.settle() is None
    writer.begin(1, {"a": torch.ones(2)}, {"step": 1})
    outcome, rounds = None, 0
    while outcome is None:
        if not writer.busy:
            rounds += 1
            outcome = writer.settle()
    assert rounds == 2
    assert writer.idle
    assert outcome.total_seconds >= outcome.blocked_seconds > 0


def test_the_synchronous_writer_copies_nothing(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointSpec(asynchronous=False))
    outcome = save(writer, 1, {"a": torch.ones(2)})
    assert outcome.blocked_seconds == outcome.total_seconds
    assert not writer._buffers


def partly_held(root: Path) -> tuple[list[str], bool]:
    """Ranks hold different tensors; one is held by two of them, one by all. Collective."""
    rank = dist.get_rank()
    tensors = {f"only.{rank}": torch.full((3,), float(rank)), "all": torch.arange(4.0)}
    if rank in (0, 2):  # like embeddings shared by the first and the last pipeline stage
        tensors["ends"] = torch.full((2, 2), 5.0)
    outcome = save(CheckpointWriter(root, CheckpointSpec()), 1, tensors)
    assert outcome.path is not None
    found = saved(outcome.path, tensors)
    return sorted(held_tensors(outcome.path)), all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_ranks_may_hold_different_tensors_and_share_some(ranks: RankPool, tmp_path: Path) -> None:
    for held, equal in ranks.run(3, partly_held, tmp_path):
        assert held == ["all", "ends", "only.0", "only.1", "only.2"]
        assert equal


def on_submeshes(root: Path) -> bool:
    """Two stages of two ranks, each with its own tensor, sharded over the stage. Collective."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    stage, shard = mesh["pp"].get_local_rank(), mesh["shard"]
    local = torch.full((2, 3), float(10 * stage + shard.get_local_rank()))
    tensors: dict[str, torch.Tensor] = {f"stage.{stage}": DTensor.from_local(local, shard, [Shard(0)])}
    outcome = save(CheckpointWriter(root, CheckpointSpec()), 1, tensors)
    assert outcome.path is not None
    whole = {f"stage.{stage}": torch.zeros(4, 3) for stage in (0, 1)}
    load_tensors(outcome.path, whole)
    expected = {f"stage.{stage}": [10.0 * stage] * 2 + [10.0 * stage + 1] * 2 for stage in (0, 1)}
    return all(whole[name][:, 0].tolist() == expected[name] for name in whole)


def test_a_tensor_lives_on_whatever_mesh_it_likes(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, on_submeshes, tmp_path) == [True] * 4


def failing_on(root: Path, bad_rank: int) -> tuple[str | None, list[str], str | None]:
    """A good save, one with a disk failure on one rank, and a good one. Collective."""
    tensors = {f"a.{dist.get_rank()}": torch.ones(3)}
    writer = CheckpointWriter(root, CheckpointSpec())
    save(writer, 1, tensors)
    really = writer_module.write_shards
    if dist.get_rank() == bad_rank:

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        writer_module.write_shards = full  # type: ignore[assignment]
    try:
        problem = save(writer, 2, tensors).problem
    finally:
        writer_module.write_shards = really
    dist.barrier()
    left = names(root)
    dist.barrier()
    return problem, left, save(writer, 3, tensors).problem


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_rank_s_full_disk_fails_the_save_and_nothing_else(ranks: RankPool, tmp_path: Path, bad_rank: int) -> None:
    for answer in ranks.run(2, failing_on, tmp_path / str(bad_rank), bad_rank):
        problem = f"rank {bad_rank}: No space left on device ({tmp_path / str(bad_rank)})"
        assert answer == (problem, ["latest", "step-00000001"], None)
    assert names(tmp_path / str(bad_rank)) == ["latest", "step-00000001", "step-00000003"]


def really_full(root: str) -> list[str | None]:
    """Save below a limit on file sizes, at which the system refuses further writes."""
    problems: list[str | None] = []

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = CheckpointWriter(Path(root), CheckpointSpec())
        tensors = {"a": torch.ones(100_000)}
        problems.append(save(writer, 1, tensors).problem)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        problems.append(save(writer, 2, tensors).problem)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        problems.append(save(writer, 3, tensors).problem)
        (Path(root) / "problems").write_text(json.dumps(problems))

    assert run_in_fork(work) == 0
    return json.loads((Path(root) / "problems").read_text())


def test_the_system_itself_refuses_to_write(ranks: RankPool, tmp_path: Path) -> None:
    [(first, second, third)] = ranks.run(1, really_full, str(tmp_path))
    assert first is None
    assert second == f"rank 0: File too large ({tmp_path})"  # torch says "unexpected pos 64 vs 0"
    assert third is None
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000003"]


def die_everywhere(root: str) -> tuple[int, list[str | None]]:
    """A process that dies right before its n-th file operation, for every n; the newest checkpoint after each death."""
    tensors, folder = {"a": torch.arange(5.0)}, Path(root)
    spec = CheckpointSpec(keep_last=1)
    save(CheckpointWriter(folder, spec), 1, tensors)
    newest: list[str | None] = []
    for moment in range(1000):
        status = run_in_fork(lambda: save(CheckpointWriter(folder, spec), 2, tensors), die_at=moment, below=folder)
        good, faults = newest_good_checkpoint(folder)
        assert not faults
        assert good is not None
        newest.append(good.name)
        assert good == list_checkpoints(folder)[-1]
        assert saved(good, tensors)["a"].tolist() == [0, 1, 2, 3, 4]
        if status == 0:
            return moment, newest
        assert status == 9
        if good.name == checkpoint_name(2):  # back to the state before the next death
            writer = CheckpointWriter(folder, spec)
            save(writer, 1, tensors)
            for left in folder.glob("abandoned-*"):
                writer_module.shutil.rmtree(left)
    raise AssertionError("it never ends")


def test_a_death_between_any_two_file_operations_leaves_a_good_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    [(moments, newest)] = ranks.run(1, die_everywhere, str(tmp_path))
    assert moments > 25
    turn = newest.index("step-00000002")  # the operation that makes the name visible; before it, the old one is newest
    assert newest == ["step-00000001"] * turn + ["step-00000002"] * (len(newest) - turn)
    assert 10 < turn < len(newest) - 3
    assert names(tmp_path) == ["latest", "step-00000002"]  # nothing is left of forty deaths


def count_operations(root: str) -> int:
    """The counter's value for one file's life: folder, open, sync, rename, removal."""
    folder = Path(root) / "data"

    def work() -> None:
        counts: list[int] = []
        before_file_operations(folder, counts.append)
        folder.mkdir()
        with (folder / "a").open("w") as file:
            sync(file.fileno())
        (folder / "a").rename(folder / "b")
        (folder / "b").unlink()
        os._exit(len(counts))

    return run_in_fork(work)


def test_operations_are_really_counted(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(1, count_operations, str(tmp_path)) == [5]


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep_last": 1, "keep_best": 2}, [2, 4, 6]),
        ({"keep_last": 1, "keep_every": 3, "keep_best": 1}, [2, 3, 6]),
    ],
)
def test_retention(tmp_path: Path, spec: dict[str, int], kept: list[int]) -> None:
    losses = {1: 5.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan"), 6: 3.0}
    writer = CheckpointWriter(tmp_path, CheckpointSpec.model_validate(spec))
    for step, loss in losses.items():
        save(writer, step, {"a": torch.ones(1)}, held_out_loss=loss)
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(step) for step in kept]
    assert (tmp_path / "latest").read_text() == "step-00000006\n"
    if "keep_best" in spec:
        assert (tmp_path / "best").read_text() == "step-00000002\n"


def test_going_back_sets_the_later_checkpoints_aside(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1)}
    writer = CheckpointWriter(tmp_path, CheckpointSpec(keep_last=2))
    for step in (1, 2, 3):
        save(writer, step, tensors)
    tensors["a"].fill_(2)
    writer.since = 1  # as in a run that continued from step 1
    outcome = save(writer, 2, tensors)
    assert outcome.problem is None
    assert names(tmp_path) == ["abandoned-step-00000002", "abandoned-step-00000003", "latest", "step-00000002"]
    assert (tmp_path / "latest").read_text() == "step-00000002\n"
    assert saved(tmp_path / "step-00000002", tensors)["a"].item() == 2
    save(writer, 3, tensors)
    writer.since = 2
    save(writer, 5, tensors)  # the next one due after the skipped ones
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000005"]
    assert saved(tmp_path / "abandoned-step-00000003", tensors)["a"].item() == 2


def kill_often(root: str) -> dict[str, int]:
    return dict(storm(Path(root), kills=14, ranks=(1, 2)))


@pytest.mark.slow
def test_kill_minus_nine_at_random_moments(ranks: RankPool, tmp_path: Path) -> None:
    """Fourteen kills here; `python -m meshwright.testing.kills` does a hundred."""
    [hit] = ranks.run(1, kill_often, str(tmp_path))
    assert hit["inside a save"] > 3
    assert hit["steps kept"] > 0
