"""A run from recipe to result: prepare, start the ranks, train, report."""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.callbacks import Callback
from meshwright.checkpoint.manifest import CheckpointError, list_checkpoints
from meshwright.data.plugged import has_datasets
from meshwright.launch.launcher import WORKER, Worker, find_nodes, find_worker, start_workers
from meshwright.launch.signals import StopRequest, end_with
from meshwright.launch.status import STOPPED, OutOfMemoryError, RunError, TrainingFailed, TrainingStopped
from meshwright.launch.supervise import RestartPolicy, after_stop
from meshwright.machine import find_machine
from meshwright.models import Model
from meshwright.objectives import Objective
from meshwright.pages.view import RunsPage
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import plugged_in
from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import ResolvedRun, Run
from meshwright.storage.lock import Lock
from meshwright.storage.scratch import scratch_folder
from meshwright.trainer.corpus import (
    check_corpus,
    corpus_of,
    with_datasets,
)
from meshwright.trainer.display import ProgressLine, following
from meshwright.trainer.folder import RESOLVED, run_lock, write_run_files
from meshwright.trainer.metrics import History, read_journal, stepped_since
from meshwright.trainer.origin import command_line
from meshwright.trainer.out_of_memory import (
    Attempts,
    page_of_killed,
    print_error,
    shortage,
    was_killed,
)
from meshwright.trainer.plugins import Plugins, write_plugins
from meshwright.trainer.rank import train_rank
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.start import check_start, require_plugins
from meshwright.trainer.state import AUTO, NEWEST, check_continues, choose_checkpoint


@dataclass(frozen=True)
class TrainResult:
    """The result of a run, read back from its `metrics.jsonl`."""

    run_dir: Path
    checkpoint: Path
    """The last checkpoint."""
    step: int
    loss: float
    """Mean loss per token of the last step's global batch, in nats."""
    held_out_loss: float | None
    """The last evaluation's; None if there was none."""
    history: History = field(repr=False)
    """Every record of `metrics.jsonl`, including records from before a resume."""

    def plot(self) -> RunsPage:
        """The run's page, which a notebook shows below its cell. Raises `UserError` if uPlot is not installed."""
        return RunsPage([self.run_dir])


def train(
    run: Run | Path | str,
    *,
    resume: bool | str = False,
    base_dir: Path | str | None = None,
    wait_for_lock: float = 0.0,
    callbacks: Sequence[Callback] = (),
    lr_schedule: Callable[[int, int], float] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    objective: Objective | None = None,
    dataset: Iterable[Any] | None = None,
    model: type[Model] | None = None,
    retry_oom: bool = False,
) -> TrainResult:
    """Train `run`, or the recipe in a file, to its last step, on the processes of its layout.

    Under torchrun, Slurm or Kubeflow this process is already one of them; otherwise it starts them. Paths in the recipe
    are relative to `base_dir`, by default the recipe file's folder. `resume` continues from the newest checkpoint in
    `run.run_dir` (True), from a named one, or (`auto`) from the newest good one if any. One in use is waited
    for `wait_for_lock` seconds. With `retry_oom`, a run out of memory restarts with the first change that fits.

    Plug-ins (docs/plugins.md) replace the recipe's settings. `callbacks` are called in order, after the recipe's.
    `lr_schedule(step, steps)` returns the factor of the peak learning rate at a step from 1 to `steps`. `optimizer` is
    a subclass of `torch.optim.Optimizer`, called with parameter groups and the recipe's `lr`. `objective` is minimised.
    `dataset` yields texts, records or token ids, trained in its order. `model` is a class; the recipe gives its sizes.
    Worker processes receive copies, so classes and functions must be importable.

    Raises `UserError` for errors that the user can fix, `TrainingFailed` if the error has been printed already, and
    `TrainingStopped`, a `KeyboardInterrupt`, if a signal ended the run.
    """
    plugins = Plugins(tuple(callbacks), lr_schedule, optimizer, objective, model, dataset)
    recipe = run if isinstance(run, Run) else load_recipe(run)
    folder = Path(base_dir or recipe.file.folder).resolve()
    run, worker = plugins.named_in(recipe), find_worker()
    end_with(worker.parent if worker else 0)
    again = worker is not None and worker.attempt > 0  # torchrun starts the same command again
    which = AUTO if again else NEWEST if resume is True else resume or None
    attempts = Attempts(run, which, retry=retry_oom, alone=worker is None)
    with StopRequest(raises=worker is None) as stop, plugged_in(plugins.objects()):
        try:
            with run_lock(Path(run.run_dir), wait_for_lock) if _writes(worker) else nullcontext() as lock:
                for run, which in attempts:
                    if lock:
                        _check_run_dir(Path(run.run_dir), which)
                    resolved = _resolve(run, folder, None if worker else which)
                    try:
                        if worker is None and _needs_workers(resolved, plugins):
                            launch = Launch(stop, lock, restarts_killed=not retry_oom)
                            attempts.status = train_in_workers(resolved, launch, which, plugins)
                        else:
                            attempts.status = train_rank(resolved, worker or Worker(), stop, which, plugins)
                    except OutOfMemoryError as error:
                        attempts.status = print_error(error)
        except RunError as error:
            attempts.status = print_error(error)
        except TrainingStopped as stopped:
            if stopped.status != STOPPED:
                raise
            attempts.status = STOPPED
    return _result(Path(run.run_dir), attempts.status, writes=_writes(worker))


