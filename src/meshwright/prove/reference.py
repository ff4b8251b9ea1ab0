"""The reference: one process's results, saved in a folder; the layout's ranks read parts of them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from meshwright.data.loader import Loader
from meshwright.data.mixture import Mixture
from meshwright.data.packing import Samples
from meshwright.families.split import Arrangement
from meshwright.models.foreign import ForeignDecoder
from meshwright.models.init import named_state
from meshwright.optim import shards
from meshwright.prove.difference import largest_entry
from meshwright.prove.gathered import as_gathered
from meshwright.prove.inputs import RandomSamples, proof_weights
from meshwright.prove.tolerance import Facts
from meshwright.prove.trace import Tracer, Visit, recorded
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.setup import RankContext, Trainer, build_trainer
from meshwright.trainer.snapshot import moments, save

PHASES = ("forward", "backward")

MOST_STEPS = 68
"""The number of steps with samples: single ones, and four whole ones after them."""


class Reference:
    """A folder with one process's results.

    step-S/step.json         the step's figures (`Facts`)
    step-S/gradients/NAME    of every parameter
    step-S/weights/NAME      of every parameter after the step; step-0 before the first
    step-S/state/NAME        of every buffer, likewise
    step-S/moments/NAME.KEY  of the optimizer's state after the step, as numbers
    trace/PHASE/NAME         activations and their gradients [G, T, ...] of all samples of one step
    trace/index.json         for each phase {NAME: largest value}, in the order in which they were computed
    trace/losses.json        of each microbatch of that step, its summed loss and its number of terms
    """

    def __init__(self, folder: Path, arrangements: Mapping[str, Arrangement] = MappingProxyType({})) -> None:
        """`arrangements`: of the reader's parameters; their tensors are read in its order."""
        self.folder, self.arrangements = folder, arrangements

    def tensor(self, *place: str) -> torch.Tensor:
        """A stored tensor, read lazily if its order stays."""
        tensor, name = self.read(self.path(*place)), place[-1]
        arrangement = self.arrangements.get(name) or self.arrangements.get(name.rpartition(".")[0])
        return shards.arranged(tensor, arrangement) if tensor.dim() else tensor

    @staticmethod
    def read(file: Path) -> torch.Tensor:
        """A tensor in a file."""
        return torch.from_numpy(np.load(file, mmap_mode="c"))

    def gradient(self, step: int, name: str) -> torch.Tensor:
        """The whole gradient of a parameter."""
        return self.tensor(f"step-{step}", "gradients", name)

    def weight(self, step: int, name: str) -> torch.Tensor:
        """A whole parameter after a step."""
        return self.tensor(f"step-{step}", "weights", name)

    def state(self, step: int, name: str) -> torch.Tensor:
        """A whole buffer after a step."""
        return self.tensor(f"step-{step}", "state", name)

    def moment(self, step: int, name: str) -> torch.Tensor:
        """A whole tensor of the optimizer's state after a step, by the parameter's name and the key."""
        return self.tensor(f"step-{step}", "moments", name)

    def facts(self, step: int) -> Facts:
        """The step's figures."""
        return json.loads((self.folder / f"step-{step}" / "step.json").read_text())

    def losses(self) -> list[tuple[float, int]]:
        """The traced (summed loss, number of terms) of each microbatch."""
        return [tuple(pair) for pair in json.loads((self.folder / "trace" / "losses.json").read_text())]

    def trace_index(self) -> dict[str, dict[str, float]]:
        """The index of the trace."""
        return json.loads((self.folder / "trace" / "index.json").read_text())

    def save(self, tensor: torch.Tensor, *place: str) -> None:
        """Store a tensor, with low precision converted to fp32."""
        save(tensor, self.path(*place))

    def path(self, *place: str) -> Path:
        """The file of a stored tensor."""
        return self.folder.joinpath(*place[:-1], f"{place[-1]}.npy")


NOT_COMPILED = {"compile_mode": "default", "compile_scope": "block"}
"""Settings that have no effect without compilation."""


def alone(resolved: ResolvedRun) -> ResolvedRun:
    """The same run on one process, without compilation, offloading or recomputation."""
    run = resolved.run
    training = run.training.model_copy(update={"compile": False, **NOT_COMPILED, "recompute": "none"})
    run = run.model_copy(update={"layout": LayoutSpec(), "training": training})
    accumulation = resolved.global_batch // resolved.micro_batch
    return resolved.model_copy(update={"run": run, "accumulation": accumulation, "stage_layers": ()})


def train_reference(
    trainer: Trainer, layout: LayoutSpec, folder: Path, steps: int, samples: Samples | Mixture | None = None
) -> Reference:
    """Train `steps` steps by `build_alone`'s trainer, on `samples` or else random ones, with weights as `layout`
    gathers them, and save the results."""
    reference = Reference(folder)
    save_state(reference, trainer, 0)
    factor = 0.0
    with loader_for(trainer, samples) as loader:
        for step in range(1, steps + 1):
            with as_gathered(trainer, layout):
                loss, _ = trainer.train_step.gradients(loader.microbatches(step - 1))
            gnorm = trainer.train_step.gradient_norm()
            for name, gradient in gradients_of(trainer):
                reference.save(gradient, f"step-{step}", "gradients", name)
            facts = facts_of(trainer, loss, gnorm)
            factor = max(factor, facts["factor"])
            trainer.train_step.update(step, gnorm)
            trainer.store.zero_grad()
            save_state(reference, trainer, step)
            facts["factor"], facts["expert_load"] = factor, trainer.train_step.balance.load
            (folder / f"step-{step}" / "step.json").write_text(json.dumps(facts))
    return reference


