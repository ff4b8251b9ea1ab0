"""The input of every engine's program: initial weights, adapters, and samples in the order in which they are seen."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from meshwright.checkpoint.hf import HfForm, export_hf
from meshwright.checkpoint.peft import Base, write_adapter
from meshwright.data.mixture import Mixture, training_samples
from meshwright.data.packing import NO_LABEL, Sample
from meshwright.data.prepare import Corpus
from meshwright.data.token_file import TokenFile
from meshwright.engines.engine import reads_places, reads_rows
from meshwright.families import finetuned_table, parameter_table, state_table
from meshwright.parallel.materialize import RowSource
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import Ia3Spec, LoraSpec
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.weights import base_of, run_weights

START, ADAPTER, DATA = "start", "adapter", "data"
"""The folders of weights, of adapters and of tokens."""
TOKENS, ORDER = "tokens.json", "order.npy"
ROWS, LABELS, PLACES, PAIRS = "rows.npy", "labels.npy", "places.npy", "pairs.jsonl"


def write_materials(resolved: ResolvedRun, corpus: Corpus, folder: Path, *, steps: int) -> None:
    """Write the inputs of the first `steps` steps: `folder`/start, a Hugging Face directory in fp32 with the tokenizer,
    `folder`/adapter where adapters train, and `folder`/data: pieces of the token files where samples are cut from a
    stream, else rows of tokens and labels, or pairs of answers.
    """
    write_start(resolved, run_weights(resolved), folder)
    corpus.tokenizer.save(folder / START)
    files, samples = [stream.train for stream in corpus.streams], training_samples(corpus, resolved.run.data)
    count, seed = steps * resolved.global_batch, resolved.run.training.seed
    if resolved.run.training.preference is not None:
        write_pairs(samples, folder / DATA, seed=seed, count=count)
    elif reads_rows(resolved.run.data):
        write_rows(resolved, samples, folder / DATA, count=count)
    else:
        assert all(file.trained is None for file in files)  # records are never cut from a stream
        write_order(files, samples, folder / DATA, seed=seed, count=count)


def write_start(resolved: ResolvedRun, read: RowSource, folder: Path) -> None:
    """Write the weights that `read` gives: the model as a Hugging Face directory in fp32, adapters as peft's."""
    model, finetune = resolved.model, resolved.run.finetune
    rows = parameter_table(model) + state_table(model)
    folder.mkdir(parents=True, exist_ok=True)
    weights = ((row.name, read(row, 0, row.shape[0])) for row in rows)
    text = model.model_copy(update={"wrapper": None})  # other engines train the text model alone
    export_hf(weights, text, folder / START, HfForm(dtype=torch.float32), prove=False)
    if isinstance(finetune, LoraSpec | Ia3Spec):
        trained = [row for row in finetuned_table(model, finetune) if row.trained]
        adapters = {row.name: read(row, 0, row.shape[0]).float() for row in trained}
        base = base_of(resolved)
        assert base is not None
        write_adapter(folder / ADAPTER, adapters, model, finetune, Base(None, base["fingerprint"]))


def write_rows(resolved: ResolvedRun, samples: Mixture, folder: Path, *, count: int) -> None:
    """Write the first `count` samples as rows: tokens, labels (-100: none is trained) and, where documents of a row are
    kept apart, each token's place in its document."""
    data, seed = resolved.run.data, resolved.run.training.seed
    folder.mkdir(parents=True, exist_ok=True)
    names = [ROWS, LABELS, *([PLACES] if reads_places(data) else [])]
    shape = count, data.sequence_length
    arrays = [np.lib.format.open_memmap(folder / name, "w+", np.int32, shape) for name in names]
    for position in range(count):
        sample = samples.sample(position, seed)
        for array, values in zip(arrays, (sample.inputs, sample.labels, _places(sample)), strict=False):
            array[position] = values
    for array in arrays:
        array.flush()


def write_pairs(samples: Mixture, folder: Path, *, seed: int, count: int) -> None:
    """Write the first `count` samples, a pair of answers each, as trl reads them: tokens of prompt and answers."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / PAIRS).open("w", encoding="utf-8") as file:
        for position in range(count):
            file.write(json.dumps(_pair(samples.sample(position, seed))) + "\n")


def _pair(sample: Sample) -> dict[str, list[int]]:
    """The tokens of a sample's pair. Raises `UserError` if its answers do not follow one prompt."""
    assert sample.documents is not None
    sides = []
    for document in (0, 1):
        here = sample.documents == document
        inputs, labels = sample.inputs[here], sample.labels[here]
        answer = np.flatnonzero(labels != NO_LABEL)
        if not len(answer) or (np.diff(answer) != 1).any():
            raise UserError(
                "trl needs one contiguous answer, but a pair trains on several turns; set data.chat.train_on=last"
            )
        sides.append((inputs[: answer[0] + 1].tolist(), labels[answer].tolist()))
    (prompt, chosen), (other, rejected) = sides
    if prompt != other:
        raise UserError("trl compares two answers to one prompt, but the answers of a pair have different prompts")
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def _places(sample: Sample) -> np.ndarray:
    """The place of each token in its document."""
    places = np.arange(len(sample.inputs))
    if sample.documents is None:
        return places
    begins = np.flatnonzero(np.r_[True, sample.documents[1:] != sample.documents[:-1]])
    return places - np.repeat(begins, np.diff(np.r_[begins, len(places)]))


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
    about = [{"path": str(file.path.resolve()), "dtype": file.tokens.dtype.newbyteorder("<").str} for file in files]
    (folder / TOKENS).write_text(json.dumps(about, indent=1) + "\n")


def _begin(file: TokenFile) -> int:
    """The first trained token, counted from the beginning of the file."""
    return int(file.places[file.firsts[0]]) // file.tokens.dtype.itemsize if len(file.firsts) > 1 else 0
