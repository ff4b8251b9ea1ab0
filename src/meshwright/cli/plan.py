"""The verb `plan`: ranks layouts by predicted memory, speed and cost, and measures the error of predictions."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.cli.output import add_json_argument, print_result
from meshwright.plan.account import explain_field
from meshwright.plan.candidate import MARGIN, TIGHT
from meshwright.plan.changes import CHANGES, GROUPS, asked_changes
from meshwright.plan.layouts import SearchLimits
from meshwright.plan.page import plan_page
from meshwright.plan.recipe import plan_recipe, planned_run
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe, load_recipe
from meshwright.validate.doubts import Doubt
from meshwright.validate.judge import Judged, judge, regret, report, worst
from meshwright.validate.table import read_table

GB = 1e9
DEGREES = ("pp=", "dp_", "cp=", "tp=", "ep=", "zero=")
"""Prefixes of a layout's parallel degrees in its text."""
MOST_DOUBTS = 10
"""Largest number of kinds of unclear cells to print."""
EPILOG = """\
forms:
  meshwright plan RECIPE [a.b=c ...]    rank the layouts of a recipe on a cluster
  meshwright plan calibrate FILE.yaml   measure this machine in about a minute and write a cluster file
  meshwright plan validate FILE.csv     predict every row of a table of published runs, and report the errors

exit status: 0 a layout fits or is tight (the plan says which), 1 none does, 2 invalid command line

examples:
  meshwright plan run.yaml --cluster 8xh100
  meshwright plan run.yaml --cluster 64xa100-80g@400Gb/s --top 20 --write plan.yaml
  meshwright plan run.yaml --explain memory
  meshwright plan run.yaml --consider offload,fp8,fp8+8bit_states --explain search
  meshwright plan validate published_runs.csv --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `plan`."""
    parser.add_argument("what", metavar="RECIPE", help="recipe file (YAML); or calibrate or validate")
    parser.add_argument("words", metavar="a.b=c", nargs="*", help="override a setting of the recipe; or the FILE")
    parser.add_argument("--cluster", help="8xh100, 64xa100-80g@400Gb/s, a file, or local (default: the recipe's)")
    parser.add_argument("--top", type=int, default=8, metavar="N", help="layouts to show (default 8)")
    parser.add_argument(
        "--margin",
        type=float,
        default=MARGIN,
        help=f"fraction of device memory to leave free; a layout that needs it is called tight (default {MARGIN})",
    )
    parser.add_argument(
        "--explain", metavar="FIELD", help="derive a figure term by term: memory, time, mfu, cost or search"
    )
    parser.add_argument(
        "--consider",
        metavar="CHANGES",
        help=f"let changes of the recipe compete with it, separated by commas: {', '.join((*GROUPS, *CHANGES))}; a+b "
        "combines two",
    )
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the recipe with the chosen layout")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the plan as one offline page")
    add_json_argument(parser)
    parser.epilog = EPILOG


