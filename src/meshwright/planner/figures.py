"""A plan's figures as text, and a layout's costs as bars: what several sections of its page share."""

from collections.abc import Sequence
from html import escape
from typing import Any

from meshwright.pages.drawing import Figure, Marks, fills_of, legend, meter

GB = 1e9
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
Facts = dict[str, Any]
"""A layout's predictions in `plan --json`, or the whole plan."""

MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "fragmentation", "context")
CAUSES = {
    "computation": ("compute",),
    "recomputation": ("recompute",),
    "tensor parallelism": ("tensor",),
    "context parallelism": ("context",),
    "expert parallelism": ("expert",),
    "data parallelism": ("data",),
    "pipeline": ("pipeline", "bubble"),
    "update": ("update",),
}
"""Cause of time in the legend -> the parts of a step; recomputation is a part of compute."""
VERDICTS = {"fits": "passed", "tight": "tight", "does not fit": "failed"}
"""Verdict -> class of its word."""


def gigabytes(size: float) -> str:
    """Bytes in a readable unit of thousands."""
    unit, name = next(((one, name) for one, name in UNITS if size >= one), (1.0, "B"))
    number = size / unit
    return f"{number:,.0f} {name}" if number >= 999.5 else f"{number:.3g} {name}"


def seconds(value: float) -> str:
    """Seconds in a readable unit."""
    if value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value / 3600:.3g} h"


def ranged(interval: Facts, show: Figure) -> str:
    """A prediction and its range."""
    return f"{show(interval['value'])} ({span_text(interval, show)})"


def span_text(interval: Facts, show: Figure) -> str:
    """A range, with one unit if both ends have the same."""
    low, high = show(interval["low"]), show(interval["high"])
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def money(facts: Facts, candidate: Facts) -> str:
    """The price of a run with its range; empty if it is not known."""
    if candidate["run_cost"] is None:
        return ""
    currency = facts["cluster"].get("currency", "")
    before, after = ("$", "") if currency.startswith("US dollars") else ("", f" {currency}")

    def amount(value: float) -> str:
        return f"{before}{value:,.0f}{after}" if value >= 100 else f"{before}{value:.3g}{after}"

    cost = candidate["run_cost"]
    return f"{amount(cost['value'])} ({amount(cost['low']).removesuffix(after)} to {amount(cost['high'])})"


def memory_parts(candidate: Facts) -> dict[str, float]:
    """Bytes by kind."""
    return {kind: float(candidate["memory"].get(kind, 0)) for kind in MEMORY}


def time_parts(candidate: Facts) -> dict[str, float]:
    """Seconds of a step by cause."""
    parts: dict[str, float] = candidate["step_parts"]
    seconds = {name: sum(parts[part] for part in causes) for name, causes in CAUSES.items()}
    seconds["computation"] -= parts["recompute"]
    return seconds


def bars_of(candidates: Sequence[Facts]) -> tuple[str, list[tuple[str, str]]]:
    """The legends, and (memory bar, time bar) of each layout, all to the same scales."""
    kinds, causes = fills_of(MEMORY), fills_of(CAUSES)
    limits = [one["memory_available"] for one in candidates]
    # One that needs many times as much, or takes many times as long, must not shrink all others.
    most_memory = min(max(one["memory_total"]["high"] for one in candidates), 2.5 * max(limits))
    most_memory = max(most_memory, 1.02 * max(limits))
    slowest, fastest = (pick(one["step_time"]["high"] for one in candidates) for pick in (max, min))
    most_seconds = min(slowest, 6 * fastest)

    def span(interval: Facts) -> tuple[float, float]:
        return interval["low"], interval["high"]

    def memory(one: Facts) -> str:
        marks = Marks(one["memory_available"], span=span(one["memory_total"]))
        return meter(memory_parts(one), kinds, gigabytes, most_memory, marks)

    def time(one: Facts) -> str:
        return meter(time_parts(one), causes, seconds, most_seconds, Marks(span=span(one["step_time"])))

    rows = [(memory(one), time(one)) for one in candidates]
    used = [name for name in CAUSES if any(time_parts(one)[name] > 0 for one in candidates)]
    held = [name for name in MEMORY if any(memory_parts(one)[name] > 0 for one in candidates)]
    keys = (
        f'<div class="two"><div><h3>Memory of a device</h3>{legend({name: kinds[name] for name in held})}</div>'
        f"<div><h3>Time of a step</h3>{legend({name: causes[name] for name in used})}</div></div>"
    )
    return keys, rows


def verdict(word: str) -> str:
    """A verdict with its colour."""
    return f'<span class="verdict {VERDICTS[word]}">{escape(word)}</span>'


def tile(name: str, value: str, small: str = "") -> str:
    """A figure at the top of the page."""
    more = f"<small>{escape(small)}</small>" if small else ""
    return f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b> {more}</div>'


def about(candidate: Facts) -> str:
    """A layout in the tip of a dot."""
    return (
        f"{candidate['strategy']}: {candidate['text']}\n"
        f"{ranged(candidate['memory_total'], gigabytes)}\n{ranged(candidate['step_time'], seconds)} a step\n"
        f"{candidate['tokens_per_second_per_device']:,.0f} tokens/s and device, {candidate['mfu']:.0%} MFU"
    )
