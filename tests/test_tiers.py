"""Tiers of memory: state in host memory and on disk changes no bit of training, and takes no device memory."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.checkpoint.dcp import local_part
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.models.slots import Wrapped
from meshwright.optim.plugged import Plugged
from meshwright.predict.blueprint import blueprint
from meshwright.predict.engine import Processor, engine_job, layout_check
from meshwright.predict.memory import predict_memory
from meshwright.rehearse.rank import rehearse_rank
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.errors import UserError
from meshwright.spec.fit import find_misfits
from meshwright.spec.foreign import ForeignModel
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.offload import OffloadSpec
from meshwright.spec.pieces import PIECES, PieceSizes
from meshwright.spec.run import ResolvedRun
from meshwright.state import TieredStore, files
from meshwright.state.files import OffloadError, StateFile, aligned_buffer, check_directory, file_system
from meshwright.state.tiers import Tier, complaint
from meshwright.state.weights import BlocksAhead
from meshwright.testing.equivalence import build_here, loader_for, whole_of_all
from meshwright.testing.ranks import RankPool
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import restore, state_tensors, state_values
from tiny import tiny_run

DISK = {"optimizer": "disk"}
ALL_DISK = DISK | {"parameters": "disk"}
SMALL = 3000
"""Parameters of a bucket, so that a tiny model has several."""
ROOM = 2 * 4 * SMALL
"""Bytes of gradients that stay in the page cache: two buckets'; the others' go to disk."""


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = PIECES.set(PieceSizes(bucket=SMALL))
    monkeypatch.setattr(Tier, "cache_room", ROOM)
    yield
    PIECES.reset(before)


def run(offload: Any, folder: Path, layout: dict[str, Any] | None = None, **options: Any) -> ResolvedRun:
    """A tiny run in a folder."""
    made = tiny_run(LayoutSpec.model_validate({**(layout or {}), "offload": offload}), **options)
    return made.model_copy(update={"run": made.run.model_copy(update={"run_dir": str(folder)})})


def train(trainer: Trainer, *steps: int) -> list[float]:
    """The losses of steps."""
    with loader_for(trainer) as loader:
        losses = []
        for trainer.step in steps:
            losses.append(trainer.train_step(trainer.step, loader.microbatches(trainer.step - 1)).loss)
    return losses


def on_disk(tensor: torch.Tensor) -> bool:
    """Whether a tensor is mapped from a file without a name, or frozen and small."""
    place = _local(tensor).data_ptr()
    if not tensor.requires_grad and _local(tensor).nbytes < files.BLOCK:
        return True
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= place < end:
            return line.endswith("(deleted)")
    return False


def assert_same(ours: Trainer, theirs: Trainer) -> None:
    """Masters, optimizer state and the model's weights, bit for bit."""
    expected = state_tensors(theirs)
    for name, tensor in state_tensors(ours).items():
        assert torch.equal(tensor, expected[name]), name
    assert all(map(torch.equal, ours.model.parameters(), theirs.model.parameters()))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("offload", "options"),
    [
        (DISK, {"precision": "bf16"}),
        (DISK, {"precision": "bf16", "optimizer": {"name": "muon"}}),
        (DISK, {"precision": "bf16", "optimizer": {"name": "adamw_8bit"}, "width": 64}),
        (DISK, {"precision": "bf16", "finetune": {"method": "lora", "rank": 3}}),
        (DISK, {"precision": "fp16", "reduce_dtype": "bf16"}),
        (DISK, {"precision": "fp32"}),
        (DISK | {"optimizer_share": 0.5, "checksums": True}, {"precision": "bf16"}),
        (ALL_DISK, {"precision": "bf16"}),
        (ALL_DISK, {"precision": "bf16", "optimizer": {"name": "muon"}, "recompute": "full"}),
        (ALL_DISK, {"precision": "bf16", "finetune": {"method": "lora", "rank": 3}, "width": 64}),
        (ALL_DISK | {"checksums": True}, {"precision": "fp32"}),
        (ALL_DISK, {"precision": "bf16", "master_dtype": "bf16"}),
        ({"optimizer": "host"}, {"precision": "bf16"}),
        ({"optimizer": "host"}, {"precision": "fp32", "optimizer": {"name": "muon"}}),
    ],
)
def test_state_elsewhere_changes_no_bit(tmp_path: Path, offload: dict[str, Any], options: dict[str, Any]) -> None:
    options = {"clip": 0.1, "accumulation": 2, **options}
    here, stored = build_here(run("none", tmp_path, **options)), build_here(run(offload, tmp_path, **options))
    assert isinstance(stored.store, TieredStore)
    assert "finetune" in options or len(stored.store.buckets) > 3
    assert stored.store._moved
    assert train(stored, 1, 2, 3) == train(here, 1, 2, 3)
    assert_same(stored, here)
    if offload.get("parameters") == "disk":
        assert all(map(on_disk, stored.model.parameters()))
        assert not any(map(on_disk, here.parameters.values()))


