"""Resolution of the recipe's `model:` section into a complete model."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

from meshwright.families import foreign
from meshwright.families.family import Family
from meshwright.families.fp8_files import fp8_files
from meshwright.families.hf_config import UnsupportedError, declared_family, model_from_hf_config
from meshwright.families.hub import cached_snapshot
from meshwright.families.plugged import own_family
from meshwright.families.registry import FAMILIES, PRESETS
from meshwright.families.table import parameter_table
from meshwright.families.tensor_headers import StoredTensor, stored_tensors
from meshwright.families.wrapped import is_multimodal, text_of, text_tensors
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.spec.model import ModelFields, ModelSpec
from meshwright.spec.plugins import has_plugin, known_plugins
from meshwright.spec.text import command
from meshwright.storage.jsonl import parse_json

SIZES = [field for field in ModelFields.model_fields if field not in ("name", "weights", "family")]
"""The fields that give a model's sizes and constants."""


def resolve_model(fields: ModelFields, *, base_dir: Path, vocab: int | None = None) -> ModelSpec:
    """The complete model that `fields` describes.

    Given fields override the values of the name (a preset, or a Hugging Face directory relative to `base_dir`), which
    override the family's defaults. `vocab`, the tokenizer's size, is used if none of them gives a vocabulary.

    Raises:
        UserError: one sentence saying what is wrong and what would work.
    """
    if fields.dims is not None:
        return _with_dims(
            resolve_model(fields.model_copy(update={"dims": None}), base_dir=base_dir, vocab=vocab), fields
        )
    directory = pretrained_directory(fields, base_dir=base_dir)
    if directory is not None:
        return _from_directory(fields, directory, starting_weights(fields, base_dir=base_dir))
    if fields.weights == "pretrained":
        raise UserError(
            f"model.weights is pretrained, but model.name {fields.name!r} is not a Hugging Face directory; "
            "give the path of a downloaded one, or the hub's id of one in the local cache, or use weights: random"
        )
    return _from_family(fields, vocab)


def pretrained_directory(fields: ModelFields, *, base_dir: Path) -> Path | None:
    """The Hugging Face directory named by `model.name`: a path, or the cached snapshot of a hub id; None if it is a
    preset or not given.

    A preset's name takes precedence over a directory of the same name, and a directory over a hub id; `./gpt2` is
    always the directory.

    Raises:
        UserError: the name is none of them, or the cache does not hold it.
    """
    if fields.name is None or fields.name in PRESETS:
        return None
    directory = base_dir / Path(fields.name).expanduser()
    if directory.is_dir():
        return directory
    try:
        snapshot = cached_snapshot(
            fields.name, "config.json", *(["*.safetensors"] if fields.weights == "pretrained" else [])
        )
    except ValueError as error:
        raise UserError(f"model.name {error}") from error
    if snapshot is not None:
        return snapshot
    raise UserError(
        f"model.name {fields.name!r} is neither a published model nor a directory; "
        + _did_you_mean(fields.name, PRESETS)
    )


def starting_weights(fields: ModelFields, *, base_dir: Path) -> Literal["random", "pretrained"]:
    """The weights that training starts from, with `auto` resolved: pretrained if `model.name` is a directory with
    weights (for `.bin` files the reader reports why it refuses them).

    Raises `UserError` like `pretrained_directory`.
    """
    if fields.weights != "auto":
        return fields.weights
    directory = pretrained_directory(fields, base_dir=base_dir)
    held = [] if directory is None else [*directory.glob("*.safetensors*"), *directory.glob("pytorch_model*.bin")]
    return "pretrained" if held else "random"


