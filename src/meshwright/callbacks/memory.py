"""The memory timeline: one step of one rank, allocation by allocation, as a page; on a GPU with torch's snapshot."""

from collections.abc import Iterator

import torch

from meshwright.callbacks.callback import Callback, Record, Training
from meshwright.devices import on_cpu
from meshwright.pages.memory import memory_page
from meshwright.parallel.timeline import RecordingLedger
from meshwright.spec.errors import UserError
from meshwright.torch_internals import all_tensors, local_tensor, passing_tensors, record_allocations, save_allocations


class MemoryTimeline(Callback):
    """Writes `memory/rank-R-step-N.html` into the run directory: one step's memory over time by kind, and what each
    layer holds at the peak. On a GPU it also writes `memory/rank-R-step-N.pickle`, torch's own snapshot, for
    https://pytorch.org/memory_viz.

    The traced step is slow but computes the same numbers; other steps and ranks run at full speed.
    """

    def __init__(self, step: int = 2, *, rank: int = 0) -> None:
        """
        Args:
            step: the step, counted from where this process begins: by the second one the optimizer has its state.
            rank: whose memory.
        """
        if type(step) is not int or step < 1:
            raise UserError(f"MemoryTimeline: step={step!r} must be a whole number, at least 1")
        if type(rank) is not int or rank < 0:
            raise UserError(f"MemoryTimeline: rank={rank!r} must be a rank, 0 or more")
        self.step, self.rank = step, rank
        self._first = 0
        self._running: RecordingLedger | None = None

    def on_start(self, training: Training) -> None:
        """Refuse a rank or a step that the run does not have."""
        self._first = training.step + self.step
        if self.rank >= training.world_size:
            raise UserError(
                f"MemoryTimeline: rank {self.rank} does not exist; this run has {training.world_size} ranks"
            )
        if training.run.training.compile:
            raise UserError("MemoryTimeline: does not see allocations of compiled code; set training.compile=false")
        if self._first > training.run.training.steps:
            training.say(f"no memory timeline: this run ends before step {self._first}")
        self._begin(training)

    def on_step(self, training: Training, record: Record) -> None:
        """Begin before the step, end after it."""
        if training.step == self._first and training.rank == self.rank:
            self._end(training)
        if training.step == self._first:
            place = training.run_dir / "memory" / f"rank-{self.rank}-step-{training.step}"
            more = f" and {place.name}.pickle" if not on_cpu(training.device) else ""
            training.say(f"memory of step {training.step}: {place}.html{more}")
        self._begin(training)

    def abandon(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None, None, None)

    def _begin(self, training: Training) -> None:
        if training.step + 1 != self._first or training.rank != self.rank:
            return
        device = training.device.type
        running = RecordingLedger(
            lambda: {key: kind for key, kind, _ in _named(training)},
            training.model,
            device_type=device,
            tensor_names=lambda: {key: name for key, _, name in _named(training) if name},
        )
        running.watch(local_tensor(tensor) for tensor in all_tensors() if local_tensor(tensor).device.type == device)
        if not on_cpu(training.device):
            record_allocations()
        self._running = running
        running.__enter__()

    def _end(self, training: Training) -> None:
        running = self._running
        assert running is not None
        self.abandon()
        folder, name = training.run_dir / "memory", f"rank-{self.rank}-step-{training.step}"
        folder.mkdir(parents=True, exist_ok=True)
        title = f"Memory of step {training.step} on rank {self.rank}"
        report = running.report()
        (folder / f"{name}.html").write_text(memory_page(title, report))
        training.log("memory", page=f"{folder.name}/{name}.html", kinds=report["peak"]["kinds"])
        if not on_cpu(training.device):
            save_allocations(folder / f"{name}.pickle")


def _named(training: Training) -> Iterator[tuple[int, str, str]]:
    """(identity, kind, name) of the storages that are known; a later one of a storage counts."""
    names = {id(tensor): name for name, tensor in training.parameters.items()}
    for optimizer in training.optimizers:
        for owner, states in optimizer.state.items():
            for key, value in states.items():
                if isinstance(value, torch.Tensor):
                    yield _key(value), "optimizer", f"{key} of {names.get(id(owner), 'a weight')}"
    model = training.model
    weights = [*training.parameters.items(), *model.named_buffers(), *model.named_parameters()]
    yield from ((_key(tensor), "weights", name) for name, tensor in weights)
    gradients = [(f"gradient of {name}", tensor.grad) for name, tensor in weights]
    for name, module in model.named_modules():
        passing, grads = passing_tensors(module)
        yield from ((_key(tensor), "gathered weights", f"gathered for {name or 'the model'}") for tensor in passing)
        gradients += [("", grad) for grad in grads]
    yield from ((_key(grad), "gradients", name) for name, grad in gradients if grad is not None)


def _key(tensor: torch.Tensor) -> int:
    return id(local_tensor(tensor).untyped_storage())
