"""A large layout as several small ones: each pair of its axes by itself, at small degrees. No torch here.

Faults of layouts arise where two axes meet, and a pair of them needs few ranks. What only three axes together get wrong
is not seen; `verify --full` proves the layout as it is.
"""

from itertools import combinations
from math import gcd

from meshwright.spec.errors import UserError
from meshwright.spec.layout import AXES, LayoutSpec

MOST_RANKS = 16
"""Of a layout that is proved as it is: beyond, two cores take minutes to start its processes alone."""

DEGREES = (4, 2, 3)
"""Of an axis in a pair, the first that divides its own; a degree without these keeps its smallest divisor."""


def pair_layouts(layout: LayoutSpec) -> list[LayoutSpec]:
    """The layouts of all pairs of axes that have several ranks; of the only such axis, where there is one."""
    axes = [axis for axis in AXES if getattr(layout, axis) > 1]
    found: list[LayoutSpec] = []
    for pair in combinations(axes, min(2, len(axes))):
        small = _restricted(layout, pair)
        if small is not None and small not in found:
            found.append(small)
    return found


def _restricted(layout: LayoutSpec, pair: tuple[str, ...]) -> LayoutSpec | None:
    """None where the axes of the pair are no layout without the others."""
    degrees = {axis: _degree(getattr(layout, axis)) if axis in pair else 1 for axis in AXES}
    sharers = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    fields = {**layout.model_dump(), **degrees, "ep": gcd(layout.ep, sharers), "stage_layers": "auto"}
    if degrees["pp"] == 1:
        fields |= {"stages_per_rank": "auto", "schedule": "1f1b"}
    if degrees["dp_shard"] * degrees["cp"] == 1:
        fields["zero"] = "auto"
    try:
        return LayoutSpec.model_validate(fields)
    except (UserError, ValueError):
        return None


def _degree(degree: int) -> int:
    return next((small for small in DEGREES if degree % small == 0), 0) or next(
        small for small in range(2, degree + 1) if degree % small == 0
    )
