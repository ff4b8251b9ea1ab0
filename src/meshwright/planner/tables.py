"""The strategies, layouts and fine-tuning methods of a plan, as rows with bars and tables."""

from collections.abc import Iterator, Sequence
from html import escape

from meshwright.pages.drawing import Scale, colour, dot, legend, line, plot
from meshwright.pages.shell import section, table
from meshwright.planner.figures import GB, Facts, about, bars_of, gigabytes, money, ranged, seconds, verdict

WIDE = 6.0
"""Ratio of the largest value to the smallest from which an axis is logarithmic."""


def strategies(facts: Facts) -> str:
    """Every strategy's best layout with its costs, and why it is not the chosen one."""
    names = list(facts["strategies"])
    if not names:
        return ""
    strategies = [facts["strategies"][name] for name in names]
    keys, bars = bars_of(strategies)
    rows = (
        '<div class="strategy"><div class="strategy-name">'
        f"<b>{escape(name).replace('+', '+<wbr/>')}</b>{verdict(one['verdict'])}</div>"
        f'<div><div class="figure">{escape(ranged(one["memory_total"], gigabytes))}</div>{memory}</div>'
        f'<div><div class="figure">{escape(ranged(one["step_time"], seconds))}</div>{time}</div>'
        f'<div class="why"><span>{escape(one["reason"])}</span><span>{escape(_run(facts, one))}</span>'
        f"<code>{escape(one['text'])}</code></div></div>"
        for name, one, (memory, time) in zip(names, strategies, bars, strict=True)
    )
    words = (
        "The best layout of each. The red mark is the device's memory, the bracket on a bar its range; bars that end "
        "at the edge are longer."
    )
    return section("Strategies", keys, f'<div class="strategies">{"".join(rows)}</div>', about=words)


def _run(facts: Facts, one: Facts) -> str:
    speed = f"{one['tokens_per_second_per_device']:,.0f} tokens/s and device, {one['mfu']:.0%} MFU"
    return "; ".join(filter(None, (speed, money(facts, one))))


def layouts(facts: Facts) -> str:
    """The fastest layouts, as the terminal lists them."""
    rows = list(_rows(facts))
    if not rows:
        return ""
    head = ("", "step", "tokens/s and device", "MFU", "memory", "", "run", "layout")
    words = f"{facts['searched']['legal']:,} layouts are legal, {facts['searched']['predicted']:,} were predicted."
    return section("Fastest layouts", f'<div class="layouts">{table(head, rows)}</div>', about=words)


def _rows(facts: Facts) -> Iterator[Sequence[str]]:
    chosen, given = facts["chosen"], facts["given"]
    marked = [("chosen", chosen)] if chosen else []
    for one in facts["candidates"]:
        if not chosen or one["text"] != chosen["text"]:
            marked.append(("" if one["runs_today"] else "not supported", one))
    if given and given["missing"] is None:
        marked.append(("the recipe's", given))
    for mark, one in marked:
        yield (
            mark,
            ranged(one["step_time"], seconds),
            f"{one['tokens_per_second_per_device']:,.0f}",
            f"{one['mfu']:.0%}",
            ranged(one["memory_total"], gigabytes),
            one["verdict"],
            money(facts, one),
            one["text"],
        )


def methods(facts: Facts) -> str:
    """Full fine-tuning, LoRA and QLoRA beside one another."""
    if not facts.get("methods"):
        return ""
    rows = [
        (
            name,
            best["verdict"],
            gigabytes(best["memory"]),
            "" if best["reason"] else f"{best['tokens_per_second_per_device']:,.0f}",
            best["reason"] or best["text"],
        )
        for name, best in facts["methods"].items()
    ]
    words = "Adapters of rank 16 on every matrix; QLoRA with a base in 4 bits."
    return section("Methods", table(("", "", "memory", "tokens/s and device", "layout"), rows), about=words)


def frontier(facts: Facts) -> str:
    """Memory against time of all layouts of the plan."""
    points = list(_points(facts))
    if not points:
        return ""
    limit = points[0][1]["memory_available"]
    sizes = [one["memory_total"]["value"] for _, one in points]
    x = Scale.around(
        [*sizes, limit],
        lambda size: f"{size / GB:,.0f}" if size >= 10 * GB else f"{size / GB:.2g}",
        room=0.06,
        wide=WIDE,
    )
    y = Scale.around((one["step_time"]["value"] for _, one in points), seconds, room=0.08, wide=WIDE)
    shapes = [line(x, y, [(limit, y.low), (limit, y.high)], 0).replace("var(--c0)", "var(--bad)")]
    edge = list(_edge(points))
    shapes.append(line(x, y, edge, 7, dash="5 4"))
    dots = "".join(
        dot(x, y, (one["memory_total"]["value"], one["step_time"]["value"]), number, tip, shape=shape)
        for one, (number, tip, shape) in ((one, _look(kind, one)) for kind, one in points)
    )
    used = {_look(kind, one)[0] for kind, one in points}
    names = {"layouts": 0, "does not fit": 7, "chosen": 1, "the recipe's own": 3}
    keys = legend({name: colour(number) for name, number in names.items() if number in used})
    drawing = plot(x, y, shapes, dots=dots, tall="19rem", titles=("GB of a device", "time of a step"))
    words = "The red line is the device's memory. The dashed line joins the layouts that no other beats in both."
    return section("Memory against time", keys, drawing, about=words)


MARKS = {"chosen": (1, "big"), "the recipe's own": (3, "diamond")}


def _look(kind: str, one: Facts) -> tuple[int, str, str]:
    """A dot's colour, tip and shape."""
    if kind in MARKS:
        number, shape = MARKS[kind]
        return number, f"{kind}\n{about(one)}", shape
    return 7 if one["verdict"] == "does not fit" else 0, about(one), ""


def _points(facts: Facts) -> Iterator[tuple[str, Facts]]:
    """(kind, layout), once each; what is marked comes last, to be drawn above the others."""
    chosen, given = facts["chosen"], facts["given"]
    seen = {chosen["text"]} if chosen else set()
    for one in (*facts["candidates"], *facts["strategies"].values()):
        if one["text"] not in seen:
            seen.add(one["text"])
            yield "", one
    if given:
        yield "the recipe's own", given
    if chosen:
        yield "chosen", chosen


def _edge(points: Sequence[tuple[str, Facts]]) -> Iterator[tuple[float, float]]:
    """The layouts for which no other needs less memory and less time, from the smallest, as steps."""
    best, last = float("inf"), None
    for size, time in sorted((one["memory_total"]["value"], one["step_time"]["value"]) for _, one in points):
        if time < best:
            if last is not None:
                yield size, last
            yield size, time
            best = last = time
