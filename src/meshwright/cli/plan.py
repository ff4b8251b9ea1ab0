"""The verb `plan`: ranks layouts by predicted memory, speed and cost, and measures the error of predictions."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.cli.common import (
    PORTS,
    add_page_argument,
    check_folder_of,
    check_page_name,
    foreign_files_named,
    serve_until_interrupted,
    write_page,
)
from meshwright.cli.output import add_json_argument, print_result
from meshwright.cli.plan_measure import (
    MeasuredLayout,
    add_measure_argument,
    check_measurable,
    fastest,
    measure_layouts,
    measured_facts,
    measured_lines,
)
from meshwright.cli.plan_solve import (
    add_solve_arguments,
    add_tokens_argument,
    answer_question,
    check_limits,
    tokens_override,
)
from meshwright.cli.waiting import waiting
from meshwright.pages.live import ADDRESS
from meshwright.planner.page import plan_page
from meshwright.planner.query import TOP, Query, answer, as_json, find_recipe
from meshwright.planner.server import serve_planner
from meshwright.planner.site import write_site
from meshwright.predict.account import explain_field
from meshwright.predict.candidate import MARGIN
from meshwright.predict.changes import CHANGES, GROUPS
from meshwright.predict.text import cluster_lines, plan_lines
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.text import command, quoted
from meshwright.terminal import columns
from meshwright.validate.doubts import Doubt
from meshwright.validate.judge import Judged, judge, regret, report, worst
from meshwright.validate.table import read_table

GB = 1e9
MOST_DOUBTS = 10
"""Largest number of kinds of unclear cells to print."""
EPILOG = """\
forms:
  meshwright plan RECIPE [a.b=c ...]   rank the layouts of a recipe on a cluster
  meshwright plan MODEL [a.b=c ...]    the same for a model without a recipe
  meshwright plan calibrate FILE.yaml  measure this machine into a cluster file
  meshwright plan validate FILE.csv    predict published runs, report the errors
  meshwright plan --serve              serve a page that plans what it asks for
  meshwright plan --site DIR           write that page as files, no server

exit status: 0 a layout fits or is tight, as the plan says; 1 none does;
  2 invalid command line

examples:
  meshwright plan run.yaml --cluster 8xh100
  meshwright plan llama-3.1-8b training.steps=500 --cluster 64xa100-80g@400Gb/s
  meshwright plan run.yaml --cluster 8xh100 --cluster 16xa100 --html plan.html
  meshwright plan run.yaml --cluster 8xh100 --top 20 --write plan.yaml
  meshwright plan run.yaml --explain memory
  meshwright plan run.yaml --measure --write plan.yaml
  meshwright plan run.yaml --consider offload,fp8 --explain search
  meshwright plan validate published_runs.csv --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `plan`."""
    parser.add_argument(
        "what",
        metavar="RECIPE",
        nargs="?",
        default="",
        help="recipe file (YAML), or a model without one; or calibrate or validate",
    )
    parser.add_argument("words", metavar="a.b=c", nargs="*", help="override a setting of the recipe; or the FILE")
    parser.add_argument(
        "--cluster",
        action="append",
        default=[],
        help="8xh100, 64xa100-80g@400Gb/s, a file, or local (default: the recipe's); give several to compare them",
    )
    parser.add_argument("--top", type=int, default=TOP, metavar="N", help=f"layouts to show (default {TOP})")
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
    parser.add_argument(
        "--no-methods",
        dest="methods",
        action="store_false",
        help="do not compare full fine-tuning, LoRA and QLoRA, which takes most of the time on a large cluster",
    )
    add_tokens_argument(parser)
    add_measure_argument(parser)
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the recipe with the chosen layout")
    add_page_argument(parser, "the plan")
    parser.add_argument(
        "--serve", action="store_true", help=f"serve the planner's page on {ADDRESS} until Ctrl-C, without RECIPE"
    )
    parser.add_argument("--port", metavar="N", type=PORTS, default=0, help="port of --serve (default: a free one)")
    parser.add_argument(
        "--site", metavar="DIR", type=Path, help="write the planner as a folder of files that plans in a browser tab"
    )
    parser.add_argument(
        "--pyodide",
        metavar="DIR",
        type=Path,
        default=Path(".pyodide"),
        help="folder with Pyodide for --site, which 'make site' fills (default .pyodide)",
    )
    add_json_argument(parser)
    add_solve_arguments(parser)
    parser.epilog = EPILOG


def run(arguments: argparse.Namespace) -> int:
    """Dispatch on the options without a recipe, then on the first word."""
    if arguments.site or arguments.serve:
        return _show(arguments)
    if not arguments.what:
        raise UserError("plan needs a recipe or a model, as in meshwright plan llama-3.1-8b --cluster 8xh100")
    if arguments.what in ("validate", "calibrate"):
        _check_alone(arguments)
    if arguments.what == "validate":
        return _validate(arguments)
    if arguments.what == "calibrate":
        return _calibrate(arguments)
    return _plan(arguments)


def _show(arguments: argparse.Namespace) -> int:
    """Write or serve the planner's page."""
    if arguments.what:
        raise UserError(
            f"the page of --{'site' if arguments.site else 'serve'} asks for the model; leave {arguments.what} out"
        )
    if arguments.site and arguments.serve:
        raise UserError("--site writes the page and --serve serves it; give one of them")
    others = [
        name
        for name in ("cluster", "explain", "consider", "write", "html", "json", "solve", "measure")
        if getattr(arguments, name)
    ]
    if others:
        raise UserError(f"--{others[0]} is for a plan of RECIPE; leave it out: the page asks for the rest")
    if arguments.site:
        write_site(arguments.site, arguments.pyodide)
        serve = f"python -m http.server --directory {quoted(arguments.site)}"
        print(f"{arguments.site} written; open it with: {serve}")
        return 0
    serve_until_interrupted(serve_planner(arguments.port))
    return 0


