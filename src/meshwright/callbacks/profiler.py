"""The profiler: a trace of chosen steps and ranks, as torch.profiler sees them."""

from collections.abc import Sequence

from torch.profiler import profile, supported_activities

from meshwright.callbacks.callback import Callback, Record, Training
from meshwright.spec.errors import UserError


class Profiler(Callback):
    """Writes `profile/rank-R-steps-A-B.json` into the run directory: a Chrome trace, for https://ui.perfetto.dev or
    chrome://tracing.

    The trace is of everything from the end of step A - 1 to the end of step B: data, collectives, kernels, and what
    happens between the steps. Other steps and ranks are as fast as without it.
    """

    def __init__(
        self, steps: Sequence[int] = (3, 5), *, ranks: Sequence[int] = (0,), memory: bool = False, stacks: bool = False
    ) -> None:
        """
        Args:
            steps: the first and the last step of the trace; the first is 1.
            ranks: which ranks write one.
            memory: record allocations too.
            stacks: record the Python stack of every operation too, which is slow.
        """
        if not _whole_numbers(steps) or len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
            raise UserError(f"Profiler: steps={steps!r} must be the first and the last step, as in [3, 5]")
        if not _whole_numbers(ranks) or not ranks or min(ranks) < 0 or len(set(ranks)) != len(ranks):
            raise UserError(f"Profiler: ranks={ranks!r} must be different ranks, as in [0, 1]")
        self.steps, self.ranks, self.memory, self.stacks = tuple(steps), tuple(ranks), memory, stacks
        self._tracing = False  # whether some rank is
        self._running: profile | None = None

    def on_start(self, training: Training) -> None:
        """Refuse steps and ranks that the run does not have."""
        first, last = self.steps
        if max(self.ranks) >= training.world_size:
            raise UserError(
                f"Profiler: rank {max(self.ranks)} does not exist; this run has {training.world_size} ranks"
            )
        if last > training.run.training.steps:
            raise UserError(
                f"Profiler: step {last} does not exist; this run has training.steps={training.run.training.steps}"
            )
        if training.step >= first:
            training.say(f"no profile: this run continues after step {training.step}, and the trace begins at {first}")
        self._begin(training)

    def on_step(self, training: Training, record: Record) -> None:
        """Begin before the first step of the trace, end after the last."""
        if self._tracing and training.step >= self.steps[1]:
            self._end(training)
        self._begin(training)

    def on_stop(self, training: Training, record: Record) -> None:
        """Write the trace so far if the run ends early."""
        if self._tracing:
            self._end(training)

    def _begin(self, training: Training) -> None:
        if self._tracing or training.step + 1 != self.steps[0]:
            return
        self._tracing = True
        if training.rank in self.ranks:
            activities = supported_activities()  # the CPU, and an accelerator if there is one
            # One cycle: PyTorch 2.11 warns that it would clear the events of earlier ones.
            self._running = profile(
                activities=activities, profile_memory=self.memory, with_stack=self.stacks, acc_events=True
            )
            self._running.start()

    def _end(self, training: Training) -> None:
        folder, name = training.run_dir / "profile", f"steps-{self.steps[0]}-{training.step}.json"
        running, self._running, self._tracing = self._running, None, False
        if running is not None:
            running.stop()
            folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(folder / f"rank-{training.rank}-{name}"))
        training.say("\n".join(f"profile of rank {rank}: {folder}/rank-{rank}-{name}" for rank in self.ranks))


def _whole_numbers(values: object) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is int for value in values)
