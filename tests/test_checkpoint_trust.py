"""Damaged, lying and foreign folders among checkpoints are reported and skipped; foreign ones are never touched."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from meshwright.checkpoint import manifest as manifest_module
from meshwright.checkpoint.dcp import load_tensors
from meshwright.checkpoint.manifest import CheckpointError, list_checkpoints, prune
from meshwright.checkpoint.verify import newest_good_checkpoint, verify_checkpoint
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.spec.checkpoint import CheckpointSpec

STATE = {"model.a": torch.arange(6.0).view(2, 3), "optimizer.a.m": torch.ones(2, 3)}


def save(root: Path, *steps: int, keep_last: int = 9) -> CheckpointWriter:
    writer = CheckpointWriter(root, CheckpointSpec(keep_last=keep_last))
    for step in steps:
        writer.begin(step, STATE, {"step": step})
        outcome = writer.finish()
        assert outcome is not None
        assert outcome.problem is None, outcome.problem
    return writer


@pytest.mark.slow
def test_every_flipped_bit_of_a_manifest_is_told_and_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 3, 6)
    path = tmp_path / "step-00000006/manifest.json"
    good = path.read_bytes()
    for place in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[place // 8] ^= 1 << place % 8
        if _same(bytes(flipped), good):
            continue  # whitespace changed to other whitespace
        path.write_bytes(flipped)
        found, faults = newest_good_checkpoint(tmp_path)
        assert found == tmp_path / "step-00000003", (place, flipped)
        assert "step-00000006" in faults[0]


def _same(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


MANIFESTS = {
    "": "not a manifest",
    "[]": "not a manifest",
    "[" * 100_000: "not a manifest",
    '{"format": 1, "step": 6}': "not a manifest",
    '{"format": 2, "step": 6, "files": {}}': "has unknown format 2",
    '{"format": 1, "step": true, "files": {}}': "damaged",
    '{"format": 1, "step": 6, "files": []}': "damaged",
    '{"format": 1, "step": 6, "files": {"../x": {}}}': "'../x' is not a plain file name",
    '{"format": 1, "step": 6, "files": {"x": {"sha256": ""}}}': "has no size for x",
    '{"format": 1, "step": 6, "files": {"x": {"bytes": 1, "sha256": 5}}}': "has no sha256 for x",
    '{"format": 1, "step": 7, "files": {}}': "is the checkpoint of step 7 according to its manifest",
}


@pytest.mark.parametrize(("text", "message"), MANIFESTS.items(), ids=[text[:60] for text in MANIFESTS])
def test_manifests_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    save(tmp_path, 3, 6)
    (tmp_path / "step-00000006/manifest.json").write_text(text)
    found, faults = newest_good_checkpoint(tmp_path)
    assert found == tmp_path / "step-00000003"
    assert message in faults[0]
    with pytest.raises(CheckpointError, match="step-00000003 is intact: continue from it with --resume step-00000003"):
        verify_checkpoint(tmp_path / "step-00000006", to_resume=True)


@pytest.mark.parametrize(("replace", "what"), [(os.mkfifo, "a pipe"), (Path.mkdir, "a folder")])
def test_a_manifest_that_is_no_file_is_passed_over(tmp_path: Path, replace: Callable[[Path], Any], what: str) -> None:
    """`--resume auto` refused the run instead."""
    save(tmp_path, 3, 6)
    path = tmp_path / "step-00000006/manifest.json"
    path.unlink()
    replace(path)
    found, faults = newest_good_checkpoint(tmp_path)
    assert found == tmp_path / "step-00000003"
    assert f"is {what}, not a file" in faults[0]


def test_a_checkpoint_that_lies_about_its_step_is_refused(tmp_path: Path) -> None:
    """Two swapped checkpoints, each complete."""
    save(tmp_path, 3, 6)
    one, other, aside = tmp_path / "step-00000003", tmp_path / "step-00000006", tmp_path / "aside"
    one.rename(aside), other.rename(one), aside.rename(other)
    found, faults = newest_good_checkpoint(tmp_path)
    assert found is None
    assert len(faults) == 2
    with pytest.raises(CheckpointError, match="step-00000006: is the checkpoint of step 3 according to its manifest"):
        verify_checkpoint(other)
    values = one / "trainer.json"
    values.write_text('{"step": 5}')
    mend(one, "trainer.json", step=3)
    with pytest.raises(CheckpointError, match=r"trainer\.json: damaged, its step is not the manifest's \(3\)"):
        verify_checkpoint(one)


def mend(checkpoint: Path, name: str, **fields: Any) -> None:
    """Make the manifest match a changed file, as an attacker would."""
    path = checkpoint / "manifest.json"
    content = json.loads(path.read_text()) | fields
    content["files"][name] = manifest_module.describe_file(checkpoint / name)
    path.write_text(json.dumps(content))


def test_foreign_folders_are_never_touched(tmp_path: Path) -> None:
    for name in ("1", "2024", "step-7", "step-00000001", ".writing-notes", "abandoned-step-00000006"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("ten years")
    elsewhere = tmp_path / "elsewhere"
    save(elsewhere, 2)
    (tmp_path / "step-00000002").symlink_to(elsewhere / "step-00000002")
    writer = save(tmp_path, 3, 6, 9, keep_last=1)
    writer.since = 3
    writer.begin(6, STATE, {"step": 6})  # a run that went back
    assert (outcome := writer.finish()) is not None
    assert outcome.problem is None, outcome.problem
    prune(tmp_path, CheckpointSpec(keep_last=1))
    for name in ("1", "2024", "step-7", "step-00000001", ".writing-notes", "abandoned-step-00000006"):
        assert (tmp_path / name / "thesis.txt").read_text() == "ten years"
    assert (tmp_path / "step-00000002/manifest.json").is_file()
    ours = [path.name for path in list_checkpoints(tmp_path)]
    assert ours == ["step-00000001", "step-00000002", "step-00000006"]  # the first two are not ours to remove
    assert newest_good_checkpoint(tmp_path)[0] == tmp_path / "step-00000006"


def test_what_a_killed_removal_leaves_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 3, 6)
    monkeypatch.setattr(shutil, "rmtree", _killed)
    with pytest.raises(InterruptedError):
        prune(tmp_path, CheckpointSpec(keep_last=1))
    monkeypatch.undo()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000006"]
    prune(tmp_path, CheckpointSpec(keep_last=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000006"]


def _killed(path: Path) -> None:
    raise InterruptedError


def place(**fields: Any) -> dict[Any, Any]:
    given = {"relative_path": "__0_0.distcp", "offset": 0, "length": 10} | fields
    return {MetadataIndex("model.a", torch.Size([0, 0])): _StorageInfo(**given)}


def tensor(size: Any = None, chunks: Any = None, properties: Any = None) -> TensorStorageMetadata:
    size = torch.Size([2, 3]) if size is None else size
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))] if chunks is None else chunks
    return TensorStorageMetadata(properties or TensorProperties(dtype=torch.float32), size, chunks)


PICKLES: dict[str, Callable[[], Any]] = {
    "a number": lambda: 5,
    "tensors in a list": lambda: Metadata(state_dict_metadata=[]),  # type: ignore[arg-type]
    "a tensor that is a number": lambda: Metadata(state_dict_metadata={"model.a": 5}),  # type: ignore[dict-item]
    "a name that is a number": lambda: Metadata(state_dict_metadata={5: tensor()}),  # type: ignore[dict-item]
    "a shape of words": lambda: Metadata(state_dict_metadata={"model.a": tensor(size="2x3")}),
    "no chunks": lambda: Metadata(state_dict_metadata={"model.a": tensor(chunks=5)}),
    "a chunk that is a number": lambda: Metadata(state_dict_metadata={"model.a": tensor(chunks=[5])}),
    "a chunk of other dims": lambda: Metadata(
        state_dict_metadata={"model.a": tensor(chunks=[ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))])}
    ),
    "a chunk beyond its tensor": lambda: Metadata(
        state_dict_metadata={
            "model.a": tensor(chunks=[ChunkStorageMetadata(torch.Size([0, 2]), torch.Size([2, 3]))]),
        }
    ),
    "no dtype": lambda: Metadata(state_dict_metadata={"model.a": tensor(properties=TensorProperties(dtype=5))}),  # type: ignore[arg-type]
    "places in a list": lambda: Metadata(state_dict_metadata={"model.a": tensor()}, storage_data=[5]),
    "a place that is a number": lambda: Metadata({"model.a": tensor()}, storage_data={5: 5}),
    "a file that is a number": lambda: Metadata({"model.a": tensor()}, storage_data=place(relative_path=5)),
    "a file elsewhere": lambda: Metadata({"model.a": tensor()}, storage_data=place(relative_path="../x")),
    "an offset of words": lambda: Metadata({"model.a": tensor()}, storage_data=place(offset="far")),
    "a negative offset": lambda: Metadata({"model.a": tensor()}, storage_data=place(offset=-5)),
    "an offset beyond the file": lambda: Metadata({"model.a": tensor()}, storage_data=place(offset=10**12)),
    "a length beyond the file": lambda: Metadata({"model.a": tensor()}, storage_data=place(length=10**12)),
    "no place": lambda: Metadata({"model.a": tensor()}, storage_data={}),
}


@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES.keys())
def test_pickles_that_are_consistent_and_malformed(tmp_path: Path, content: Callable[[], Any]) -> None:
    save(tmp_path, 3)
    checkpoint = tmp_path / "step-00000003"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(content()))
    mend(checkpoint, ".metadata")
    verify_checkpoint(checkpoint)
    with pytest.raises(CheckpointError):
        load_tensors(checkpoint, {"model.a": torch.zeros(2, 3)})
