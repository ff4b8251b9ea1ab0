"""A plan in words: lines for the terminal, and remarks that its page shows too."""

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.predict.candidate import TIGHT
from meshwright.spec.text import billions

GB = 1e9
DEGREES = ("pp=", "dp_", "cp=", "tp=", "ep=", "zero=")
"""Prefixes of a layout's parallel degrees in its text."""
WIDE = 120
"""Columns of a terminal from which rows of tables are one line."""
LONG = 1000.0
"""Seconds of a step from which they are shown as hours."""
SMALLEST_COST, MOST_WITH_HUNDREDTHS = 0.01, 100
"""Costs below the first are not told apart, and costs from the second have no hundredths."""


def plan_lines(facts: dict[str, Any], width: int | None = None) -> Iterator[str]:
    """The plan as lines of text; where they are narrower than `WIDE`, rows of tables are two lines."""
    narrow = width is not None and width < WIDE
    cluster, chosen = facts["cluster"], facts["chosen"]
    searched = facts["searched"]
    count = f"{cluster['devices']} x "
    name = cluster["name"] if cluster["name"].startswith(count) else f"{cluster['name']}: {count}{cluster['device']}"
    if " + " in cluster["name"]:
        name = f"{cluster['name']}, each planned as {cluster['device']}"
    size, sequences = billions(facts["parameters"]), facts["sequences_per_step"]
    yield f"{facts['model']}: {size} parameters; {sequences} x {facts['sequence_length']} tokens a step"
    yield (
        f"{name}, {cluster['memory_gb']:.1f} GB each; {searched['legal']} layouts, "
        f"{searched['predicted']} predicted; ranges cover {facts['interval']:.0%}"
    )
    if not facts["runs_on_it"]:
        yield f"{cluster['device']}: figures to compare with; this version trains on CPUs and GPUs"
    yield ""
    yield f"  {'step':>20}{'tok/s/dev':>10}{'MFU':>6}{'memory GB':>16}  {'':<6} layout"
    shown = {chosen["text"]} if chosen else set()
    if chosen:
        yield from _candidate("*", chosen, narrow)
    for candidate in facts["candidates"]:
        if candidate["text"] not in shown:
            yield from _candidate(" " if candidate["runs_today"] else "-", candidate, narrow)
    given = facts["given"]
    runs = given is not None and given["missing"] is None
    if given is not None and runs:
        yield from _candidate(">", given, narrow)
    yield ""
    yield "* chosen   - not supported by this version's trainer"
    yield from ["> the recipe's own layout, on its own number of devices"] if runs else ()
    yield from (f"{label:<11}{words}" if label else words for label, words in remarks(facts))
    if not chosen and not searched["legal"]:
        return
    yield ""
    yield "the best layout of each strategy:"
    yield from _strategies(facts["strategies"], narrow)
    if facts.get("methods"):
        yield ""
        yield (
            "methods, each in its fastest layout that fits, else in the one with least memory (adapters of rank 16 "
            "on every matrix; qlora: 4 bits):"
        )
        yield from (line for name, best in facts["methods"].items() for line in _method(name, best, narrow))


