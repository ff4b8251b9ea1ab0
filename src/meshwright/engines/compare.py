"""The comparison: every engine's program trains the same recipe, in turns, and is measured."""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.engines.engine import Engine, InexpressibleError, Translation, explained
from meshwright.engines.materials import write_materials
from meshwright.engines.ours import Ours
from meshwright.engines.readback import check_optimizer, check_what_ran
from meshwright.engines.registry import MissingPackageError, check_installed
from meshwright.launch.launcher import find_worker
from meshwright.launch.programs import ProgramError, RankedProgram
from meshwright.launch.status import TrainingStopped
from meshwright.machine import find_machine
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.corpus import check_vocabulary, corpus_of
from meshwright.trainer.metrics import read_journal
from meshwright.trainer.start import check_start

JOURNAL, OUTPUT = "metrics.jsonl", "output.log"


@dataclass(frozen=True)
class Pace:
    """The number of steps, and the schedule of turns."""

    rounds: int = 5
    """Turns of each engine."""
    turn: int = 4
    """Steps of a turn."""
    warm_up: int = 3
    """Steps before the first turn: allocators, caches and compilers settle."""

    @property
    def pauses(self) -> list[int]:
        """The steps after which an engine waits."""
        return [self.warm_up + self.turn * number for number in range(self.rounds + 1)]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A recipe in an engine."""

    name: str
    engine: Engine
    resolved: ResolvedRun
    python: Path = Path(sys.executable)
    """The Python that runs its program."""
    checkout: Path | None = None
    """The folder of an engine that is not a package."""


@dataclass(kw_only=True)
class ContestRow:
    """A contestant's results."""

    name: str
    engine: str
    strategy: str
    error: str | None = None
    """Why it was not measured, or not completely."""
    absent: bool = False
    """Whether it took no part, because it is not installed or cannot express the recipe."""
    translation: Translation | None = None
    ran: dict[str, Any] = field(default_factory=dict)
    """Its report after its first step (`what_ran`)."""
    turns: list[list[float]] = field(default_factory=list)
    """Seconds of every step, by turn."""
    losses: list[float] = field(default_factory=list)
    """The loss of every step, warm-up included."""
    gnorms: list[float] = field(default_factory=list)
    tokens_per_step: int = 0
    peak_bytes: int | None = None
    """Most bytes that one rank ever held."""
    first_step: float | None = None
    """Seconds from the start of its processes to the end of its first step."""

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput by the median over all timed steps."""
        seconds = [second for turn in self.turns for second in turn]
        return None if self.error or not seconds else self.tokens_per_step / statistics.median(seconds)

    def ratio_to(self, other: "ContestRow") -> tuple[float, float, float] | None:
        """Its speed relative to another's: by the medians of all steps, then the least and the largest of single
        rounds."""
        mine, theirs = self.tokens_per_second, other.tokens_per_second
        if mine is None or theirs is None:
            return None
        scale = self.tokens_per_step / other.tokens_per_step
        rounds = [
            scale * statistics.median(there) / statistics.median(here)
            for here, there in zip(self.turns, other.turns, strict=False)  # one has more turns if it was stopped
        ]
        return mine / theirs, min(rounds), max(rounds)

    def difference_from(self, other: "ContestRow", what: str = "losses") -> float | None:
        """The largest difference of a step's losses, or of another list."""
        pairs = zip(getattr(self, what), getattr(other, what), strict=False)
        return None if self.error or other.error else max((abs(a - b) for a, b in pairs), default=None)


class ComparisonStopped(TrainingStopped):
    """A signal ended the comparison; `rows` holds what was measured before it."""

    def __init__(self, stop: TrainingStopped, rows: Sequence[ContestRow]) -> None:
        super().__init__(stop.status, str(stop))
        self.rows = list(rows)


def compare(
    contestants: Sequence[Contestant], folder: Path, *, pace: Pace, patience: float, say: Callable[[str], None]
) -> list[ContestRow]:
    """Train every contestant in turns on this machine; `folder` receives programs, inputs and journals.

    An engine becomes a row with an error if it cannot express its recipe, is not installed, fails, makes no step for
    `patience` seconds, or trains differently than asked. Raises `UserError` for mistakes in the recipes, and
    `ComparisonStopped` on a signal.
    """
    if find_worker() is not None:
        raise UserError("compare starts the engines' processes; run it without torchrun or srun")
    rows = list[ContestRow]()
    try:
        _take_turns(contestants, folder, rows, pace=pace, patience=patience, say=say)
    except TrainingStopped as stop:
        for row in rows:
            row.error = row.error or (None if row.turns else "stopped before its first turn")
        raise ComparisonStopped(stop, rows) from stop
    return rows


def _take_turns(
    contestants: Sequence[Contestant],
    folder: Path,
    rows: list[ContestRow],
    *,
    pace: Pace,
    patience: float,
    say: Callable[[str], None],
) -> None:
    """Start every contestant, and let them take turns; each adds its row when it starts."""
    running = list[_Running]()
    inputs = _write_inputs(contestants, folder, pace, say)
    with ExitStack() as stack:
        for contestant in contestants:
            layout = contestant.resolved.run.layout
            row = ContestRow(name=contestant.name, engine=contestant.engine.name, strategy=layout.strategy)
            row.tokens_per_step = contestant.resolved.tokens_per_step
            rows.append(row)
            one = _Running(contestant, row, folder / _file_name(contestant.name), pace, patience)
            say(f"{contestant.name}: starting, {pace.warm_up} warm-up steps")
            if one.attempt(lambda one=one: one.start(inputs[_key(one.contestant)], stack)):
                say(f"{contestant.name}: first step after {row.first_step:.1f} s")
                running.append(one)
            else:
                say(f"{contestant.name}: {row.error}")
        for number in range(pace.rounds):
            if not running:
                break
            say(f"round {number + 1} of {pace.rounds}: {pace.turn} steps of each engine{_left(running, number, pace)}")
            for one in running if number % 2 == 0 else list(reversed(running)):
                if not one.attempt(lambda one=one, number=number: one.take_turn(number)):
                    say(f"{one.row.name}: {one.row.error}")
            running = [one for one in running if one.row.error is None]


