"""Users' models: one of our families with the user's blocks, and the named dims of their parameters.

`models/own.py` has the class that users subclass; this file, without torch, checks its table.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from meshwright.families.family import Family
from meshwright.families.registry import FAMILIES
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec, Parameter
from meshwright.spec.plugins import load_plugin

ENDS = ("layers", "tok_embeddings", "pos_embeddings", "norm", "output")
"""The modules of a model, as pipeline stages share them."""


def own_model(name: str) -> Any:
    """The user's model named as a family (see `models/own.py`); raises `UserError` if it does not exist."""
    return _made(load_plugin("models", name), name)


@lru_cache(maxsize=16)
def _made(kind: Any, name: str) -> Any:
    made = kind() if isinstance(kind, type) else kind
    if not all(hasattr(made, field) for field in ("base", "switches", "table", "build")):
        raise UserError(f"model.family {name} is not a subclass of meshwright.Model")
    if made.base not in FAMILIES:
        raise UserError(f"model.family {name}: base = {made.base!r} is not one of {', '.join(FAMILIES)}")
    return made


def own_family(name: str) -> Family:
    """The base family with the model's changed switches."""
    model = own_model(name)
    base = FAMILIES[model.base]
    if unknown := sorted(model.switches.keys() - ModelSpec.model_fields.keys()):
        raise UserError(f"model.family {name}: switches has unknown {unknown[0]!r}")
    return replace(base, name=name, switches={**base.switches, **model.switches})


def own_table(spec: ModelSpec, sizes: Mapping[str, int]) -> tuple[Parameter, ...]:
    """The rows of a user's model; raises `UserError` for an unknown dim, or one whose size differs from its name's."""
    return _rows(own_model(spec.family), spec, tuple(sizes.items()))  # pyright: ignore[reportArgumentType]


@lru_cache(maxsize=16)
def _rows(model: Any, spec: ModelSpec, sizes: tuple[tuple[str, int], ...]) -> tuple[Parameter, ...]:
    known, rows = dict(sizes), tuple(model.table(spec))
    for row in rows:
        where = f"model.family {spec.family}: {row.name}"
        if row.name.split(".")[0] not in ENDS:
            raise UserError(f"{where} is outside of {', '.join(ENDS)}, so no pipeline stage would hold it")
        if len(row.dims) != len(row.shape):
            raise UserError(f"{where} has shape {list(row.shape)} and {len(row.dims)} dims, {', '.join(row.dims)}")
        for dim, size in zip(row.dims, row.shape, strict=True):
            if dim != "other" and dim not in known:
                raise UserError(
                    f"{where} has an unknown dim {dim!r}; known are {', '.join(known)}, and other, which is never split"
                )
            if known.get(dim, size) != size:
                raise UserError(f"{where} has {size} numbers along {dim}, which is {known[dim]} in this model")
    return rows
