"""The one place that says where each parameter lies in a Hugging Face checkpoint."""

from dataclasses import dataclass

from meshwright.families.registry import FAMILIES
from meshwright.families.table import parameter_table
from meshwright.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """Where a parameter lies: in tensor `key` (its transpose, where `transposed`), from row `offset` on."""

    key: str
    """Name of the stored tensor."""
    shape: tuple[int, ...]
    """Shape of the stored tensor, as stored."""
    transposed: bool = False
    """The tensor is stored (in, out); ours are (out, in)."""
    offset: int = 0
    """First row, in our orientation, that belongs to this parameter (more than one may share a stored tensor)."""


def hf_tensors(spec: ModelSpec) -> dict[str, HfTensor]:
    """Our parameter name -> where it lies, for every row of the parameter table, in its order."""
    family = FAMILIES[spec.family]
    keys: dict[str, tuple[str, bool]] = {}
    offsets: dict[str, int] = {}
    rows: dict[
        str, int
    ] = {}  # rows of each stored tensor so far: what shares a name is stacked in table order
    table = parameter_table(spec)
    for parameter in table:
        module, _, kind = parameter.name.rpartition(".")
        head, _, rest = module.partition("layers.")
        layer, _, part = rest.partition(".")
        pattern = module if not rest else f"{head}layers.{{i}}.{part}"
        stored = family.hf_modules[pattern].format(i=layer)
        key = f"{stored}.{kind}"
        transposed = kind == "weight" and stored.rpartition(".")[2] in family.hf_transposed
        keys[parameter.name] = (key, transposed)
        offsets[parameter.name] = rows.get(key, 0)
        rows[key] = offsets[parameter.name] + parameter.shape[0]

    places = {}
    for parameter in table:
        key, transposed = keys[parameter.name]
        shape = (rows[key], *parameter.shape[1:])
        places[parameter.name] = HfTensor(
            key=key,
            shape=shape[::-1] if transposed else shape,
            transposed=transposed,
            offset=offsets[parameter.name],
        )
    return places
