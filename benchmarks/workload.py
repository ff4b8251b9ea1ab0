"""The work that every engine of `engines.py` does: model, batches, hyper-parameters, and the report on it."""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from meshwright.data.loader import Loader
from meshwright.data.mixture import training_samples
from meshwright.data.prepare import prepare_corpus
from meshwright.families import parameter_table, resolve_model
from meshwright.models import build_model, initialize
from meshwright.models.decoder import Decoder
from meshwright.models.kernel_choice import Shapes
from meshwright.spec.data import DataSpec
from meshwright.spec.model import ModelFields, ModelSpec

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
"""AdamW at a constant rate; decay on matrices and embeddings only; clipping by the global norm."""


@dataclass(frozen=True)
class Workload:
    """GPT-2's shape, small: tied embeddings, learned positions, no dropout."""

    vocab: int
    precision: str
    """fp32 or bf16."""
    rounds: int
    """Turns in which steps are timed."""
    turn: int
    """Steps of a turn."""
    warm_up: int
    """Steps before them: allocators, caches and kernels settle."""
    threads: int = 2
    compile: bool = False
    """torch.compile, the way each engine does it."""
    layers: int = 6
    width: int = 384
    heads: int = 6
    length: int = 256
    batch: int = 8
    cache: str = "runs/cache"

    @property
    def steps(self) -> int:
        """Optimizer steps that an engine makes in all."""
        return self.warm_up + self.rounds * self.turn

    @property
    def data(self) -> DataSpec:
        """The standard library in 4,096 tokens; a larger vocabulary only has more rows than are ever met."""
        return DataSpec(sequence_length=self.length, tokenizer_vocab=4096, cache_dir=self.cache)

    @property
    def fields(self) -> ModelFields:
        """The model's fields as in a recipe."""
        return ModelFields(
            family="gpt2",
            hidden=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            vocab=self.vocab,
            max_positions=self.length,
        )

    @property
    def shapes(self) -> Shapes:
        """The sizes by which a CPU's kernels are chosen."""
        spec, dtype = self.spec, torch.float32 if self.precision == "fp32" else torch.bfloat16
        heads = self.batch * spec.num_heads
        return Shapes(self.batch * self.length, spec.hidden, spec.ffn, heads, heads, self.length, spec.head_dim, dtype)

    @property
    def spec(self) -> ModelSpec:
        """The model, complete."""
        return resolve_model(self.fields, base_dir=Path())

    def model(self) -> Decoder:
        """Our model with every engine's initial weights, fp32."""
        model = build_model(self.spec, device="cpu")
        initialize(model, parameter_table(self.spec), seed=0)
        return model

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """inputs_BT and labels_BT (inputs moved on by one) of every step, the same for all engines."""
        corpus = prepare_corpus(self.data, base_dir=Path())
        samples = training_samples(corpus, self.data)
        with Loader(samples, seed=0, global_batch=self.batch, micro_batch=self.batch) as loader:
            for step in range(self.steps):
                microbatch = loader.microbatches(step)[0]
                yield torch.from_numpy(microbatch.tokens), torch.from_numpy(microbatch.labels)


class Timed(Protocol):
    """What a report needs to know of the work."""

    @property
    def turn(self) -> int:
        """Steps of a turn."""
        ...

    @property
    def warm_up(self) -> int:
        """Steps before the first turn."""
        ...


class Report:
    """Times the steps of one engine's process, a turn at a time, and tells the parent by lines of json.

    After the warm-up and after every turn the process waits until the parent gives it the next one: all engines are
    alive together, but only one computes.
    """

    def __init__(self, workload: Timed, began: float) -> None:
        self.workload, self.began = workload, began
        self.losses: list[float] = []
        self._seconds: list[float] = []
        self._steps = 0
        self._since = time.perf_counter()
        self._parent = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to the errors

    def step(self, loss: float | None = None) -> None:
        """Call at the end of every step."""
        self._seconds.append(time.perf_counter() - self._since)
        self._steps += 1
        if loss is not None:
            self.losses.append(loss)
        if self._steps == 1:
            self._tell(first_step_s=time.time() - self.began)
        done = self._steps - self.workload.warm_up
        if done >= 0 and done % self.workload.turn == 0:
            self._tell(seconds=self._seconds)
            self._seconds = []
            sys.stdin.readline()
        self._since = time.perf_counter()

    def end(self, about: str) -> None:
        """Send the rest: peak resident memory, first and last loss, and the engine's report of what it trained."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        losses = [round(loss, 4) for loss in (self.losses[0], self.losses[-1])]
        self._tell(peak_gib=peak, losses=losses, about=about)

    def _tell(self, **what: object) -> None:
        print(json.dumps(what), file=self._parent, flush=True)


def describe(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> str:
    """What was trained and how, read from the training objects."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # wrapped by Accelerate
    tensors, groups = list(parameters), optimizer.param_groups
    dtypes = "/".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
    decays = ", ".join(f"decay {group['weight_decay']:g} on {len(group['params'])} tensors" for group in groups)
    return (
        f"{sum(tensor.numel() for tensor in tensors)} parameters in {dtypes}; {type(optimizer).__name__}, "
        f"lr {groups[0]['lr']:g}, betas {groups[0]['betas']}, eps {groups[0]['eps']:g}, "
        f"fused {bool(groups[0].get('fused'))}, {decays}; {torch.get_num_threads()} threads"
    )


def decay_groups(parameters: Iterable[torch.Tensor]) -> list[dict]:
    """AdamW's two groups."""
    tensors = list(parameters)
    matrices, vectors = [t for t in tensors if t.dim() >= 2], [t for t in tensors if t.dim() < 2]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


def arguments_for(workload: Workload) -> list[str]:
    """The command-line words from which `read_arguments` makes the same workload."""
    return ["--workload", json.dumps(asdict(workload)), "--began", repr(time.time())]


def read_arguments() -> tuple[Workload, Report, Path | None]:
    """The work that the parent requests; sets the number of threads."""
    parser = argparse.ArgumentParser(description="One engine of benchmarks/engines.py, started by it.")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--began", type=float, required=True)
    parser.add_argument("--nanogpt", type=Path)
    arguments = parser.parse_args(sys.argv[1:])
    workload = Workload(**json.loads(arguments.workload))
    torch.set_num_threads(workload.threads)
    return workload, Report(workload, arguments.began), arguments.nanogpt
