"""The pages of a judge's report and of a run's checkpoints evaluated one after another."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from meshwright.pages.drawing import Scale, colour, dot, lanes, line, plot, stacked_bars
from meshwright.pages.shell import header, page, section, table

Report = Mapping[str, Any]
SCORES = {"ratings": ("Ratings", 0), "mean_ratings": ("Mean ratings", 2)}
"""Key of a report -> its title and digits."""


def judge_page(report: Report, lines: Sequence[str]) -> str:
    """The page of a judge's report; `lines`: as in the terminal."""
    judge = f"judged by {report['judge']}, {report['questions']} questions" if "judge" in report else "people's votes"
    body = [header("Answers compared", escape(judge))]
    body += _compared(report, "")
    for heading in ("turn", "category"):
        for group, compared in report.get(f"by_{heading}", {}).items():
            body += _compared(compared, f", {heading} {group or 'none'}")
    body.append(section("In numbers", f"<pre>{escape(chr(10).join(lines))}</pre>"))
    return page("Answers compared - meshwright", body, parts=("reports.css",))


def _compared(report: Report, of: str) -> Iterator[str]:
    for key, (title, digits) in SCORES.items():
        if key in report:
            yield section(
                title + of, _intervals(report[key], digits), about="A dot is the value, a line its 95 % interval."
            )
    if report.get("pairs"):
        rows = [
            (
                f"{pair['model_a']} against {pair['model_b']}",
                {"won": float(pair["wins"]), "tied": float(pair["ties"]), "lost": float(pair["losses"])},
            )
            for pair in report["pairs"]
        ]
        bars = stacked_bars(
            rows, lambda count: f"{count:g}", fills={"won": colour(2), "tied": colour(7), "lost": colour(1)}
        )
        yield section(f"Pairs of models{of}", bars)


def _intervals(rated: Mapping[str, Mapping[str, float]], digits: int) -> str:
    """A lane for each model, the best at the top: its value and its interval."""
    best_first = sorted(rated.items(), key=lambda item: -item[1]["value"])
    ends = [one[end] for one in rated.values() for end in ("low", "high")]
    x, y = Scale.around(ends, lambda value: f"{value:.{digits}f}"), Scale(0.0, float(len(rated)))
    shapes, dots = list[str](), list[str]()
    for number, (name, one) in enumerate(best_first):
        height = y.high - number - 0.5
        shapes.append(line(x, y, [(one["low"], height), (one["high"], height)], 0, width=3))
        tip = f"{name}: {one['value']:.{digits}f}, from {one['low']:.{digits}f} to {one['high']:.{digits}f}"
        dots.append(dot(x, y, (one["value"], height), 0, tip))
    return lanes(x, [name for name, _ in best_first], shapes, each=2.2, dots="".join(dots))


def checkpoints_page(title: str, rows: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """The page of a run's checkpoints: (step, figures) each."""
    names = list(rows[0][1])
    curves = (_curve(name, [(step, one[name]) for step, one in rows]) for name in names)
    body = [
        header("Every checkpoint", escape(title)),
        f'<div class="panels">{"".join(curves)}</div>',
        section(
            "In numbers", table(("step", *names), [(str(step), *map(_figure, one.values())) for step, one in rows])
        ),
    ]
    return page("Every checkpoint - meshwright", body, parts=("reports.css",))


def _figure(value: float) -> str:
    return f"{value:.4f}"


def _curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """A figure over steps."""
    x = Scale(min(0, points[0][0]), max(1, points[-1][0]), lambda step: f"{step:,.0f}")
    y = Scale.around(value for _, value in points)
    dots = (dot(x, y, point, 0, f"step {point[0]}: {name} {_figure(point[1])}") for point in points)
    return section(name, plot(x, y, [line(x, y, points, 0)], dots="".join(dots), titles=("step", "")))