@pytest.mark.parametrize("offload", [DISK, ALL_DISK])
def test_gradients_with_room_in_the_page_cache_are_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: dict[str, Any]
) -> None:
    """Their files move only the rest of the state, and no other file is flushed less than before."""
    trainer = build_here(run(offload, tmp_path, precision="bf16"))
    store, flushed = trainer.store, list[tuple[StateFile, int]]()
    assert isinstance(store, TieredStore)
    buckets = list(store._moved.values())
    cached = [bucket for bucket in buckets if bucket.cached]
    assert 0 < sum(bucket.all_bytes - bucket.kept_bytes for bucket in cached) <= ROOM
    assert 2 <= len(cached) < len(buckets)
    train(trainer, 1)
    before = [bucket.home.moved for bucket in buckets]
    forget = StateFile.forget

    def told(file: StateFile, size: int | None = None) -> None:
        flushed.append((file, file.size if size is None else size))
        forget(file, size)

    monkeypatch.setattr(StateFile, "forget", told)
    train(trainer, 2)
    for bucket, moved in zip(buckets, before, strict=True):
        ahead = (
            bucket.home.moved - moved - bucket.kept_bytes - (bucket.kept_bytes if bucket.cached else bucket.all_bytes)
        )
        assert ahead == 0 or (offload is ALL_DISK and ahead > 0)  # weights that are read for the passes
        sizes = {size for file, size in flushed if file is bucket.home}
        assert sizes == {bucket.kept_bytes if bucket.cached else bucket.all_bytes}


def _differences(folder: Path, layouts: list[dict[str, Any]], offload: dict[str, Any], options: dict[str, Any]) -> list:
    """For each layout, the names of tensors that differ from the same layout in memory. Collective."""
    PIECES.set(PieceSizes(bucket=SMALL))
    Tier.cache_room = ROOM  # type: ignore[assignment]
    found = []
    for layout in layouts:
        trained: list[Any] = []
        beside = "cpu" if offload.get("parameters") else "none"
        for place in (beside, offload):
            trainer = build_here(run(place, folder, layout, **options))
            losses = train(trainer, 1, 2)
            in_memory = [name for name in trainer.parameters if not on_disk(trainer.parameters[name])]
            assert not in_memory or offload.get("parameters") != "disk" or place is beside, in_memory
            trained.append((losses, whole_of_all(trainer, trainer.parameters), state_tensors(trainer)))
        (losses, weights, state), (others, their_weights, their_state) = trained
        found.append(
            [name for name in weights if not torch.equal(weights[name], their_weights[name])]
            + [name for name in state if not torch.equal(_local(state[name]), _local(their_state[name]))]
            + (["loss"] if losses != others else [])
        )
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("layouts", "offload", "options"),
    [
        (
            [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}, {"dp_shard": 2, "zero": 3}],
            DISK,
            {"precision": "bf16"},
        ),
        ([{"tp": 2}, {"pp": 2}, {"cp": 2}], DISK, {"precision": "bf16"}),
        ([{"dp_shard": 2, "zero": 3}], DISK, {"precision": "fp32", "optimizer": {"name": "muon"}}),
        ([{"dp_shard": 2, "ep": 2}], DISK, {"family": "mixtral"}),
        ([{"dp_shard": 2, "zero": 3}], {"optimizer": "host"}, {"finetune": {"method": "lora", "rank": 3}}),
        ([{"dp_shard": 2, "zero": 3}], DISK | {"parameters": "host"}, {}),
        (
            [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}, {"dp_shard": 2, "zero": 3}],
            ALL_DISK,
            {"precision": "bf16", "reduce_dtype": "bf16", "accumulation": 2},
        ),
        ([{"tp": 2}, {"pp": 2}, {"cp": 2}], ALL_DISK, {"accumulation": 2}),
        ([{"dp_shard": 3}], ALL_DISK, {}),  # a vocabulary that FSDP2 pads
        ([{"dp_shard": 2, "ep": 2}], ALL_DISK, {"family": "mixtral", "precision": "bf16"}),
        ([{"dp_shard": 2}], ALL_DISK, {"finetune": {"method": "lora", "rank": 3}, "width": 64}),
        ([{"dp_shard": 2}], ALL_DISK, {"precision": "bf16", "master_dtype": "bf16", "optimizer": {"name": "muon"}}),
    ],
)
def test_every_layout_trains_to_the_bit(
    ranks: RankPool, tmp_path: Path, layouts: list[dict[str, Any]], offload: dict[str, Any], options: dict[str, Any]
) -> None:
    size = LayoutSpec.model_validate(layouts[0]).world_size
    for found in ranks.run(size, _differences, tmp_path, layouts, offload, options):
        assert found == [[]] * len(layouts)


