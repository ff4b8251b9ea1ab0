"""The page of a memory timeline: one HTML file with inline SVG that needs nothing else."""

from collections.abc import Iterator
from html import escape
from typing import Any

COLOURS = {
    "weights": "#4477aa",
    "gathered weights": "#66ccee",
    "optimizer": "#228833",
    "gradients": "#ccbb44",
    "activations": "#ee6677",
    "temporaries": "#aa3377",
}
"""Kinds in the order in which they are stacked."""
PHASES = {"forward": "#e8eef7", "backward": "#fbe9e7", "optimizer's step": "#e6f2e6", "between": "#f4f4f4"}
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 360, 60, 30
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title>
<style>body{{font:15px system-ui,sans-serif;margin:1em auto;max-width:60em;padding:0 .7em;color:#222}}
svg{{width:100%;height:auto}}text{{font-size:12px;fill:#222}}h2{{font-size:1.1em;margin:1.6em 0 .3em}}
table{{border-collapse:collapse}}td,th{{padding:.15em .8em .15em 0;text-align:left}}td.n{{text-align:right}}
.at{{fill:transparent}}.at:hover{{fill:#0002}}</style></head><body><h1>{title}</h1>
"""


def memory_page(title: str, report: dict[str, Any]) -> str:
    """The page of a `Timeline.report`."""
    peak = report["peak"]
    where = ", ".join(filter(None, (peak["phase"], peak["place"])))
    kinds = sorted(peak["kinds"].items(), key=lambda item: -item[1])
    places = sorted(peak["places"].items(), key=lambda item: -item[1])
    largest = [
        (f"{one['place']} {one['what']}".strip() or "made before", one["kind"], one["bytes"]) for one in peak["largest"]
    ]
    parts = [
        HEAD.format(title=escape(title)),
        f"<p>The peak is <b>{size(peak['total'])}</b>, {1e3 * peak['seconds']:.0f} ms into the step: {escape(where)}. "
        "Sizes are of tensors, without an allocator's reserve. Point at the picture for figures.</p>",
        _picture(report["points"]),
        "<h2>At the peak, by kind</h2>",
        _table(("kind", "size"), [(kind, size(held)) for kind, held in kinds]),
        "<h2>At the peak, activations by the module that made them</h2>",
        _table(("module", "size"), [(place, size(held)) for place, held in places]),
        "<h2>At the peak, the largest tensors</h2>",
        _table(("tensor", "kind", "size"), [(name, kind, size(held)) for name, kind, held in largest]),
    ]
    return "\n".join(parts) + "</body></html>\n"


def size(number: float) -> str:
    """Bytes in a readable unit."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= one:
            return f"{number / one:.3g} {unit}"
    return f"{number:.0f} B"


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[:-1]) + f'<td class="n">{row[-1]}</td></tr>'
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _picture(points: list[dict[str, Any]]) -> str:
    """Kinds stacked over time, on bands that show the phases."""
    most = max([point["total"] for point in points] + [1])
    last = max([point["seconds"] for point in points] + [1e-9])

    def x(seconds: float) -> float:
        return LEFT + seconds / last * (WIDTH - LEFT - 10)

    def y(held: float) -> float:
        return HEIGHT - BOTTOM - held / most * (HEIGHT - BOTTOM - 30)

    def shapes() -> Iterator[str]:
        ends = [*(point["seconds"] for point in points[1:]), last]
        for point, end in zip(points, ends, strict=True):
            left, wide = x(point["seconds"]), max(0.5, x(end) - x(point["seconds"]))
            band = f'x="{left:.1f}" y="20" width="{wide:.1f}" height="{HEIGHT - BOTTOM - 20}"'
            yield f'<rect {band} fill="{PHASES[point["phase"]]}"/>'
        below = [0.0] * len(points)
        for kind, colour in COLOURS.items():
            above = [low + point["kinds"].get(kind, 0) for low, point in zip(below, points, strict=True)]
            outline = [(x(point["seconds"]), y(high)) for point, high in zip(points, above, strict=True)]
            outline += [(x(point["seconds"]), y(low)) for point, low in zip(points[::-1], below[::-1], strict=True)]
            yield f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in outline)}" fill="{colour}"/>'
            below = above
        for point, end in zip(points, ends, strict=True):
            left, wide = x(point["seconds"]), max(0.5, x(end) - x(point["seconds"]))
            held = ", ".join(f"{kind} {size(bytes_)}" for kind, bytes_ in point["kinds"].items())
            where = " ".join(filter(None, (point["phase"], point["place"])))
            title = f"{1e3 * point['seconds']:.1f} ms, {where}: {size(point['total'])} ({held})"
            band = f'x="{left:.1f}" y="20" width="{wide:.1f}" height="{HEIGHT - BOTTOM - 20}"'
            yield f'<rect class="at" {band}><title>{escape(title)}</title></rect>'
        for index, (name, colour) in enumerate({**COLOURS, **PHASES}.items()):
            left, down = LEFT + index % 6 * 140, 2 if index < 6 else HEIGHT + 4
            yield f'<rect x="{left}" y="{down}" width="10" height="10" fill="{colour}" stroke="#999"/>'
            yield f'<text x="{left + 14}" y="{down + 10}">{escape(name)}</text>'
        yield f'<text x="0" y="{y(most) + 4:.0f}">{size(most)}</text><text x="0" y="{y(0):.0f}">0</text>'
        yield f'<text x="{LEFT}" y="{HEIGHT - 12}">0 ms</text>'
        yield f'<text x="{WIDTH - 70}" y="{HEIGHT - 12}">{1e3 * last:.0f} ms</text>'

    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 20}" role="img">{"".join(shapes())}</svg>'