def _result(run_dir: Path, status: int, *, writes: bool) -> TrainResult:
    """The result of a run that ended with this exit status, or the error that it means."""
    if status == STOPPED:
        raise TrainingStopped(status, after_stop(run_dir) if writes else "")
    if status:
        raise TrainingFailed(status)
    return read_result(run_dir)


def _writes(worker: Worker | None) -> bool:
    """Whether this process takes the lock of its run's directory."""
    return worker.rank == 0 if worker else find_nodes().rank == 0


def _resolve(run: Run, base_dir: Path, resume: str | None) -> ResolvedRun:
    """The run with every `auto` resolved, if it can start, and can continue from `resume`."""
    require_plugins(run)
    resolved = resolve_run(with_datasets(run, base_dir), base_dir=base_dir)
    if has_datasets(run.data):
        resolved = resolved.model_copy(update={"given": run})
    resolved = resolved.model_copy(update={"command": command_line()})
    check_start(resolved)
    if resume and resume != AUTO:
        check_continues(resolved, Path(run.run_dir) / "checkpoints", resume)
    return resolved


@dataclass(frozen=True)
class Launch:
    """How this process starts workers and watches over them."""

    stop: StopRequest
    lock: Lock | None
    """The run directory's lock, if this process holds it."""
    restarts_killed: bool
    """Whether a worker that the kernel killed is started again without a change."""


def train_in_workers(resolved: ResolvedRun, launch: Launch, resume: str | None, plugins: Plugins) -> int:
    """Train in one process per rank; returns the exit status."""
    run, run_dir = resolved.run, Path(resolved.run.run_dir)
    # Once here, so that errors are raised before any process starts.
    with ProgressLine() as progress:
        corpus = corpus_of(resolved, progress)
    check_corpus(resolved, corpus, resume)
    # The run directory's own files are written after the ranks have begun: a refused run leaves it untouched.
    with scratch_folder("run") as folder:
        write_run_files(resolved, folder)
        arguments = ["--resolved", str(folder / RESOLVED), *(["--resume", resume] if resume else [])]
        arguments += write_plugins(plugins, folder)
        with following(run_dir / "metrics.jsonl", run.training.steps) as shown:
            arguments += ["--steps-shown"] if shown else []
            policy = RestartPolicy(
                run_dir=run_dir,
                restarts=run.guards.restarts,
                stepped=functools.partial(stepped_since, run_dir / "metrics.jsonl"),
                explain_kill=functools.partial(page_of_killed, resolved, run_dir),
                restarts_killed=launch.restarts_killed,
            )
            inherited = [launch.lock.inherited] if launch.lock else []
            return start_workers(run, find_nodes(), [WORKER, *arguments], launch.stop, policy, inherited)


def _needs_workers(resolved: ResolvedRun, plugins: Plugins) -> bool:
    """Whether the run needs several ranks, or a launcher that outlives its only rank: a run without plug-in objects
    that is predicted to need more memory than the host has, or that the kernel has killed before."""
    run = resolved.run
    if run.layout.world_size > 1 or find_nodes().count > 1:
        return True
    if plugins.given or find_machine(run.device).kind != "cpu":
        return False
    return bool(shortage(resolved)) or was_killed(Path(run.run_dir))


def read_result(run_dir: Path) -> TrainResult:
    """The result of the run in `run_dir`; raises `UserError` if it has no finished step."""
    records = read_journal(run_dir / "metrics.jsonl")
    last = {record["kind"]: record for record in records}
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    if "step" not in last and checkpoints:
        raise UserError(
            f"{run_dir}/metrics.jsonl contains no step: it was removed or damaged; {checkpoints[-1].name} exists"
        )
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: the folder was removed during the run")
    if "step" not in last:
        raise UserError(f"{run_dir}: contains no trained step")
    if not checkpoints:
        raise CheckpointError(f"{run_dir}: contains no checkpoint")
    return TrainResult(
        run_dir=run_dir,
        checkpoint=checkpoints[-1],
        step=last["step"]["step"],
        loss=last["step"]["loss"],
        held_out_loss=last["evaluation"]["loss"] if "evaluation" in last else None,
        history=History(records),
    )


def _check_run_dir(run_dir: Path, resume: str | None) -> None:
    """Raise `UserError` if the run would overwrite another's checkpoints."""
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    if checkpoints and not resume:
        raise UserError(
            f"{run_dir} already contains a run (up to {checkpoints[-1].name}); continue it with --resume, or choose "
            "another run_dir"
        )
    if resume == NEWEST and not checkpoints:
        raise CheckpointError(f"{run_dir}: no checkpoint to continue from; start without --resume")
    if resume and resume not in (NEWEST, AUTO):
        choose_checkpoint(run_dir / "checkpoints", resume)
