"""The one place for one process's results: computed, kept in a folder, and read part by part by the layout's ranks."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from meshwright.data.loader import Loader
from meshwright.prove.samples import RandomSamples
from meshwright.prove.trace import Tracer
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.launch import Worker
from meshwright.trainer.setup import Trainer, build_trainer

PHASES = ("forward", "backward")


class Reference:
    """A folder with what one process computed.

    step-S/step.json         loss, gradient norm, largest gradient, smallest norm of a matrix's gradient (0 without one)
    step-S/gradients/NAME    of every parameter, and step-S/weights/NAME after the step; step-0/weights before the first
    trace/PHASE/NAME         activations and their gradients [G, T, ...] of all samples of one step
    trace/index.json         for each phase {NAME: largest value}, in the order in which they were computed
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tensor(self, *place: str) -> torch.Tensor:
        """A stored tensor; what is not looked at is not read."""
        return torch.from_numpy(np.load(self._path(*place), mmap_mode="c"))

    def gradient(self, step: int, name: str) -> torch.Tensor:
        """The whole gradient of a parameter."""
        return self.tensor(f"step-{step}", "gradients", name)

    def weight(self, step: int, name: str) -> torch.Tensor:
        """A whole parameter after a step."""
        return self.tensor(f"step-{step}", "weights", name)

    def facts(self, step: int) -> dict[str, float]:
        """The step's figures."""
        return json.loads((self.folder / f"step-{step}" / "step.json").read_text())

    def trace_index(self) -> dict[str, dict[str, float]]:
        """What was traced."""
        return json.loads((self.folder / "trace" / "index.json").read_text())

    def save(self, tensor: torch.Tensor, *place: str) -> None:
        """Store a tensor, low precision widened to fp32."""
        path = self._path(*place)
        path.parent.mkdir(parents=True, exist_ok=True)
        wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        np.save(path, wide.numpy())

    def _path(self, *place: str) -> Path:
        return self.folder.joinpath(*place[:-1], f"{place[-1]}.npy")


def alone(resolved: ResolvedRun) -> ResolvedRun:
    """The same run on one process, plainly: nothing compiled, offloaded or computed twice."""
    run = resolved.run
    training = run.training.model_copy(update={"compile": False, "recompute": "none"})
    run = run.model_copy(update={"layout": LayoutSpec(), "training": training})
    accumulation = resolved.global_batch // resolved.micro_batch
    return resolved.model_copy(update={"run": run, "accumulation": accumulation, "stage_layers": ()})


def train_reference(resolved: ResolvedRun, folder: Path, steps: int) -> Reference:
    """Train `steps` steps on this process and keep what they computed."""
    reference = Reference(folder)
    trainer = build_trainer(alone(resolved), Worker(), torch.device("cpu"), None)
    _save_weights(reference, trainer, 0)
    with loader_for(trainer) as loader:
        for step in range(1, steps + 1):
            loss, _ = trainer.train_step.gradients(loader.microbatches(step - 1))
            gnorm = trainer.train_step.gradient_norm()
            norms = []
            for name, gradient in _gradients(trainer):
                reference.save(gradient, f"step-{step}", "gradients", name)
                if gradient.dim() >= 2:
                    norms.append(gradient.norm().item())
            largest = max(gradient.abs().max().item() for _, gradient in _gradients(trainer))
            trainer.train_step.update(step, gnorm)
            trainer.optimizers.zero_grad()
            _save_weights(reference, trainer, step)
            facts = {"loss": loss, "gnorm": gnorm, "largest": largest, "smallest_norm": min(norms, default=0.0)}
            (folder / f"step-{step}" / "step.json").write_text(json.dumps(facts))
    return reference


def trace_reference(resolved: ResolvedRun, reference: Reference, step: int) -> None:
    """Keep every activation of a step and its gradient, computed with the weights that the step started from."""
    trainer = build_trainer(alone(resolved), Worker(), torch.device("cpu"), None)
    for name, parameter in trainer.parameters.items():
        parameter.data.copy_(reference.weight(step - 1, name))
    if trainer.masters is not None:
        trainer.masters.refresh()
    stored: dict[tuple[str, str], np.memmap] = {}
    index: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}

    def keep(phase: str, name: str, microbatch: int, tensor: torch.Tensor) -> None:
        rows = slice(microbatch * resolved.micro_batch, (microbatch + 1) * resolved.micro_batch)
        if tensor.shape[:2] != (resolved.micro_batch, resolved.run.data.sequence_length):
            return  # not the sequence's own dims: experts' rows
        values = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).numpy()
        if (phase, name) not in stored:
            path = reference.folder / "trace" / phase / f"{name}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            shape = resolved.global_batch, *values.shape[1:]
            stored[phase, name] = np.lib.format.open_memmap(path, "w+", values.dtype, shape)
        stored[phase, name][rows] = values
        index[phase][name] = max(index[phase].get(name, 0.0), float(np.abs(values).max()))

    with loader_for(trainer) as loader, Tracer(trainer.model, keep):
        trainer.train_step.gradients(loader.microbatches(step - 1))
    for array in stored.values():
        array.flush()
    (reference.folder / "trace" / "index.json").write_text(json.dumps(index))


def loader_for(trainer: Trainer) -> Loader:
    """This rank's microbatches of random samples, packed as the recipe says."""
    resolved = trainer.resolved
    data, steps_at_most = resolved.run.data, 64
    samples = RandomSamples(
        vocab=resolved.model.vocab,
        sequence_length=data.sequence_length,
        count=steps_at_most * resolved.global_batch,
        documents=data.separate_documents,
    )
    return Loader.of_run(samples, resolved, trainer.data_rank, trainer.places)


def _save_weights(reference: Reference, trainer: Trainer, step: int) -> None:
    for name, parameter in trainer.parameters.items():
        reference.save(parameter, f"step-{step}", "weights", name)


def _gradients(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in trainer.parameters.items():
        yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
