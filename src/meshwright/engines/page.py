"""A comparison as one HTML page that needs no other file: table, speeds, loss curves on top of each other, programs."""

from collections.abc import Iterator, Sequence
from html import escape

from meshwright.engines.compare import ContestRow
from meshwright.engines.report import introduction, left_out, made, ran, reference, table

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999", "#ee8866")
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 260, 60, 24
"""Sizes of a drawing and its axes."""

HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>Engines side by side</title>
<style>body{font:15px system-ui,sans-serif;margin:1em auto;max-width:52em;padding:0 .7em;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25em .6em;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}
svg{width:100%;height:auto}text{font-size:12px;fill:#222}
h2{font-size:1.1em;margin:1.6em 0 .3em}pre{overflow:auto;background:#f6f6f6;padding:.6em;font-size:12px}
.error{color:#a00}</style></head><body>"""


def comparison_page(rows: Sequence[ContestRow], about: dict[str, str]) -> str:
    """The page of a comparison."""
    first, measured = reference(rows), [row for row in rows if row.losses and not row.error]
    head, *body = table(rows)
    parts = ["<h1>Engines side by side</h1>", f"<p>{escape(introduction(rows, about))}</p>", "<table><tr>"]
    parts += [f"<th>{escape(cell)}</th>" for cell in head]
    parts += ["</tr>", *("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in body)]
    parts.append("</table>")
    parts += [f'<p class="error"><b>{escape(row.name)}</b>: {escape(row.error)}</p>' for row in rows if row.error]
    if measured:
        parts += ["<h2>Tokens per second; a tick is a round</h2>", _speeds(measured)]
        curves = [(row.name, row.losses) for row in measured]
        parts += ["<h2>Loss by step, all engines on top of each other</h2>", _curves(curves)]
    if measured and measured[0] is first and len(measured) > 1:
        apart = [
            (row.name, [abs(a - b) for a, b in zip(row.losses, first.losses, strict=False)]) for row in measured[1:]
        ]
        parts += [f"<h2>How far each loss is from {escape(first.name)}'s</h2>", _curves(apart, colour=1)]
    parts.append("<h2>What ran, what is left out, and the programs</h2>")
    parts += [_engine(row) for row in rows]
    parts += ["<h2>How it was made</h2><ul>"]
    parts += [f"<li>{escape(key)}: <code>{escape(value)}</code></li>" for key, value in made(about).items()]
    return HEAD + "\n".join(parts) + "</ul></body></html>\n"


def _engine(row: ContestRow) -> str:
    parts = [f"<p><b>{escape(row.name)}</b>"]
    if row.ran:
        parts.append(f": {escape(ran(row))}")
    if missing := left_out(row):
        parts.append(f"<br>left out: {escape(missing)}")
    parts.append("</p>")
    for name, text in (row.translation.files if row.translation else {}).items():
        parts.append(f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)


def _speeds(rows: Sequence[ContestRow]) -> str:
    """A bar an engine."""
    rounds = [[row.tokens_per_step * len(turn) / sum(turn) for turn in row.turns] for row in rows]
    most = max(max(speeds) for speeds in rounds)
    scale = (WIDTH - LEFT - 120) / most

    def shapes() -> Iterator[str]:
        for number, (row, speeds) in enumerate(zip(rows, rounds, strict=True)):
            y, speed = 26 * number, row.tokens_per_second or 0.0
            fill = COLOURS[number % len(COLOURS)]
            yield f'<text x="0" y="{y + 15}">{escape(row.name)}</text>'
            yield f'<rect x="120" y="{y + 3}" width="{speed * scale:.1f}" height="16" fill="{fill}" opacity=".8"/>'
            for single in speeds:
                x = 120 + single * scale
                yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 2}" y2="{y + 20}" stroke="#222"/>'
            yield f'<text x="{126 + max(*speeds, speed) * scale:.1f}" y="{y + 15}">{speed:.0f}</text>'

    return _svg(26 * len(rows), shapes())


def _curves(curves: Sequence[tuple[str, Sequence[float]]], *, colour: int = 0) -> str:
    """Lines over steps; later lines are thinner, so equal lines all stay visible."""
    steps = max(len(values) for _, values in curves)
    low, high = min(min(values) for _, values in curves), max(max(values) for _, values in curves)
    wide, tall = (WIDTH - LEFT - 10) / max(1, steps - 1), (HEIGHT - BOTTOM - 10) / ((high - low) or 1.0)

    def shapes() -> Iterator[str]:
        for number, (name, values) in enumerate(curves):
            fill = COLOURS[(number + colour) % len(COLOURS)]
            points = " ".join(
                f"{LEFT + wide * step:.1f},{HEIGHT - BOTTOM - (value - low) * tall:.1f}"
                for step, value in enumerate(values)
            )
            thick = max(1.0, 2.0 * (len(curves) - number))
            yield f'<polyline points="{points}" fill="none" stroke="{fill}" stroke-width="{thick}"/>'
            yield f'<rect x="{WIDTH - 130}" y="{6 + 16 * number}" width="10" height="10" fill="{fill}"/>'
            yield f'<text x="{WIDTH - 115}" y="{15 + 16 * number}">{escape(name)}</text>'
        yield f'<text x="0" y="14">{high:.4g}</text><text x="0" y="{HEIGHT - BOTTOM}">{low:.4g}</text>'
        yield f'<text x="{LEFT}" y="{HEIGHT - 6}">step 1</text>'
        yield f'<text x="{WIDTH - 60}" y="{HEIGHT - 6}">step {steps}</text>'

    return _svg(HEIGHT, shapes())


def _svg(height: float, shapes: Iterator[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(shapes)}</svg>'