def _check_alone(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for an option of a plan beside `validate` or `calibrate`."""
    of_plans = ("cluster", "explain", "consider", "write", "html", "solve", "measure", "deadline", "budget", "tokens")
    for name in of_plans:
        if getattr(arguments, name) not in (None, []):
            raise UserError(f"--{name} is for a plan of RECIPE; leave it out beside {arguments.what}")


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
        f"saved to {path}; use it with: {command('plan', 'run.yaml', '--cluster', path)}",
    ]
    print_result(arguments, cluster.model_dump(mode="json"), lines)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    query = _query(arguments)
    query.check()
    check_limits(arguments)
    if arguments.write and arguments.write.exists():
        raise UserError(f"{arguments.write} already exists; give another --write, or remove it")
    if arguments.write:
        check_folder_of("--write", arguments.write)
    if arguments.html:
        check_page_name(arguments.html)
    for option in ("explain", "write"):
        if len(query.clusters) > 1 and getattr(arguments, option) and not arguments.solve:
            raise UserError(f"--{option} is for one cluster; give one --cluster")
    with foreign_files_named(Path(query.what)):
        recipe, base_dir = find_recipe(query.what, query.words)
    if arguments.solve:
        return answer_question(arguments, query, recipe, base_dir)
    with waiting("searching layouts"):
        planned = answer(query, recipe, base_dir)
    measured = list[MeasuredLayout]()
    if arguments.measure:
        check_measurable(arguments, planned)
        measured = measure_layouts(planned[0], arguments.measure, base_dir)
    if arguments.explain:
        explained = explain_field(planned[0].plan, arguments.explain)
        print_result(arguments, {arguments.explain: explained.splitlines()}, [explained])
    else:
        facts = [one.facts for one in planned]
        lines = plan_lines(facts[0], columns(sys.stdout)) if len(facts) == 1 else cluster_lines(facts)
        more = {"measured": measured_facts(measured)} if measured else {}
        print_result(arguments, as_json(planned) | more, [*lines, *measured_lines(measured, planned[0].plan.chosen)])
    if arguments.html:
        write_page(arguments.html, plan_page(planned))
    if arguments.write:
        best = fastest(measured)
        arguments.write.write_text(planned[0].write(best and best.candidate), encoding="utf-8")
        print(f"{arguments.write} written", file=sys.stderr)
    return 0 if any(one.facts["chosen"] for one in planned) else 1


def _query(arguments: argparse.Namespace) -> Query:
    return Query(
        arguments.what,
        (*arguments.words, *tokens_override(arguments.tokens)),
        tuple(arguments.cluster),
        top=arguments.top,
        margin=arguments.margin,
        consider=arguments.consider or "",
        methods=arguments.methods,
    )


def _validate(arguments: argparse.Namespace) -> int:
    if len(arguments.words) != 1:
        raise UserError("plan validate needs one table of published runs: meshwright plan validate FILE.csv")
    path = Path(arguments.words[0])
    table = read_table(path)
    judged = judge(table.runs)
    shown = report(judged, table.refused)
    facts = shown | {"cells_not_understood": [asdict(doubt) for doubt in table.doubts]}
    print_result(arguments, facts, [*_validation(shown["summary"], judged), "", *_doubts(path, table.doubts)])
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
