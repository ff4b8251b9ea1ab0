"""Hugging Face's config.json, read and written, in the spellings of transformers 4 and 5."""

import json
from collections.abc import Mapping
from typing import Any

from meshwright.families.family import Family
from meshwright.families.fp8_files import QUANTIZATION, fp8_files
from meshwright.families.registry import FAMILIES, family_of
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, ModelSpec
from meshwright.spec.problems import foreign_problems, read_foreign


class UnsupportedError(UserError):
    """A setting of config.json that our family does not compute; transformers may."""


NEEDED_SCALING = {"factor": "factor", "original_max_positions": "original_max_position_embeddings"}

SCALINGS = {
    "llama3": {**NEEDED_SCALING, "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": {
        **NEEDED_SCALING,
        **{key: key for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")},
    },
}
"""Rope type -> field of `RopeScaling` -> key of the rope parameters in config.json."""


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
    values = {field: _value(config, key, family, where) for field, key in family.hf_fields.items()}
    for field in ("hidden", "num_layers", "num_heads"):
        if values[field] is None:
            raise UserError(
                f"{where}: {family.hf_fields[field]} is null; a {family.name} model cannot be built without it"
            )
    if values.get("sliding_window") is not None and not _slides(config, family, values["num_layers"], where):
        values["sliding_window"] = None
    if family.switches["positions"] == "rope":
        values |= _rope(config, family, where)
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
    kind = config.get("model_type")
    return FAMILIES.get(str(kind if kind in FAMILIES else classes.get(str(first))))


def _value(config: Mapping[str, Any], key: str, family: Family, where: str) -> Any:
    for spelling in (key, family.hf_aliases.get(key, key)):
        if spelling in config:
            return config[spelling]
    if key in family.hf_absent:
        return family.hf_absent[key]
    raise UserError(f"{where}: {key!r} is missing; a {family.name} model cannot be built without it")


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    for key, accepted in family.hf_accepts.items():
        if key in config and config[key] not in accepted:
            raise UnsupportedError(
                f"{where}: {key}={config[key]!r} is not supported for {family.name}, only {accepted[0]!r}"
            )
    if config.get("is_causal") is False:
        raise UserError(f"{where}: is_causal=false is not supported: only causal language models can be trained")


def _rope(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, from the `rope_parameters` of transformers 5 or the two keys of 4."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"{where}: the rope parameters are {rope!r}, not an object")
    theta = rope.get("rope_theta", _value(config, "rope_theta", family, where))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *SCALINGS):
        raise UnsupportedError(f"{where}: rope type {kind!r} is not supported, only 'default', 'llama3' and 'yarn'")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedError(f"{where}: partial_rotary_factor is not supported, only rotation of the whole head")
    if kind == "default":
        return {"rope_theta": theta}
    if not rope.get("truncate", True):
        raise UnsupportedError(f"{where}: truncate=false is not supported for rope type 'yarn', only true")
    keys = SCALINGS[kind]
    needed = keys if kind == "llama3" else NEEDED_SCALING
    missing = [key for key in needed.values() if key not in rope]
    if missing:
        raise UnsupportedError(f"{where}: rope type {kind!r} needs {', '.join(missing)}")
    given = {field: rope[key] for field, key in keys.items() if rope.get(key) is not None}
    return {"rope_theta": theta, "rope_scaling": {"kind": kind, **given}}


def _slides(config: Mapping[str, Any], family: Family, num_layers: int, where: str) -> bool:
    """Whether every layer has the sliding window (some and not others are refused)."""
    if family.hf_window == "given":
        return True
    if not _value(config, "use_sliding_window", family, where):
        return False
    if family.hf_window == "switched":
        return True
    layers = config.get("layer_types")
    if layers is None:
        full = min(_value(config, "max_window_layers", family, where), num_layers)
        layers = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if set(layers) not in ({"full_attention"}, {"sliding_attention"}):
        raise UnsupportedError(f"{where}: a sliding window must be on all layers or none")
    return layers[0] == "sliding_attention"


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
    config: dict[str, Any] = {"architectures": [family.hf_architecture], "model_type": family.name}
    for field, key in family.hf_fields.items():
        value = getattr(spec, field)
        if config.setdefault(key, value) != value:
            raise UserError(
                f"{field}={value} cannot be expressed in a {family.name} config.json: {key} is {config[key]}"
            )
    config |= {alias: config[key] for key, alias in family.hf_aliases.items()}
    config |= {key: accepted[0] for key, accepted in family.hf_accepts.items()}
    if spec.positions == "rope":
        config |= _rope_keys(spec)
    if family.hf_window != "given":
        slides = spec.sliding_window is not None
        config |= {"use_sliding_window": slides, "max_window_layers": 0 if slides else spec.num_layers}
    config |= {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    return config | known


def _rope_keys(spec: ModelSpec) -> dict[str, Any]:
    scaling = None
    if spec.rope_scaling is not None:
        values = {key: getattr(spec.rope_scaling, field) for field, key in SCALINGS[spec.rope_scaling.kind].items()}
        scaling = {key: value for key, value in values.items() if value is not None}
        scaling["rope_type"] = spec.rope_scaling.kind
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": spec.rope_theta, **(scaling or {"rope_type": "default"})},
    }
