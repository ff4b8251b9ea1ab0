"""The location of each parameter in a Hugging Face checkpoint."""

import re
from collections import Counter
from dataclasses import dataclass

from meshwright.families.family import Family
from meshwright.families.registry import FAMILIES
from meshwright.families.table import parameter_table, state_table
from meshwright.spec.model import ModelSpec, Parameter


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """The location of a parameter: in tensor `key` (transposed, if `transposed`), starting at row `offset`; or, if it
    stacks all experts of a layer, in one tensor per expert."""

    key: str
    """Name of the stored tensor, `{e}` for the expert and `{part}` for each of several parts."""
    shape: tuple[int, ...]
    """Shape of the stored tensor, as stored."""
    experts: int | None = None
    """Number of stored tensors that our parameter stacks along an extra first dim; None: it does not stack any."""
    parts: tuple[str, ...] = ("",)
    """Stored tensors whose rows are concatenated in each expert's matrix."""
    transposed: bool = False
    """The tensor is stored (in, out); ours are (out, in)."""
    offset: int = 0
    """First row, in our orientation, that belongs to this parameter: several may share a stored tensor."""

    @property
    def keys(self) -> list[str]:
        """Names of all stored tensors, expert by expert."""
        if self.experts is None:
            return [self.key]
        return [self.key.format(e=e, part=part) for e in range(self.experts) for part in self.parts]


def hf_tensors(spec: ModelSpec) -> dict[str, HfTensor]:
    """Our tensor's name -> its location, for every row of the parameter table, in order, and of the state table."""
    table = parameter_table(spec) + state_table(spec)
    if spec.foreign is not None:  # its names are Hugging Face's
        stacks, renamed = dict(spec.foreign.stacks), spec.foreign.renamed
        return {row.name: _of_foreign(row, stacks.get(row.name), renamed) for row in table}
    if spec.family not in FAMILIES:  # a user's own; adapters use its names
        return {row.name: _of_foreign(row, None, ()) for row in table}
    family = FAMILIES[spec.family]
    rows: Counter[str] = Counter()  # per stored tensor: parameters that share it are stacked in table order
    starts = []
    for parameter in table:
        key = _hf_key(family, parameter.name)
        starts.append((parameter, key, rows[key]))
        rows[key] += parameter.shape[0]

    places = {}
    for parameter, key, offset in starts:
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


def stored_name(name: str, renamed: tuple[tuple[str, str], ...]) -> str:
    """The name in files of a tensor of transformers' module."""
    for theirs, files in renamed:
        name = name.replace(theirs, files)
    return name


def _of_foreign(row: Parameter, parts: tuple[str, ...] | None, renamed: tuple[tuple[str, str], ...]) -> HfTensor:
    name = stored_name(row.name, renamed)
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