class _Running:
    """A contestant's processes."""

    def __init__(self, contestant: Contestant, row: ContestRow, folder: Path, pace: Pace, patience: float) -> None:
        self.contestant, self.row, self.folder, self.pace, self.patience = contestant, row, folder, pace, patience
        self.program: RankedProgram | None = None

    def attempt(self, what: Callable[[], None]) -> bool:
        """Call `what`; if it fails, record the reason in the row and end its processes."""
        try:
            what()
        except UserError as error:
            self.row.error = " ".join(str(error).split())
            self.row.absent = isinstance(error, MissingPackageError | InexpressibleError)
            if self.program:
                self.program.close()
        return self.row.error is None

    def start(self, inputs: Path, stack: ExitStack) -> None:
        """Start the program and let it warm up."""
        resolved, engine = self.contestant.resolved, self.contestant.engine
        self.row.translation = translation = engine.translate(resolved)
        path = translation.write_measured(self.folder)
        check_installed(engine, self.contestant.python, self.contestant.checkout)
        options = ["--inputs", str(inputs), "--journal", str(self.folder / JOURNAL), "--save-every", "0"]
        options += ["--checkout", str(self.contestant.checkout)] if engine.checkout else []
        pauses = ["--pause", *map(str, self.pace.pauses)]
        command = [str(self.contestant.python), "-P", str(path), *options, *pauses]
        self.program = program = RankedProgram(command, resolved.run.layout.world_size, self.folder / OUTPUT)
        stack.enter_context(program)
        self._wait(1)
        (report,) = (record for record in read_journal(self.folder / JOURNAL) if record["kind"] == "engine")
        self.row.ran = report
        check_what_ran(resolved, report)
        check_optimizer(resolved, report)
        self._wait(self.pace.warm_up)
        self.row.first_step = self._steps()[0]["time"] - program.began

    def take_turn(self, number: int) -> None:
        """Let it make its next steps."""
        assert self.program is not None
        self.program.go_on()
        last = self.pace.pauses[number + 1]
        self._wait(last)
        steps = self._steps()
        self.row.turns.append([record["seconds"] for record in steps[last - self.pace.turn : last]])
        self.row.losses = [record["loss"] for record in steps]
        self.row.gnorms = [record["gnorm"] for record in steps]
        on_cpu = find_machine(self.contestant.resolved.run.device).kind == "cpu"
        self.row.peak_bytes = self.program.peak_bytes() if on_cpu else steps[-1]["mem"]

    def _wait(self, step: int) -> None:
        assert self.program is not None
        try:
            self.program.wait_for(self.folder / JOURNAL, f'"step": {step},'.encode(), self.patience)
        except ProgramError as error:
            raise explained(self.contestant.engine, error) from error

    def _steps(self) -> list[dict[str, Any]]:
        return [record for record in read_journal(self.folder / JOURNAL) if record["kind"] == "step"]


def _write_inputs(
    contestants: Sequence[Contestant], folder: Path, pace: Pace, say: Callable[[str], None]
) -> Mapping[str, Path]:
    """The folder of weights and tokens of every recipe that differs in more than its layout."""
    folders: dict[str, Path] = {}
    for contestant in contestants:
        resolved, steps = contestant.resolved, pace.pauses[-1]
        if resolved.run.training.steps < steps:
            raise UserError(
                f"the comparison takes {steps} steps ({pace.warm_up} + {pace.rounds} x {pace.turn}), but "
                f"training.steps={resolved.run.training.steps}; set training.steps={steps}, or lower --rounds"
            )
        if (key := _key(contestant)) in folders:
            continue
        check_start(resolved)
        say("preparing tokens and initial weights for every engine")
        corpus = corpus_of(resolved)
        check_vocabulary(resolved.run, resolved.model, corpus.tokenizer.vocab_size, Path(resolved.base_dir))
        folders[key] = (folder / f"inputs-{len(folders) + 1}").resolve()
        if any(_key(other) == key and _reads_inputs(other) for other in contestants):
            write_materials(resolved, corpus, folders[key], steps=steps)
    return folders


def _reads_inputs(contestant: Contestant) -> bool:
    try:
        contestant.engine.translate(contestant.resolved)
    except InexpressibleError:  # reported in its row
        return False
    return contestant.engine.name != Ours.name


def _key(contestant: Contestant) -> str:
    resolved = contestant.resolved
    training = resolved.run.training
    same = [resolved.model.model_dump(mode="json"), resolved.run.data.model_dump(mode="json"), training.seed]
    start = resolved.run.finetune, resolved.run.model.name, resolved.run.checkpoint.start_from
    return json.dumps([*same, resolved.base_dir, resolved.global_batch, training.steps, *map(str, start)])


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)


def _left(running: Sequence[_Running], number: int, pace: Pace) -> str:
    """The remaining time, estimated once one round is done."""
    if not number:
        return ""
    seconds = sum(sum(turn) for one in running for turn in one.row.turns) / number * (pace.rounds - number)
    return f"; about {seconds:.0f} s left"
