"""The watchdog: detects a hung run, names the rank at fault, and ends the process.

A thread alongside training regularly publishes this rank's progress in the group's store. If one rank's main thread
makes no progress within a limit, which is learned from the run, all ranks' threads publish their Python stack and their
last collective. One of them prints all reports, then every rank exits. A rank that is stopped, or whose machine is
gone, publishes nothing, which identifies it.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from meshwright import torch_internals
from meshwright.launch.status import STUCK
from meshwright.spec.errors import UserError
from meshwright.spec.guards import GuardSpec

TIMES_LONGEST, TIMES_UNKNOWN, TIMES_PATIENT = 10, 30, 720
"""The limit as a multiple: of the longest step so far; of `guards.stuck_after`, for operations that have not occurred
before and for slow disks."""

FAMILIAR = 3
"""How often an operation must have occurred before its longest time is used."""

ANSWER_SECONDS = 3.0
"""Minimum time for a rank to answer: hung machines are often busy."""


@dataclass
class Collective:
    """The last collective of one rank in one group."""

    group: str
    number: int
    """Running number of the group's collectives; equal on all ranks that are in step."""
    name: str
    waiting: bool
    """Whether the rank still waits for others in it."""


@dataclass
class RankReport:
    """The report of one rank."""

    rank: int
    host: str
    doing: str
    seconds: float
    """Since its last progress."""
    limit: float = 0.0
    """Seconds allowed without progress."""
    stack: str = ""
    collectives: list[Collective] = field(default_factory=list)


