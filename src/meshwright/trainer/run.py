"""A run from recipe to result: prepare, start the ranks, train, report."""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.callbacks import Callback, named_callbacks
from meshwright.checkpoint.manifest import CheckpointError, list_checkpoints
from meshwright.comm.objects import gather_everywhere
from meshwright.data.plugged import has_datasets
from meshwright.data.prepare import Corpus, prepare_corpus
from meshwright.launch.launcher import WORKER, Worker, find_nodes, find_worker, join_all, leave_group, start_workers
from meshwright.launch.memory import host_pressure, memory_room, resident
from meshwright.launch.signals import StopRequest, end_with, signal_name
from meshwright.launch.status import STOPPED, RunError, TrainingFailed, TrainingStopped
from meshwright.launch.supervise import RestartPolicy, after_stop
from meshwright.models import Model
from meshwright.objectives import Objective
from meshwright.pages.view import RunsPage
from meshwright.plan.machine import find_machine
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import plugged_in
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.run import ResolvedRun, Run
from meshwright.storage.durable import write_durably
from meshwright.storage.lock import Lock
from meshwright.storage.scratch import scratch_folder
from meshwright.terminal import printable
from meshwright.trainer.banner import banner
from meshwright.trainer.device import free_all
from meshwright.trainer.display import Display, ProgressLine, following
from meshwright.trainer.loop import train_loop
from meshwright.trainer.metrics import History, MetricsJournal, read_journal, stepped_since
from meshwright.trainer.origin import command_line, describe_environment, describe_origin
from meshwright.trainer.out_of_memory import (
    check_retry,
    is_out_of_memory,
    moment_of,
    page_of,
    page_of_killed,
    shortage,
    train_again,
    was_killed,
)
from meshwright.trainer.plugins import Plugins, all_callbacks, open_trackers, write_plugins
from meshwright.trainer.reference import with_references
from meshwright.trainer.replicas import ReplicaGuard
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.samples import SampleTexts
from meshwright.trainer.session import Outputs, Session
from meshwright.trainer.setup import Trainer, build_trainer, find_place, write_json
from meshwright.trainer.start import (
    PLAN,
    RECIPE,
    RESOLVED,
    TOKENIZER,
    check_objective,
    check_start,
    check_tokenizer,
    check_vocabulary,
    require_plugins,
    run_lock,
    starting_model,
    with_datasets,
)
from meshwright.trainer.state import AUTO, NEWEST, begin, check_continues, choose_checkpoint, seed_generators
from meshwright.trainer.tasks import TaskCallback
from meshwright.trainer.verification import VerifyGuard


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
    run: Run,
    *,
    resume: bool | str = False,
    base_dir: Path | str = ".",
    wait_for_lock: float = 0.0,
    callbacks: Sequence[Callback] = (),
    lr_schedule: Callable[[int, int], float] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    objective: Objective | None = None,
    dataset: Iterable[Any] | None = None,
    model: type[Model] | None = None,
    retry_oom: bool = False,
) -> TrainResult:
    """Train `run` to its last step, on the processes of its layout.

    Under torchrun, Slurm or Kubeflow this process is already one of them; otherwise it starts them. Paths in the recipe
    are relative to `base_dir`. `resume` continues from the newest checkpoint in `run.run_dir` (True), from a named one,
    or (`auto`) from the newest good one if there is any. Only one run may use a run directory: if another run does,
    this one waits `wait_for_lock` seconds for its end, then raises an error. With `retry_oom`, a run that runs out of
    memory restarts from its newest checkpoint, with the first change that would fit.

    Plug-ins (docs/plugins.md) replace the recipe's settings. `callbacks` are called in order, after the recipe's.
    `lr_schedule(step, steps)` returns the factor of the peak learning rate at a step from 1 to `steps`. `optimizer` is
    a subclass of `torch.optim.Optimizer`, called with parameter groups and the recipe's `lr`. `objective` is minimised.
    `dataset` yields texts, records or token ids, trained in its order. `model` is a class; the recipe gives its sizes.
    Worker processes receive copies, so classes and functions must be importable.

    Raises `UserError` for errors that the user can fix, `TrainingFailed` if the error has been printed already, and
    `TrainingStopped`, a `KeyboardInterrupt`, if a signal ended the run.
    """
    plugins = Plugins(tuple(callbacks), lr_schedule, optimizer, objective, model, dataset)
    run, worker = plugins.named_in(run), find_worker()
    end_with(worker.parent if worker else 0)
    which = NEWEST if resume is True else resume or None
    if worker is not None and worker.attempt:
        which = AUTO  # torchrun starts the same command again
    check_retry(retry_oom, alone=worker is None)
    with StopRequest(raises=worker is None) as stop, plugged_in(plugins.objects()):
        try:
            with run_lock(Path(run.run_dir), wait_for_lock) if _writes(worker) else nullcontext() as lock:
                context = _Context(plugins, Path(base_dir).resolve(), worker, stop, lock, retry_oom)
                status = train_again(functools.partial(_train, context), run, which, retry=retry_oom)
        except RunError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            status = error.status
        except TrainingStopped as stopped:
            if stopped.status != STOPPED:
                raise
            status = STOPPED
    if status == STOPPED:
        if _writes(worker):
            print(after_stop(Path(run.run_dir)), file=sys.stderr)
        raise TrainingStopped(status)
    if status:
        raise TrainingFailed(status)
    return read_result(Path(run.run_dir))


