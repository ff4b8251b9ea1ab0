"""Hugging Face's config.json, read and written, in the spellings of transformers 4 and 5."""

import json
from collections.abc import Mapping
from typing import Any

from meshwright.families.family import Family
from meshwright.families.fp8_files import QUANTIZATION, fp8_files
from meshwright.families.hf_layers import HfReader, UnsupportedError
from meshwright.families.hf_rope import read_ropes, write_ropes
from meshwright.families.registry import FAMILIES, family_of
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec
from meshwright.spec.problems import foreign_problems, read_foreign

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def model_from_hf_config(config: Mapping[str, Any], *, where: str = "config.json") -> ModelSpec:
    """The model that a parsed config.json describes.

    Dropout is ignored (training here has none). Any other setting that would change the numbers and is not implemented
    is refused.

    Raises:
        UserError: unknown model_type, a missing or malformed size, or an unsupported feature; the message names
            `where`.
    """
    fp8_files(config, where=where)  # other quantized weights are refused
    family = declared_family(config)
    if family is None:
        raise UserError(
            f"{where}: model_type {config.get('model_type')!r} is not supported, only {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(config, family, where)
    reader = HfReader(config, family, where)
    values = {field: reader.value(key) for field, key in family.hf_fields.items()}
    for field in ("hidden", "num_layers", "num_heads"):
        if values[field] is None:
            raise UserError(
                f"{where}: {family.hf_fields[field]} is null; a {family.name} model cannot be built without it"
            )
    read_foreign(ModelFields, {"num_layers": values["num_layers"]}, where=where, names=family.hf_fields)
    if family.hf_layers is not None:
        values |= family.hf_layers.read(reader, values)
    if family.switches["positions"] == "rope":
        values |= read_ropes(reader, values)
    # config.json uses null for a size that follows from the others.
    given = {field: value for field, value in values.items() if value is not None}
    sizes = {field: value for field, value in given.items() if field in ModelFields.model_fields}
    read_foreign(ModelFields, sizes, where=where, names=family.hf_fields)  # before others are computed from them
    with foreign_problems(ModelSpec, given, where=where, names=family.hf_fields):
        return family.model(given)


def declared_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json: by its model_type, or else by the class that it declares, which other model_types
    share (kimi_k2 has DeepSeek-V3's)."""
    classes = {family.hf_architecture: name for name, family in FAMILIES.items()}
    declared = config.get("architectures")
    first = declared[0] if isinstance(declared, list) and declared else None
    types = {family.hf_type or name: name for name, family in FAMILIES.items()}
    return FAMILIES.get(str(types.get(str(config.get("model_type"))) or classes.get(str(first))))


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    for key, accepted in family.hf_accepts.items():
        if key in config and config[key] not in accepted:
            raise UnsupportedError(
                f"{where}: {key}={config[key]!r} is not supported for {family.name}, only {accepted[0]!r}"
            )
    if config.get("is_causal") is False:
        raise UserError(f"{where}: is_causal=false is not supported: only causal language models can be trained")


def model_to_hf_config(
    spec: ModelSpec, *, dtype: str = "float32", **token_ids: int | list[int] | None
) -> dict[str, Any]:
    """config.json of `spec`; keys that transformers 4 and 5 spell differently are written in both spellings.

    Args:
        dtype: of the accompanying weights, e.g. `bfloat16`.
        token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id`, if the tokenizer has them.
    """
    known = {key: value for key, value in token_ids.items() if value is not None}
    whole = spec.wrapper or spec.foreign
    if whole is not None:
        given = json.loads(whole.config)
        config = {key: value for key, value in given.items() if key != QUANTIZATION}
        return config | {"dtype": dtype, "torch_dtype": dtype} | known
    family = family_of(spec)
    config: dict[str, Any] = {"architectures": [family.hf_architecture], "model_type": family.hf_type or family.name}
    for field, key in family.hf_fields.items():
        value = getattr(spec, field)
        if config.setdefault(key, value) != value:
            raise UserError(
                f"{field}={value} cannot be expressed in a {family.name} config.json: {key} is {config[key]}"
            )
    config |= {alias: config[key] for key, alias in family.hf_aliases.items()}
    config |= {key: accepted[0] for key, accepted in family.hf_accepts.items()}
    if family.hf_layers is not None:
        config |= family.hf_layers.write(spec)
    if spec.positions == "rope":
        config |= write_ropes(spec, family)
    config |= {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    config |= dict.fromkeys(TOKEN_IDS) if family.hf_tokens else {}
    return config | known
