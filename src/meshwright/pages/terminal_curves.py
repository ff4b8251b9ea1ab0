"""Curves of runs in a terminal: braille dots, eight to a character."""

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.pages.view import view_data

COLUMNS, ROWS = 80, 8
"""Widest picture, and height of a curve, in characters."""
LABEL = 10
"""Width of the numbers beside a curve."""
BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of a dot, by its column and row in a character."""
FIGURES = {
    "number": "{:.4g}",
    "rate": "{:.3g}",
    "share": "{:.1%}",
    "bytes": "{:.3g} B",
    "seconds": "{:.3g} s",
}


def terminal_view(run_dirs: Sequence[Path]) -> str:
    """Every chart of the runs as text; several runs below each other on one scale."""
    data = view_data(run_dirs)
    wide = min(COLUMNS, shutil.get_terminal_size((COLUMNS, 24)).columns) - 1
    lines = [line for run in data["runs"] for line in _headline(run)]
    for chart in data["charts"]:
        lines += ["", *_chart(chart, data["runs"], wide)]
    return "\n".join(lines)


def _headline(run: dict[str, Any]) -> Iterator[str]:
    steps = run["tables"].get("step", {})
    figures = {name: _last(steps.get(name, [])) for name in ("step", "loss", "tokens_per_s")}
    of = f"/{run['steps']}" if run["steps"] else ""
    words = [f"step {figures['step']}{of}"] if figures["step"] is not None else []
    words += [f"loss {figures['loss']:.4g}"] if figures["loss"] is not None else []
    words += [f"{figures['tokens_per_s']:.0f} tokens/s"] if figures["tokens_per_s"] is not None else []
    yield f"{run['name']}: {', '.join([run['state'], *words])}"


def _chart(chart: dict[str, Any], runs: Sequence[dict[str, Any]], wide: int) -> Iterator[str]:
    curves = list(_curves(chart, runs))
    ys = [y for _, _, values in curves for y in values]
    log = bool(chart.get("log")) and min(ys) > 0
    if log:
        curves = [(name, xs, [math.log10(y) for y in values]) for name, xs, values in curves]
    span = (min(x for _, xs, _ in curves for x in xs), max(x for _, xs, _ in curves for x in xs))
    scale = (math.log10(min(ys)), math.log10(max(ys))) if log else (min(ys), max(ys))
    show = FIGURES[chart["unit"]].format
    yield f"{chart['title']}{' (log)' if log else ''}"
    for name, xs, values in curves:
        if len(curves) > 1:
            yield f"{'':<{LABEL}} {name}"
        rows = braille(xs, values, span=span, scale=scale, wide=wide - LABEL - 1)
        ends = [show(max(ys)), *[""] * (len(rows) - 2), show(min(ys))]
        yield from (f"{end:>{LABEL}} {row}" for end, row in zip(ends, rows, strict=True))
    left, right = f"{span[0]:g}", f"step {span[1]:g}"
    yield f"{'':<{LABEL}} {left}{right:>{wide - LABEL - 1 - len(left)}}"


def _curves(chart: dict[str, Any], runs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[float], list[float]]]:
    """(name, steps, values) of every curve with a value."""
    for run in runs:
        for line in chart["lines"]:
            columns = run["tables"].get(line["table"], {})
            pairs = [
                (x, y)
                for x, y in zip(columns.get("step", []), columns.get(line["column"], []), strict=False)
                if y is not None
            ]
            names = [run["name"]] * (len(runs) > 1) + [line["name"]] * (len(chart["lines"]) > 1)
            if pairs:
                yield ", ".join(filter(None, names)), [x for x, _ in pairs], [y for _, y in pairs]


def braille(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    span: tuple[float, float],
    scale: tuple[float, float],
    wide: int,
) -> list[str]:
    """A curve as `ROWS` rows of `wide` characters; its points are joined by lines."""
    across, down = 2 * wide - 1, 4 * ROWS - 1
    grid = [[0] * wide for _ in range(ROWS)]

    def place(value: float, ends: tuple[float, float], most: int) -> int:
        return round((value - ends[0]) / ((ends[1] - ends[0]) or 1.0) * most)

    dots = [(place(x, span, across), down - place(y, scale, down)) for x, y in zip(xs, ys, strict=True)]
    for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            x, y = x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps)
            grid[y // 4][x // 2] |= DOTS[x % 2][y % 4]
    return ["".join(chr(BRAILLE + cell) for cell in row).replace(chr(BRAILLE), " ").rstrip() for row in grid]


def _last(values: Sequence[Any]) -> Any:
    return next((value for value in reversed(values) if value is not None), None)