def _writes(worker: Worker | None) -> bool:
    """Whether this process takes the lock of its run's directory."""
    return worker.rank == 0 if worker else find_nodes().rank == 0


@dataclass(frozen=True)
class _Context:
    """State that survives a restart with a change."""

    plugins: Plugins
    base_dir: Path
    worker: Worker | None
    stop: StopRequest
    lock: Lock | None
    """The run directory's lock, if this process holds it."""
    retry_oom: bool


def _train(context: _Context, run: Run, resume: str | None) -> int:
    """Train, here or in workers; returns the exit status."""
    plugins, base_dir, worker = context.plugins, context.base_dir, context.worker
    stop, lock, run_dir = context.stop, context.lock, Path(run.run_dir)
    if lock:
        _check_run_dir(run_dir, resume)
    require_plugins(run)
    resolved = resolve_run(with_datasets(run, base_dir), base_dir=base_dir)
    if has_datasets(run.data):
        resolved = resolved.model_copy(update={"asked": run})
    resolved = resolved.model_copy(update={"command": command_line()})
    check_start(resolved)
    if worker is None and resume and resume != AUTO:
        check_continues(resolved, run_dir / "checkpoints", resume)
    if worker is None and _needs_workers(resolved, plugins):
        # Once here, so that errors are raised before any process starts.
        with ProgressLine() as progress:
            corpus = corpus_of(resolved, progress)
        _check_corpus(resolved, corpus, resume)
        # The run directory's own files are written after the ranks have begun: a refused run leaves it untouched.
        with scratch_folder("run") as folder:
            write_run_files(resolved, folder)
            arguments = ["--resolved", str(folder / RESOLVED), *(["--resume", resume] if resume else [])]
            arguments += write_plugins(plugins, folder)
            with following(run_dir / "metrics.jsonl", resolved.run.training.steps):
                policy = RestartPolicy(
                    run_dir=run_dir,
                    restarts=run.guards.restarts,
                    stepped=functools.partial(stepped_since, run_dir / "metrics.jsonl"),
                    explain_kill=functools.partial(page_of_killed, resolved, run_dir),
                    restarts_killed=not context.retry_oom,
                )
                inherited = [lock.inherited] if lock else []
                return start_workers(resolved.run, find_nodes(), [WORKER, *arguments], stop, policy, inherited)
    return STOPPED if train_rank(resolved, worker or Worker(), stop, resume=resume, plugins=plugins) else 0


def _needs_workers(resolved: ResolvedRun, plugins: Plugins) -> bool:
    """Whether the run needs several ranks, or a launcher that outlives its only rank: a run without plug-in objects
    that is predicted to need more memory than the host has, or that the kernel has killed before."""
    run = resolved.run
    if run.layout.world_size > 1 or find_nodes().count > 1:
        return True
    if plugins.given or find_machine(run.device).kind != "cpu":
        return False
    return bool(shortage(resolved)) or was_killed(Path(run.run_dir))


def train_rank(
    resolved: ResolvedRun, worker: Worker, stop: StopRequest, *, resume: str | None, plugins: Plugins
) -> bool:
    """Run one rank from start to end; every rank of the layout calls it. Returns whether a signal ended it early.

    Raises `OutOfMemoryError` with a page about it if the rank runs out of memory.
    """
    built = list[Trainer]()
    try:
        return _train_rank(resolved, worker, stop, resume, plugins, built)
    except BaseException as error:
        for callback in built[0].callbacks.values() if built else ():
            callback.abandon()
        if not is_out_of_memory(error):
            raise
        moment = moment_of(error, worker.rank, built[0] if built else None)
        error.__traceback__ = error.__context__ = error.__cause__ = None  # its frames hold the step's tensors
    built.clear()
    if worker.world_size == 1:
        leave_group()
    free_all()
    raise page_of(resolved, moment, Path(resolved.run.run_dir))


