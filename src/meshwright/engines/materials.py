"""What every engine's program reads: the weights that a run starts from, its tokens, and the order of its samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.checkpoint.hf import export_hf
from meshwright.data.mixture import training_samples
from meshwright.data.prepare import Corpus
from meshwright.families import parameter_table, state_table
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
    read = run_weights(resolved)
    rows = parameter_table(resolved.model) + state_table(resolved.model)
    weights = ((row.name, read(row, 0, row.shape[0])) for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    export_hf(weights, resolved.model, folder / START, tokenizer_dir=None, dtype=torch.float32, prove=False)
    (folder / DATA).mkdir()
    samples, seed = training_samples(corpus, resolved.run.data), resolved.run.training.seed
    order = np.empty((steps * resolved.global_batch, 2), np.int64)
    begins = [_begin(stream.train) for stream in corpus.streams]
    for position in range(len(order)):
        stream, index = samples.locate(position, seed)
        (piece,) = samples.streams[stream].pieces(index)
        order[position] = stream, begins[stream] + piece.start
    np.save(folder / DATA / ORDER, order)
    files = [{"path": str(stream.train.path.resolve()), "dtype": _dtype(stream.train)} for stream in corpus.streams]
    (folder / DATA / TOKENS).write_text(json.dumps(files, indent=1) + "\n")


def _begin(file: Any) -> int:
    """The first token of what is trained on, counted from the beginning of the file."""
    return int(file.places[file.firsts[0]]) // file.tokens.dtype.itemsize if len(file.firsts) > 1 else 0


def _dtype(file: Any) -> str:
    return file.tokens.dtype.newbyteorder("<").str