def run(arguments: argparse.Namespace) -> int:
    """Dispatch on the first word."""
    if arguments.what == "validate":
        return _validate(arguments)
    if arguments.what == "calibrate":
        return _calibrate(arguments)
    return _plan(arguments)


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine and write a cluster file."""
    if len(arguments.words) != 1 or not arguments.words[0].endswith((".yaml", ".yml")):
        raise UserError("plan calibrate needs the name of the file to write: meshwright plan calibrate cluster.yaml")
    from meshwright.trainer.calibrate import calibrate  # loads torch

    cluster = calibrate()
    path = Path(arguments.words[0])
    path.write_text(dump_recipe(cluster), encoding="utf-8")
    measured = cluster.measured
    rates = ", ".join(f"{name} {rate:.3g} TFLOP/s" for name, rate in measured.matmul_tflops.items())
    costs = measured.collectives.items()
    lines = [
        f"{cluster.devices} simultaneous ranks, each: {rates}, memory {measured.memory_gb_s:.3g} GB/s",
        *(f"{kind}: {cost.latency_us:.0f} us, {cost.bandwidth_gb_s:.3g} GB/s" for kind, cost in costs),
        f"saved to {path}; use it with: meshwright plan run.yaml --cluster {path}",
    ]
    print_result(arguments, cluster.model_dump(mode="json"), lines)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.margin < 1:
        raise UserError(
            f"--margin {arguments.margin} is not allowed: must be at least 0 and below 1 (default {MARGIN})"
        )
    if arguments.top < 1:
        raise UserError(f"--top {arguments.top} is not allowed: show at least 1 layout")
    if arguments.write and arguments.write.exists():
        raise UserError(f"{arguments.write} already exists; give another --write, or remove it")
    path = Path(arguments.what)
    recipe = load_recipe(path, arguments.words)
    plan, facts = plan_recipe(
        recipe,
        base_dir=path.parent,
        cluster=arguments.cluster,
        top=arguments.top,
        limits=SearchLimits(margin=arguments.margin),
        consider=asked_changes(arguments.consider) if arguments.consider else (),
    )
    if arguments.explain:
        print(explain_field(plan, arguments.explain))
    else:
        print_result(arguments, facts, _table(facts))
    if arguments.html:
        arguments.html.write_text(plan_page(facts), encoding="utf-8")
        print(f"{arguments.html} written", file=sys.stderr)
    if arguments.write:
        arguments.write.write_text(dump_recipe(planned_run(recipe, plan)), encoding="utf-8")
        print(f"{arguments.write} written", file=sys.stderr)
    return 0 if facts["chosen"] else 1


def _table(facts: dict[str, Any]) -> Iterator[str]:
    """The plan as lines of text."""
    cluster, chosen = facts["cluster"], facts["chosen"]
    searched = facts["searched"]
    count = f"{cluster['devices']} x "
    name = cluster["name"] if cluster["name"].startswith(count) else f"{cluster['name']}: {count}{cluster['device']}"
    yield (
        f"{name}, {cluster['memory_gb']:.1f} GB each; {searched['legal']} layouts, "
        f"{searched['predicted']} predicted; ranges cover {facts['interval']:.0%}"
    )
    yield ""
    yield f"  {'step':>16}{'tok/s/dev':>10}{'MFU':>6}{'memory GB':>16}  {'':<6} layout"
    shown = {chosen["text"]} if chosen else set()
    if chosen:
        yield _candidate("*", chosen)
    for candidate in facts["candidates"]:
        if candidate["text"] not in shown:
            yield _candidate(" " if candidate["runs_today"] else "-", candidate)
    given = facts["given"]
    runs = given is not None and given["missing"] is None
    if given is not None and runs:
        yield _candidate(">", given)
    yield ""
    own = "   > the recipe's own layout, on its own number of devices" if runs else ""
    yield f"* chosen   - not supported by this version's trainer{own}"
    if given and not runs:
        yield f"refused    the recipe's own layout: {given['missing']}"
    if chosen and chosen["verdict"] == "tight":
        yield _tight(facts, chosen)
    if chosen and chosen["change"]:
        yield _changed(facts, chosen["change"])
    if chosen:
        yield from _chosen(facts, chosen)
    elif not searched["legal"]:
        yield f"no layout  {facts['problem']}"
        return
    elif facts["problem"]:
        yield f"no layout  that fits is supported; the fastest is refused: {facts['problem']}"
    else:
        yield from _nothing_fits(facts)
    if facts.get("relief"):
        yield f"relief     the recipe's layout does not fit with its margin; cheapest: {facts['relief']}"
    yield ""
    yield "the best layout of each strategy:"
    yield from _strategies(facts["strategies"])
    if facts.get("methods"):
        yield ""
        yield (
            "methods, each in its fastest layout that fits, else in the one with least memory (adapters of rank 16 "
            "on every matrix; qlora: 4 bits):"
        )
        yield from (_method(name, best) for name, best in facts["methods"].items())


def _nothing_fits(facts: dict[str, Any]) -> Iterator[str]:
    yield "no layout that this version's trainer supports fits; see the strategies below"
    if disk := facts.get("disk"):
        yield (
            f"disk       fits with state on disk: {disk['text']}, {disk['disk'] / GB:.3g} GB per device on disk, "
            f"about {disk['step_time']['value']:.3g} s a step"
        )


def _changed(facts: dict[str, Any], name: str) -> str:
    """The difference between the chosen layout and the recipe, and its reason."""
    change = facts["considered"][name]
    why = "no layout fits without it" if facts["last_resort"] else "--consider"
    results = "the arithmetic stays the same" if change["exact"] else "results differ from the recipe's"
    return f"changed    {' '.join(change['overrides'])} ({why}); {results}"


def _tight(facts: dict[str, Any], chosen: dict[str, Any]) -> str:
    """The warning that the chosen layout is tight."""
    return (
        f"tight      the chosen layout needs {chosen['memory_total']['value'] / GB:.1f} of "
        f"{chosen['memory_available'] / GB:.1f} GB and may run out of memory; every layout that leaves "
        f"{facts['margin']:.0%} of it free (--margin) takes at least {TIGHT:g} times as long"
    )


def _candidate(mark: str, facts: dict[str, Any]) -> str:
    step, memory = facts["step_time"], facts["memory_total"]
    times = f"{step['value']:.3g} s ({step['low']:.3g}-{step['high']:.3g})"
    sizes = f"{memory['value'] / GB:.1f} ({memory['low'] / GB:.0f}-{memory['high'] / GB:.0f})"
    verdict = {"fits": "fits", "tight": "tight", "does not fit": "no"}[facts["verdict"]]
    return (
        f"{mark} {times:>20}{facts['tokens_per_second_per_device']:>8.0f}{facts['mfu']:>6.0%}{sizes:>16}  "
        f"{verdict:<6} {facts['text']}"
    )


def _method(name: str, best: dict[str, Any]) -> str:
    if best["reason"]:
        return f"  {name:<6} does not fit: {best['reason']}, with {best['text']}"
    return (
        f"  {name:<6} {best['verdict']:<6}{best['memory'] / GB:>7.1f} GB "
        f"{best['tokens_per_second_per_device']:>8.0f} tok/s/dev  {best['text']}"
    )


def _strategies(strategies: dict[str, Any]) -> Iterator[str]:
    """Each strategy with its verdict, reason, memory and degrees."""
    names = max(map(len, strategies), default=0)
    reasons = max((len(candidate["reason"]) for candidate in strategies.values()), default=0)
    for name, candidate in strategies.items():
        degrees = " ".join(word for word in candidate["text"].split() if word.startswith(DEGREES))
        yield (
            f"  {name:<{names}}  {candidate['verdict']:<13}{candidate['reason']:<{reasons}}  "
            f"{candidate['memory_total']['value'] / GB:>6.1f} GB  {degrees}"
        )


def _chosen(facts: dict[str, Any], chosen: dict[str, Any]) -> Iterator[str]:
    parts = {name: seconds for name, seconds in chosen["step_parts"].items() if name != "recompute"}
    total = sum(parts.values())
    shown = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds >= 0.005 * total)
    yield f"time       {shown}"
    sizes = chosen["memory"].items()
    host = f"; {chosen['host_memory'] / GB:.1f} GB per device in host memory" if chosen["host_memory"] else ""
    kinds = ", ".join(f"{kind} {size / GB:.1f}" for kind, size in sizes if size >= 0.05 * GB)
    yield f"memory     {kinds} GB{host}"
    run, cost = chosen["run_seconds"], chosen["run_cost"]
    price = f", {_money(cost)} {facts['cluster'].get('currency', 'in your currency')}" if cost else ""
    uncounted = "; the recipe's epochs are counted when the data are prepared" if facts["epochs"] else ""
    yield f"run        {facts['steps']} steps: {_duration(run['value'])}{price}{uncounted}"
    yield f"binding    {facts['binding']}"
    if (found := facts["fastest"]) and found["verdict"] == chosen["verdict"]:
        faster = 1 - found["step_time"]["value"] / chosen["step_time"]["value"]
        yield (
            f"simplest   of the layouts within the prediction error of the fastest; {faster:.1%} faster: "
            f"{found['text']}"
        )
    if facts["compile"] and facts["compile"] > 0.01:
        yield f"compile    training.compile=true would save {facts['compile']:.0%} of the step"
    if plain := facts["emulated"]:
        yield (
            "emulated   this version has no kernel for this precision on this device and multiplies in fp32; with "
            f"training.precision=bf16: {plain['step_time']:.3g} s a step, {plain['saved']:.0%} less"
        )
    if fp8 := facts["fp8"]:
        yield f"fp8        with training.precision=fp8: {fp8['step_time']:.3g} s a step, {fp8['saved']:.0%} less"
    if facts["bandwidth"]:
        yield f"network    {facts['bandwidth']}"


def _money(cost: dict[str, float]) -> str:
    """A run's cost with its range, in significant digits."""
    value, low, high = (
        f"{cost[key]:,.0f}" if cost["value"] >= 100 else f"{cost[key]:.3g}" for key in ("value", "low", "high")
    )
    return f"{value} ({low}-{high})"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _validate(arguments: argparse.Namespace) -> int:
    if len(arguments.words) != 1:
        raise UserError("plan validate needs one table of published runs: meshwright plan validate FILE.csv")
    path = Path(arguments.words[0])
    table = read_table(path)
    judged = judge(table.runs)
    found = report(judged, table.refused)
    facts = found | {"cells_not_understood": [asdict(doubt) for doubt in table.doubts]}
    print_result(arguments, facts, [*_validation(found["summary"], judged), "", *_doubts(path, table.doubts)])
    return 0