def read_hf_directory(directory: Path, *, family: str | None = None) -> ModelSpec:
    """The model of a Hugging Face directory, from its config.json alone; for a foreign architecture, for the text model
    inside a multimodal one, or if `family` is transformers, also from its files' headers.

    Raises:
        UserError: config.json is missing, malformed, or needs an unsupported feature.
    """
    path = directory / "config.json"
    try:
        config = parse_json(regular(path).read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        is_run = (directory / "checkpoints").is_dir()
        export = command("export", directory, "--hf", directory / "export")
        hint = f"; to write one from a run: {export}" if is_run else ""
        raise UserError(f"{directory} is not a Hugging Face model directory: it has no config.json{hint}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 at byte {error.start}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object")
    if not isinstance(config.get("model_type", ""), str):
        raise UserError(f"{path}: model_type is {config['model_type']!r}, not a name")
    form = fp8_files(config, where=str(path))
    if is_multimodal(config):
        stored = stored_tensors(directory)[0]
        text, wrapper = text_of(config, stored, where=str(path))
        if any(name.endswith(".experts.gate_up_proj") for name in stored):  # our families have a tensor for each expert
            family = foreign.FAMILY
        spec = _described(text, family, partial(text_tensors, directory, wrapper, form), where=f"{path}, text model")
        return spec.model_copy(update={"wrapper": wrapper, "fp8": form})
    spec = _described(config, family, partial(text_tensors, directory, None, form), where=str(path))
    return spec.model_copy(update={"fp8": form})


def _described(
    config: Mapping[str, Any], family: str | None, tensors: Callable[[], dict[str, StoredTensor]], *, where: str
) -> ModelSpec:
    """The model that `config` describes: one of ours or of transformers. `tensors` reads the files' headers."""
    if family == foreign.FAMILY or ("model_type" in config and declared_family(config) is None):
        foreign.check_causal(config, where=where)
        return foreign.read_foreign(config, tensors(), where=where)
    try:
        return model_from_hf_config(config, where=where)
    except UnsupportedError as error:
        try:
            foreign.check_causal(config, where=where)
            foreign.read_foreign(config, tensors(), where=where)
        except UserError:  # its files fail too; the first error is more useful
            raise error from None
        remedy = (
            "to compute it with transformers, set model.family=transformers (for eval, generate and export: --family "
            "transformers)"
        )
        raise UnsupportedError(str(error), remedy) from error


def _from_directory(fields: ModelFields, directory: Path, weights: Literal["random", "pretrained"]) -> ModelSpec:
    published = read_hf_directory(directory, family=fields.family)
    if published.foreign is not None or published.wrapper is not None:
        return _checked_unchanged(published, fields, directory)
    family = FAMILIES[published.family]
    given = _given(fields, family)
    spec = _complete(family, published.model_dump() | given)
    if weights == "pretrained" and _shapes(spec) != _shapes(published):
        changed = [f"model.{field}" for field in given if given[field] != getattr(published, field)]
        raise UserError(
            f"model.weights is pretrained{' by default' if fields.weights == 'auto' else ''}, so the sizes come "
            f"from {directory}: remove {', '.join(changed)} or use weights: random"
        )
    return spec


def _with_dims(model: ModelSpec, fields: ModelFields) -> ModelSpec:
    """The model with the recipe's dims."""
    if model.foreign is None or fields.dims is None:
        raise UserError("model.dims: only models that transformers computes have derived dims; remove it")
    return model.model_copy(update={"foreign": model.foreign.model_copy(update={"dims": tuple(fields.dims.items())})})


def _checked_unchanged(published: ModelSpec, fields: ModelFields, directory: Path) -> ModelSpec:
    """The published model; a recipe can change none of its fields."""
    given = [f"model.{field}" for field in SIZES if getattr(fields, field) is not None]
    if given or fields.weights == "random":
        what = f"remove {', '.join(given)}" if given else "set model.weights=pretrained"
        kind = "is a multimodal model, whose text model is trained" if published.wrapper else "is not one of ours"
        computed = ", computed by transformers" if published.foreign else ""
        raise UserError(
            f"model.name {fields.name!r}: {directory / 'config.json'} {kind}{computed}, with its own weights and "
            f"sizes; {what}"
        )
    return published


def _from_family(fields: ModelFields, vocab: int | None) -> ModelSpec:
    preset = ModelFields() if fields.name is None else PRESETS[fields.name]
    name = preset.family or fields.family
    if name is None:
        raise UserError(f"model needs a name (such as llama-3.2-1b) or a family ({', '.join(FAMILIES)})")
    if name == foreign.FAMILY:
        raise UserError("model.family transformers needs model.name, the path of a Hugging Face directory")
    if name not in FAMILIES and not has_plugin("models", name):
        again = "; an object passed to train in Python must be passed again" if "." in name else ""
        known = [*FAMILIES, *known_plugins("models")]
        raise UserError(f"model.family {name!r} is unknown; {_did_you_mean(name, known)}{again}")
    family = FAMILIES[name] if name in FAMILIES else own_family(name)
    tokenizer = {} if vocab is None else {"vocab": vocab}
    given = tokenizer | _given(preset, family) | _given(fields, family)
    missing = [f"model.{field}" for field in ("hidden", "num_layers", "num_heads", "vocab") if field not in given]
    if missing:
        raise UserError(f"model: a {name} model without a published name needs {', '.join(missing)}")
    return _complete(family, given)


def _complete(family: Family, given: dict[str, Any]) -> ModelSpec:
    try:
        return family.model(given)
    except ValueError as error:
        raise UserError(f"model: {error}") from error


def _given(fields: ModelFields, family: Family) -> dict[str, Any]:
    """The given sizes; the family must have all of them."""
    if fields.family not in (None, family.name):
        raise UserError(f"model.name {fields.name!r} has family {family.name}, not {fields.family!r}; remove one")
    given = {field: getattr(fields, field) for field in SIZES if getattr(fields, field) is not None}
    for field in given:
        if family.lacks(field):
            raise UserError(f"model.{field} does not exist in the family {family.name}; remove it")
    return given


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in parameter_table(spec)}


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = get_close_matches(name.lower(), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
