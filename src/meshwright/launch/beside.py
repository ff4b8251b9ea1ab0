"""A process that runs alongside a rank, on its machine."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class Beside:
    """A module of this package that runs as a separate process until it ends or is stopped. It must exit with its
    parent (`signals.end_with`), whose process id it receives as `--parent`."""

    def __init__(self, module: str, words: Sequence[str], log: Path) -> None:
        """Start `python -m module words...`; its output goes to `log`."""
        self.log = log
        command = [sys.executable, "-m", module, *words, "--parent", str(os.getpid())]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The last line that it printed."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"ended with status {self.status} and without a message"

    def end(self) -> None:
        """End it if it is still running."""
        self._process.kill()
        self._process.wait()
