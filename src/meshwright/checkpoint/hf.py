"""Weights of Hugging Face directories, read and written one tensor or slice at a time."""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.fp8 import Dequantized
from meshwright.checkpoint.hf_proof import prove_export
from meshwright.checkpoint.hf_rest import REST_FILES, read_rest, rest_of
from meshwright.checkpoint.mxfp4 import Unpacked
from meshwright.checkpoint.tensor_files import DTYPES, TensorFileWriter, UnmappedTensor, named_dtype, open_tensors
from meshwright.families import family_of, hf_tensors, model_to_hf_config, parameter_table, state_table
from meshwright.families.fp8_files import FP8, scale_of, without_scales
from meshwright.families.hf_tensors import HfTensor, stored_scalars
from meshwright.families.mxfp4_files import BLOCKS, MXFP4, SCALES, with_unpacked
from meshwright.families.tensor_headers import INDEX, WEIGHTS, StoredTensor, stored_tensors
from meshwright.models import Decoder, build_model, named_state, named_tensors
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.spec.text import counted
from meshwright.storage.durable import complete_folder

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    GENERATION,
)
"""Tokenizer and generation files, copied unchanged if they exist."""


class HfWeights:
    """The weights of a Hugging Face directory under our names, read lazily."""

    def __init__(self, directory: Path, spec: ModelSpec, *, mapped: bool = True):
        """Check every tensor's presence, shape and dtype from the files' headers alone. `mapped`: read through maps of
        whole files, not by ordinary reads.

        Raises:
            UserError: names the file, the tensor that does not fit `spec`, and the expected value.
        """
        self._places = hf_tensors(spec)
        self._handles: dict[Path, Any] = {}
        self._mapped = mapped
        self._stored, where = stored_tensors(directory)
        stored = with_unpacked(self._stored)
        self._tensors = {
            name: [_find(stored, key, name, place.shape, spec, where) for key in place.keys]
            for name, place in self._places.items()
        }
        self._scales = {
            key: scale_of(stored, key, spec.fp8)
            for stored_parts in self._tensors.values()
            for key, tensor in stored_parts
            if tensor.dtype == FP8
        }
        self._block = spec.fp8 and spec.fp8.block
        _refuse_unknown(
            without_scales(stored, spec.fp8),
            {key for stored_parts in self._tensors.values() for key, _ in stored_parts},
            spec,
        )
        self._twin = _second_head(stored, spec)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of our parameter `name` in our orientation and the file's dtype, on the CPU.

        Only those rows are read from disk.
        """
        place, tensors = self._places[name], self._tensors[name]
        if place.experts is not None:
            parts = len(place.parts)
            wanted = [self._slice(*tensor)[:] for tensor in tensors[start * parts : stop * parts]]
            if not wanted:
                rows, columns = place.shape
                return self._slice(*tensors[0])[:0].new_empty(0, parts * rows, columns)
            return torch.stack(wanted).unflatten(0, (-1, parts)).flatten(1, 2)
        lazy = self._slice(*tensors[0])
        if place.lane is not None:
            own, lanes = place.lane
            if len(place.shape) == 2:  # biases
                return lazy[start:stop][:, own::lanes, None]
            return (lazy[start:stop].mT if place.transposed else lazy[start:stop])[:, own::lanes]
        rows = slice(place.offset + start, place.offset + stop)
        if self._twin is not None and self._twin[0] == name:
            self._check_twin(lazy[rows], rows, tensors[0][0])
        if len(place.shape) > 2:  # a stack of matrices
            return lazy[rows].mT if place.transposed else lazy[rows]
        return lazy[:, rows].t() if place.transposed else lazy[rows]

    def _check_twin(self, embedding: torch.Tensor, rows: slice, key: str) -> None:
        assert self._twin is not None
        _, head, tensor = self._twin
        if tensor.shape[1:] != embedding.shape[1:] or not torch.equal(self._slice(head, tensor)[rows], embedding):
            raise UserError(
                f"{tensor.file}: {head} and {key} differ, but tie_word_embeddings in config.json ties them; "
                'write "tie_word_embeddings": false there, or remove the wrong tensor'
            )

    def _slice(self, key: str, tensor: StoredTensor) -> Any:
        if tensor.dtype == MXFP4:
            codes, scales = ((key + suffix, self._stored[key + suffix]) for suffix in (BLOCKS, SCALES))
            return Unpacked(self._stored_slice(*codes), self._stored_slice(*scales))
        lazy = self._stored_slice(key, tensor)
        if tensor.dtype != FP8:
            return lazy
        return Dequantized(lazy, tensor.shape, self._scales[key], self._block)

    def _stored_slice(self, key: str, tensor: StoredTensor) -> Any:
        if not self._mapped:
            return UnmappedTensor(tensor)
        if tensor.file not in self._handles:
            self._handles[tensor.file] = open_tensors(tensor.file)
        return self._handles[tensor.file].get_slice(key)


def _find(
    stored: Mapping[str, StoredTensor], full: str, name: str, shape: tuple[int, ...], spec: ModelSpec, where: Path
) -> tuple[str, StoredTensor]:
    """The stored tensor `full`, which contains our parameter `name`, and its name in the file."""
    bare = full if spec.foreign or spec.wrapper else full.removeprefix(family_of(spec).hf_prefix)
    key = next((key for key in (full, bare) if key in stored), None)
    if key is None:
        raise UserError(f"{where} has no tensor {full}, which {spec.family} needs for {name}")
    tensor = stored[key]
    if tensor.shape != shape:
        raise UserError(
            f"{tensor.file}: tensor {key} has shape {list(tensor.shape)}, but config.json implies {list(shape)}"
        )
    if tensor.dtype not in (*DTYPES, FP8, MXFP4):
        raise UserError(f"{tensor.file}: tensor {key} is {tensor.dtype}; only {', '.join(DTYPES)} are supported")
    return key, tensor


def _refuse_unknown(stored: Mapping[str, StoredTensor], used: set[str], spec: ModelSpec) -> None:
    """Raise `UserError` for a tensor that would not be read: ignoring it would silently change the model."""
    if spec.foreign:  # its parameters come from the files and have been compared with transformers' module
        return
    family = family_of(spec)
    ignored = family.hf_ignored + (("lm_head.weight",) if spec.tied_embeddings else ())
    for key in stored.keys() - used:
        if spec.wrapper is not None and not key.startswith(tuple(file for _, file in spec.wrapper.files)):
            continue
        if not _predicts_further(key, spec) and not key.endswith(ignored):
            raise UserError(f"{stored[key].file}: tensor {key} does not belong to the {spec.family} of config.json")


def _predicts_further(key: str, spec: ModelSpec) -> bool:
    """Whether a stored tensor is part of layers or heads that predict several tokens."""
    family = family_of(spec)
    layer = re.search(r"\blayers\.(\d+)\.", key) if family.hf_more_layers else None
    return (layer is not None and int(layer[1]) >= spec.num_layers) or key.startswith(family.hf_left_out)


def about_left_out(directory: Path, spec: ModelSpec) -> str:
    """A sentence that names the tensors of a directory that are not read because they predict several tokens; empty
    if there are none."""
    if spec.foreign:
        return ""
    stored, _ = stored_tensors(directory)
    left_out = sorted(key for key in stored if _predicts_further(key, spec))
    if not left_out:
        return ""
    named = left_out[0] if len(left_out) == 1 else f"{left_out[0]} to {left_out[-1]}"
    lost = "" if spec.wrapper else "; exports do not have them"
    return f"{counted(len(left_out), 'tensor')} of multi-token prediction not read: {named}{lost}"


def _second_head(stored: Mapping[str, StoredTensor], spec: ModelSpec) -> tuple[str, str, StoredTensor] | None:
    """A head stored in the files although it is tied to the embedding: our name for the embedding, and the head."""
    head = "lm_head.weight" if spec.wrapper is None else f"{spec.wrapper.files[-1][1]}weight"
    if not spec.tied_embeddings or head not in stored:
        return None
    embeddings = [row.name for row in parameter_table(spec) if row.dims[0] == "vocab"]
    if "lm_head.weight" in embeddings:  # of a model that transformers computes but does not mark as one
        return None
    return embeddings[0], head, stored[head]


@dataclass(frozen=True, kw_only=True)
class HfForm:
    """How an exported model is stored, and the files beside its weights."""

    dtype: torch.dtype = torch.bfloat16
    """Of the stored weights."""
    shard_bytes: int = 5 * 10**9
    """Size limit of a file."""
    tokenizer_dir: Path | None = None
    """Folder whose tokenizer files are copied."""
    token_ids: Mapping[str, int | list[int] | None] = field(default_factory=dict)
    """`bos_token_id`, `eos_token_id`, `pad_token_id` for config.json and generation_config.json."""
    rest: Path | None = None
    """Of a text model inside a multimodal one: the directory whose other tensors and files are copied."""


def export_hf(
    parameters: Iterable[tuple[str, torch.Tensor]],
    spec: ModelSpec,
    out_dir: Path,
    form: HfForm,
    *,
    prove: bool = True,
    seal: Callable[[Path, dict[str, float]], None] | None = None,
) -> dict[str, float]:
    """Write a directory that transformers 4 and 5 and this project can read. It gets its name only when complete.

    Args:
        parameters: our names with whole tensors, state included, each once, in any order. One is held at a time; those
            that share a stored tensor (gpt2's queries, keys and values) are held until all have arrived.
        prove: before the directory gets its name, read it back and compare logits, also with transformers if it is
            installed. Holds two models in fp32 in host memory.
        seal: called with the complete directory and the proof's findings, before the directory gets its name.

    Returns:
        the largest difference between two logits in the proof, by program; empty without a proof.

    Raises:
        UserError: `out_dir` exists, the parameters do not belong to `spec`, or the logits differ.
    """
    with complete_folder(out_dir) as staging:
        reference = build_model(spec, device="cpu") if prove else None
        kept = parameters if reference is None else _kept(parameters, reference, form.dtype)
        _write_weights(as_stored(kept, spec), spec, staging, form)
        _write_configs(spec, staging, form)
        differences = {}
        if reference is not None:
            differences = prove_export(reference, staging, lambda written: HfWeights(staging, written).read_rows)
        if seal is not None:
            seal(staging, differences)
    return differences


def _kept(
    parameters: Iterable[tuple[str, torch.Tensor]], reference: Decoder, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same parameters, each also copied into `reference`, rounded as it will be stored."""
    targets, state = named_tensors(reference), named_state(reference)
    for name, tensor in parameters:
        if name in targets and tensor.shape == targets[name].shape:
            targets[name].data.copy_(tensor.detach() if name in state else tensor.detach().to(dtype))
        yield name, tensor


def as_stored(parameters: Iterable[tuple[str, torch.Tensor]], spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Every stored tensor, in its orientation, as soon as all parameters that share it have arrived."""
    places = hf_tensors(spec)
    missing = {row.name: row.shape for row in parameter_table(spec) + state_table(spec)}
    waiting: dict[str, dict[int, torch.Tensor]] = {}  # rows of a stored tensor that have arrived, by its first row
    for name, tensor in parameters:
        if missing.pop(name, None) != tuple(tensor.shape):
            raise UserError(f"export: {name} of shape {list(tensor.shape)} is unexpected or occurs twice")
        place = places[name]
        if place.experts is not None:
            pieces = tensor.detach().unflatten(1, (len(place.parts), -1)).flatten(0, 1)
            yield from zip(place.keys, pieces.unbind(), strict=True)
            continue
        (key,) = place.keys
        if place.lane is not None:
            lanes = waiting.setdefault(key, {})
            lanes[place.lane[0]] = tensor.detach()
            if len(lanes) == place.lane[1]:
                yield key, _interleaved(waiting.pop(key), place)
            continue
        parts = waiting.setdefault(key, {})
        parts[place.offset] = tensor.detach()
        if sum(len(part) for part in parts.values()) == place.shape[1 if place.transposed and tensor.dim() == 2 else 0]:
            rows = [part for _, part in sorted(waiting.pop(key).items())]
            whole = rows[0] if len(rows) == 1 else torch.cat(rows)
            yield key, whole.mT if place.transposed else whole
    yield from ((key, torch.tensor(value)) for key, value in stored_scalars(spec).items())
    if missing:
        raise UserError(f"export: {len(missing)} parameters are missing, first {next(iter(missing))}")


def _interleaved(lanes: Mapping[int, torch.Tensor], place: HfTensor) -> torch.Tensor:
    """A stored stack of all experts' matrices or biases, whose outputs are those of several parameters in turn."""
    whole_EOI = torch.stack([lane for _, lane in sorted(lanes.items())], 2).flatten(1, 2)
    if len(place.shape) == 2:
        return whole_EOI.squeeze(-1)
    return whole_EOI.mT if place.transposed else whole_EOI


def _write_weights(tensors: Iterable[tuple[str, torch.Tensor]], spec: ModelSpec, directory: Path, form: HfForm) -> None:
    """One file, or several with an index. All are open at once, because tensors arrive in any order."""
    places = hf_tensors(spec)
    shapes = {key: place.shape for place in places.values() for key in place.keys}
    scalars = dict.fromkeys(stored_scalars(spec), ())
    exact = scalars.keys() | {
        key for row in state_table(spec) for key in places[row.name].keys
    }  # sensitive to rounding
    shapes |= scalars
    dtypes = {key: torch.promote_types(form.dtype, torch.float32) if key in exact else form.dtype for key in shapes}
    rest = rest_of(form.rest, spec)
    shapes |= {key: tensor.shape for key, tensor in rest.items()}
    dtypes |= {key: form.dtype if tensor.dtype == FP8 else named_dtype(tensor) for key, tensor in rest.items()}
    sizes = {key: prod(shape) * dtypes[key].itemsize for key, shape in shapes.items()}
    shards = _plan_shards(sizes, form.shard_bytes)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [WEIGHTS]
    weight_map = {key: file for file, keys in zip(files, shards, strict=True) for key in keys}
    with ExitStack() as stack:
        writers = {
            file: stack.enter_context(
                TensorFileWriter(directory / file, {key: (shapes[key], dtypes[key]) for key in keys})
            )
            for file, keys in zip(files, shards, strict=True)
        }
        for key, tensor in itertools.chain(tensors, read_rest(form.rest, spec)):
            writers[weight_map[key]].write(key, tensor)
    if len(shards) > 1:
        metadata = {"total_parameters": sum(map(prod, shapes.values())), "total_size": sum(sizes.values())}
        _write_json(directory / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """The keys of each file: filled in order up to `shard_bytes`, at least one tensor each."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    return shards


def _write_configs(spec: ModelSpec, directory: Path, form: HfForm) -> None:
    config = model_to_hf_config(spec, dtype=str(form.dtype).removeprefix("torch."))
    _write_json(directory / "config.json", config if spec.wrapper else config | dict(form.token_ids))
    for name in TOKENIZER_FILES:
        if form.tokenizer_dir is not None and (form.tokenizer_dir / name).is_file():
            shutil.copyfile(form.tokenizer_dir / name, directory / name)
    for name in REST_FILES:
        if form.rest is not None and (form.rest / name).is_file():
            shutil.copyfile(form.rest / name, directory / name)
    known = {key: value for key, value in form.token_ids.items() if value is not None}
    _write_generation(directory / GENERATION, known)


def _write_generation(path: Path, token_ids: dict[str, Any]) -> None:
    """Write `token_ids` for generation, or add those that the copied file lacks."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        missing = {key: value for key, value in token_ids.items() if given.get(key) is None}
    except FileNotFoundError:
        given, missing = {}, token_ids
    except (ValueError, AttributeError):  # unreadable: left unchanged
        return
    if missing or not given:
        _write_json(path, given | missing)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
