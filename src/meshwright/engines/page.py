"""A comparison as one HTML page: table, speeds, loss curves on top of each other, programs."""

from collections.abc import Iterator, Sequence
from html import escape

from meshwright.engines.compare import ContestRow
from meshwright.engines.report import introduction, left_out, made, ran, reference, table
from meshwright.pages.drawing import Scale, colour, legend, line, plot, stacked_bars
from meshwright.pages.shell import header, page, section
from meshwright.pages.shell import table as html_table

TITLE = "Engines side by side"


def comparison_page(rows: Sequence[ContestRow], about: dict[str, str]) -> str:
    """The page of a comparison."""
    first, measured = reference(rows), [row for row in rows if row.losses and not row.error]
    head, *cells = table(rows)
    errors = (f'<p class="failed">{escape(row.name)}: {escape(row.error)}</p>' for row in rows if row.error)
    body = [header(TITLE, escape(introduction(rows, about))), section("Results", html_table(head, cells), *errors)]
    if measured:
        body.append(section("Tokens per second", _speeds(measured), about="A mark is a round."))
        curves = [(row.name, row.losses) for row in measured]
        body.append(section("Loss by step", _curves(curves, first=0), about="All engines on top of each other."))
    if measured and measured[0] is first and len(measured) > 1:
        apart = [
            (row.name, [abs(a - b) for a, b in zip(row.losses, first.losses, strict=False)]) for row in measured[1:]
        ]
        body.append(section(f"How far each loss is from {first.name}'s", _curves(apart, first=1)))
    body.append(section("What ran, what is left out, and the programs", *map(_engine, rows)))
    body.append(section("How it was made", html_table((), made(about).items())))
    return page(TITLE, body)


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
    rounds = {row.name: [row.tokens_per_step * len(turn) / sum(turn) for turn in row.turns] for row in rows}
    bars = [(row.name, {"tokens per second": row.tokens_per_second or 0.0}) for row in rows]
    return stacked_bars(bars, lambda speed: f"{speed:,.0f}", ticks=rounds)


def _curves(curves: Sequence[tuple[str, Sequence[float]]], *, first: int) -> str:
    """Lines over steps; later lines are thinner, so equal lines all stay visible. `first`: the first one's colour."""
    x = Scale(1, max(2, *(len(values) for _, values in curves)), lambda step: f"{step:g}")
    y = Scale.around(value for _, values in curves for value in values)

    def lines() -> Iterator[str]:
        for number, (_, values) in enumerate(curves):
            width = max(1.5, 2.0 * (len(curves) - number))
            yield line(x, y, enumerate(values, 1), number + first, width=width)

    names = {name: colour(number + first) for number, (name, _) in enumerate(curves)}
    return legend(names) + plot(x, y, lines())