def remarks(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a plan says beside its tables: (label, words)."""
    given, chosen = facts["given"], facts["chosen"]
    if given and given["missing"] is not None:
        yield "refused", f"the recipe's own layout: {given['missing']}"
    if chosen and chosen["verdict"] == "tight":
        yield "tight", _tight(facts, chosen)
    if chosen and chosen["change"]:
        yield "changed", _changed(facts, chosen["change"])
    if chosen:
        yield from _chosen(facts, chosen)
    elif not facts["searched"]["legal"]:
        yield "no layout", facts["problem"]
        return
    elif facts["problem"]:
        yield "no layout", f"that fits is supported; the fastest is refused: {facts['problem']}"
    else:
        yield from _nothing_fits(facts)
    if facts.get("relief"):
        yield "relief", f"the recipe's layout does not fit with its margin; cheapest: {facts['relief']}"


def _nothing_fits(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "", "no layout that this version's trainer supports fits; see the strategies below"
    for number, words in enumerate(facts.get("advice", [])):
        yield ("would fit", words) if number == 0 else ("", f"{'':<11}{words}")


def _changed(facts: dict[str, Any], name: str) -> str:
    """The difference between the chosen layout and the recipe, and its reason."""
    change = facts["considered"][name]
    reason = "no layout fits without it" if facts["last_resort"] else "--consider"
    results = "the arithmetic stays the same" if change["exact"] else "results differ from the recipe's"
    return f"changed    {' '.join(change['overrides'])} ({reason}); {results}"


def _tight(facts: dict[str, Any], chosen: dict[str, Any]) -> str:
    """The warning that the chosen layout is tight."""
    return (
        f"tight      the chosen layout needs {chosen['memory_total']['value'] / GB:.1f} of "
        f"{chosen['memory_available'] / GB:.1f} GB and may run out of memory; every layout that leaves "
        f"{facts['margin']:.0%} of it free (--margin) takes at least {TIGHT:g} times as long"
    )


def _rows(figures: str, words: str, narrow: bool) -> Iterator[str]:
    """A row of a table: one line, or its words in a second line."""
    if not narrow:
        yield f"{figures}{words}"
        return
    yield figures.rstrip()
    yield f"      {words}"


def _candidate(mark: str, facts: dict[str, Any], narrow: bool) -> Iterator[str]:
    step, memory = facts["step_time"], facts["memory_total"]
    long = step["value"] >= LONG
    value, low, high = (step[key] / (3600 if long else 1) for key in ("value", "low", "high"))
    times = f"{value:.3g} {'h' if long else 's'} ({low:.3g}-{high:.3g})"
    sizes = f"{memory['value'] / GB:.1f} ({memory['low'] / GB:.0f}-{memory['high'] / GB:.0f})"
    verdict = {"fits": "fits", "tight": "tight", "does not fit": "no"}[facts["verdict"]]
    speed = f"{facts['tokens_per_second_per_device']:>10.0f}{facts['mfu']:>6.0%}"
    yield from _rows(f"{mark} {times:>20}{speed}{sizes:>16}  {verdict:<6} ", facts["text"], narrow)


def _method(name: str, best: dict[str, Any], narrow: bool) -> Iterator[str]:
    if best["reason"]:
        yield f"  {name:<6} does not fit: {best['reason']}, with {best['text']}"
        return
    figures = (
        f"  {name:<6} {best['verdict']:<6}{best['memory'] / GB:>7.1f} GB "
        f"{best['tokens_per_second_per_device']:>8.0f} tok/s/dev  "
    )
    yield from _rows(figures, best["text"], narrow)


def _strategies(strategies: dict[str, Any], narrow: bool) -> Iterator[str]:
    """Each strategy with its verdict, reason, memory and degrees."""
    names = max(map(len, strategies), default=0)
    reasons = max((len(candidate["reason"]) for candidate in strategies.values()), default=0)
    for name, candidate in strategies.items():
        degrees = " ".join(word for word in candidate["text"].split() if word.startswith(DEGREES))
        verdict, size = f"  {name:<{names}}  {candidate['verdict']:<13}", candidate["memory_total"]["value"] / GB
        if narrow:
            yield from _rows(f"{verdict}{size:>6.1f} GB  {degrees}", candidate["reason"], narrow)
        else:
            yield f"{verdict}{candidate['reason']:<{reasons}}  {size:>6.1f} GB  {degrees}"


def _chosen(facts: dict[str, Any], chosen: dict[str, Any]) -> Iterator[tuple[str, str]]:
    parts = {name: seconds for name, seconds in chosen["step_parts"].items() if name != "recompute"}
    total = sum(parts.values())
    shown = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds >= 0.005 * total)
    yield "time", shown
    sizes = chosen["memory"].items()
    host = f"; {chosen['host_memory'] / GB:.1f} GB per device in host memory" if chosen["host_memory"] else ""
    kinds = ", ".join(f"{kind} {size / GB:.1f}" for kind, size in sizes if size >= 0.05 * GB)
    yield "memory", f"{kinds} GB{host}"
    uncounted = "; the recipe's epochs are counted when the data are prepared" if facts["epochs"] else ""
    yield (
        "run",
        f"{facts['steps']} steps: {duration(chosen['run_seconds']['value'])}, {price(facts, chosen)}{uncounted}",
    )
    yield "binding", facts["binding"]
    if (fastest := facts["fastest"]) and fastest["verdict"] == chosen["verdict"]:
        faster = 1 - fastest["step_time"]["value"] / chosen["step_time"]["value"]
        yield (
            "simplest",
            f"of the layouts within the prediction error of the fastest; {faster:.1%} faster "
            f"({fastest['step_time']['value']:.4g} s instead of {chosen['step_time']['value']:.4g} s): "
            f"{fastest['text']}",
        )
    if facts["compile"] and facts["compile"] > 0.01:
        yield "compile", f"training.compile=true would save {facts['compile']:.0%} of the step"
    yield from _precisions(facts)
    if facts["bandwidth"]:
        yield "network", facts["bandwidth"]


def _precisions(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What other precisions would change."""

    def faster(other: dict[str, float]) -> str:
        return f"{seconds_text(other['step_time'])} a step, {other['saved']:.0%} less"

    if plain := facts["emulated"]:
        yield (
            "emulated",
            "this version has no kernel for this precision on this device and multiplies in fp32; with "
            f"training.precision=bf16: {faster(plain)}",
        )
    if fp8 := facts["fp8"]:
        yield "fp8", f"with training.precision=fp8: {faster(fp8)}"
    if half := facts["fp16"]:
        device = facts["cluster"]["device"]
        yield "bf16", f"{device} has no fast products in bf16; with training.precision=fp16: {faster(half)}"


def price(facts: dict[str, Any], candidate: dict[str, Any]) -> str:
    """The price of a run with its range and currency."""
    if cost := candidate["run_cost"]:
        return f"{money_text(cost)} {facts['cluster'].get('currency', 'in your currency')}"
    return "price unknown: set price_per_hour in a cluster file"


def seconds_text(value: float) -> str:
    """Seconds of a step, in hours from `LONG`."""
    return f"{value:.3g} s" if value < LONG else f"{value / 3600:.3g} h"


def money_text(cost: dict[str, float], *, short: bool = False) -> str:
    """A run's cost with its range, in three digits below 100; `short`: to hundredths."""
    if short and cost["high"] < SMALLEST_COST:
        return f"under {SMALLEST_COST}"
    form = ",.0f" if cost["value"] >= MOST_WITH_HUNDREDTHS else ".2f" if short else ".3g"
    value, low, high = (f"{cost[key]:{form}}" for key in ("value", "low", "high"))
    return f"{value} ({low}-{high})"


def duration(seconds: float) -> str:
    """The length of a run in a fitting unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def cluster_lines(plans: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Two lines a cluster: what a step and the run take and cost there, and the chosen layout."""
    rows = [("", "step", "tok/s/dev", "MFU", "run", "cost"), *map(_cluster_cells, plans)]
    name, *widths = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    yield _aligned(rows[0], name, widths)
    for facts, cells in zip(plans, rows[1:], strict=True):
        chosen = facts["chosen"]
        if chosen is None:
            yield f"{cells[0]:<{name}}  {facts['problem'] or 'no layout that this version supports fits'}"
            continue
        yield _aligned(cells, name, widths)
        yield f"  {chosen['text']}{' (tight)' if chosen['verdict'] == 'tight' else ''}"
    currencies = {facts["cluster"]["currency"] for facts in plans if facts["chosen"] and facts["chosen"]["run_cost"]}
    if currencies:
        yield f"cost of the run in {' and '.join(sorted(currencies))}"


def _cluster_cells(facts: dict[str, Any]) -> tuple[str, ...]:
    """A cluster's cells in the comparison of clusters."""
    chosen = facts["chosen"]
    if chosen is None:
        return (facts["cluster"]["name"], *[""] * 5)
    step, cost = chosen["step_time"], chosen["run_cost"]
    return (
        facts["cluster"]["name"],
        f"{seconds_text(step['value'])} (±{step['value'] / step['low'] - 1:.0%})",
        f"{chosen['tokens_per_second_per_device']:.0f}",
        f"{chosen['mfu']:.0%}",
        duration(chosen["run_seconds"]["value"]),
        money_text(cost, short=True) if cost else "price unknown",
    )


def _aligned(cells: Sequence[str], name: int, widths: Sequence[int]) -> str:
    """A row of a table: its name to the left, figures to the right."""
    figures = (f" {cell:>{width}}" for cell, width in zip(cells[1:], widths, strict=True))
    return f"{cells[0]:<{name}}{''.join(figures)}"
