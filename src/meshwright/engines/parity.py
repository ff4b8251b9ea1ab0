"""Proof of an engine's program against Meshwright on one process: loss, gradients, norm and updates of a few steps,
tensor by tensor."""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from meshwright.checkpoint.hf import as_stored
from meshwright.checkpoint.peft import stored_places
from meshwright.data.mixture import Mixture
from meshwright.data.packing import ConcatenatedSamples
from meshwright.data.token_file import file_in_memory
from meshwright.data.tokenizer import numbers_tokenizer
from meshwright.engines.engine import Engine, explained
from meshwright.engines.materials import DATA, START, write_order, write_start
from meshwright.engines.ours import Ours
from meshwright.engines.readback import check_what_ran
from meshwright.engines.registry import check_installed
from meshwright.families import family_of, parameter_table, state_table
from meshwright.launch.programs import ProgramError, RankedProgram
from meshwright.prove.difference import Difference, measure
from meshwright.prove.inputs import proof_weights
from meshwright.prove.reference import Reference, build_alone, train_reference
from meshwright.prove.tolerance import Tolerance, derive_tolerance
from meshwright.prove.verify import for_proof
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import Ia3Spec, LoraSpec
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.metrics import read_journal

PATIENCE = 600.0
"""Seconds without a step after which a program is ended: DeepSpeed compiles at first use."""

What = Literal["loss", "gradient", "norm", "update"]


@dataclass(frozen=True)
class Compared:
    """One number or tensor of a step."""

    step: int
    what: What
    name: str
    """The engine's name of a tensor."""
    difference: Difference


@dataclass(frozen=True)
class EngineProof:
    """The comparisons of an engine, in the order of computation."""

    relative: float
    """The largest relative difference that rounding explains in the first step."""
    compared: list[Compared]

    @property
    def first(self) -> Compared | None:
        """The first that differs; None if all are equal."""
        return next((one for one in self.compared if not one.difference.equal), None)

    def worst(self, step: int, what: What) -> Compared:
        """The comparison of a kind in a step that is largest relative to its allowance."""
        kind = (one for one in self.compared if (one.step, one.what) == (step, what))
        return max(kind, key=lambda one: one.difference.share)

    def as_data(self) -> dict[str, Any]:
        """The proof as plain data."""
        first = None if self.first is None else asdict(self.first)
        return {"equal": self.first is None, "relative": self.relative, "first": first}


def verify_engine(
    resolved: ResolvedRun,
    engine: Engine,
    *,
    steps: int,
    python: Path = Path(sys.executable),
    checkout: Path | None = None,
    patience: float = PATIENCE,
) -> EngineProof:
    """Train `steps` steps in the engine's program and in Meshwright on one process, from the same weights on the same
    random tokens, in fp32, and compare.

    Raises `InexpressibleError`, `MissingPackageError`, `ProgramError` or `SilentFallbackError` if there is nothing
    to compare, `UserError` if the program cannot dump its gradients.
    """
    if engine.name == Ours.name:
        raise UserError("verify compares Meshwright's own layouts without --engine; leave it out")
    if resolved.run.training.steps < steps:
        raise UserError(f"--steps {steps} exceeds training.steps={resolved.run.training.steps}; lower it")
    if reason := engine.cannot_dump(resolved):
        raise UserError(f"verify cannot compare {engine.name} on this run: {reason}")
    engine.translate(resolved)  # what it refuses of the recipe, before its samples are a stream
    resolved = for_proof(_as_stream(_as_files_say(resolved)))
    translation = engine.translate(resolved)
    check_installed(engine, python, checkout)
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as name:
        folder = Path(name)
        samples = _write_inputs(resolved, folder, steps)
        journal, ranks = folder / "metrics.jsonl", resolved.run.layout.world_size
        options = ["--inputs", str(folder), "--journal", str(journal), "--dump", str(folder), "--pause", str(steps)]
        options += ["--save-every", "0"]
        options += ["--checkout", str(checkout)] if engine.checkout else []
        command = [str(python), "-P", str(translation.write_measured(folder / "program")), *options]
        made, path = tempfile.mkstemp(prefix="meshwright-verify-", suffix=".log")
        os.close(made)
        log = Path(path)  # stays, for whoever reads why it failed
        try:
            with RankedProgram(command, ranks, log) as program:
                program.wait_for(journal, f'"step": {steps},'.encode(), patience)
        except ProgramError as error:
            raise explained(engine, error) from error
        log.unlink()
        records = read_journal(journal)
        check_what_ran(resolved, next(record for record in records if record["kind"] == "engine"))
        reference = train_reference(build_alone(resolved), resolved.run.layout, folder / "reference", steps, samples)
        tolerance, compared = derive_tolerance(resolved), list[Compared]()
        for record in (record for record in records if record["kind"] == "step"):
            compared += _compare_step(resolved, reference, folder, record, tolerance)
    return EngineProof(tolerance.relative, compared)