class Watchdog:
    """Watches one rank. Use it in `with`; call `enter` whenever the main thread starts something new."""

    def __init__(
        self,
        spec: GuardSpec,
        rank: int = 0,
        world_size: int = 1,
        store: dist.Store | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`store` is a separate connection to the group's store, because the main thread may block the other. `end` is
        called with the exit status after everything has been reported."""
        self.spec, self._rank, self._world_size, self._end = spec, rank, world_size, end
        self._store = store or dist.HashStore()
        self._doing, self._kind, self._since = "start", "start", time.monotonic()
        self._patient = True
        self._longest: dict[str, float] = {}
        self._times: dict[str, int] = {}
        self._main = threading.get_ident()
        self._done = threading.Event()
        self._aborting = False
        self._thread = threading.Thread(target=self._watch, name="meshwright-watchdog", daemon=True)
        self._pulse = min(5.0, spec.stuck_after / 20)

    def enter(self, kind: str, which: object = "", *, patient: bool = False) -> None:
        """Report that the main thread starts an operation of this kind; `patient` if it may take any time (a slow
        disk)."""
        now = time.monotonic()
        if not self._patient:
            self._longest[self._kind] = max(self._longest.get(self._kind, 0.0), now - self._since)
            self._times[self._kind] = self._times.get(self._kind, 0) + 1
        self._kind, self._doing, self._since, self._patient = kind, f"{kind} {which}".strip(), now, patient

    @property
    def limit(self) -> float:
        """Time limit in seconds of the main thread's current operation."""
        if self._patient:
            return TIMES_PATIENT * self.spec.stuck_after
        if self._times.get(self._kind, 0) < FAMILIAR:
            return TIMES_UNKNOWN * self.spec.stuck_after
        return max(self.spec.stuck_after, TIMES_LONGEST * self._longest[self._kind])

    def __enter__(self) -> "Watchdog":
        if self.spec.stuck_after:
            self.enter(self._kind, patient=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._aborting:
            self._thread.join()  # a rank that exits early breaks the others' collectives

    def _watch(self) -> None:
        try:
            while not self._done.is_set():
                seconds = time.monotonic() - self._since
                # If a call never releases the interpreter lock, this thread hangs too; then C code prints.
                faulthandler.dump_traceback_later(max(self.limit, 1.0) + 10 * self._pulse, file=2)
                self._publish("pulse", self._report(seconds))
                if seconds > self.limit or self._must_stop():
                    self._abort(seconds)
                    return
                self._done.wait(self._pulse)
        except dist.DistError:  # the store's host is gone, and so is the run: the main thread will fail
            return
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            self._end(STUCK)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _must_stop(self) -> bool:
        """Whether a rank has reported a hang. Raises `UserError` if the report is not signed by one of our ranks."""
        return self._store.check(["stuck"]) and bool(self._store.get("stuck"))

    def _publish(self, what: str, report: RankReport) -> None:
        self._store.set(f"{what}/{self._rank}", json.dumps(asdict(report)))

    def _report(self, seconds: float) -> RankReport:
        return RankReport(self._rank, socket.gethostname(), self._doing, seconds, self.limit)

    def _read(self, what: str, rank: int) -> RankReport | None:
        if not self._store.check([f"{what}/{rank}"]):
            return None
        values: dict[str, Any] = json.loads(self._store.get(f"{what}/{rank}"))
        values["collectives"] = [Collective(**value) for value in values["collectives"]]
        return RankReport(**values)

    def _abort(self, seconds: float) -> None:
        """Publish this rank's report, or print all reports, and end the process."""
        self._aborting = True
        faulthandler.cancel_dump_traceback_later()
        mine = self._report(seconds)
        mine.stack = "".join(traceback.format_stack(sys._current_frames()[self._main]))
        patience = max(ANSWER_SECONDS, 6 * self._pulse)
        mine.collectives = within(patience / 2, last_collectives)
        with contextlib.suppress(dist.DistError):  # the store ends with the first rank; by then everything is reported
            self._publish("report", mine)
            noticed = int(self._store.compare_set("stuck", "", str(self._rank)))
            self._await([f"report/{rank}" for rank in range(self._world_size)], patience)
            if int(self._store.compare_set("teller", "", str(self._rank))) == self._rank:
                reports = [self._read("report", rank) for rank in range(self._world_size)]
                pulses = {rank: self._read("pulse", rank) for rank, report in enumerate(reports) if report is None}
                print(explain(reports, pulses, noticed), file=sys.stderr, flush=True)
                self._store.set("told", "")
            self._await(["told"], patience)
        self._end(STUCK)

    def _await(self, keys: list[str], seconds: float) -> None:
        """Wait until the store has all `keys`, or until the time is over."""
        deadline = time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)


def within(seconds: float, read: Callable[[], list[Collective]]) -> list[Collective]:
    """The answer of `read`; empty if it takes longer: NCCL's recorder asks the GPU, which may hang as the run does."""
    answer: list[Collective] = []
    reader = threading.Thread(target=lambda: answer.extend(read()), name="meshwright-recorder", daemon=True)
    reader.start()
    reader.join(seconds)
    return list(answer)


def last_collectives() -> list[Collective]:
    """This process's last collective in every group, from torch's flight recorder."""
    last: dict[str, Collective] = {}
    for entry in sorted(torch_internals.recorded_collectives(), key=lambda entry: entry["record_id"]):
        group = f"{entry['process_group'][1] or 'group'} {entry['process_group'][0]}"
        number, name = entry["collective_seq_id"], entry["profiling_name"]
        last[group] = Collective(group, number, name, waiting=not entry["retired"])
    return list(last.values())


def explain(reports: list[RankReport | None], pulses: dict[int, RankReport | None], noticed: int) -> str:
    """The rank at fault with its stack, and the last collective of every rank; `noticed` is the rank that detected the
    hang."""
    silent = [rank for rank, report in enumerate(reports) if report is None]
    there = [report for report in reports if report is not None]
    first = next(report for report in there if report.rank == noticed)
    lines = [f"error: no progress for {first.seconds:.0f} s in {first.doing} (limit {first.limit:.0f} s)"]
    blamed: list[RankReport] = []
    for rank in silent:
        pulse = pulses.get(rank)
        last = f"; last report: on {pulse.host}, in {pulse.doing}" if pulse else ""
        lines.append(f"stuck: rank {rank} does not respond: its process is stopped or its machine is down{last}")
    if not silent:
        blamed = _late(there)
        lines += [f"stuck: rank {report.rank} on {report.host}, {_reason(report, there)}" for report in blamed]
        if not blamed:
            lines.append("stuck: all ranks wait in the same collective: check the network")
    for report in blamed or [first]:
        lines.append(f"stack of rank {report.rank}:\n{report.stack.rstrip()}")
    lines.append("last collectives:")
    for report in there:
        collectives = ", ".join(
            f"{last.name} {last.number} of {last.group}{' (waiting)' if last.waiting else ''}"
            for last in report.collectives
        )
        lines.append(f"  rank {report.rank}, {report.doing}: {collectives or 'none'}")
    return "\n".join(lines)


def _late(reports: list[RankReport]) -> list[RankReport]:
    """The ranks that wait for no one while others wait; else those that are behind in a group."""
    if len(reports) == 1:
        return reports
    free = [report for report in reports if not any(collective.waiting for collective in report.collectives)]
    return free or [report for report in reports if _behind(report, reports)]


def _behind(report: RankReport, reports: list[RankReport]) -> Collective | None:
    """A collective that others are in and this rank is not."""
    mine = {collective.group: collective.number for collective in report.collectives}
    for other in reports:
        for collective in other.collectives:
            if collective.waiting and mine.get(collective.group, 0) < collective.number:
                return collective
    return None


def _reason(report: RankReport, reports: list[RankReport]) -> str:
    missed = _behind(report, reports)
    if missed is None:
        return f"in {report.doing}"
    return f"in {report.doing}: other ranks wait for it in {missed.name} {missed.number} of {missed.group}"
