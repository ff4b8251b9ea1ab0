"""The work that every engine of `finetune.py` does: base, records, adapters and hyper-parameters."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workload import Report, Workload

from meshwright.checkpoint.hf import export_hf
from meshwright.data.loader import HostBatch, Loader
from meshwright.data.mixture import training_samples
from meshwright.data.prepare import StartingModel, prepare_corpus
from meshwright.families import parameter_table, resolve_model
from meshwright.models import build_model, initialize
from meshwright.spec.data import DataSpec
from meshwright.spec.model import ModelFields

LR, RANK, ALPHA, CLIP = 2e-4, 16, 32.0, 1.0
LENGTHS = (0.8, 0.7)
"""Mean and standard deviation of the logarithm of a record's length in units of 40 tokens: instructions are short, a
few are long."""


@dataclass(frozen=True)
class Tuning:
    """A llama of 12 million parameters, an adapter beside every matrix of its layers, AdamW at a constant rate."""

    folder: str
    """Contains the base, `base`, and the records, `records.jsonl`."""
    method: str
    """lora or qlora."""
    packed: bool
    """Whether records share rows as separate documents, or each has its own row."""
    precision: str
    rounds: int
    turn: int
    warm_up: int
    threads: int = 2
    length: int = 256
    batch: int = 8

    @property
    def steps(self) -> int:
        """Optimizer steps that an engine makes in all."""
        return self.warm_up + self.rounds * self.turn

    @property
    def base(self) -> Path:
        """A Hugging Face directory."""
        return Path(self.folder) / "base"

    @property
    def data(self) -> dict[str, Any]:
        """The recipe's section."""
        return {
            "sources": [str(Path(self.folder) / "records.jsonl")],
            "sequence_length": self.length,
            "packing": "best_fit" if self.packed else "padded",
            "separate_documents": True,
            "cache_dir": str(Path(self.folder) / "cache"),
            "held_out": 0,
        }

    def batches(self) -> Iterator[HostBatch]:
        """The rows of every step, the same for all engines."""
        data = DataSpec.model_validate(self.data)
        corpus = prepare_corpus(data, base_dir=Path(), model=StartingModel(self.base))
        with Loader(training_samples(corpus, data), seed=0, global_batch=self.batch, micro_batch=self.batch) as loader:
            for step in range(self.steps):
                yield loader.microbatches(step)[0]

    def tokens(self) -> list[int]:
        """Tokens of records, padding left out, in every step."""
        return [sum(map(used, batch.labels)) for batch in self.batches()]


def used(labels_T: np.ndarray) -> int:
    """The used length of a row: answers end records, so up to the last label."""
    return int(np.flatnonzero(labels_T != -100)[-1]) + 1


def prepare(folder: Path) -> None:
    """Write a base with random weights and records cut from the standard library, a third of each not trained on."""
    fields = ModelFields(family="llama", hidden=384, num_layers=6, num_heads=6, num_kv_heads=6, ffn=1024, vocab=4096)
    spec = resolve_model(fields, base_dir=Path())
    model = build_model(spec, device="cpu")
    initialize(model, parameter_table(spec), seed=0)
    source = Workload(vocab=4096, precision="fp32", rounds=1, turn=1, warm_up=1).data
    corpus = prepare_corpus(source, base_dir=Path())
    corpus.tokenizer.save(folder / "tokenizer")
    parameters = ((name, tensor.detach()) for name, tensor in model.named_parameters())
    export_hf(parameters, spec, folder / "base", tokenizer_dir=folder / "tokenizer", dtype=torch.float32, prove=False)
    numbers, text = np.random.default_rng(0), corpus.streams[0].train.tokens
    with (folder / "records.jsonl").open("w") as stream:
        for _ in range(2000):
            length = int(np.clip(40 * numbers.lognormal(*LENGTHS), 16, 250))
            start = int(numbers.integers(len(text) - length))
            tokens = [int(token) for token in text[start : start + length]]
            labels = [-100] * (length // 3) + tokens[length // 3 :]
            stream.write(json.dumps({"input_ids": tokens, "labels": labels}) + "\n")


def arguments_for(work: Tuning) -> list[str]:
    """The command-line words from which `read_arguments` makes the same work."""
    return ["--work", json.dumps(asdict(work)), "--began", repr(time.time())]


def read_arguments() -> tuple[Tuning, Report]:
    """The work that the parent requests; sets the number of threads."""
    parser = argparse.ArgumentParser(description="One engine of benchmarks/finetune.py, started by it.")
    parser.add_argument("--work", required=True)
    parser.add_argument("--began", type=float, required=True)
    arguments = parser.parse_args(sys.argv[1:])
    work = Tuning(**json.loads(arguments.work))
    torch.set_num_threads(work.threads)
    return work, Report(work, arguments.began)