def _as_files_say(resolved: ResolvedRun) -> ResolvedRun:
    """The run with head_dim = hidden / heads where Hugging Face's files (GPT-2's) store no head_dim: shrinking makes
    heads narrower."""
    model = resolved.model
    if model.foreign is not None or model.kv_rank is not None or "head_dim" in family_of(model).hf_fields:
        return resolved
    return resolved.model_copy(update={"model": model.model_copy(update={"head_dim": model.hidden // model.num_heads})})


def _as_stream(resolved: ResolvedRun) -> ResolvedRun:
    """The run with samples cut from one stream, as random tokens are."""
    data = resolved.run.data.model_copy(update={"packing": "concatenated", "separate_documents": False})
    return resolved.model_copy(update={"run": resolved.run.model_copy(update={"data": data})})


def _write_inputs(resolved: ResolvedRun, folder: Path, steps: int) -> Mixture:
    """Write perturbed weights and random tokens, all of them trained on."""
    count, length = steps * resolved.global_batch, resolved.run.data.sequence_length
    tokens = np.random.default_rng(0).integers(0, resolved.model.vocab, count * length + 1)
    file = file_in_memory([tokens], folder / "tokens.bin")
    file.tokens.tofile(file.path)
    shuffled, seed = resolved.run.data.order == "shuffled", resolved.run.training.seed
    samples = Mixture([ConcatenatedSamples(file.tokens, length)], shuffled=shuffled)
    write_start(resolved, proof_weights(resolved), folder)
    numbers_tokenizer(resolved.model.vocab).save(folder / START)
    write_order([file], samples, folder / DATA, seed=seed, count=count)
    return samples


def _compare_step(
    resolved: ResolvedRun, reference: Reference, folder: Path, record: dict[str, Any], tolerance: Tolerance
) -> Iterator[Compared]:
    """Everything that a step computes, in the order of computation: the gradient of the last parameter comes first.

    A program continues from its own weights, so every earlier step adds its rounding to the allowance.
    """
    step = record["step"]
    facts, relative = reference.facts(step), step * tolerance.relative
    yield Compared(step, "loss", "", _number(record["loss"], facts["loss"], relative))
    clip, factor, path = resolved.run.training.clip, 1.0, folder / f"gradients-{step}.npz"
    if not path.exists():  # the engine gives them only as the optimizer has them
        path = folder / f"clipped-{step}.npz"
        factor = 1.0 if clip is None else min(1.0, clip / facts["gnorm"])
    expected = _theirs(resolved, reference, f"step-{step}", "gradients")
    for name, tensor in reversed(list(_pairs(path, expected))):
        allowed = relative * facts["largest"] * factor
        yield Compared(step, "gradient", name, measure(tensor, expected[name] * factor, allowed, 0))
    yield Compared(step, "norm", "", _number(record["gnorm"], facts["gnorm"], relative))
    expected = _theirs(resolved, reference, f"step-{step}", "weights")
    for name, tensor in _pairs(folder / f"weights-{step}.npz", expected):
        allowed = step * tolerance.of_update(facts, expected[name].abs().max().item())
        yield Compared(step, "update", name, measure(tensor, expected[name], allowed, 0))


def _number(theirs: float, ours: float, relative: float) -> Difference:
    number = torch.tensor([theirs, ours], dtype=torch.float64)
    return measure(number[:1], number[1:], relative * abs(ours), 0)


def _theirs(resolved: ResolvedRun, reference: Reference, *place: str) -> dict[str, torch.Tensor]:
    """The reference's tensors under the names, and in the shapes, of Hugging Face files; of adapters, peft's."""
    finetune = resolved.run.finetune
    if isinstance(finetune, LoraSpec | Ia3Spec):
        places = stored_places(resolved.model, finetune)
        return {stored.key: stored.to_file(reference.tensor(*place, name)) for name, stored in places.items()}
    ours = [(row.name, reference.tensor(*place, row.name)) for row in parameter_table(resolved.model)]
    ours += [(row.name, torch.zeros(row.shape)) for row in state_table(resolved.model)]
    return dict(as_stored(ours, resolved.model))


def _pairs(path: Path, expected: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a program has written, by name. Raises `UserError` if the names are not the files'."""
    with np.load(path) as archive:
        if unknown := [name for name in archive.files if name not in expected]:
            raise UserError(
                f"the engine's parameter {unknown[0]} is not in the model's Hugging Face files; experts that "
                "transformers stacks cannot be compared"
            )
        for name in archive.files:
            yield name, torch.from_numpy(archive[name])
