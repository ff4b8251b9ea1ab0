"""The rotary tables of a config.json, read and written, in the spellings of transformers 4 and 5."""

from collections.abc import Mapping
from math import nextafter
from typing import Any

from meshwright.families.family import Family
from meshwright.families.hf_layers import FULL, SLIDING, HfReader, UnsupportedError
from meshwright.spec.errors import UserError
from meshwright.spec.layers import Rope
from meshwright.spec.model import ModelSpec

NEEDED_SCALING = {"factor": "factor", "original_max_positions": "original_max_position_embeddings"}

SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {**NEEDED_SCALING, "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"},
    "yarn": {
        **NEEDED_SCALING,
        **{key: key for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")},
    },
}
"""Rope type -> field of `RopeScaling` -> key of the rope parameters in config.json."""


def read_ropes(reader: HfReader, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ModelSpec` that describe rotation, from the `rope_parameters` of transformers 5 or the two keys of
    4. `values`: the fields read so far."""
    config, where = reader.config, reader.where
    usual = reader.family.hf_absent.get("rope_scaling") or {}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or usual
    if not isinstance(rope, Mapping):
        raise UserError(f"{where}: the rope parameters are {rope!r}, not an object")
    theta = reader.value("rope_theta")
    if reader.family.hf_window_theta is None:
        return _fields(_table(rope, theta, reader)) | _rotated(rope, reader, values)
    full = _table(rope.get(FULL) or ({} if SLIDING in rope else rope), theta, reader)
    local = _table(rope.get(SLIDING) or {}, reader.value(reader.family.hf_window_theta), reader)
    if full["scaling"] is not None and full["scaling"].get("truncate") is False:
        raise UnsupportedError(
            f"{where}: truncate=false is not supported for {reader.family.name}; transformers ignores it"
        )
    if local["scaling"] not in (None, full["scaling"]):
        raise UnsupportedError(f"{where}: rope_parameters of {SLIDING} have a scaling other than those of {FULL}")
    scaled = {} if full["scaling"] is None else {"window_scaled": local["scaling"] is not None}
    own = local["theta"] != full["theta"] or "window_theta" in reader.family.defaults
    return _fields(full) | scaled | {"window_theta": local["theta"] if own else None}


def _fields(table: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_theta": table["theta"], "rope_scaling": table["scaling"]}


def _table(rope: Mapping[str, Any], theta: Any, reader: HfReader) -> dict[str, Any]:
    """The fields of a `Rope`."""
    if not isinstance(rope, Mapping):
        raise UserError(f"{reader.where}: the rope parameters of a kind of layer are {rope!r}, not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *SCALINGS):
        known = ", ".join(map(repr, ("default", *SCALINGS)))
        raise UnsupportedError(f"{reader.where}: rope type {kind!r} is not supported, only {known}")
    theta, scaling = rope.get("rope_theta", theta), None
    if kind != "default":
        keys = SCALINGS[kind]
        needed = NEEDED_SCALING if kind == "yarn" else keys
        missing = [key for key in needed.values() if key not in rope]
        if missing:
            raise UnsupportedError(f"{reader.where}: rope type {kind!r} needs {', '.join(missing)}")
        scaling = {"kind": kind, **{field: rope[key] for field, key in keys.items() if rope.get(key) is not None}}
    return {"theta": theta, "scaling": scaling}


def _rotated(rope: Mapping[str, Any], reader: HfReader, values: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_head_dim`, if only a part of each head is rotated."""
    config, default = reader.config, reader.family.hf_rotated
    sizes = [values.get("head_dim") or 1, values["hidden"], values["num_heads"]]
    if not all(type(size) is int and size > 0 for size in sizes):
        return {}  # refused when the sizes are checked
    head_dim = values.get("head_dim") or max(1, values["hidden"] // values["num_heads"])
    if reader.family.hf_rotary_dim and type(config.get("rotary_dim")) is int:
        default = config["rotary_dim"] / head_dim
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", default or 1.0))
    if type(factor) not in (int, float) or not 0 < factor <= 1:
        raise UnsupportedError(f"{reader.where}: partial rotation of {factor!r} of a head: must be above 0, at most 1")
    if default is None and factor == 1:
        return {}
    if default is None:
        raise UnsupportedError(
            f"{reader.where}: partial_rotary_factor is not supported, only rotation of the whole head"
        )
    return {"rope_head_dim": int(head_dim * factor)}


def write_ropes(spec: ModelSpec, family: Family) -> dict[str, Any]:
    """The keys of the rotary tables."""
    full, partial = _keys(spec.rope), _partial(spec, family)
    scaling = {key: value for key, value in full.items() if key != "rope_theta"}
    keys = {"rope_theta": spec.rope_theta, "rope_scaling": scaling if spec.rope_scaling is not None else None}
    if family.hf_window_theta is None:
        return {**keys, "rope_parameters": {**full, **partial}, **partial}
    local = _keys(spec.window_rope)
    if family.hf_window_theta != "rope_theta":
        keys[family.hf_window_theta] = local["rope_theta"]
    return {**keys, "rope_parameters": {FULL: full, SLIDING: local}}


def _keys(rope: Rope) -> dict[str, Any]:
    if rope.scaling is None:
        return {"rope_theta": rope.theta, "rope_type": "default"}
    values = {key: getattr(rope.scaling, field) for field, key in SCALINGS[rope.scaling.kind].items()}
    given = {key: value for key, value in values.items() if value is not None and (key, value) != ("truncate", True)}
    return {"rope_theta": rope.theta, **given, "rope_type": rope.scaling.kind}


def _partial(spec: ModelSpec, family: Family) -> dict[str, Any]:
    """The rotated part of each head, as a factor from which the same width follows."""
    if family.hf_rotated is None:
        return {}
    factor = spec.rotated_dim / spec.head_dim
    return {
        "partial_rotary_factor": factor if int(spec.head_dim * factor) == spec.rotated_dim else nextafter(factor, 2)
    }
