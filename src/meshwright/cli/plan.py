"""The verb `plan`: what fits, how fast and at what cost, and how far off such predictions are."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.cli.output import add_json_argument, print_json
from meshwright.plan.published import read_published
from meshwright.plan.validate import Judged, judge, regret, report, worst

EPILOG = """\
forms:
  meshwright plan validate FILE.csv     predict every row of a table of published runs, and say how far off

example:
  meshwright plan validate published_runs.csv --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Operands and options of `plan`."""
    parser.add_argument("what", metavar="validate", help="the word validate")
    parser.add_argument("words", metavar="FILE", nargs="*", help="a table of published runs (CSV)")
    add_json_argument(parser)
    parser.epilog = EPILOG


def run(arguments: argparse.Namespace) -> int:
    """Dispatch on the first word."""
    if arguments.what == "validate":
        return _validate(arguments)
    raise ValueError(f"plan {arguments.what}: there is 'plan validate FILE.csv'")


def _validate(arguments: argparse.Namespace) -> int:
    if len(arguments.words) != 1:
        raise ValueError("plan validate needs one table of published runs: meshwright plan validate FILE.csv")
    runs, refused = read_published(Path(arguments.words[0]))
    judged = judge(runs)
    found = report(judged, refused)
    if arguments.json:
        print_json(found)
    else:
        print("\n".join(_validation(found["summary"], judged)))
    return 0


def _validation(summary: dict[str, Any], judged: list[Judged]) -> Iterator[str]:
    """The summary as a table, a source a line."""
    counted = f"{summary['rows']} rows, {summary['completed']} completed by rules, {summary['refused']} not predictable"
    yield f"{counted}; intervals meant to hold {summary['nominal_coverage']:.0%}"
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
        f"out of memory: {memory['oom_rows']} rows ran out, {memory['oom_predicted']} were predicted to; "
        f"precision {_percent(memory['oom_precision'])}, recall {_percent(memory['oom_recall'])}"
    )
    regrets = [sweep["regret"] for sweep in regret(judged)]
    if regrets:
        mean = sum(regrets) / len(regrets)
        yield f"regret over {len(regrets)} measured sweeps: mean {mean:.1%}, largest {max(regrets):.1%}"
    yield "furthest off in time: " + ", ".join(
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
