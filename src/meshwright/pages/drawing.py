"""Drawings of pages without a plotting library: lines, areas, dots and boxes on axes with a grid, and stacked bars.

A drawing is as wide as its place: shapes stretch with it, lines and letters keep their sizes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 8
"""Colours of the palette, which `look.css` defines for light and dark."""
SIDE = 1000.0
"""Width and height of a drawing, in its own units."""
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)

Figure = Callable[[float], str]
Point = tuple[float, float]


def colour(number: int) -> str:
    """A colour of the palette."""
    return f"var(--c{number % COLOURS})"


def plain(value: float) -> str:
    """A number in four significant digits."""
    return f"{value:.4g}"


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float
    show: Figure = plain
    log: bool = False

    @classmethod
    def around(
        cls, values: Iterable[float], show: Figure = plain, *, room: float = 0.04, wide: float = math.inf
    ) -> "Scale":
        """The scale that holds the values, with some room; from 0 if they are not far from it; logarithmic if the
        largest of positive values is more than `wide` times the smallest."""
        numbers = list(values)
        low, high = min(numbers), max(numbers)
        if 0 < low * wide < high:
            return cls(low / (1 + 3 * room), high * (1 + 3 * room), show, log=True)
        spare = (high - low or abs(high) or 1.0) * room
        return cls(0.0 if 0 <= low < high / 2 else low - spare * (room > 0), high + spare, show)

    def place(self, value: float) -> float:
        """A value's distance from the low end, 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def ticks(self, most: int) -> list[float]:
        """At most `most` round values."""
        if self.log:
            return self._powers(most)
        rough = (self.high - self.low) / max(1, most - 1) or 1.0
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(size * power for size in STEPS if size * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _powers(self, most: int) -> list[float]:
        """Powers of ten and, if there is room, their multiples."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        chosen: list[float] = []
        for factors in ((1,), (1, 3), (1, 2, 5)):
            ticks = [factor * 10.0**power for power in powers for factor in factors]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) <= most or not chosen:
                chosen = ticks
        return chosen


def plot(
    x: Scale,
    y: Scale,
    shapes: Iterable[str],
    *,
    dots: str = "",
    tall: str = "16rem",
    titles: tuple[str, str] = ("", ""),
) -> str:
    """Axes around `shapes`, which are SVG in the units of `at`; `dots`: HTML above them; `titles` of both axes."""
    ys = [(y.place(value), y.show(value)) for value in y.ticks(6)]
    grid = "".join(f'<line class="grid" x1="0" x2="{SIDE:.0f}" y1="{_down(p)}" y2="{_down(p)}"/>' for p, _ in ys)
    return _framed(x, ys, (grid, *shapes), dots=dots, tall=tall, titles=titles)


def lanes(
    x: Scale, names: Sequence[str], shapes: Iterable[str], *, each: float = 1.4, title: str = "", dots: str = ""
) -> str:
    """A lane for each name, from the top, `each` rem high, above an x axis; `shapes` and `dots` as in `plot`."""
    ys = [(1 - (number + 0.5) / len(names), name) for number, name in enumerate(names)]
    return _framed(x, ys, shapes, dots=dots, tall=f"{each * len(names):.2f}rem", titles=(title, ""))


def _framed(
    x: Scale,
    ys: Sequence[tuple[float, str]],
    shapes: Iterable[str],
    *,
    dots: str = "",
    tall: str,
    titles: tuple[str, str],
) -> str:
    wide = max((len(label) for _, label in ys), default=4)
    labels = "".join(f'<span style="top:{100 * (1 - p):.2f}%">{escape(label)}</span>' for p, label in ys)
    below = "".join(f'<span style="left:{100 * x.place(v):.2f}%">{escape(x.show(v))}</span>' for v in x.ticks(5))
    across, up = (
        f'<div class="{kind}">{escape(title)}</div>' if title else ""
        for kind, title in zip(("x-title", "y-title"), titles, strict=True)
    )
    return (
        f'<div class="plot" style="--tall:{tall};--ys:{0.62 * wide:.1f}em">{up}<div class="ys">{labels}</div>'
        f'<div class="area"><svg viewBox="0 0 {SIDE:.0f} {SIDE:.0f}" preserveAspectRatio="none" role="img">'
        f'{"".join(shapes)}</svg>{dots}</div><div class="xs">{below}</div>{across}</div>'
    )


def at(x: Scale, y: Scale, point: Point) -> str:
    """A point in a drawing's units."""
    return f"{SIDE * x.place(point[0]):.1f},{_down(y.place(point[1]))}"


def _down(share: float) -> str:
    return f"{SIDE * (1 - share):.1f}"


def line(x: Scale, y: Scale, points: Iterable[Point], number: int, *, width: float = 1.75, dash: str = "") -> str:
    """A curve."""
    where = " ".join(at(x, y, point) for point in points)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{where}" fill="none" stroke="{colour(number)}" stroke-width="{width}"{style}/>'


def area(x: Scale, y: Scale, above: Sequence[Point], below: Sequence[Point], fill: str) -> str:
    """The area between two curves."""
    where = " ".join(at(x, y, point) for point in (*above, *reversed(below)))
    return f'<polygon points="{where}" fill="{fill}"/>'


def box(
    x: Scale, span: tuple[float, float], fill: str, *, rows: tuple[float, float] = (0.0, 1.0), tip: str = ""
) -> str:
    """A rectangle over `span` of the x axis and `rows` of the height; `fill`: a colour, or empty for a place to point
    at."""
    left, wide = SIDE * x.place(span[0]), max(0.5, SIDE * (x.place(span[1]) - x.place(span[0])))
    top, tall = SIDE * rows[0], SIDE * (rows[1] - rows[0])
    look = f'fill="{fill}"' if fill else 'class="at"'
    note = f' data-tip="{escape(tip)}"' if tip else ""
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{tall:.1f}" {look}{note}/>'


def dot(x: Scale, y: Scale, point: Point, number: int, tip: str, *, shape: str = "") -> str:
    """A dot, as HTML above a drawing; `shape`: ring, diamond, cross or big, so that it does not differ by colour
    alone."""
    left, top = 100 * x.place(point[0]), 100 * (1 - y.place(point[1]))
    style = f"left:{left:.2f}%;top:{top:.2f}%;--of:{colour(number)}"
    return f'<span class="{f"dot {shape}".strip()}" style="{style}" data-tip="{escape(tip)}"></span>'


def legend(names: Mapping[str, str]) -> str:
    """Names with their colours."""
    items = (f'<li><i style="--of:{fill}"></i>{escape(name)}</li>' for name, fill in names.items())
    return f'<ul class="legend">{"".join(items)}</ul>'


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    show: Figure,
    *,
    limit: float | None = None,
    ticks: Mapping[str, Sequence[float]] | None = None,
    fills: Mapping[str, str] | None = None,
) -> str:
    """A bar for each row below its name, with a legend of the parts; `limit`: a red mark; `ticks`: marks of a row;
    `fills`: colours of parts."""
    names = dict.fromkeys(name for _, parts in rows for name in parts)
    drawn = [name for name in names if any(parts.get(name, 0) > 0 for _, parts in rows)]
    fills = fills_of(drawn) if fills is None else {name: fill for name, fill in fills.items() if name in drawn}
    marks = ticks or {}
    most = max([sum(parts.values()) for _, parts in rows] + [limit or 0.0] + [m for row in marks.values() for m in row])
    bars = "".join(
        f'<div><div class="bar-name"><span>{escape(name)}</span><b>{escape(show(sum(parts.values())))}</b></div>'
        f"{meter(parts, fills, show, most, Marks(limit, marks.get(name, ())))}</div>"
        for name, parts in rows
    )
    return (legend(fills) if len(fills) > 1 else "") + f'<div class="bars">{bars}</div>'


