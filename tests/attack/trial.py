"""One trial of an attack: a command in a forked process, and its outcome."""

import importlib
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import meshwright.checkpoint.hf
import meshwright.cli.check
import meshwright.cli.data
import meshwright.cli.export
import meshwright.cli.generate
import meshwright.cli.train
import meshwright.serve.trained  # noqa: F401  (all of it once, here, so that forks need not)
from meshwright.cli.main import main
from meshwright.launch.forkserver import LOADED

for module in (*LOADED, "transformers.models.llama.modeling_llama"):
    importlib.import_module(module)

Fate = Literal["survived", "named", "as written", "vague", "silent", "trace", "hang"]
"""survived: the same result as without damage. named: refused, and the message names the fault. as written: a file
without checksums is still legal, and was obeyed. The others are failures: refused without a name, a different result
without a message, a stack trace, or no end within the limit."""

FAILURES: tuple[Fate, ...] = ("vague", "silent", "trace", "hang")
LIMIT = 240.0
"""Seconds for a trial in one process, on a busy machine: most take a tenth of a second."""
PATIENCE = 20.0
"""Seconds after which `meanwhile` is called."""
MEMORY = 6 * 2**30
"""Bytes of address space that a trial may take beyond those of its process at the start."""
SAID = 2000
"""Characters of a trial's output in the report of its failure."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int | None
    """Exit status, negative for a signal; None if the limit ended it."""
    out: str
    err: str

    @property
    def traced(self) -> bool:
        """Whether it printed a stack trace, or died of a signal that nobody sent."""
        return "Traceback (most recent call last)" in self.err or (self.status or 0) < 0


Cell = tuple[str, str]
"""A kind of file, process or request, and a kind of damage."""


@dataclass(frozen=True)
class Trial:
    """A trial and its outcome."""

    attack: str
    seed: str
    """Repeats the same trial."""
    done: str
    """The damage, in words."""
    fate: Fate
    said: str = ""
    """The output of a failure."""
    cell: Cell = ("", "")
    """Its place in the table: what was attacked, and how."""


class Kind(Protocol):
    """A kind of attack: a table of cells, each of which can be tried at any place and moment."""

    @property
    def name(self) -> str:
        """In tables and seeds."""
        ...

    def cells(self) -> Sequence[Cell]:
        """Every cell, in order."""
        ...

    def attempt(self, cell: Cell, draw: random.Random, seed: str) -> Trial:
        """One trial; `draw` chooses the place and the moment."""
        ...


def trial_of(kind: Kind, seed: str) -> Trial:
    """The trial of a seed, `KIND/SEED/NUMBER`: the cell of that number, and after the last one any cell."""
    draw, number, cells = random.Random(seed), int(seed.rpartition("/")[2]), kind.cells()
    return kind.attempt(cells[number] if number < len(cells) else draw.choice(cells), draw, seed)


def run(
    words: Sequence[str],
    cwd: Path,
    *,
    limit: float = LIMIT,
    output: Path | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Ended:
    """`meshwright WORDS` in `cwd`, in a fork of this process, which has already imported it.

    It leads its own process group. Its output goes to files in `output`, or next to `cwd`. `meanwhile` is called once,
    if it has not ended within `PATIENCE` seconds.
    """
    out, err = ((output or cwd.parent) / f"{cwd.name}.{kind}" for kind in ("out", "err"))
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            os.chdir(cwd)
            for path, stream in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
            sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))  # not a test's own
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))
            status = main(list(words))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = wait(child, limit, meanwhile)
    ended = Ended(status, out.read_text(errors="replace"), err.read_text(errors="replace"))
    for path in (out, err):
        path.unlink()
    return ended


def wait(child: int, limit: float, meanwhile: Callable[[], object] | None = None) -> int | None:
    """A child's exit status, negative for a signal; None, and its whole group killed, after `limit` seconds."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < limit:
        if meanwhile and waited > PATIENCE:
            meanwhile()
            meanwhile = None
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(code)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def judge(ended: Ended, *, same: bool, names: Sequence[str] = (), checked: bool = True) -> tuple[Fate, str]:
    """The outcome of a trial, and the output of a failure.

    `same`: whether the result is the same as without damage; `names`: words, one of which a refusal must contain;
    `checked`: whether a checksum or a reader's check must detect every change.
    """
    said = f"exit {ended.status}\n{ended.out[-SAID:]}\n{ended.err[-SAID:]}"
    if ended.status is None:
        return "hang", said
    if ended.traced:
        return "trace", said
    if ended.status != 0:
        named = not names or any(name in ended.err or name in ended.out for name in names)
        return ("named", "") if named else ("vague", said)
    if same:
        return "survived", ""
    return ("silent", said) if checked else ("as written", "")


def copy(good: Path, folder: Path) -> Path:
    """A fresh copy of the undamaged folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder, symlinks=True)
    return folder
