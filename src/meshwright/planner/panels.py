"""Small charts of a plan: what its speed depends on, and the error of plans like it."""

from collections.abc import Iterator, Sequence
from html import escape

from meshwright.pages.drawing import Scale, area, box, colour, dot, lanes, line, plot
from meshwright.pages.shell import section
from meshwright.planner.figures import gigabytes, seconds
from meshwright.planner.published import Measurement, published_error, summary
from meshwright.planner.sensitivity import Panel, Point
from meshwright.predict.candidate import Candidate
from meshwright.predict.explain import describe_candidate
from meshwright.predict.interval import NOMINAL

FURTHEST = 2.5
"""Ratio of prediction to measurement, and its inverse, at which the axis of errors ends."""


def sensitivities(panels: Sequence[Panel]) -> str:
    """Tokens per second and device for other values of each setting."""
    if not panels:
        return ""
    most = max(_speeds(point.candidate)[2] for panel in panels for point in panel.points if point.candidate)
    charts = "".join(_panel(panel, most) for panel in panels)
    words = (
        "Tokens per second and device, and their range, if one setting changes: with the chosen degrees of tp, cp, pp "
        "and ep, and the best state sharding, microbatch and recomputation for them. The large dot is this plan; a "
        "cross is a value that does not work. Point at a dot."
    )
    return section("What the speed depends on", f'<div class="panels">{charts}</div>', about=words)


def _panel(panel: Panel, most: float) -> str:
    labels = [point.label for point in panel.points]
    x = Scale(-0.3, len(labels) - 0.7, lambda value: labels[round(value)])
    y = Scale(0.0, 1.05 * most, lambda value: f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}")
    known = [(place, _speeds(point.candidate)) for place, point in enumerate(panel.points) if point.candidate]
    shapes = []
    if not panel.ordered:
        shapes += [line(x, y, [(place, low), (place, high)], 0) for place, (low, _, high) in known]
    elif len(known) > 1:
        above = [(float(place), high) for place, (_, _, high) in known]
        below = [(float(place), low) for place, (low, _, _) in known]
        shapes.append(area(x, y, above, below, colour(0)).replace("<polygon", '<polygon opacity="0.16"'))
        shapes.append(line(x, y, [(float(place), value) for place, (_, value, _) in known], 0))
    dots = "".join(_dots(panel, x, y))
    return f'<div class="panel"><h3>{escape(panel.title)}</h3>{plot(x, y, shapes, dots=dots, tall="8.5rem")}</div>'


def _dots(panel: Panel, x: Scale, y: Scale) -> Iterator[str]:
    for place, point in enumerate(panel.points):
        tip = f"{panel.title.lower()}: {point.label}\n{_about(point)}"
        if point.candidate is None:
            yield dot(x, y, (place, y.low), 7, tip, shape="cross")
        else:
            value = _speeds(point.candidate)[1]
            yield dot(x, y, (place, value), 1 if point.now else 0, tip, shape="big" if point.now else "")


def _speeds(candidate: Candidate) -> tuple[float, float, float]:
    """Tokens per second and device: lowest, predicted, highest."""
    time, value = candidate.seconds, candidate.tokens_per_second
    return value * time.value / time.high, value, value * time.value / time.low


def _about(point: Point) -> str:
    if point.candidate is None:
        return point.problem
    low, value, high = _speeds(point.candidate)
    time, size = point.candidate.seconds, point.candidate.memory_bytes
    return (
        f"{value:,.0f} tokens/s and device ({low:,.0f} to {high:,.0f})\n{seconds(time.value)} a step, "
        f"{gigabytes(size.value)}, {point.candidate.verdict}\n{describe_candidate(point.candidate)}"
    )


def errors(chosen: Candidate) -> str:
    """How far published runs like this plan were from their predictions."""
    errors = published_error(chosen)
    shown = [
        (name, [one for one in rows if one.fitted == fitted])
        for what, rows in (("step time", errors.times), ("memory", errors.memory))
        for name, fitted in ((f"{what}, fitted", True), (f"{what}, others", False))
    ]
    shown = [(name, rows) for name, rows in shown if rows]
    x = Scale(1 / FURTHEST, FURTHEST, lambda ratio: f"{ratio:g}", log=True)
    height = 1 / len(shown)

    def marks() -> Iterator[str]:
        yield box(x, (0.9, 1.1), "var(--soft)")
        yield box(x, (0.998, 1.002), "var(--dim)")
        for lane, (_, rows) in enumerate(shown):
            for one in rows:
                ratio = min(FURTHEST / 1.01, max(1.01 / FURTHEST, one.ratio))
                where = (height * (lane + 0.12), height * (lane + 0.88))
                yield box(
                    x, (ratio / 1.003, ratio * 1.003), colour(0 if one.fitted else 1), rows=where, tip=_run_about(one)
                )

    drawing = lanes(x, [name for name, _ in shown], marks(), each=2.2, title="predicted, relative to measured")
    lines = "".join(f"<li>{escape(name)}: {escape(summary(rows))}</li>" for name, rows in shown)
    words = (
        f"Published runs of {errors.like}, each a mark; the band is within 10 %. Ranges should hold {NOMINAL:.0%} of "
        "measurements. The planner's constants were fitted to the first kind of rows and never to the others."
    )
    return section("The error of such plans", drawing, f'<ul class="errors">{lines}</ul>', about=escape(words))


def _run_about(one: Measurement) -> str:
    size = f"{one.billions:g}B parameters on {one.devices:,} x {one.device}"
    return f"{one.id}\n{size}\npredicted {one.ratio:.2f} of the measurement"