def fills_of(kinds: Iterable[str]) -> dict[str, str]:
    """A colour for each kind."""
    return {kind: colour(number) for number, kind in enumerate(kinds)}


@dataclass(frozen=True)
class Marks:
    """What is drawn on a bar of parts."""

    limit: float | None = None
    """A red mark."""
    ticks: Sequence[float] = ()
    span: tuple[float, float] | None = None
    """The range of the total."""


def meter(
    parts: Mapping[str, float], fills: Mapping[str, str], show: Figure, most: float, marks: Marks | None = None
) -> str:
    """A bar of parts, as long as `most` at the most."""
    marks = marks or Marks()

    def left(value: float) -> str:
        return f"{100 * min(1.0, value / (most or 1.0)):.2f}%"

    def pieces() -> Iterator[str]:
        for kind, part in parts.items():
            if part > 0:
                style = f"width:{left(part)};--of:{fills[kind]}"
                yield f'<span style="{style}" data-tip="{escape(f"{kind}: {show(part)}")}"></span>'
        if span := marks.span:
            width = f"{100 * max(0.0, min(1.0, span[1] / most) - min(1.0, span[0] / most)):.2f}%"
            tip = f"range: {show(span[0])} to {show(span[1])}"
            yield f'<i class="range" style="left:{left(span[0])};width:{width}" data-tip="{escape(tip)}"></i>'
        yield from (f'<em style="left:{left(tick)}"></em>' for tick in marks.ticks)
        if limit := marks.limit:
            yield f'<em class="limit" style="left:calc({left(limit)} - 2px)"></em>'

    return f'<div class="bar">{"".join(pieces())}</div>'
