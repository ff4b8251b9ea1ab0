"""Asynchronous saving: copy the state, write it in a thread, publish it, report the outcome.

Threads never communicate with other ranks. A save goes through three stages, and ranks communicate between two steps,
when all know that no thread is working (`busy`):

    begin   every rank copies its share to host memory and its thread writes it        training waits for the copy
    settle  ranks send rank 0 the list of their files; its thread writes the index, publishes, removes old checkpoints
    settle  every rank learns the outcome

A disk error on any rank ends as a `SaveOutcome` with a problem; the previous checkpoint is unchanged.
"""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.storage import WriteResult

from meshwright.checkpoint.dcp import ShardPlan, local_part, plan_shards, write_index, write_shards
from meshwright.checkpoint.manifest import STAGING, TRAINER, checkpoint_name, describe_file, point_at, prune, publish
from meshwright.checkpoint.metadata import METADATA
from meshwright.comm.objects import from_first, gather, rank
from meshwright.devices import host_tensors, synchronize_all, with_my_device
from meshwright.spec.checkpoint import CheckpointSpec

Files = dict[str, dict[str, Any]]
"""Name -> size and sha256."""


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """The outcome of a save, the same on every rank."""

    step: int
    path: Path | None
    """The published checkpoint; None if there is none."""
    problem: str | None
    """The error, if any; a published checkpoint may have one too (old ones could not be removed)."""
    blocked_seconds: float
    """Wall time that training waited on rank 0."""
    total_seconds: float
    """Wall time from the first copy to the end of the publication."""
    bytes: int
    """Size of all files."""


@dataclass(frozen=True)
class _Written:
    """The report of one rank's thread."""

    results: list[WriteResult]
    files: Files
    problem: str | None


class CheckpointWriter:
    """Saves the checkpoints of one run. Every rank has a writer and makes the same calls in the same order."""

    def __init__(self, root: Path, spec: CheckpointSpec, beside: Mapping[str, bytes] | None = None) -> None:
        """`beside`: files, by plain names, that every checkpoint includes a copy of; rank 0's are used."""
        self.root, self.spec, self._beside = root, spec, dict(beside or {})
        self.since: int | None = None
        """Step of the checkpoint that the next one follows; checkpoints between the two are abandoned."""
        self._plan: ShardPlan | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._step: int | None = None  # of the save in progress
        self._publishing = False
        self._written = _Written([], {}, None)
        self._outcome: SaveOutcome | None = None
        self._began = self._blocked = 0.0
        self._trainer = ""

    @property
    def idle(self) -> bool:
        """Whether no save is in progress; the same on every rank."""
        return self._step is None

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is working."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, tensors: dict[str, Any], trainer: dict[str, Any]) -> None:
        """Start to save `tensors`, as `plan_shards` takes them, and the JSON value `trainer`; both may change after.

        Must be idle. The first call is collective: it plans which rank writes which part.
        """
        assert self.idle, f"step {self._step} is still being saved"
        self._began = time.perf_counter()
        if self._plan is None:
            self._plan = plan_shards(tensors)
        assert self._plan.names == tensors.keys(), "a run saves the same tensors every time"
        self._step, self._trainer, self._publishing = step, json.dumps(trainer, indent=1), False
        mine = {item.index.fqn: local_part(tensors[item.index.fqn]) for item in self._plan.mine.items}
        if self.spec.asynchronous:
            mine = self._copy(mine)
        self._blocked = time.perf_counter() - self._began
        self._start(self._write, self._plan, mine)

    def settle(self) -> SaveOutcome | None:
        """Advance the save in progress to its next stage; returns the outcome when it has ended. Collective.

        Call it on all ranks when none is `busy`.
        """
        if self.idle:
            return None
        assert not self.busy
        if self._publishing:
            outcome = from_first(self._outcome)
            self._step, self._outcome = None, None
            return outcome
        self._publishing = True
        reports = gather(self._written)
        if reports is not None:
            self._start(self._publish, reports)
        return None

    def finish(self) -> SaveOutcome | None:
        """Wait until the save in progress has ended; returns the outcome. Collective."""
        outcome = None
        while not self.idle:
            began = time.perf_counter()
            if self._thread is not None:
                self._thread.join()
            self._blocked += time.perf_counter() - began
            outcome = self.settle()
        return outcome

    def _copy(self, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Host copies of `parts`, in buffers that every save reuses; pinned if `parts` are on a GPU."""
        if not self._buffers:
            self._buffers = host_tensors(parts)
        for name, part in parts.items():
            self._buffers[name].copy_(part, non_blocking=True)
        synchronize_all(parts.values())
        return self._buffers

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        self._thread = threading.Thread(
            target=with_my_device(work), args=args, name="meshwright-checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def _staging(self) -> Path:
        assert self._step is not None
        assert self._plan is not None
        name = checkpoint_name(self._step)
        suffix = hashlib.sha256(f"{self._plan.token}/{name}".encode()).hexdigest()[:8]
        return self.root / f"{STAGING}{name}-{suffix}"

    def _write(self, plan: ShardPlan, parts: dict[str, torch.Tensor]) -> None:
        """Thread of every rank: its shards, on disk and hashed."""
        results, files, problem = [], {}, None
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            results = write_shards(self._staging, plan, parts)
            names = sorted({result.storage_data.relative_path for result in results})
            files = {name: describe_file(self._staging / name) for name in names}
        except Exception as error:  # torch.save reports a full disk by several exception types
            problem = f"rank {rank()}: {_described(error, self.root)}"
        self._written = _Written(results, files, problem)

    def _publish(self, reports: list[_Written]) -> None:
        """Thread of rank 0: the rest of the files, the visible name, retention."""
        assert self._plan is not None
        assert self._step is not None
        path, files = None, {name: entry for report in reports for name, entry in report.files.items()}
        problem = next((report.problem for report in reports if report.problem), None)
        if problem is None:
            try:
                write_index(self._staging, self._plan, [report.results for report in reports])
                (self._staging / TRAINER).write_text(self._trainer)
                for name, content in self._beside.items():
                    (self._staging / name).write_bytes(content)
                files |= {name: describe_file(self._staging / name) for name in (METADATA, TRAINER, *self._beside)}
                path = publish(self._staging, self.root, self._step, dict(sorted(files.items())), since=self.since)
                self.since = self._step
                point_at(path)
                prune(self.root, self.spec)
            except Exception as error:
                what = "after it was saved, " if path else ""
                problem = f"{what}{_described(error, self.root)}"
        if path is None:
            shutil.rmtree(self._staging, ignore_errors=True)
        total = time.perf_counter() - self._began
        self._outcome = SaveOutcome(
            step=self._step,
            path=path,
            problem=problem,
            blocked_seconds=self._blocked if self.spec.asynchronous else total,
            total_seconds=total,
            bytes=sum(entry["bytes"] for entry in files.values()),
        )


def _described(error: Exception, folder: Path) -> str:
    """The error in one line; for torch's writers, the underlying error of the file system and its path."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.strerror:
            return f"{behind.strerror} ({behind.filename or folder})"
        behind = behind.__cause__ or behind.__context__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
