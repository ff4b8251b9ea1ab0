"""What a step of the acceptance finds, and where it works."""

import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """One thing that a step looked at."""

    name: str
    passed: bool | None
    """None: not a test; a figure, or something that this machine cannot do."""
    detail: str
    """The figures, and what was expected of them, in words."""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a step works: the device's type, and the folders that it uses."""

    device: str
    """The recipe's `device`: cuda or cpu."""
    work: Path
    """Folder of recipes and runs, which steps share."""
    references: Path | None = None
    """File with figures of a CPU, made elsewhere (`meshwright accept --references`)."""
    nanogpt: Path | None = None
    """Folder of nanoGPT's code."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU. On a CPU, steps rehearse themselves with tiny shapes."""
        return self.device != "cpu"

    def options(self) -> list[str]:
        """The command line that gives a step's process this place."""
        words = ["--device", self.device, "--work", str(self.work)]
        for option, path in (("--references", self.references), ("--nanogpt", self.nanogpt)):
            words += [option, str(path)] if path is not None else []
        return words


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    status: int
    output: str
    seconds: float

    def check(self, name: str, *, status: int = 0) -> Check:
        """Whether it ended with this status; the end of its output if it did not."""
        passed = self.status == status
        detail = f"exit status {self.status} after {self.seconds:.0f} s"
        return Check(name, passed, detail if passed else f"{detail}, expected {status}:\n{self.output[-1500:]}")


def meshwright(*words: object) -> Ended:
    """Run a verb to its end in a process of its own."""
    began = time.monotonic()
    ended = subprocess.run(
        command(*words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, time.monotonic() - began)


def command(*words: object) -> list[str]:
    """The command line of a verb."""
    return [sys.executable, "-P", "-m", "meshwright", *map(str, words)]


def tried(make: Callable[..., Check], name: str, *arguments: Any, **options: Any) -> Check:
    """`make(name, ...)`; an exception fails this check alone."""
    try:
        return make(name, *arguments, **options)
    except Exception:
        return Check(name, passed=False, detail=traceback.format_exc()[-2000:])


def within(name: str, difference: float, allowed: float, what: str = "largest difference") -> Check:
    """Whether a difference is within what is allowed; NaN is not."""
    passed = math.isfinite(difference) and difference <= allowed
    return Check(name, passed, f"{what} {difference:.1e}, allowed {allowed:.1e}", {"difference": difference})


def write_check(check: Check, file: Path) -> None:
    """Append a check to a step's results at once, so that it survives the process."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(check)) + "\n")


def read_checks(file: Path) -> list[Check]:
    """The checks that a step has written."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Check(**json.loads(line)) for line in lines]
