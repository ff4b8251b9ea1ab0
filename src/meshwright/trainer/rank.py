"""One rank of a run, from its corpus to its last checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from meshwright.callbacks import Callback, named_callbacks
from meshwright.comm.objects import gather_everywhere
from meshwright.data.prepare import Corpus
from meshwright.launch.launcher import Worker, join_all, leave_group
from meshwright.launch.memory import host_pressure, memory_room, resident
from meshwright.launch.signals import StopRequest, signal_name
from meshwright.launch.status import STOPPED
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun
from meshwright.storage.durable import write_json
from meshwright.trainer.banner import banner
from meshwright.trainer.corpus import check_corpus, corpus_of
from meshwright.trainer.device import free_all
from meshwright.trainer.display import Display, ProgressLine
from meshwright.trainer.folder import TOKENIZER, write_run_files
from meshwright.trainer.kernels import measured_kernels
from meshwright.trainer.loop import train_loop
from meshwright.trainer.metrics import MetricsJournal
from meshwright.trainer.origin import describe_environment, describe_origin
from meshwright.trainer.out_of_memory import is_out_of_memory, moment_of, page_of
from meshwright.trainer.plugins import Plugins, all_callbacks, open_trackers
from meshwright.trainer.reference import with_references
from meshwright.trainer.replicas import ReplicaGuard
from meshwright.trainer.samples import SampleTexts
from meshwright.trainer.session import Outputs, Session
from meshwright.trainer.setup import RankContext, Trainer, build_trainer, find_place
from meshwright.trainer.state import begin, seed_generators
from meshwright.trainer.tasks import TaskCallback
from meshwright.trainer.verification import VerifyGuard


def train_rank(resolved: ResolvedRun, worker: Worker, stop: StopRequest, resume: str | None, plugins: Plugins) -> int:
    """Run one rank from start to end; every rank of the layout calls it. Returns the exit status: 0, or STOPPED if a
    signal ended it early.

    Raises `OutOfMemoryError` with a page about it if the rank runs out of memory.
    """
    trainer = session = None
    try:
        place = find_place(resolved.run, worker)
        corpus = _same_corpus(resolved, worker, resume)
        with measured_kernels(resolved, place) as measured:
            trainer = _build(resolved, place, corpus, plugins)
            trainer.kernels = measured
            with _started(trainer, corpus, stop, resume, plugins) as session:
                signal = train_loop(session)
        if signal:
            session.say(f"stopped by {signal_name(signal)} after step {trainer.step}")
        elif session.reason:
            session.say(f"stopped after step {trainer.step}: {session.reason}")
        leave_group()
        return STOPPED if signal else 0
    except BaseException as error:
        for callback in trainer.callbacks.values() if trainer else ():
            callback.abandon()
        if not is_out_of_memory(error):
            raise
        moment = moment_of(error, worker.rank, trainer)
        error.__traceback__ = error.__context__ = error.__cause__ = None  # its frames hold the step's tensors
    trainer = session = None  # and so do these
    if worker.world_size == 1:
        leave_group()
    free_all()
    raise page_of(resolved, moment, Path(resolved.run.run_dir))


def _same_corpus(resolved: ResolvedRun, worker: Worker, resume: str | None) -> Corpus:
    """The run's tokens, the same on every rank; one rank of each machine prepares them. Collective.

    Raises `UserError` if they do not fit the model, the weights or the objective.
    """
    if worker.local_rank == 0:
        with ProgressLine() as progress:
            corpus_of(resolved, progress if worker.rank == 0 else None)
    join_all()
    corpus = corpus_of(resolved)
    if worker.world_size > 1:
        check_same(corpus)
    check_corpus(resolved, corpus, resume)
    return corpus


def _build(resolved: ResolvedRun, place: RankContext, corpus: Corpus, plugins: Plugins) -> Trainer:
    """This rank's trainer, without weights."""
    before, _ = resident(), memory_room(place.worker.local_world_size)  # before anything is freed
    trainer = build_trainer(resolved, place)
    trainer.process_bytes = before
    seed_generators(trainer)
    trainer.callbacks = named_callbacks(all_callbacks(resolved.run, plugins))
    if place.worker.rank == 0:  # the only rank that writes and prints
        trainer.data = corpus.identity()
        trainer.origin = describe_origin(resolved, trainer.data)
    return trainer


@contextmanager
def _started(
    trainer: Trainer, corpus: Corpus, stop: StopRequest, resume: str | None, plugins: Plugins
) -> Iterator[Session]:
    """The run in progress: weights read, outputs opened, callbacks ready. Collective."""
    resolved, run, first = trainer.resolved, trainer.resolved.run, trainer.worker.rank == 0
    run_dir = Path(run.run_dir)
    display = Display(
        steps=run.training.steps,
        memory_bytes=trainer.memory_bytes,
        device=trainer.device.type,
        enabled=first,
        pressure=host_pressure,
    )
    display.shows_steps = trainer.worker.shows_steps
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
        session.log("start", world_size=trainer.worker.world_size, strategy=run.layout.strategy)
        yield session


def own_callbacks(trainer: Trainer, corpus: Corpus) -> list[Callback]:
    """The built-in callbacks that the recipe enables."""
    training = trainer.resolved.run.training
    samples = [SampleTexts(training.samples, trainer, corpus)] if training.samples else []
    return [ReplicaGuard(), *samples, *([TaskCallback(trainer, corpus)] if training.evaluation.tasks else [])]


def check_same(corpus: Corpus) -> None:
    """Raise `UserError` if ranks have read different data, because a dataset differs between reads. Collective."""
    fingerprints = gather_everywhere([stream["fingerprint"] for stream in corpus.identity()])
    others = [rank for rank, prints in enumerate(fingerprints) if prints != fingerprints[0]]
    if others:
        raise UserError(
            f"rank {others[0]} read different data from rank 0; a dataset must yield the same items in the same order "
            "in every process"
        )
