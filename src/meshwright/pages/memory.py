"""The page of a memory timeline."""

from itertools import groupby, pairwise
from typing import Any

from meshwright.pages.drawing import Scale, area, box, fills_of, legend, plot
from meshwright.pages.shell import header, page, section, table

KINDS = ("weights", "gathered weights", "optimizer", "gradients", "activations", "temporaries")
"""Kinds in the order in which they are stacked."""
FILLS = fills_of(KINDS)
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
    about = (
        f"The peak is {size(peak['total'])}, {1e3 * peak['seconds']:.0f} ms into the step: {where}. "
        "Sizes are of tensors, without an allocator's reserve."
    )
    titles = ("by kind", "activations by the module that made them", "the largest tensors")
    tables = zip(titles, peak_tables(peak), strict=True)
    body = [
        header(title),
        section("Memory over the step", memory_picture(report["points"]), about=about),
        *(section(f"At the peak, {what}", one) for what, one in tables),
    ]
    return page(title, body)


def peak_tables(peak: dict[str, Any]) -> tuple[str, str, str]:
    """What is held at the peak: by kind, activations by module, and the largest tensors."""
    kinds, places = (sorted(peak[what].items(), key=lambda item: -item[1]) for what in ("kinds", "places"))
    largest = [(_name(one), one["kind"], size(one["bytes"])) for one in peak["largest"]]
    return (
        table(("kind", "size"), [(kind, size(held)) for kind, held in kinds]),
        table(("module", "size"), [(place, size(held)) for place, held in places]),
        table(("tensor", "kind", "size"), largest),
    )


def size(number: float) -> str:
    """Bytes in a readable unit."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= one:
            return f"{number / one:.3g} {unit}"
    return f"{number:.0f} B"


def _name(tensor: dict[str, Any]) -> str:
    """The tensor's own name, or the module and operation that made it."""
    return tensor.get("name") or f"{tensor['place']} {tensor['what']}".strip() or "made before"


def memory_picture(points: list[dict[str, Any]], *, timed: bool = True) -> str:
    """Kinds stacked over a step, on bands that show the phases. `timed`: over seconds, else over allocations."""
    first = points[0]["index"] if points else 0
    places = [point["seconds"] if timed else point["index"] - first for point in points]
    unit, of_unit = ("s", 1.0) if max(places, default=0.0) >= 1 else ("ms", 1e3)
    x = Scale(0.0, max([*places, 1e-9]), lambda at: f"{of_unit * at:.3g} {unit}" if timed else f"{at:.0f}")
    y = Scale(0.0, 1.05 * max([*(point["total"] for point in points), 1]), size)
    spans = list(pairwise([*places, x.high]))
    phases = {phase: fill for phase, fill in PHASES.items() if any(point["phase"] == phase for point in points)}
    bands = [list(band) for _, band in groupby(zip(spans, points, strict=True), key=lambda one: one[1]["phase"])]
    shapes = [box(x, (band[0][0][0], band[-1][0][1]), phases[band[0][1]["phase"]]) for band in bands]
    below = [0.0] * len(points)
    for kind, fill in FILLS.items():
        above = [low + point["kinds"].get(kind, 0) for low, point in zip(below, points, strict=True)]
        curves = [list(zip(places, values, strict=True)) for values in (above, below)]
        shapes.append(area(x, y, curves[0], curves[1], fill))
        below = above
    for span, place, point in zip(spans, places, points, strict=True):
        held = "\n".join(f"{kind} {size(bytes_)}" for kind, bytes_ in point["kinds"].items())
        where = ", ".join(filter(None, (x.show(place) if timed else "", point["phase"], point["place"])))
        shapes.append(box(x, span, "", tip=f"{where}: {size(point['total'])}\n{held}"))
    names = {kind: fill for kind, fill in FILLS.items() if any(point["kinds"].get(kind) for point in points)}
    title = "" if timed else "allocations and releases"
    return legend(names) + plot(x, y, shapes, tall="20rem", titles=(title, "")) + legend(phases)
