"""Signals that ask a run to stop.

After the first SIGTERM, SIGINT, SIGUSR1 or SIGHUP, all ranks save and exit at the next agreed step (`loop.py`). Before
the first step there is nothing to save, and the process exits at once; so does a second signal. Schedulers and
terminals often signal both a launcher and its workers, so workers receive it twice. A signal within a second of the
first is therefore ignored.

A launcher killed by SIGKILL cannot forward signals. Workers detect its end and exit at once, so a restarted run does
not meet old workers that are still saving.
"""

import os
import signal
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from meshwright.launch.status import STOPPED, TrainingStopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ECHO_SECONDS = 1.0
PARENT_THREAD = "meshwright-parent"
PARENT_SECONDS = 0.5
"""Interval at which a worker checks that its parent is alive."""


class StopRequest:
    """Whether this process was asked to stop, and by which signal. Use it in `with`, from the main thread.

    In the process that the user started (`raises`), it raises `TrainingStopped` in the main thread. A worker may be in
    a call that waits for other ranks and never returns to Python, so in a worker a thread listens and ends the process.
    """

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.number = 0
        """The signal received; 0 if none."""
        self._nothing_to_save = True
        self._when = 0.0
        self._before: dict[int, Any] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None

    def running(self) -> None:
        """Call when there is something to save: from now on a first signal only sets `number`."""
        self._nothing_to_save = False
        if self.number:  # it has just arrived
            self._leave(STOPPED)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python handles signals in the main thread only
        if not self.raises:
            self._wakeup = socket.socketpair()
            for end in self._wakeup:
                end.setblocking(end is self._wakeup[0])
            signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
            threading.Thread(
                target=self._listen, args=[self._wakeup[0]], name="meshwright-signals", daemon=True
            ).start()
        # A process started with `nohup` ignores SIGHUP, to outlive its terminal.
        outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        heard = [number for number in STOP_SIGNALS if not (outlives and number == signal.SIGHUP)]
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # A signal cannot damage anything in a worker any more; the process that the user started continues.
            signal.signal(number, handler if self.raises else signal.SIG_IGN)
        if self._wakeup:
            signal.set_wakeup_fd(-1)
            self._wakeup[1].close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.raises:
            self._heard(number)
        else:  # the thread receives it too, but perhaps some steps later
            self.number = self.number or number

    def _listen(self, wakeup: socket.socket) -> None:
        while received := wakeup.recv(1):
            if received[0] in STOP_SIGNALS:
                self._heard(received[0])

    def _heard(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            _leave_terminal()
        if not self._when:
            self.number, self._when = self.number or number, now
            if self._nothing_to_save:
                self._leave(STOPPED)
        elif now - self._when > ECHO_SECONDS:
            self._leave(128 + number)

    def _leave(self, status: int) -> None:
        if self.raises:
            raise TrainingStopped(status)
        os._exit(status)


def _leave_terminal() -> None:
    """Discard output to a closed terminal, because writing to it is an error."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def end_with(parent: int) -> None:
    """End this process, from a thread, as soon as it is no longer a child of process `parent`; 0: never."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        try:
            print(f"error: the launcher (process {parent}) has ended; this worker ends", file=sys.stderr, flush=True)
        finally:  # its reader may have ended too
            os._exit(128 + signal.SIGHUP)

    if parent and not any(thread.name == PARENT_THREAD for thread in threading.enumerate()):
        threading.Thread(target=look, name=PARENT_THREAD, daemon=True).start()


def signal_name(number: int) -> str:
    """15 as `SIGTERM`, 36 as `SIGRTMIN+2`."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return signal.Signals(number).name
