"""The page of a memory timeline."""

from itertools import pairwise
from typing import Any

from meshwright.pages.drawing import Scale, area, box, colour, legend, plot
from meshwright.pages.shell import header, page, section, table

KINDS = ("weights", "gathered weights", "optimizer", "gradients", "activations", "temporaries")
"""Kinds in the order in which they are stacked, and of their colours."""
PHASES = {
    "forward": "color-mix(in srgb, var(--c0) 16%, var(--card))",
    "backward": "color-mix(in srgb, var(--c1) 16%, var(--card))",
    "optimizer's step": "color-mix(in srgb, var(--c2) 16%, var(--card))",
    "between": "var(--soft)",
}
"""The colour behind each phase."""


def memory_page(title: str, report: dict[str, Any]) -> str:
    """The page of a `Timeline.report`."""
    peak = report["peak"]
    where = ", ".join(filter(None, (peak["phase"], peak["place"])))
    kinds = sorted(peak["kinds"].items(), key=lambda item: -item[1])
    places = sorted(peak["places"].items(), key=lambda item: -item[1])
    about = (
        f"The peak is {size(peak['total'])}, {1e3 * peak['seconds']:.0f} ms into the step: {where}. "
        "Sizes are of tensors, without an allocator's reserve."
    )
    largest = [(_name(one), one["kind"], size(one["bytes"])) for one in peak["largest"]]
    body = [
        header(title),
        section("Memory over the step", _picture(report["points"]), about=about),
        section("At the peak, by kind", table(("kind", "size"), [(kind, size(held)) for kind, held in kinds])),
        section(
            "At the peak, activations by the module that made them",
            table(("module", "size"), [(place, size(held)) for place, held in places]),
        ),
        section("At the peak, the largest tensors", table(("tensor", "kind", "size"), largest)),
    ]
    return page(title, body)


def size(number: float) -> str:
    """Bytes in a readable unit."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= one:
            return f"{number / one:.3g} {unit}"
    return f"{number:.0f} B"


def _name(tensor: dict[str, Any]) -> str:
    """The tensor's own name, or the module and operation that made it."""
    return tensor.get("name") or f"{tensor['place']} {tensor['what']}".strip() or "made before"


def _picture(points: list[dict[str, Any]]) -> str:
    """Kinds stacked over time, on bands that show the phases."""
    seconds = [point["seconds"] for point in points]
    x = Scale(0.0, max([*seconds, 1e-9]), lambda value: f"{1e3 * value:.3g} ms")
    y = Scale(0.0, 1.05 * max([*(point["total"] for point in points), 1]), size)
    spans = list(pairwise([*seconds, x.high]))
    shapes = [box(x, span, PHASES[point["phase"]]) for span, point in zip(spans, points, strict=True)]
    below = [0.0] * len(points)
    for number, kind in enumerate(KINDS):
        above = [low + point["kinds"].get(kind, 0) for low, point in zip(below, points, strict=True)]
        curves = [list(zip(seconds, values, strict=True)) for values in (above, below)]
        shapes.append(area(x, y, curves[0], curves[1], number))
        below = above
    for span, point in zip(spans, points, strict=True):
        held = "\n".join(f"{kind} {size(bytes_)}" for kind, bytes_ in point["kinds"].items())
        where = " ".join(filter(None, (point["phase"], point["place"])))
        shapes.append(box(x, span, "", tip=f"{1e3 * point['seconds']:.1f} ms, {where}: {size(point['total'])}\n{held}"))
    names = {kind: colour(number) for number, kind in enumerate(KINDS)}
    return legend(names) + plot(x, y, shapes, tall="20rem") + legend(PHASES)
