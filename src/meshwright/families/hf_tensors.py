"""The location of each parameter in a Hugging Face checkpoint."""

import re
from collections import Counter
from dataclasses import dataclass, replace

from meshwright.families.family import Family
from meshwright.families.registry import FAMILIES
from meshwright.families.split import is_experts
from meshwright.families.table import parameter_table, state_table
from meshwright.spec.foreign import Wrapper
from meshwright.spec.model import ModelSpec, Parameter


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """The location of a parameter: in tensor `key` (transposed, if `transposed`), starting at row `offset`; or, if it
    stacks all experts of a layer, in one tensor per expert."""

    key: str
    """Name of the stored tensor, `{e}` for the expert and `{part}` for each of several parts. Of a text model inside a
    multimodal one: as in transformers' class; the files may have another prefix."""
    prefix: tuple[str, str] = ("", "")
    """A prefix of `key`, and its spelling in the files."""
    shape: tuple[int, ...]
    """Shape of the stored tensor, as stored."""
    experts: int | None = None
    """Number of stored tensors that our parameter stacks along an extra first dim; None: it does not stack any."""
    parts: tuple[str, ...] = ("",)
    """Stored tensors whose rows are concatenated in each expert's matrix."""
    transposed: bool = False
    """The tensor, or each matrix of a stored stack, is stored (in, out); ours are (out, in)."""
    offset: int = 0
    """First row, in our orientation, that belongs to this parameter: several may share a stored tensor."""

    lane: tuple[int, int] | None = None
    """(own, all): the outputs of each expert's matrix or bias in a stored stack are those of `all` parameters in turn;
    None: not of a stack of experts."""

    @property
    def keys(self) -> list[str]:
        """Names of all stored tensors, expert by expert."""
        there, in_files = self.prefix
        stored = in_files + self.key.removeprefix(there)
        if self.experts is None:
            return [stored]
        return [stored.format(e=e, part=part) for e in range(self.experts) for part in self.parts]


def hf_tensors(spec: ModelSpec) -> dict[str, HfTensor]:
    """Our tensor's name -> its location, for every row of the parameter table, in order, and of the state table."""
    places = _text_places(spec)
    return places if spec.wrapper is None else {name: _inside(place, spec.wrapper) for name, place in places.items()}


def _inside(place: HfTensor, wrapper: Wrapper) -> HfTensor:
    """The location of a text model's tensor inside a multimodal model."""
    for (text, module), (_, file) in zip(wrapper.modules, wrapper.files, strict=True):
        if place.key.startswith(text):
            return replace(place, key=module + place.key.removeprefix(text), prefix=(module, file))
    raise AssertionError(place.key)


def _text_places(spec: ModelSpec) -> dict[str, HfTensor]:
    table = parameter_table(spec) + state_table(spec)
    if spec.foreign is not None:  # its names are Hugging Face's
        stacks, renamed = dict(spec.foreign.stacks), spec.foreign.renamed
        places = {row.name: _of_foreign(row, stacks.get(row.name), renamed) for row in table}
        turned = {name: replace(places[name], transposed=True) for name in spec.foreign.transposed}
        return places | {name: replace(place, shape=_turned(place.shape)) for name, place in turned.items()}
    if spec.family not in FAMILIES:  # a user's own; adapters use its names
        return {row.name: _of_foreign(row, None, ()) for row in table}
    family = FAMILIES[spec.family]
    rows: Counter[str] = Counter()  # per stored tensor: parameters that share it are stacked in table order
    starts = []
    for parameter in table:
        key = _hf_key(family, parameter.name)
        starts.append((parameter, key, rows[key]))
        rows[key] += parameter.shape[0]

    places, sharing = {}, Counter(key for _, key, _ in starts)
    lanes: Counter[str] = Counter()
    for parameter, key, offset in starts:
        if "{e}" not in key and is_experts(parameter):
            places[parameter.name] = _stacked(parameter, key, (lanes[key], sharing[key]))
            lanes[key] += 1
            continue
        if "{e}" in key:
            experts, *shape = parameter.shape
            places[parameter.name] = HfTensor(key=key, shape=tuple(shape), experts=experts)
            continue
        *_, module, kind = key.split(".")
        transposed = kind == "weight" and module in family.hf_transposed
        shape = (rows[key], *parameter.shape[1:])
        places[parameter.name] = HfTensor(
            key=key,
            shape=shape[::-1] if transposed else shape,
            transposed=transposed,
            offset=offset,
        )
    return places


def _stacked(parameter: Parameter, key: str, lane: tuple[int, int]) -> HfTensor:
    """Experts that a file stores in one stack, (in, out)."""
    experts, out, into = parameter.shape
    outputs = out * lane[1]
    if parameter.dims[-1] == "bias":
        return HfTensor(key=key, shape=(experts, outputs), lane=lane)
    return HfTensor(key=key, shape=(experts, into, outputs), transposed=True, lane=lane)


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def stored_scalars(spec: ModelSpec) -> dict[str, float]:
    """The scalar tensors of a foreign model's files, by their names there; other models have none."""
    if spec.foreign is None:
        return {}
    scalars = {}
    for name, value in spec.foreign.scalars:
        place = HfTensor(key=_stored_name(name, spec.foreign.renamed), shape=())
        (key,) = (place if spec.wrapper is None else _inside(place, spec.wrapper)).keys
        scalars[key] = value
    return scalars


def _stored_name(name: str, renamed: tuple[tuple[str, str], ...]) -> str:
    """The name in files of a tensor of transformers' module."""
    for theirs, files in renamed:
        name = name.replace(theirs, files)
    return name


def _of_foreign(row: Parameter, parts: tuple[str, ...] | None, renamed: tuple[tuple[str, str], ...]) -> HfTensor:
    name = _stored_name(row.name, renamed)
    if parts is None:
        return HfTensor(key=name, shape=row.shape)
    experts, rows, columns = row.shape
    key = f"{name.rpartition('.')[0]}.{{e}}.{{part}}.weight"
    return HfTensor(key=key, shape=(rows // len(parts), columns), experts=experts, parts=parts)


def _hf_key(family: Family, name: str) -> str:
    layer = re.match(r"layers\.(\d+)\.", name)
    number = "" if layer is None else layer[1]
    general = name if layer is None else "layers.{i}." + name[layer.end() :]
    module, _, kind = general.rpartition(".")
    stored = family.hf_modules.get(general) or f"{family.hf_modules[module]}.{kind}"
    return stored.replace("{i}", number)
