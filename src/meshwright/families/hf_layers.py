"""The layers of a config.json that differ from one another: which have a sliding window, rotate, or have the gated
delta rule in the place of attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import UserError
from meshwright.spec.layers import GatedDeltaSpec
from meshwright.spec.model import ModelSpec

if TYPE_CHECKING:
    from meshwright.families.family import Family

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class UnsupportedError(UserError):
    """A setting of config.json that our family does not compute; transformers may."""


@dataclass(frozen=True)
class HfReader:
    """A parsed config.json of a family; `where` names it in errors."""

    config: Mapping[str, Any]
    family: "Family"
    where: str

    def value(self, key: str) -> Any:
        """The value of a key, or its default; raises `UserError` if it has none."""
        for spelling in (key, self.family.hf_aliases.get(key, key)):
            if spelling in self.config:
                return self.config[spelling]
        if key in self.family.hf_absent:
            return self.family.hf_absent[key]
        raise UserError(f"{self.where}: {key!r} is missing; a {self.family.name} model cannot be built without it")

    def layer_types(self, layers: int, default: Callable[[int], bool], other: str = SLIDING) -> list[bool]:
        """Which of the layers have `other` than full attention; `default` says it if the config does not."""
        types = self.config.get("layer_types")
        if types is None:
            return [default(i) for i in range(layers)]
        if not isinstance(types, list) or len(types) != layers:
            raise UserError(f"{self.where}: layer_types is not a list of the {layers} layers' types")
        if unknown := [one for one in types if one not in (FULL, other)]:
            raise UnsupportedError(
                f"{self.where}: layer_types {unknown[0]!r} is not supported, only {FULL!r} and {other!r}"
            )
        return [one == other for one in types]


@dataclass(frozen=True)
class HfLayers:
    """How config.json says what differs between layers."""

    read: Callable[[HfReader, Mapping[str, Any]], dict[str, Any]]
    """(config, fields read so far) -> further or changed fields of `ModelSpec`."""
    write: Callable[[ModelSpec], dict[str, Any]]
    """The keys that say it."""


def shortest(pattern: Sequence[bool]) -> tuple[bool, ...]:
    """The shortest pattern whose repetition is the given one."""
    periods = range(1, len(pattern) + 1)
    return tuple(next(pattern[:n] for n in periods if all(pattern[i] == pattern[i % n] for i in range(len(pattern)))))


def windowed(spec: ModelSpec) -> list[bool]:
    """Which layers have the window."""
    return [layer.mixer.window is not None for layer in spec.layers]


def _types(slides: Sequence[bool]) -> list[str]:
    return [SLIDING if one else FULL for one in slides]


def _window(reader: HfReader, values: Mapping[str, Any], slides: Sequence[bool]) -> dict[str, Any]:
    """The fields of layers of which some have the window."""
    if any(slides) and values["sliding_window"] is None:
        raise UserError(f"{reader.where}: sliding_window is null, but some layers are {SLIDING}")
    return {"window_layers": shortest(slides)}


def _read_switched(reader: HfReader, values: Mapping[str, Any]) -> dict[str, Any]:
    return {} if reader.value("use_sliding_window") else {"sliding_window": None}


def _write_switched(spec: ModelSpec) -> dict[str, Any]:
    slides = windowed(spec)
    full = next((i for i, one in enumerate(slides) if one), spec.num_layers)
    mixed = {"layer_types": _types(slides)} if len(set(slides)) > 1 else {}
    return {"use_sliding_window": any(slides), "max_window_layers": full, **mixed}


SWITCHED = HfLayers(_read_switched, _write_switched)
"""All layers have the window if use_sliding_window is set (qwen3_moe)."""


def _read_by_layer(reader: HfReader, values: Mapping[str, Any]) -> dict[str, Any]:
    if values["sliding_window"] is None or not reader.value("use_sliding_window"):
        return {"sliding_window": None}
    full = reader.value("max_window_layers")
    slides = reader.layer_types(values["num_layers"], lambda i: i >= full)
    return _window(reader, values, slides) if any(slides) else {"sliding_window": None}


BY_LAYER = HfLayers(_read_by_layer, _write_switched)
"""If use_sliding_window is set, the layers from max_window_layers on, or by layer_types (qwen2)."""


def every(period: int) -> tuple[bool, ...]:
    """The pattern in which each `period`-th layer is full and the others have the window."""
    return (True,) * (period - 1) + (False,)


def _read_typed(reader: HfReader, values: Mapping[str, Any]) -> dict[str, Any]:
    period = reader.config.get("sliding_window_pattern")  # in files of transformers before 4.53
    pattern = reader.family.switches["window_layers"] if period is None else every(period)
    slides = reader.layer_types(values["num_layers"], lambda i: pattern[i % len(pattern)])
    return _window(reader, values, slides)


TYPED = HfLayers(_read_typed, lambda spec: {"layer_types": _types(windowed(spec))})
"""By layer_types; without them as in the family's window_layers."""


