"""A lock file: one owner at a time, across processes, machines and network file systems.

The owner of lock `L` is the process that created the file `L-N` with the highest N. Exclusive creation of a file
succeeds for one process only, even on NFS. A stale lock is taken over by creating the next file, so two processes that
try cannot both succeed, and an owner that wakes up later detects that it has lost the lock.

Whether an owner is alive:

- It holds `flock` on its file, and its workers inherit it. If `flock` is refused, one of them is alive. If it is
  granted and the owner was a process of this machine since its last boot, all are dead.
- For an owner on another machine, only the file's modification time counts; the owner's thread renews it every `BEAT`
  seconds. It is compared with the time that the same file system gives a new file, so clocks need not agree. A lock
  that has not been renewed for `LEASE` seconds is stale.
"""

import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.storage.sync import sync

BEAT, LEASE = 5.0, 60.0
"""Seconds between an owner's heartbeats, and seconds without one after which it counts as dead."""
LONGEST = 4096
"""Bytes that are read of a lock's file."""
LOOK = 0.2
"""Seconds between two polls of another owner's lock."""


class LockedError(UserError):
    """Another process owns the lock."""


@dataclass(frozen=True)
class Owner:
    """The owner of a lock, read from its file."""

    token: str = ""
    host: str = "an unknown machine"
    boot: str = ""
    """Different after each boot of the machine."""
    pid: int = 0
    since: str = "an unknown time"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lock:
    """The lock `path`, for one owner at a time. Use it in `with`; `path` itself never exists, only `path-N`.

    Missing parent folders are created, and removed at the end if nothing else is in them.
    """

    def __init__(
        self,
        path: Path,
        *,
        wait: float = 0.0,
        hint: str = "",
        say: Callable[[str], object] = lambda text: None,
        lost: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`wait`: seconds to wait for a live owner; 0 refuses as soon as the owner is known to be alive, and adds
        `hint`. `say` is called once with the owner that it waits for; `lost` is called in a thread when another process
        has taken over the lock."""
        self.path, self._wait, self._hint, self._say, self._lost = path, wait, hint, say, lost
        self._number, self._file = 0, -1
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="meshwright-lock", daemon=True)
        self._made: list[Path] = []
        """Created folders, the deepest first."""

    @property
    def inherited(self) -> int:
        """The descriptor to pass to children that must end before the lock is free."""
        return self._file

    def __enter__(self) -> "Lock":
        folder = self.path.parent
        self._made = [missing for missing in (folder, *folder.parents) if not missing.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._acquire()
        except BaseException:
            self._tidy()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._thread.join(BEAT)  # it may hang if the file system does
        with suppress(OSError):
            if self.owner is None:
                self._name(self._number).unlink()
        os.close(self._file)
        self._tidy()

    @property
    def owner(self) -> Owner | None:
        """The other process that owns the lock now; None if there is none."""
        numbers = self._numbers()
        if not numbers:
            return None  # the file has been removed
        newest = self._name(numbers[-1])
        with _opened(newest) as file:
            return None if os.path.sameopenfile(file, self._file) else _read(file)

    def _acquire(self) -> None:
        deadline, announced, seen = time.monotonic() + self._wait, False, _Sighting()
        while True:
            numbers = self._numbers()
            newest = numbers[-1] if numbers else 0
            lives = seen.look(self._name(newest)) if newest else False
            if lives is False and self._claim(newest):
                return
            in_use = f"{self.path.parent} is in use by {seen.owner}"
            if lives and time.monotonic() >= deadline:
                raise LockedError(in_use + self._hint)
            if not announced and (lives or seen.silence > BEAT):
                announced = True
                self._say(f"{in_use}; waiting for it to end" + ("" if lives else ", or a sign of life"))
            time.sleep(1.0 if lives else LOOK)

    def _claim(self, stale: int) -> bool:
        """Try to become the owner after the stale lock with this number (0: none); returns whether it worked."""
        mine = self._name(stale + 1)
        try:
            file = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            _hold(file)  # before its content is written: until then the file must not look abandoned
            me = Owner(secrets.token_hex(8), socket.gethostname(), _boot(), os.getpid(), time.strftime("%F %T"))
            os.write(file, json.dumps(asdict(me)).encode())
            sync(file)
        except OSError as error:
            mine.unlink()
            os.close(file)
            raise OSError(error.errno, error.strerror, str(mine)) from error
        others = [number for number in self._numbers() if number not in (stale, stale + 1)]
        if any(number > stale or _Sighting().look(self._name(number)) is not False for number in others):
            mine.unlink()  # two processes have claimed it; the later one withdraws
            os.close(file)
            return False
        self._number, self._file = stale + 1, file
        for number in (*others, stale):
            self._name(number).unlink(missing_ok=True)
        return True

    def _beat(self) -> None:
        """Renew the lock's time; call `lost` when it is lost."""
        while not self._released.wait(BEAT):
            with suppress(OSError):  # file system unavailable: no process can take the lock either
                os.utime(self._file)
                if (owner := self.owner) is not None and not self._released.is_set():
                    self._lost(
                        f"{self.path.parent} was taken over by {owner}: this process had stopped updating its lock"
                    )
                    return

    def _name(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}-{number}")

    def _numbers(self) -> list[int]:
        prefix = f"{self.path.name}-"
        names = (name.removeprefix(prefix) for name in os.listdir(self.path.parent) if name.startswith(prefix))
        return sorted(int(name) for name in names if name.isdecimal())

    def _tidy(self) -> None:
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock `path`, as far as one look shows."""
    if not path.parent.is_dir():
        return False
    names = [name for name in path.parent.iterdir() if re.fullmatch(rf"{re.escape(path.name)}-\d+", name.name)]
    return any(_Sighting().look(name) is not False for name in names)


class _Sighting:
    """The state of another owner's lock between two polls."""

    def __init__(self) -> None:
        self.owner, self.silence = Owner(), 0.0
        """`silence`: seconds since the last heartbeat, by the file system's clock."""
        self._last: tuple[str, int] | None = None

    def look(self, name: Path) -> bool | None:
        """Whether the owner of the lock file `name` is alive; None if that is not known yet."""
        try:
            with _opened(name) as file:
                self.owner = _read(file)
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may poll too
                    free = True
                except BlockingIOError:
                    return True
                except OSError:  # not every file system supports it
                    free = False
                if free and (self.owner.host, self.owner.boot) == (socket.gethostname(), _boot()):
                    return False
                beaten = os.fstat(file).st_mtime_ns
        except FileNotFoundError:
            return None  # released or taken over just now
        self.silence = (_now(name) - beaten) / 1e9
        if self.silence > LEASE:
            return False
        before, self._last = self._last, (self.owner.token, beaten)
        return True if before and before[0] == self.owner.token and before[1] != beaten else None


def _hold(file: int) -> None:
    """Lock `file` with flock, if the file system supports it."""
    for _ in range(50):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is polling it
            time.sleep(0.01)
        except OSError:
            return None
    return None


@contextmanager
def _opened(name: Path) -> Iterator[int]:
    """A lock's file, opened each time, because NFS then asks for the current time. A link, which no owner makes, is an
    error, and a pipe is never waited for."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield file
    finally:
        os.close(file)


def _read(file: int) -> Owner:
    try:
        return Owner(**json.loads(os.pread(file, LONGEST, 0)))
    except (OSError, ValueError, TypeError):
        return Owner()


def _now(beside: Path) -> int:
    """The current time, in ns, of the file system that contains `beside`."""
    with suppress(OSError, AttributeError):  # a file without a name: a process that is killed here leaves nothing
        file = os.open(beside.parent, os.O_WRONLY | os.O_TMPFILE, 0o600)
        try:
            return os.fstat(file).st_mtime_ns
        finally:
            os.close(file)
    probe = beside.with_name(f".{beside.name}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return probe.stat().st_mtime_ns
    finally:
        probe.unlink(missing_ok=True)


def _boot() -> str:
    """The machine's boot id; empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
