"""Exit statuses of a run's processes, and their errors.

0    trained to the last step
1    an exception; its stack trace is printed above
2    an error in the recipe, the data or the command line
69   a rank hung or never arrived
70   crashed three times (guards.restarts) without a new checkpoint in between
71   out of memory, on the device or the host; the cause and the remedies are printed
74   the last checkpoint could not be written
75   stopped by a signal, everything saved: start again with --resume
76   replicas differ
77   another run has taken over the run directory
78   a step differs from its recomputation on one process (guards.verify_every)
128 + n   ended at once by signal n

69 to 78 are named in BSD's sysexits.h; none of them is given by a shell or by a signal. 75 is EX_TEMPFAIL, "try again".
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from meshwright.spec.errors import OneLine

MISUSE = 2
STUCK = 69
CRASH_LOOP = 70
OUT_OF_MEMORY = 71
UNSAVED = 74
STOPPED = 75
DIFFERING = 76
LOCK_LOST = 77
MISCOMPUTED = 78

FINAL = (0, MISUSE, OUT_OF_MEMORY, UNSAVED, STOPPED, LOCK_LOST, MISCOMPUTED)
"""Statuses after which a restart would not help, or is left to the user."""


class RunError(RuntimeError):
    """A run that cannot continue; `status` is the exit status."""

    status = 1


class StuckError(RunError):
    """A rank hangs, or never arrived."""

    status = STUCK


class OutOfMemoryError(RunError):
    """A rank ran out of memory; the message is a page about it."""

    status = OUT_OF_MEMORY


class UnsavedError(RunError):
    """The last checkpoint could not be written."""

    status = UNSAVED


class ReplicasDifferError(RunError):
    """Tensors that should be equal on several ranks are not."""

    status = DIFFERING


class VerificationError(RunError):
    """A step differs from its recomputation on one process, or could not be recomputed."""

    status = MISCOMPUTED


class TrainingFailed(OneLine, RuntimeError):  # noqa: N818  (it names what happened, not a kind of error)
    """Some rank ended the run; its message has been printed. `status` is the exit status to pass on."""

    def __init__(self, status: int) -> None:
        super().__init__(f"training ended with status {status}")
        self.status = status


class TrainingStopped(OneLine, KeyboardInterrupt):
    """A signal ended the run; `status` is `STOPPED` if everything is saved. The message says how to go on, if this
    process is the one to say it."""

    def __init__(self, status: int, remark: str = "") -> None:
        super().__init__(remark)
        self.status = status


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run this rank's program and end without an orderly teardown, in which gloo's threads may abort the process.

    An error is printed here: Python's own end waits for NCCL, which may wait for the other ranks, and they for it.
    """
    status = 1
    try:
        status = main()
    except SystemExit as end:  # of argparse
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