def _read_nope(reader: HfReader, values: Mapping[str, Any]) -> dict[str, Any]:
    layers, given = values["num_layers"], reader.config.get("no_rope_layers")
    interval = reader.config.get("no_rope_layer_interval", 4)
    if not (given is None or isinstance(given, list)) or type(interval) is not int or interval < 1:
        raise UserError(
            f"{reader.where}: no_rope_layers={given!r} with no_rope_layer_interval={interval!r}; give a list of 0 and "
            "1, one for each layer, and a whole number of layers"
        )
    rotates = [(i + 1) % interval != 0 for i in range(layers)] if given is None else [bool(one) for one in given]
    if len(rotates) < layers:
        raise UserError(f"{reader.where}: no_rope_layers has {len(rotates)} entries for {layers} layers")
    rotates = rotates[:layers]
    pattern = {"rope_layers": shortest(rotates)}
    if not reader.value("use_sliding_window") and any(reader.layer_types(layers, lambda i: False)):
        raise UnsupportedError(
            f"{reader.where}: layer_types has {SLIDING}, but use_sliding_window is false; transformers' kernels "
            "disagree about such layers"
        )
    if values["sliding_window"] is None or not reader.value("use_sliding_window"):
        return pattern | {"sliding_window": None}
    slides = reader.layer_types(layers, lambda i: not rotates[i])
    return pattern | (_window(reader, values, slides) if any(slides) else {"sliding_window": None})


def _write_nope(spec: ModelSpec) -> dict[str, Any]:
    slides = windowed(spec)
    rotates = [int(layer.mixer.rope is not None) for layer in spec.layers]
    return {"no_rope_layers": rotates, "use_sliding_window": any(slides), "layer_types": _types(slides)}


NOPE = HfLayers(_read_nope, _write_nope)
"""no_rope_layers has a 1 for each layer that rotates; the others have the window if use_sliding_window is set
(smollm3)."""


def _read_linear(reader: HfReader, values: Mapping[str, Any]) -> dict[str, Any]:
    interval = reader.config.get("full_attention_interval", 4)
    if type(interval) is not int or interval < 1:
        raise UserError(f"{reader.where}: full_attention_interval={interval!r} is not a number of layers")
    kinds = reader.layer_types(values["num_layers"], lambda i: (i + 1) % interval != 0, LINEAR)
    return {"delta_layers": shortest(kinds)}


def _write_linear(spec: ModelSpec) -> dict[str, Any]:
    kinds = [isinstance(layer.mixer, GatedDeltaSpec) for layer in spec.layers]
    return {"layer_types": [LINEAR if one else FULL for one in kinds]}


DELTA = HfLayers(_read_linear, _write_linear)
"""By layer_types; without them each full_attention_interval-th layer has full attention (qwen3_next)."""
