"""What a layout needs to know of a model that transformers computes, derived in this process, once for each model."""

from collections.abc import Callable
from typing import Any

from meshwright.derive.probe import derived_context, derived_cuts, derived_experts, derived_split
from meshwright.spec.foreign import ForeignModel
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec

_KNOWN: dict[tuple[str, str, int], Any] = {}


def derived_here(model: ModelSpec, layout: LayoutSpec) -> ModelSpec:
    """The model with its split, cuts, context and experts, as far as the layout uses them.

    Like `families.derived.with_derived`, without the seconds that a process of its own takes to start.
    """
    foreign = model.foreign
    assert foreign is not None
    wanted: dict[str, tuple[int, Callable[[ForeignModel], Any]]] = {
        "split": (layout.tp, lambda bare: derived_split(bare, layout.tp)),
        "cuts": (layout.pp, derived_cuts),
        "context": (layout.cp, derived_context),
        "experts": (layout.ep, derived_experts),
    }
    changes = {}
    for field, (degree, derive) in wanted.items():
        if degree > 1:
            key = foreign.model_dump_json(), field, layout.tp if field == "split" else 0
            if key not in _KNOWN:
                _KNOWN[key] = derive(foreign)
            changes[field] = _KNOWN[key]
    return model.model_copy(update={"foreign": foreign.model_copy(update=changes)})