@pytest.mark.parametrize("from_disk", [True, False])
@pytest.mark.parametrize("offload", [DISK | {"checksums": True}, ALL_DISK | {"checksums": True}])
def test_checkpoints_go_to_disk_and_back(tmp_path: Path, from_disk: bool, offload: dict[str, Any]) -> None:
    options = {"precision": "bf16", "steps": 3}
    here, stored = build_here(run("none", tmp_path, **options)), build_here(run(offload, tmp_path, **options))
    first, second = (stored, here) if from_disk else (here, stored)
    train(first, 1, 2)
    assert first.store.writes_at_once == from_disk
    writer = CheckpointWriter(tmp_path / "checkpoints", CheckpointSpec(asynchronous=not from_disk))
    writer.begin(2, state_tensors(first), state_values(first))
    outcome = writer.finish()
    assert outcome is not None
    assert outcome.path is not None, outcome.problem
    train(second, 1)  # elsewhere
    restore(second, outcome.path)
    assert_same(second, first)
    assert train(first, 3) == train(second, 3)
    assert_same(second, first)


TINY = {"precision": "bf16", "steps": 3}
HOST = {"optimizer": "host"}


def of_rank(
    folder: Path, checkpoint: Path, layout: dict[str, Any], offloads: list[Any]
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """With state in each place: the loss of the third step after a checkpoint, and all state. Collective."""
    PIECES.set(PieceSizes(bucket=SMALL))
    found = []
    for offload in offloads:
        trainer = build_here(run(offload, folder, layout, **TINY))
        restore(trainer, checkpoint)
        losses = train(trainer, 3)
        found.append((losses, {name: local_part(tensor).clone() for name, tensor in state_tensors(trainer).items()}))
    return found


@pytest.mark.slow
def test_from_disk_to_other_tiers_and_layouts(ranks: RankPool, tmp_path: Path) -> None:
    """One process's state on disk continues in host memory, and sharded over two ranks, on disk and in memory."""
    stored = build_here(run(DISK, tmp_path, **TINY))
    train(stored, 1, 2)
    writer = CheckpointWriter(tmp_path / "checkpoints", CheckpointSpec(asynchronous=False))
    writer.begin(2, state_tensors(stored), state_values(stored))
    outcome = writer.finish()
    assert outcome is not None
    assert outcome.path is not None, outcome.problem
    alone = of_rank(tmp_path, outcome.path, {}, [HOST, "none"])
    assert [train(stored, 3)] * 2 == [losses for losses, _ in alone]
    sharded = ranks.run(2, of_rank, tmp_path, outcome.path, {"dp_shard": 2}, [DISK, HOST, "none"])
    for outcomes in (alone, *sharded):
        *moved, (losses, expected) = outcomes
        for ours, state in moved:
            assert ours == losses
            assert state.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
    assert sharded[0][0][0] == pytest.approx(alone[0][0], rel=1e-2)  # bf16 sums in another order


def test_files_have_no_names_and_are_what_was_written(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "bucket", 10000, checksums=True)
    assert not list(tmp_path.iterdir())
    assert file.size == 12288
    mapped = file.tensor(4096, torch.zeros(4, 8, dtype=torch.float64))
    assert not mapped.any()
    buffer = aligned_buffer(file.size)
    buffer.copy_(torch.arange(file.size) % 251)
    file.write(buffer)
    expected = buffer[4096 : 4096 + 256].view(torch.float64).view(4, 8)
    assert torch.equal(mapped, expected)
    mapped.fill_(7)
    file.changed()
    file.read(buffer)
    assert torch.equal(expected, torch.full((4, 8), 7, dtype=torch.float64))


MOVED = """
import sys
from collections.abc import Iterator
from pathlib import Path
import torch
from meshwright.spec.offload import OffloadSpec
from meshwright.state.files import StateFile
from meshwright.state.tiers import Tier
def own():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
folder, kept = Path(sys.argv[1]), []
Tier(OffloadSpec(optimizer="disk"), folder, torch.device("cpu")).prepare()
before = own()
for number in range(40):
    moments = [torch.zeros(2**18), torch.zeros(2**18)]
    file = StateFile(folder, str(number), 2**21)
    for moment, place in zip(moments, (0, 2**20)):
        moment.data = file.tensor(place, moment)
    file.forget()
    kept.append((file, moments))
print(own() - before)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_what_moves_to_disk_leaves_no_memory_behind(tmp_path: Path) -> None:
    """In a separate process: in one that has run tests, the C library's heap already has free memory."""
    found = subprocess.run([sys.executable, "-c", MOVED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 10e6, "of 80 MB"


def test_without_direct_access_the_bytes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_open_directly", lambda path: None)
    stored = build_here(run(DISK, tmp_path, precision="bf16"))
    here = build_here(run("none", tmp_path, precision="bf16"))
    assert train(stored, 1, 2) == train(here, 1, 2)
    assert_same(stored, here)


def test_a_full_disk_is_one_sentence_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as inside:
        inside.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            OffloadError, match=r"rank0-weights0-.*: no space left on device: .* GB are free; free space"
        ):
            build_here(run(DISK, tmp_path, precision="bf16"))
    assert not list((tmp_path / "offload").iterdir())
    trainer = build_here(run(DISK, tmp_path, precision="bf16"))
    train(trainer, 1)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OffloadError, match=r"could not be written \(no space left on device\); the last checkpoint is"):
        train(trainer, 2)


def test_a_bit_that_flips_on_disk_is_found(tmp_path: Path) -> None:
    trainer = build_here(run(DISK | {"checksums": True}, tmp_path, precision="bf16"))
    train(trainer, 1)
    state = next(iter(trainer.store.buckets[1].state.values()))
    state["exp_avg"].view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(OffloadError, match="fails its checksum"):
        train(trainer, 2)


def test_a_folder_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nnone {tmp_path}/fast tmpfs rw 0 0\n")
    assert [file_system(path, mounts) for path in (tmp_path / "fast/a", tmp_path / "fastest")] == ["tmpfs", "ext4"]
    monkeypatch.setattr(files, "file_system", lambda path: "tmpfs")
    with pytest.raises(OffloadError, match="is on tmpfs, whose files are in memory"):
        check_directory(tmp_path)


def test_a_slow_disk_is_told_once() -> None:
    class Home:
        moved, seconds = 10**8, 2.0

    assert "reads and writes 50 MB/s" in (complaint([Home()]) or "")  # type: ignore[list-item]
    Home.moved = 10**9
    assert complaint([Home()]) is None  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ({"parameters": "host"}, "add optimizer=host, or optimizer=disk"),
        ({"parameters": "host", "optimizer": "host", "optimizer_share": 0.5}, "leave optimizer_share out"),
        ({"optimizer": "host", "directory": "x"}, "directory applies only to optimizer=disk"),
        ({"checksums": True}, "checksums applies only to optimizer=disk"),
        ({"parameters": "disk", "optimizer": "host"}, "parameters=disk with optimizer=host: .* add optimizer=disk"),
        (ALL_DISK | {"optimizer_share": 0.5}, "with optimizer_share=0.5: .*, without optimizer_share"),
    ],
)
def test_what_makes_no_sense_is_refused(offload: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffloadSpec.model_validate(offload)


def test_one_process_on_a_gpu_and_transformers_models_keep_their_weights() -> None:
    made = tiny_run(layout := LayoutSpec.model_validate({"offload": ALL_DISK}))
    assert not layout_check(made.run, made.model, "cpu")(layout)
    (refused,) = layout_check(made.run, made.model, "gpu")(layout)
    assert "use parameters=host, or several processes" in refused
    several = layout.model_copy(update={"dp_shard": 2})
    assert not layout_check(made.run, made.model, "gpu")(several)
    foreign = ForeignModel(config="{}", blocks="layers", tensors=())
    model = made.model.model_copy(update={"foreign": foreign})
    assert any("constants would stay on the host" in misfit for misfit in find_misfits(several, model, 16))


def test_the_next_blocks_are_read_and_the_past_ones_dropped() -> None:
    """Two ahead in the direction of the pass; parameters outside blocks follow the last and precede the first."""
    told: list[str] = []

    class Home:
        def __init__(self, name: int) -> None:
            self.name = name

        def expect(self, offset: int, size: int) -> None:
            told.append(f"+{self.name}")

        def drop(self, offset: int, size: int) -> None:
            told.append(f"-{self.name}")

    class Layer(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def compute(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = nn.Module()
    model.layers = nn.ModuleDict({str(index): Layer() for index in range(4)})
    model.head = Layer()
    places: Any = {id(one): (one, Home(index), 0) for index, one in enumerate(model.parameters())}
    blocks = BlocksAhead(model, places)
    x = torch.ones((), requires_grad=True)
    for layer in model.layers.values():
        x = layer(x)
    x.backward()
    blocks.forget()
    blocks._thread.shutdown()
    forward, backward = "+0 +1 +2 -0 +3 -1 +4 -2", "-4 +2 +1 -3 +0 -2 +4 -1"
    assert told[:-2] == f"{forward} {backward}".split()
    assert sorted(told[-2:]) == ["-0", "-4"]


def test_a_plugged_optimizer_stays_in_memory(tmp_path: Path) -> None:
    tier = Tier(OffloadSpec(optimizer="disk"), tmp_path, torch.device("cpu"))
    made = run("none", tmp_path)
    trainer = build_here(made)
    rows = [row for row in trainer.table if row.trained]

    def plugged(spec: Any, rows: Any, parameters: Any) -> list[torch.optim.Optimizer]:
        return [Plugged(torch.optim.SGD, [{"params": list(parameters.values()), "lr": 1.0}], {"lr": 1.0}, "SGD")]

    with pytest.raises(UserError, match="cannot be offloaded"):
        TieredStore(trainer.model, rows, made.run.training, plugged, tier=tier)


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("layout", "offload", "bytes_each"),
    [
        ({}, DISK, 16),
        ({}, DISK | {"optimizer_share": 0.5}, 8),
        ({}, ALL_DISK, 18),
        ({"dp_shard": 2, "zero": 1}, ALL_DISK, 16),
    ],
)
def test_the_planner_and_a_rehearsal_agree(
    tmp_path: Path, layout: dict[str, Any], offload: dict[str, Any], bytes_each: float
) -> None:
    """A rehearsal counts bytes in memory; the planner gives the same, and the bytes on disk."""
    options = {"precision": "bf16", "width": 256, "num_layers": 4}
    resolved = run(offload, tmp_path, layout, **options)
    report = rehearse_rank(resolved, 0, on_gpu=False)
    job = engine_job(
        resolved.run,
        blueprint(resolved.model),
        global_batch=resolved.global_batch,
        micro_batch=resolved.micro_batch,
        processor=Processor("cpu"),
    )
    predicted = predict_memory(job)
    assert report["peak"] == pytest.approx(predicted.allocated, rel=0.05)
    assert predicted.disk == pytest.approx(bytes_each * report["parameters"], rel=0.01)
    assert not (tmp_path / "offload").exists()
