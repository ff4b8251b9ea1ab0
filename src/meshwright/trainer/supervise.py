"""The one place that looks after worker processes: starts them, passes signals on, starts them again, gives up.

Where the launchers of several machines share a run, the first that sees a worker fail decides for all, through the
store: all end their workers, and all start them again or none.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from meshwright.checkpoint.manifest import checkpoint_name, list_checkpoints, step_of
from meshwright.trainer.metrics import read_journal
from meshwright.trainer.signals import STOP_SIGNALS, StopRequest
from meshwright.trainer.status import CRASH_LOOP, FINAL, STOPPED, TrainingStopped

POLL_SECONDS = 0.1
LAST_WORDS_SECONDS = 2.0
"""How long the others have, when one worker has failed, to say what they know: often all fail by the same mistake."""
LEAVE_SECONDS = 30.0
"""How long workers have to leave when another has left by a signal."""


@dataclass(frozen=True)
class Job:
    """What is to be run on this machine, and how often."""

    command: list[str]
    environments: Callable[[int], list[dict[str, str]]]
    """From the number of the attempt to the environment of each local worker."""
    run_dir: Path | None
    """Where checkpoints and journal are; None for work that keeps nothing to continue from."""
    restarts: int
    """Allowed in a row without a new checkpoint."""
    store: dist.Store
    """Shared by the launchers of all machines."""
    nodes: int = 1


@dataclass(frozen=True)
class Verdict:
    """What happens after an attempt that failed, on every machine."""

    again: bool
    status: int
    fruitless: int
    """Attempts in a row without a new checkpoint."""
    reached: int
    """Step of the newest checkpoint."""
    message: str


def supervise(job: Job, stop: StopRequest) -> int:
    """Run the job's workers until all have ended well, or for good; returns the exit status."""
    stop.running()
    attempt, verdict = 0, Verdict(True, 0, 0, _newest_step(job.run_dir), "")
    while True:
        failure = _run_attempt(job, attempt, stop)
        if failure is None:
            return 0
        key = f"verdict-{attempt}"
        mine = json.dumps(asdict(_judge(job, attempt, failure, verdict)))
        verdict = Verdict(**json.loads(job.store.compare_set(key, "", mine)))
        if verdict.message:
            print(verdict.message, file=sys.stderr, flush=True)
        if not verdict.again or stop.number:
            if job.nodes > 1:
                time.sleep(LAST_WORDS_SECONDS)  # until the other launchers have read it
            return verdict.status
        attempt += 1


@dataclass(frozen=True)
class _Failure:
    began: float
    status: int
    message: str


def _run_attempt(job: Job, attempt: int, stop: StopRequest) -> _Failure | None:
    """Start the workers once and wait until they have ended; what failed first, if anything did."""
    began = time.time()
    again = ["--resume", "auto"] if attempt else []
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        workers: list[_Worker] = []
        try:
            for environment in job.environments(attempt):
                last_words = Path(folder) / environment["RANK"]
                environment = {**environment, "TORCHELASTIC_ERROR_FILE": str(last_words)}
                process = subprocess.Popen([*job.command, *again], env=environment)
                workers.append(_Worker(int(environment["RANK"]), process, last_words))
            failed = _wait(workers, job.store, f"verdict-{attempt}", stop)
        except TrainingStopped:
            _kill(workers)
            raise
        return failed and _Failure(began, failed.status, failed.message)


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    last_words: Path

    @property
    def status(self) -> int:
        """Exit status; a worker that a stop signal ended before it could listen has stopped like the others."""
        code = self.process.returncode
        if -code in STOP_SIGNALS:
            return STOPPED
        return code if code >= 0 else 128 - code

    @property
    def message(self) -> str:
        if self.last_words.exists():
            return "error: " + json.loads(self.last_words.read_text())["message"]
        code = self.process.returncode
        if code < 0:
            return f"error: rank {self.rank} was killed by {signal.Signals(-code).name}"
        return f"error: rank {self.rank} ended with status {code}; its messages stand above"


def _wait(workers: list[_Worker], store: dist.Store, verdict: str, stop: StopRequest) -> _Worker | None:
    """Until all workers have ended; returns the one that failed first. The rest are made to follow it."""
    forwarded, failed, deadline = False, None, float("inf")
    while None in [worker.process.poll() for worker in workers]:
        if stop.number and not forwarded:
            forwarded = True
            _send(workers, stop.number)
        if failed is None and (failed := _first_failure(workers)):
            deadline = time.monotonic() + LAST_WORDS_SECONDS
        if failed is None and store.check([verdict]):
            deadline = 0.0  # workers elsewhere have failed
        if time.monotonic() > deadline:
            if failed is not None and failed.status == STOPPED and not forwarded:
                forwarded, deadline = True, time.monotonic() + LEAVE_SECONDS
                _send(workers, signal.SIGTERM)
            else:
                _kill(workers)
        time.sleep(POLL_SECONDS)
    return failed or _first_failure(workers)  # all may have ended between two looks


def _first_failure(workers: list[_Worker]) -> _Worker | None:
    """The worker that began it: of several that have ended, one that stopped or was killed; the others only lost it."""
    ended = [worker for worker in workers if worker.process.returncode]
    return min(ended, key=lambda worker: (worker.status != STOPPED, worker.process.returncode), default=None)


def _send(workers: list[_Worker], number: int) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(number)


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
        worker.process.wait()


def _judge(job: Job, attempt: int, failure: _Failure, before: Verdict) -> Verdict:
    """Whether to start again after `failure`."""
    reached = _newest_step(job.run_dir)
    fruitless = 1 if reached > before.reached else before.fruitless + 1
    trained = attempt > 0 or (job.run_dir is not None and _stepped(job.run_dir, failure.began))
    again, status, message = False, failure.status, failure.message
    if status == STOPPED:
        message = ""  # whoever started the job says what there is to continue from
    elif status not in FINAL and status - 128 not in STOP_SIGNALS and trained and job.restarts:
        again = fruitless <= job.restarts
        newest = f"the newest checkpoint is {checkpoint_name(reached) if reached else 'none'}"
        if again:
            message += f"\nstarting again ({fruitless} of {job.restarts} without a new checkpoint); {newest}"
        else:
            status = CRASH_LOOP
            message += f"\nerror: giving up after {job.restarts} restarts without a new checkpoint; {newest}"
    return Verdict(again, status, fruitless, reached, message)


def after_stop(run_dir: Path) -> str:
    """What to do after a stop."""
    newest = _newest_step(run_dir)
    if not newest:
        return "stopped before the first checkpoint; start again without --resume"
    return f"stopped; continue with --resume (newest checkpoint: {checkpoint_name(newest)})"


def _stepped(run_dir: Path, since: float) -> bool:
    journal = read_journal(run_dir / "metrics.jsonl")
    return any(record["kind"] == "step" and record["time"] >= since for record in journal)


def _newest_step(run_dir: Path | None) -> int:
    """Step of the newest checkpoint; 0 where there is none."""
    published = list_checkpoints(run_dir / "checkpoints") if run_dir else []
    return step_of(published[-1]) if published else 0