def _train_rank(
    resolved: ResolvedRun, worker: Worker, stop: StopRequest, resume: str | None, plugins: Plugins, built: list[Trainer]
) -> bool:
    """See `train_rank`. `built` receives the trainer, for error reports."""
    run, first = resolved.run, worker.rank == 0
    run_dir = Path(run.run_dir)
    place = find_place(run, worker)
    if worker.local_rank == 0:
        with ProgressLine() as progress:
            corpus_of(resolved, progress if first else None)
    join_all()
    corpus = corpus_of(resolved)
    if worker.world_size > 1:
        check_same(corpus)
    _check_corpus(resolved, corpus, resume)
    before, _ = resident(), memory_room(worker.local_world_size)  # before anything is freed
    trainer = build_trainer(resolved, place)
    trainer.process_bytes = before
    built.append(trainer)
    seed_generators(trainer)
    trainer.callbacks = named_callbacks(all_callbacks(run, plugins))
    if first:  # the only rank that writes and prints
        trainer.data = corpus.identity()
        trainer.origin = describe_origin(resolved, trainer.data)
    display = Display(
        steps=run.training.steps,
        memory_bytes=trainer.memory_bytes,
        device=trainer.device.type,
        enabled=first,
        pressure=host_pressure,
    )
    display.say(banner(trainer, corpus))
    display.say(begin(trainer, run_dir / "checkpoints", resume))
    corpus = with_references(trainer, corpus, run_dir)
    join_all()
    if trainer.step >= run.training.steps:
        display.say(f"nothing to train: the run is at step {trainer.step}, and training.steps={run.training.steps}")
    stop.running()
    if first:
        write_run_files(resolved, run_dir)
        corpus.tokenizer.save(run_dir / TOKENIZER)
        write_json(run_dir / "env.json", describe_environment(trainer))
    with MetricsJournal(run_dir / "metrics.jsonl") if first else nullcontext() as journal:
        callbacks = [
            *own_callbacks(trainer, corpus),
            *(open_trackers(run) if first else ()),
            *trainer.callbacks.values(),
            *([VerifyGuard(trainer, plugins)] if run.guards.verify_every else []),
        ]
        session = Session(trainer, corpus, Outputs(run_dir, display, journal), stop, callbacks)
        session.log("start", world_size=worker.world_size, strategy=run.layout.strategy)
        signal = train_loop(session)
    if signal:
        display.say(f"stopped by {signal_name(signal)} after step {trainer.step}")
    elif session.reason:
        display.say(f"stopped after step {trainer.step}: {session.reason}")
    leave_group()
    return bool(signal)


def own_callbacks(trainer: Trainer, corpus: Corpus) -> list[Callback]:
    """The built-in callbacks that the recipe enables."""
    training = trainer.resolved.run.training
    samples = [SampleTexts(training.samples, trainer, corpus)] if training.samples else []
    return [ReplicaGuard(), *samples, *([TaskCallback(trainer, corpus)] if training.evaluation.tasks else [])]


def corpus_of(resolved: ResolvedRun, progress: Callable[[str, int, int], None] | None = None) -> Corpus:
    """The run's tokens, prepared or from the cache."""
    run, base_dir = resolved.run, Path(resolved.base_dir)
    return prepare_corpus(run.data, base_dir=base_dir, model=starting_model(run, base_dir), progress=progress)


def check_same(corpus: Corpus) -> None:
    """Raise `UserError` if ranks have read different data, because a dataset differs between reads. Collective."""
    found = gather_everywhere([stream["fingerprint"] for stream in corpus.identity()])
    others = [rank for rank, prints in enumerate(found) if prints != found[0]]
    if others:
        raise UserError(
            f"rank {others[0]} read different data from rank 0; a dataset must yield the same items in the same order "
            "in every process"
        )


def _check_corpus(resolved: ResolvedRun, corpus: Corpus, resume: str | None) -> None:
    """Raise `UserError` if the tokens do not fit the model, the weights or the objective."""
    run_dir = Path(resolved.run.run_dir)
    continued = run_dir if resume and list_checkpoints(run_dir / "checkpoints") else None
    check_vocabulary(resolved.run, resolved.model, corpus.tokenizer.vocab_size, Path(resolved.base_dir))
    check_tokenizer(resolved, corpus.tokenizer, continued=continued)
    check_objective(resolved.run, {stream.name: stream.train.is_pairs for stream in corpus.streams})


def write_run_files(resolved: ResolvedRun, run_dir: Path) -> None:
    """Write `recipe.yaml` as given, `resolved.yaml` with every `auto` resolved, `plan.json` if the planner decided."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_durably(run_dir / RECIPE, dump_recipe(resolved.asked or resolved.run))
    write_durably(run_dir / RESOLVED, dump_recipe(resolved.model_copy(update={"plan": None}), expanded=True))
    if resolved.plan is not None:
        write_json(run_dir / PLAN, resolved.plan)


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
