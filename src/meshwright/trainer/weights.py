"""The weights that a run starts from."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.dcp import load_tensors
from meshwright.checkpoint.hf import HfWeights, about_left_out
from meshwright.checkpoint.manifest import MANIFEST, CheckpointError
from meshwright.checkpoint.peft import read_adapter
from meshwright.checkpoint.peft_config import CONFIG, AdapterSpec
from meshwright.checkpoint.verify import verify_checkpoint
from meshwright.families import finetuned_table, parameter_table, pretrained_directory
from meshwright.families.low_precision import HISTORY
from meshwright.models.init import draw_rows
from meshwright.models.quantized import QuantizedRows
from meshwright.parallel.materialize import RowSource
from meshwright.spec.finetune import FullSpec
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.folder import checkpoint_at, starting_checkpoint

SAMPLED_BYTES, SAMPLES = 2**16, 64
"""The number and size in bytes of the pieces of each base file in its fingerprint; a shorter file is used whole."""


def run_weights(resolved: ResolvedRun) -> RowSource:
    """The weights of a fresh run, adapters included; collective if they come from a checkpoint."""
    base, finetune = kept_weights(resolved), resolved.run.finetune
    if finetune is None or isinstance(finetune, FullSpec):
        return base
    adapters = _with_fresh_adapters(base, resolved)
    if finetune.start_from is None:
        return adapters
    return _with_given_adapters(adapters, resolved, finetune, Path(resolved.base_dir) / finetune.start_from)


def kept_weights(resolved: ResolvedRun) -> RowSource:
    """The weights without adapters, as stored: quantized ones are encoded."""
    table = finetuned_table(resolved.model, resolved.run.finetune)
    return QuantizedRows(base_weights(resolved), parameter_table(resolved.model), table)


def base_weights(resolved: ResolvedRun) -> RowSource:
    """The weights without adapters: fresh, from the recipe's Hugging Face directory, or, for fine-tuning, from the
    checkpoint that `checkpoint.start_from` names."""
    source = _named_weights(resolved)

    def read(row: Parameter, start: int, stop: int) -> torch.Tensor:
        if row.name.endswith(HISTORY):  # not part of any weights
            return torch.zeros(stop - start, *row.shape[1:])
        return source(row, start, stop)

    return read


def _named_weights(resolved: ResolvedRun) -> RowSource:
    run, seed = resolved.run, resolved.run.training.seed
    if run.finetune is not None and run.checkpoint.start_from:
        checkpoint = starting_checkpoint(resolved)
        verify_checkpoint(checkpoint)
        return _rows_of_checkpoint(checkpoint)
    if run.model.weights != "pretrained":
        return lambda parameter, start, stop: draw_rows(parameter, seed, start, stop)
    pretrained = HfWeights(_directory(resolved), resolved.model)
    return lambda parameter, start, stop: pretrained.read_rows(parameter.name, start, stop)


def left_out_weights(resolved: ResolvedRun) -> str:
    """The tensors of the Hugging Face directory that a run does not read (`about_left_out`); empty if there are
    none."""
    return about_left_out(_directory(resolved), resolved.model) if resolved.run.model.weights == "pretrained" else ""


def base_of(resolved: ResolvedRun) -> dict[str, str] | None:
    """The origin and fingerprint of a fine-tuned run's base, which the run does not save because it does not change.

    None if everything trains.
    """
    run = resolved.run
    if run.finetune is None or all(row.trained for row in finetuned_table(resolved.model, run.finetune)):
        return None
    if run.checkpoint.start_from:
        checkpoint = starting_checkpoint(resolved)
        return {"path": str(checkpoint), "fingerprint": fingerprint_of(checkpoint)}
    if run.model.weights != "pretrained":
        drawn = [_fields_of_drawn(resolved.model), run.training.seed]
        return {"path": "random weights", "fingerprint": _digest(json.dumps(drawn).encode())}
    directory = _directory(resolved)
    return {"path": str(directory), "fingerprint": fingerprint_of(directory)}


LATER_FIELDS = ("wrapper", "fp8", "norms", "rope_layers", "query_scalar", "window_layers", "window_theta")
LATER_FIELDS += ("window_scaled", "embedding_scaled", "sinks", "expert_bias", "glu_alpha", "glu_limit")
LATER_FIELDS += ("router_z_loss", "shared_ffn", "shared_gate", "attention_gate", "delta_layers", "delta_heads")
LATER_FIELDS += ("delta_key_heads", "delta_key_dim", "delta_value_dim", "delta_kernel", "delta_by_key_head")
"""Fields of a model that the first version did not have."""


def _fields_of_drawn(model: ModelSpec) -> dict[str, Any]:
    """The fields in a fingerprint of random weights, in the form of the first version, whose adapters continue."""
    fields = model.model_dump(mode="json")
    if not fields["gated"]:
        del fields["gated"]
    elif fields["activation"] == "silu":
        del fields["gated"]
        fields["activation"] = "swiglu"
    fields["qk_norm"] = {"none": False, "heads": True}.get(fields["qk_norm"], fields["qk_norm"])
    plain = ModelSpec.model_construct().model_dump(mode="json", warnings=False)
    for later in LATER_FIELDS:
        if fields[later] == plain[later]:
            del fields[later]
    if fields["rope_scaling"] is not None and fields["rope_scaling"]["truncate"]:
        del fields["rope_scaling"]["truncate"]
    if fields["foreign"] is not None and not fields["foreign"]["transposed"]:
        del fields["foreign"]["transposed"]
    return fields


def fingerprint_of(source: Path) -> str:
    """The fingerprint of a base: a checkpoint, or a Hugging Face directory."""
    if (source / MANIFEST).is_file():
        return _digest((source / MANIFEST).read_bytes())
    return _digest(b"".join(map(_sample, sorted(source.glob("*.safetensors")))))


def _directory(resolved: ResolvedRun) -> Path:
    directory = pretrained_directory(resolved.run.model, base_dir=Path(resolved.base_dir))
    assert directory is not None  # otherwise the model is not resolved
    return directory


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _sample(file: Path) -> bytes:
    """Evenly spaced pieces of a file: reading all of a large base at every save would take minutes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= SAMPLES * SAMPLED_BYTES:
            return stream.read()
        pieces = [size.to_bytes(8, "little")]
        for index in range(SAMPLES):
            stream.seek(index * (size - SAMPLED_BYTES) // (SAMPLES - 1))
            pieces.append(stream.read(SAMPLED_BYTES))
        return b"".join(pieces)


def _rows_of_checkpoint(checkpoint: Path) -> RowSource:
    """Rows of a verified checkpoint's weights, a whole tensor read at a time."""
    name, whole = "", torch.empty(0)

    def read(parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        nonlocal name, whole
        if name != parameter.name:
            whole = torch.empty(parameter.shape)
            load_tensors(checkpoint, {f"model.{parameter.name}": whole})
            name = parameter.name
        return whole[start:stop]

    return read


def _with_fresh_adapters(base: RowSource, resolved: ResolvedRun) -> RowSource:
    """Adapters' rows: drawn, or, if initialized to the norms of a weight's rows, computed from the base."""
    seed = resolved.run.training.seed
    weights = {row.name: row for row in parameter_table(resolved.model)}

    def read(parameter: Parameter, start: int, stop: int) -> torch.Tensor:
        if not parameter.adapter:
            return base(parameter, start, stop)
        if parameter.init != "row_norms":
            return draw_rows(parameter, seed, start, stop)
        weight = weights[f"{parameter.name.rpartition('.')[0]}.weight"]
        rows = base(weight, start, stop)
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))

    return read


