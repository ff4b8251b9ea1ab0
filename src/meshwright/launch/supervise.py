"""The supervisor of worker processes: starts them, forwards signals, restarts them, gives up.

If launchers of several machines share a run, they decide together (`launchers.py`): all end their workers, then either
all restart them or none does.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from meshwright.checkpoint.manifest import checkpoint_name, list_checkpoints, step_of
from meshwright.launch.forkserver import Process
from meshwright.launch.launchers import POLL_SECONDS, Launchers, RestartDecision, VerdictWatch
from meshwright.launch.memory import MemoryWatch
from meshwright.launch.signals import STOP_SIGNALS, StopRequest, signal_name
from meshwright.launch.status import CRASH_LOOP, FINAL, OUT_OF_MEMORY, STOPPED, TrainingStopped
from meshwright.storage.scratch import scratch_folder

LAST_WORDS_SECONDS = 2.0
"""Time for the other workers to report after one has failed: often all fail for the same reason."""
LEAVE_SECONDS = 30.0
"""Time for workers to exit after another has exited on a signal."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """The conditions for restarting failed workers."""

    run_dir: Path | None
    """Folder of checkpoints and journal; None for work that cannot be resumed."""
    restarts: int = 0
    """Restarts allowed in a row without a new checkpoint."""
    stepped: Callable[[float], bool] = lambda since: False
    """Whether a training step was recorded since a time, in seconds since the epoch: workers that crash before the
    first step are not restarted."""
    explain_kill: Callable[[int, int, int], str] | None = None
    """An addition to the message about a rank that the kernel killed for lack of memory: (rank, bytes held, bytes
    there)."""
    restarts_killed: bool = True
    """Whether such a rank is restarted like any crashed one."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The workers of this machine."""

    command: list[str]
    environments: Callable[[int], list[dict[str, str]]]
    """Returns the environment of each local worker for an attempt's number."""
    policy: RestartPolicy
    store: dist.Store
    """Shared by the launchers of all machines."""
    node: int = 0
    """This machine's number."""
    nodes: int = 1
    inherited: tuple[int, ...] = ()
    """File descriptors that workers inherit."""
    start: Callable[..., Process] = subprocess.Popen
    """Starts a command with `env` and `pass_fds`."""


def supervise(spec: WorkerSpec, stop: StopRequest) -> int:
    """Run the workers until all have succeeded or the supervisor gives up; returns the exit status."""
    launchers = Launchers(spec.store, spec.node, spec.nodes)
    attempt, verdict = 0, RestartDecision(0, reached=_newest_step(spec.policy.run_dir))
    try:
        stop.running()
        while failure := _run_attempt(spec, launchers, attempt, stop):
            verdict = launchers.decide(attempt, _judge(spec, attempt, failure, verdict))
            _say(verdict.message)
            if verdict.again and stop.number:
                launchers.withdraw(attempt)
                break
            if verdict.again:
                verdict = launchers.meet(attempt + 1, verdict)
                _say(verdict.message, verdict.again)
            if not verdict.again:
                break
            attempt += 1
    except BaseException:
        launchers.withdraw(attempt)
        launchers.leave(attempt, at_once=True)
        raise
    launchers.leave(attempt)
    return verdict.status if failure else 0


def _say(*lines: str) -> None:
    for line in filter(None, lines):
        print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Failure:
    began: float
    status: int
    message: str


def _run_attempt(spec: WorkerSpec, launchers: Launchers, attempt: int, stop: StopRequest) -> _Failure | None:
    """Start the workers once and wait until they have ended; returns the first failure, if any."""
    began = time.time()
    again = ["--resume", "auto"] if attempt else []
    with scratch_folder("workers") as folder:
        workers: list[_Worker] = []
        memory = MemoryWatch()
        try:
            for environment in spec.environments(attempt):
                last_words = folder / environment["RANK"]
                environment = {**environment, "TORCHELASTIC_ERROR_FILE": str(last_words)}
                process = spec.start([*spec.command, *again], env=environment, pass_fds=spec.inherited)
                workers.append(_Worker(int(environment["RANK"]), process, last_words, memory, spec))
            failed = _wait(workers, launchers.watch(attempt), stop)
        except TrainingStopped:
            _kill(workers)
            raise
        return failed and _Failure(began, failed.status, failed.message)


