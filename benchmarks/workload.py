"""The work that every engine of `engines.py` does: model, batches, hyper-parameters, and the report on it."""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from meshwright.data.loader import Loader
from meshwright.data.packing import ConcatenatedSamples
from meshwright.data.prepare import prepare_corpus
from meshwright.families import parameter_table, resolve_model
from meshwright.models import build_model, initialize
from meshwright.models.decoder import Decoder
from meshwright.spec.data import DataSpec
from meshwright.spec.model import ModelFields, ModelSpec

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
WARM_UP = 3
"""Steps left out of the rate: allocators, caches and kernels settle."""


@dataclass(frozen=True)
class Workload:
    """GPT-2's shape, small: tied embeddings, learned positions, no dropout."""

    vocab: int
    precision: str
    """fp32 or bf16."""
    steps: int
    threads: int = 2
    layers: int = 6
    width: int = 384
    heads: int = 6
    length: int = 256
    batch: int = 8
    cache: str = "runs/cache"

    @property
    def data(self) -> DataSpec:
        """The standard library in 4,096 tokens; a larger vocabulary only has more rows than are ever met."""
        return DataSpec(sequence_length=self.length, tokenizer_vocab=4096, cache_dir=self.cache)

    @property
    def fields(self) -> ModelFields:
        """The model as a recipe says it."""
        return ModelFields(
            family="gpt2",
            hidden=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            vocab=self.vocab,
            max_positions=self.length,
        )

    @property
    def spec(self) -> ModelSpec:
        """The model, complete."""
        return resolve_model(self.fields, base_dir=Path())

    def model(self) -> Decoder:
        """Our model with the weights that every engine starts from, fp32."""
        model = build_model(self.spec, device="cpu")
        initialize(model, parameter_table(self.spec), seed=0)
        return model

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """inputs_BT and labels_BT (inputs moved on by one) of every step, the same for all engines."""
        corpus = prepare_corpus(self.data, base_dir=Path())
        samples = ConcatenatedSamples(corpus.train.tokens, self.length)
        with Loader(samples, seed=0, global_batch=self.batch, micro_batch=self.batch) as loader:
            for step in range(self.steps):
                inputs, labels = loader.microbatches(step)[0]
                yield torch.from_numpy(inputs), torch.from_numpy(labels)


class Report:
    """Collects what one engine's process measured and prints it as the last line."""

    def __init__(self, workload: Workload, began: float) -> None:
        self.workload, self.began = workload, began
        self.ends: list[float] = []
        self.losses: list[float] = []

    def step(self, loss: float | None = None, at: float | None = None) -> None:
        """Call at the end of every step."""
        self.ends.append(at or time.time())
        if loss is not None:
            self.losses.append(loss)

    def print(self) -> None:
        """Tokens per second by the median step, peak resident memory, seconds from the command to the first step."""
        seconds = [after - before for before, after in zip(self.ends[WARM_UP:], self.ends[WARM_UP + 1 :], strict=False)]
        tokens = self.workload.batch * self.workload.length
        report = {
            "tokens_per_s": tokens / statistics.median(seconds),
            "steps": len(seconds),
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "first_step_s": self.ends[0] - self.began,
            "losses": [round(loss, 4) for loss in (self.losses[0], self.losses[-1])],
        }
        print(json.dumps(report), flush=True)


def arguments_for(workload: Workload) -> list[str]:
    """The command-line words from which `read_arguments` makes the same workload."""
    return ["--workload", json.dumps(asdict(workload)), "--began", repr(time.time())]


def read_arguments() -> tuple[Workload, Report, Path | None]:
    """What the parent asks of this process; sets the number of threads."""
    parser = argparse.ArgumentParser(description="One engine of benchmarks/engines.py, started by it.")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--began", type=float, required=True)
    parser.add_argument("--nanogpt", type=Path)
    arguments = parser.parse_args(sys.argv[1:])
    workload = Workload(**json.loads(arguments.workload))
    torch.set_num_threads(workload.threads)
    return workload, Report(workload, arguments.began), arguments.nanogpt