def _with_given_adapters(fresh: RowSource, resolved: ResolvedRun, finetune: AdapterSpec, path: Path) -> RowSource:
    """All trained tensors from a peft adapter, or a checkpoint of adapters, at `path`."""
    base = base_of(resolved)
    assert base is not None
    if (path / CONFIG).is_file() or not path.is_dir():
        tensors = read_adapter(path, resolved.model, finetune, fingerprint=base["fingerprint"])
        # peft stores no router state.
        return lambda row, start, stop: (
            tensors[row.name][start:stop] if row.name in tensors else fresh(row, start, stop)
        )
    checkpoint = checkpoint_at(path, "finetune.start_from")
    check_base(checkpoint, verify_checkpoint(checkpoint), base)
    given = _rows_of_checkpoint(checkpoint)
    return lambda row, start, stop: (given if row.trained else fresh)(row, start, stop)


def check_base(checkpoint: Path, saved: dict, base: dict[str, str] | None) -> None:
    """Raise `CheckpointError` if a checkpoint's adapters were trained on another base than this run's."""
    theirs = saved.get("base")
    if (theirs or {}).get("fingerprint") != (base or {}).get("fingerprint"):
        had = f"adapters of {theirs['path']}" if theirs else "a whole model"
        has = f"this run's base is {base['path']}, with other weights" if base else "this run trains the whole model"
        raise CheckpointError(f"{checkpoint}: has {had}, but {has}; use the same base")