def build_alone(resolved: ResolvedRun) -> Trainer:
    """The reference's trainer, with the weights of a proof."""
    resolved = alone(resolved)
    return widened(build_trainer(resolved, RankContext(), proof_weights(resolved)))


def widened(trainer: Trainer) -> Trainer:
    """The trainer, whose model computes everything in float64 if transformers computes it in float64."""
    if isinstance(trainer.model, ForeignDecoder):
        trainer.model.widen()
    return trainer


def load_weights(trainer: Trainer, reference: Reference, step: int) -> None:
    """Give this rank's part of the model the reference's weights and buffers after `step`."""
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            shards.local(parameter).copy_(shards.part_like(reference.weight(step, name), parameter))
        for name, buffer in named_state(trainer.model).items():
            shards.local(buffer).copy_(shards.part_like(reference.state(step, name), buffer))
    trainer.store.refresh()


def trace_reference(resolved: ResolvedRun, reference: Reference, step: int) -> None:
    """Save every activation of a step and its gradient, computed with the weights before the step."""
    stored: dict[tuple[str, str], np.memmap] = {}
    index: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}

    def keep(phase: str, name: str, microbatch: int, tensor: torch.Tensor) -> None:
        if tensor.shape[:2] != (resolved.micro_batch, resolved.run.data.sequence_length):
            return  # not indexed by sequence: experts' rows
        values = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).numpy()
        if (phase, name) not in stored:
            stored[phase, name] = trace_file(reference, resolved, values, "trace", phase, name)
        stored[phase, name][rows_of(resolved, microbatch)] = values
        index[phase][name] = max(index[phase].get(name, 0.0), float(np.abs(values).max()))

    losses = trace_alone(build_alone(resolved), resolved.run.layout, reference, step, keep)
    for array in stored.values():
        array.flush()
    (reference.folder / "trace" / "index.json").write_text(json.dumps(index))
    (reference.folder / "trace" / "losses.json").write_text(json.dumps(losses))


def trace_alone(
    trainer: Trainer, layout: LayoutSpec, reference: Reference, step: int, visit: Visit, names: set[str] | None = None
) -> list[tuple[float, int]]:
    """Pass to `visit` one process's activations of a step (those of `names`, or all), from the reference's weights as
    `layout` gathers them. Returns (summed loss, number of terms) of each microbatch."""
    load_weights(trainer, reference, step - 1)
    passes = trainer.train_step.passes
    tracer, gathered = Tracer(trainer.model, visit, names), as_gathered(trainer, layout)
    with loader_for(trainer) as loader, tracer, recorded(passes) as losses, gathered:
        trainer.train_step.gradients(loader.microbatches(step - 1))
    return losses.terms()


def trace_file(reference: Reference, resolved: ResolvedRun, values: np.ndarray, *place: str) -> np.memmap:
    """A file for one process's values over all samples of a step; `values` are one microbatch's."""
    path = reference.path(*place)
    path.parent.mkdir(parents=True, exist_ok=True)
    return np.lib.format.open_memmap(path, "w+", values.dtype, (resolved.global_batch, *values.shape[1:]))


def rows_of(resolved: ResolvedRun, microbatch: int) -> slice:
    """The samples of the step in one of its microbatches on one process."""
    return slice(microbatch * resolved.micro_batch, (microbatch + 1) * resolved.micro_batch)


def loader_for(trainer: Trainer, samples: Samples | Mixture | None = None) -> Loader:
    """This rank's microbatches of `samples`, or else of random ones, packed as in the recipe."""
    return Loader.of_run(samples or samples_for(trainer), trainer.resolved, trainer.data_rank, trainer.places)


def samples_for(trainer: Trainer, *, seed: int = 0, count: int = 0) -> RandomSamples:
    """Random samples: `count`, or for `MOST_STEPS` steps."""
    resolved = trainer.resolved
    data = resolved.run.data
    return RandomSamples(
        vocab=resolved.model.vocab,
        sequence_length=data.sequence_length,
        seed=seed,
        count=count or MOST_STEPS * resolved.global_batch,
        documents=data.separate_documents,
        pairs=trainer.train_step.passes.objective.needs_pairs,
    )


def save_state(reference: Reference, trainer: Trainer, step: int) -> None:
    """Save the parameters, buffers and moments after a step."""
    for name, parameter in trainer.parameters.items():
        reference.save(parameter, f"step-{step}", "weights", name)
    for name, buffer in named_state(trainer.model).items():
        reference.save(buffer, f"step-{step}", "state", name)
    for name, moment, _ in moments(trainer):
        reference.save(moment, f"step-{step}", "moments", name)


def facts_of(trainer: Trainer, loss: float, gnorm: float) -> Facts:
    """The figures of the step whose gradient is in the store, before its update."""
    norms, largest = [], 0.0
    for _, gradient in gradients_of(trainer):
        largest = max(largest, largest_entry(gradient))
        if gradient.dim() >= 2:
            norms.append(gradient.norm().item())
    return Facts(
        loss=loss,
        gnorm=gnorm,
        largest=largest,
        smallest_norm=min(norms, default=0.0),
        factor=trainer.train_step.gradient_factor(gnorm),
        expert_load=None,
    )


def gradients_of(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every trained parameter's gradient; zeros if it has none."""
    for name, parameter in trainer.parameters.items():
        yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