def _doubts(path: Path, doubts: list[Doubt]) -> Iterator[str]:
    """Cells that were not understood; equal ones are on one line."""
    if not doubts:
        return
    groups: dict[tuple[str, str, str], list[Doubt]] = {}
    for doubt in doubts:
        groups.setdefault((doubt.column, doubt.value, doubt.made), []).append(doubt)
    yield f"cells not understood, or contradicted by other cells ({len(doubts)}); every row was kept"
    for (column, value, made), alike in list(groups.items())[:MOST_DOUBTS]:
        cell = (
            f"{column}={' '.join(value.split())[:40]}: "
            if column and alike[0].line > 1
            else f"{column}: " * bool(column)
        )
        more = f" (and in {len(alike) - 1} more rows)" if len(alike) > 1 else ""
        yield f"  {path}:{alike[0].line}: {cell}{made}{more}"
    if len(groups) > MOST_DOUBTS:
        yield f"  ... and {len(groups) - MOST_DOUBTS} more kinds; --json has all"


def _validation(summary: dict[str, Any], judged: list[Judged]) -> Iterator[str]:
    """The summary as a table with one line per source."""
    counted = f"{summary['rows']} rows, {summary['completed']} completed by rules, {summary['refused']} not predictable"
    yield f"{counted}; intervals should cover {summary['nominal_coverage']:.0%}"
    yield ""
    head = f"{'median':>7}{'mean':>7}{'skill':>7}{'rank':>7}{'inside':>7}{'calib.':>7}"
    yield f"{'':<62}{'rows':>5}{head}"
    for quantity in ("step_time", "memory"):
        yield f"{quantity.replace('_', ' ')}"
        yield _line("  all sources", summary[quantity])
        for name, source in summary["per_source"].items():
            if source[quantity]["rows"]:
                yield _line(f"  {name}", source[quantity])
    memory = summary["memory"]
    yield ""
    yield (
        f"out of memory: {memory['oom_rows']} rows, {memory['oom_predicted']} predicted; "
        f"precision {_percent(memory['oom_precision'])}, recall {_percent(memory['oom_recall'])}"
    )
    if summary["unknown_devices"]:
        named = (f"{name} ({rows})" for name, rows in summary["unknown_devices"].items())
        yield f"unknown devices, with their number of rows: {', '.join(named)}"
    regrets = [sweep["regret"] for sweep in regret(judged)]
    if regrets:
        mean = sum(regrets) / len(regrets)
        yield f"regret over {len(regrets)} measured sweeps: mean {mean:.1%}, largest {max(regrets):.1%}"
    yield "largest time errors: " + ", ".join(
        f"{row.run.id} ({row.seconds.value / row.run.seconds:.2f}x)"
        for row in worst(judged, "step_time")
        if row.run.seconds
    )


def _line(name: str, errors: dict[str, Any]) -> str:
    shown = [errors.get(key) for key in ("median_ape", "mape", "skill")]
    rank = errors.get("spearman")
    columns = "".join(f"{_percent(value):>7}" for value in shown)
    columns += f"{'' if rank is None else f'{rank:.2f}':>7}"
    columns += "".join(f"{_percent(errors.get(key)):>7}" for key in ("coverage", "calibrated_median_ape"))
    return f"{name if len(name) <= 61 else name[:58] + '...':<62}{errors['rows']:>5}{columns}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
