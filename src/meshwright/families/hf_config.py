"""The one place that reads and writes Hugging Face's config.json, as transformers 4 and 5 spell it."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from meshwright.families.family import Family
from meshwright.families.registry import FAMILIES
from meshwright.spec.model import ModelSpec, RopeScaling


def model_from_hf_config(config: Mapping[str, Any], *, where: str = "config.json") -> ModelSpec:
    """The model that a parsed config.json describes.

    Dropout is ignored (training here has none). Whatever else would change the numbers and is not implemented
    is refused.

    Raises:
        ValueError: unknown model_type, a missing or malformed size, or a feature that is not supported;
        `where` is named.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ValueError(
            f"{where}: model_type {config.get('model_type')!r} is not supported, only {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(config, family, where)
    values = {field: _value(config, key, family, where) for field, key in family.hf_fields.items()}
    if "sliding_window" in values:
        values["sliding_window"] = _sliding_window(config, values["sliding_window"], values["num_layers"], where)
    if family.switches["positions"] == "rope":
        values |= _rope(config, family, where)
    # None is how config.json says "follows from the other sizes".
    given = {field: value for field, value in values.items() if value is not None}
    for field in ("hidden", "num_layers", "num_heads"):
        if type(given.get(field)) is not int or given[field] < 1:
            raise ValueError(f"{where}: {family.hf_fields[field]} is {given.get(field)!r}, not a positive integer")
    try:
        return family.model(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = family.hf_fields.get(str(first["loc"][0]), str(first["loc"][0]))
        raise ValueError(f"{where}: {key} is {first['input']!r}: {first['msg']}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _value(config: Mapping[str, Any], key: str, family: Family, where: str) -> Any:
    if key in config:
        return config[key]
    if key in family.hf_absent:
        return family.hf_absent[key]
    raise ValueError(f"{where}: {key!r} is missing; a {family.name} model cannot be built without it")


def _refuse_unsupported(config: Mapping[str, Any], family: Family, where: str) -> None:
    for key, accepted in family.hf_accepts.items():
        if key in config and config[key] not in accepted:
            raise ValueError(f"{where}: {key}={config[key]!r} is not supported for {family.name}, only {accepted[0]!r}")
    if config.get("quantization_config"):
        raise ValueError(f"{where}: quantized weights are not supported; use the unquantized model")


def _rope(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, from the `rope_parameters` of transformers 5 or the two keys of 4."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", family.hf_absent["rope_theta"]))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{where}: rope type {kind!r} is not supported, only 'default' and 'llama3'")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor is not supported, only rotation of the whole head")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    try:
        scaling = RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_positions=rope["original_max_position_embeddings"],
        )
    except KeyError as error:
        raise ValueError(f"{where}: rope type 'llama3' needs {error.args[0]!r}") from error
    return {"rope_theta": theta, "rope_scaling": scaling}


def _sliding_window(config: Mapping[str, Any], window: int | None, num_layers: int, where: str) -> int | None:
    """The window if every layer has it, None if no layer has it; anything between is refused."""
    if not config.get("use_sliding_window", config["model_type"] == "mistral"):
        window = None
    layers = config.get("layer_types")
    if layers is None:
        full = min(config.get("max_window_layers", 28), num_layers) if "use_sliding_window" in config else 0
        layers = ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if window is None or set(layers) == {"full_attention"}:
        return None
    if set(layers) == {"sliding_attention"}:
        return window
    raise ValueError(f"{where}: a sliding window on some layers only is not supported; all layers or none can have it")


def model_to_hf_config(spec: ModelSpec, *, dtype: str = "float32", **token_ids: int | None) -> dict[str, Any]:
    """config.json of `spec`: what transformers 4 and 5 spell differently is there in both spellings.

    Args:
        dtype: of the weights beside it, e.g. `bfloat16`.
        token_ids: `bos_token_id`, `eos_token_id`, `pad_token_id` where the tokenizer has them.
    """
    family = FAMILIES[spec.family]
    config: dict[str, Any] = {"architectures": [family.hf_architecture], "model_type": family.name}
    for field, key in family.hf_fields.items():
        value = getattr(spec, field)
        if config.setdefault(key, value) != value:
            raise ValueError(f"{field}={value} cannot be said in a {family.name} config.json: {key} is {config[key]}")
    config |= {key: accepted[0] for key, accepted in family.hf_accepts.items()}
    if spec.positions == "rope":
        config |= _rope_keys(spec)
    if spec.family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": spec.sliding_window is not None, "max_window_layers": 0}
        if spec.sliding_window is None:
            config["max_window_layers"] = spec.num_layers
    config |= {"dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    return config | {key: value for key, value in token_ids.items() if value is not None}


def _rope_keys(spec: ModelSpec) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if spec.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_max_positions,
        }
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": spec.rope_theta, **(scaling or {"rope_type": "default"})},
    }
