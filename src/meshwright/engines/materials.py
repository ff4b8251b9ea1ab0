"""The input of every engine's program: initial weights, tokens, and the order of samples."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from meshwright.checkpoint.hf import export_hf
from meshwright.data.mixture import Mixture, training_samples
from meshwright.data.prepare import Corpus
from meshwright.data.token_file import TokenFile
from meshwright.families import parameter_table, state_table
from meshwright.parallel.materialize import RowSource
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.weights import run_weights

START, DATA = "start", "data"
"""The folders of weights and of tokens."""
TOKENS, ORDER = "tokens.json", "order.npy"


def write_materials(resolved: ResolvedRun, corpus: Corpus, folder: Path, *, steps: int) -> None:
    """Write `folder`/start, a Hugging Face directory in fp32, and `folder`/data: where the tokens are, and for each
    sample of the first `steps` steps its file and its first token there.

    The run packs its tokens as one stream (`data.packing=concatenated`), which `Engine.translate` makes sure of.
    """
    write_start(resolved.model, run_weights(resolved), folder / START)
    files, samples = [stream.train for stream in corpus.streams], training_samples(corpus, resolved.run.data)
    count = steps * resolved.global_batch
    write_order(files, samples, folder / DATA, seed=resolved.run.training.seed, count=count)


def write_start(model: ModelSpec, read: RowSource, folder: Path) -> None:
    """Write the weights that `read` gives as a Hugging Face directory in fp32."""
    rows = parameter_table(model) + state_table(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    weights = ((row.name, read(row, 0, row.shape[0])) for row in rows)
    export_hf(weights, model, folder, tokenizer_dir=None, dtype=torch.float32, prove=False)


def write_order(files: Sequence[TokenFile], samples: Mixture, folder: Path, *, seed: int, count: int) -> None:
    """Write the locations of the tokens of `samples`, which are cut from `files`, and the order of the first
    `count`."""
    folder.mkdir(parents=True, exist_ok=True)
    order = np.empty((count, 2), np.int64)
    begins = [_begin(file) for file in files]
    for position in range(count):
        stream, index = samples.locate(position, seed)
        (piece,) = samples.streams[stream].pieces(index)
        order[position] = stream, begins[stream] + piece.start
    np.save(folder / ORDER, order)
    about = [{"path": str(file.path.resolve()), "dtype": _dtype(file)} for file in files]
    (folder / TOKENS).write_text(json.dumps(about, indent=1) + "\n")


def _begin(file: TokenFile) -> int:
    """The first trained token, counted from the beginning of the file."""
    return int(file.places[file.firsts[0]]) // file.tokens.dtype.itemsize if len(file.firsts) > 1 else 0


def _dtype(file: TokenFile) -> str:
    return file.tokens.dtype.newbyteorder("<").str
