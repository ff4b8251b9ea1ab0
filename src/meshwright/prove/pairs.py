"""Small layouts that replace a large one: each pair of its axes separately, at small degrees. Without torch.

Faults of layouts occur where two axes meet, and a pair of axes needs few ranks. Faults that need three axes are missed;
`verify --full` proves the unchanged layout.
"""

from itertools import combinations
from math import gcd

from meshwright.spec.errors import UserError
from meshwright.spec.layout import AXES, LayoutSpec

MOST_RANKS = 16
"""Largest number of ranks of a layout that is proved unchanged: with more, two cores take minutes just to start the
processes."""

DEGREES = (4, 2, 3)
"""Degrees of an axis in a pair: the first that divides the axis's own degree, else its smallest divisor."""


def pair_layouts(layout: LayoutSpec) -> list[LayoutSpec]:
    """The layouts of all pairs of axes with several ranks, or of the only such axis."""
    axes = [axis for axis in AXES if getattr(layout, axis) > 1]
    pairs: list[LayoutSpec] = []
    for pair in combinations(axes, min(2, len(axes))):
        small = _restricted(layout, pair)
        if small is not None and small not in pairs:
            pairs.append(small)
    return pairs


def _restricted(layout: LayoutSpec, pair: tuple[str, ...]) -> LayoutSpec | None:
    """The layout of a pair of axes; None if the pair alone is not a legal layout."""
    degrees = {axis: _degree(getattr(layout, axis)) if axis in pair else 1 for axis in AXES}
    sharers = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    fields = {**layout.model_dump(), **degrees, "ep": gcd(layout.ep, sharers), "stage_layers": "auto"}
    if degrees["pp"] == 1:
        fields |= {"stages_per_rank": "auto", "schedule": "1f1b"}
    if degrees["dp_shard"] * degrees["cp"] == 1:
        fields |= {
            "zero": "auto",
            "quantized_weights": "none",
            "quantized_gradients": "none",
            "gradient_error_feedback": False,
        }
    try:
        return LayoutSpec.model_validate(fields)
    except (UserError, ValueError):
        return None


def _degree(degree: int) -> int:
    return next((small for small in DEGREES if degree % small == 0), 0) or next(
        small for small in range(2, degree + 1) if degree % small == 0
    )
