"""Heartbeats between ranks, from start to exit: they detect a stopped process and a machine without network.

A thread on every rank renews the rank's heartbeat in the group's store and checks the next rank's, in a ring. The
sentry checks only that processes are alive; `watchdog.py` checks their progress. A call to the store may hang for a
quarter of an hour if the network is down, so a second thread watches the first.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from meshwright.launch.status import STUCK
from meshwright.spec.errors import UserError

TIMES_SILENT = 2
"""The limit of silence, as a multiple of `guards.stuck_after`."""
ENDED = "sentry/ended"
"""The store's key for the message of the rank that detected a fault."""


class Sentry:
    """Watches the next rank and the connection to the store. `start` it after all have arrived; `stop` it before
    exit."""

    def __init__(
        self, store: dist.Store, where: str, rank: int, world_size: int, stuck_after: float,
        end: Callable[[int], object] = os._exit,
    ) -> None:  # fmt: skip
        """`store` is a separate connection, to `where`; `end` is called with the exit status after the message."""
        self._store, self._where, self._rank, self._end = store, where, rank, end
        self._next = (rank + 1) % world_size
        self._limit, self._period = TIMES_SILENT * stuck_after, min(5.0, stuck_after / 10)
        self._reached = time.monotonic()
        self._stopped = threading.Event()

    def start(self) -> "Sentry":
        """Start both threads."""
        for watch in (self._watch_next, self._watch_store) if self._limit else ():
            threading.Thread(target=watch, name="meshwright-sentry", daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop watching, because the ranks are about to exit, or this one has failed and reports it itself."""
        self._stopped.set()

    def _watch_next(self) -> None:
        beats, seen, heard = 0, b"", time.monotonic()
        try:
            while not self._stopped.wait(self._period):
                beats += 1
                self._store.set(f"sentry/{self._rank}", f"{beats} {socket.gethostname()}")
                if self._store.check([ENDED]):
                    self._store.get(ENDED)  # raises if no rank has signed it
                    self._abort(None)
                now = self._store.get(f"sentry/{self._next}") if self._store.check([f"sentry/{self._next}"]) else b""
                self._reached = time.monotonic()
                if now != seen:
                    seen, heard = now, self._reached
                elif self._reached - heard > self._limit:
                    host = seen.decode().partition(" ")[2] or "an unknown machine"
                    self._abort(
                        f"rank {self._next} on {host} has not responded for {self._reached - heard:.0f} s: its "
                        "process is stopped or its machine is down"
                    )
        except UserError as error:
            self._abort(str(error))
        except dist.DistError as error:
            if not self._stopped.wait(self._period):  # else the run has ended
                self._abort(
                    f"rank {self._rank} lost the connection to the rendezvous at {self._where} ({_first_line(error)})"
                )

    def _watch_store(self) -> None:
        while not self._stopped.wait(self._period):
            silence = time.monotonic() - self._reached
            if silence > self._limit:
                self._abort(
                    f"rank {self._rank} on {socket.gethostname()} has not reached the rendezvous at {self._where} "
                    f"for {silence:.0f} s: the network or the first machine is down",
                    report=False,
                )

    def _abort(self, reason: str | None, *, report: bool = True) -> None:
        """End this process. If several detect the same failure, the first reports it and the others repeat its
        report."""
        if self._stopped.is_set():
            return
        first = True
        if reason and report:
            with contextlib.suppress(dist.DistError, UserError):  # if the store is gone, every process reports it
                first = int(self._store.compare_set(ENDED, "", str(self._rank))) == self._rank
        if reason and first:
            print(f"error: {reason}", file=sys.stderr, flush=True)
        if report:
            time.sleep(2 * self._period)  # so that the others can read it while the store exists
        self._end(STUCK)
        self._stopped.set()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