@dataclass
class _Worker:
    rank: int
    process: Process
    last_words: Path
    memory: MemoryWatch
    spec: WorkerSpec

    @property
    def status(self) -> int:
        """Exit status; a worker that a stop signal ended before it could handle it counts as stopped."""
        code = self.process.returncode
        if not self.spec.policy.restarts_killed and self.lack_of_memory:
            return OUT_OF_MEMORY
        if -code in STOP_SIGNALS:
            return STOPPED
        return code if code >= 0 else 128 - code

    @property
    def lack_of_memory(self) -> str:
        """Why the kernel most likely killed it; empty if it did not, or not for memory."""
        killed = self.process.returncode == -signal.SIGKILL
        return self.memory.explain(self.process.pid) if killed else ""

    @property
    def message(self) -> str:
        if self.last_words.exists():
            return "error: " + json.loads(self.last_words.read_text())["message"]
        code = self.process.returncode
        if code < 0:
            cause, explain = self.lack_of_memory, self.spec.policy.explain_kill
            more = "\n" + explain(self.rank, *self.memory.of(self.process.pid)) if cause and explain else ""
            return f"error: rank {self.rank} was killed by {signal_name(-code)}{cause}{more}"
        return f"error: rank {self.rank} ended with status {code}; see its messages above"


def _wait(workers: list[_Worker], elsewhere: VerdictWatch, stop: StopRequest) -> _Worker | None:
    """Wait until all workers have ended; returns the first that failed. The rest are made to follow it."""
    forwarded, failed, deadline = False, None, float("inf")
    while None in [worker.process.poll() for worker in workers]:
        for worker in workers:
            worker.memory.look(worker.process.pid)
        if stop.number and not forwarded:
            forwarded = True
            _send(workers, stop.number)
        if failed is None and (failed := _first_failure(workers)):
            deadline = time.monotonic() + LAST_WORDS_SECONDS
        if failed is None and elsewhere.given:
            deadline = 0.0
        if time.monotonic() > deadline:
            if failed is not None and failed.status == STOPPED and not forwarded:
                forwarded, deadline = True, time.monotonic() + LEAVE_SECONDS
                _send(workers, signal.SIGTERM)
            else:
                _kill(workers)
        time.sleep(POLL_SECONDS)
    elsewhere.over = True
    return failed or _first_failure(workers)  # all may have ended between two polls


def _first_failure(workers: list[_Worker]) -> _Worker | None:
    """The worker that failed first: of several, one that stopped, was killed, or has a specific status; the others only
    lost their connection, which is status 1."""
    ended = [worker for worker in workers if worker.process.returncode]

    def rank(worker: _Worker) -> tuple[bool, bool, int]:
        code = worker.process.returncode
        return worker.status != STOPPED, code == 1, code

    return min(ended, key=rank, default=None)


def _send(workers: list[_Worker], number: int) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.send_signal(number)


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
        worker.process.wait()


def _judge(spec: WorkerSpec, attempt: int, failure: _Failure, before: RestartDecision) -> RestartDecision:
    """Whether to restart after `failure`."""
    reached = _newest_step(spec.policy.run_dir)
    fruitless = 1 if reached > before.reached else before.fruitless + 1
    trained = attempt > 0 or spec.policy.stepped(failure.began)
    again, status, message = "", failure.status, failure.message
    if status == STOPPED:
        message = ""  # the process that started the job reports the checkpoint to resume from
    elif status not in FINAL and status - 128 not in STOP_SIGNALS and trained and (allowed := spec.policy.restarts):
        newest = f"the newest checkpoint is {checkpoint_name(reached) if reached else 'none'}"
        if fruitless <= allowed:
            again = f"starting again ({fruitless} of {allowed} without a new checkpoint); {newest}"
        else:
            status = CRASH_LOOP
            message += f"\nerror: giving up after {allowed} restarts without a new checkpoint; {newest}"
    return RestartDecision(status, message, again, fruitless, reached)


def after_stop(run_dir: Path) -> str:
    """What to do after a stop."""
    newest = _newest_step(run_dir)
    if not newest:
        return "stopped before the first checkpoint; start again without --resume"
    return f"stopped; continue with --resume (newest checkpoint: {checkpoint_name(newest)})"


def _newest_step(run_dir: Path | None) -> int:
    """Step of the newest checkpoint; 0 if none exists."""
    published = list_checkpoints(run_dir / "checkpoints") if run_dir else []
    return step_of(published[-1]) if published else 0
