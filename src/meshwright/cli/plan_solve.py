"""The questions of `plan --solve`: their options, and the answer as text, JSON, a page and a recipe."""

import argparse
import sys
import time
from pathlib import Path

from meshwright.cli.common import write_page
from meshwright.cli.output import print_result
from meshwright.planner.query import Query
from meshwright.planner.solve import QUANTITIES, PlanQuestion, solve
from meshwright.planner.solved import parse_duration, parse_tokens, solved_json, solved_lines, solved_page
from meshwright.spec.errors import UserError
from meshwright.spec.run import Run

QUIET = 2.0
"""Seconds without a line before the values that are planned are named."""


def add_solve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--solve` and the limits that it keeps."""
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--solve",
        choices=QUANTITIES,
        metavar="QUANTITY",
        help="plan for many values of it and name the best: devices (the fewest by --deadline), deadline (the shortest "
        "run), budget (the cheapest run by --deadline), sequence (the longest), batch (the smallest at full speed), "
        "model (the family's size of least expected loss), cluster (the cheapest of several)",
    )
    group.add_argument("--deadline", metavar="TIME", help="time in which the run must end: 36h, 7d")
    group.add_argument("--budget", metavar="PRICE", type=float, help="largest price of the run")


def add_tokens_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--tokens`."""
    parser.add_argument("--tokens", metavar="N", help="length of the run, as in 300B or 1.5T: training.tokens")


def tokens_override(text: str | None) -> tuple[str, ...]:
    """`--tokens` as an override of the recipe."""
    return (f"training.tokens={parse_tokens(text)}",) if text else ()


def check_limits(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for a limit without a question, and for one that nothing keeps."""
    for option in ("deadline", "budget"):
        if getattr(arguments, option) is not None and not arguments.solve:
            raise UserError(
                f"--{option} is for --solve, as in --solve devices --{option} {'7d' if option == 'deadline' else 5000}"
            )
    if arguments.budget is not None and not 0 < arguments.budget < float("inf"):
        raise UserError(f"--budget {arguments.budget:g} is not allowed: must be above 0")
    if arguments.solve:
        for option in ("explain", "consider", "measure"):
            if getattr(arguments, option):
                raise UserError(f"--{option} is for one plan; leave out --{option} or --solve")


def answer_question(arguments: argparse.Namespace, query: Query, recipe: Run, base_dir: Path) -> int:
    """Answer `--solve`; 0 if there is an answer, 1 if not."""
    deadline = parse_duration(arguments.deadline) if arguments.deadline is not None else None
    started, quiet = time.monotonic(), arguments.json

    def progress(value: str) -> None:
        if not quiet and time.monotonic() - started > QUIET:
            print(f"planning {value}", file=sys.stderr, flush=True)

    solved = solve(query, PlanQuestion(arguments.solve, deadline, arguments.budget), recipe, base_dir, progress)
    print_result(arguments, solved_json(solved), solved_lines(solved, recipe))
    if arguments.html:
        write_page(arguments.html, solved_page(solved, recipe))
    if arguments.write:
        if solved.answer is None or solved.answer.planned is None:
            raise UserError("--solve has no answer, so no recipe is written")
        if solved.answer.planned.cluster is None and arguments.solve in ("devices", "deadline", "budget"):
            raise UserError("--write with --solve needs a cluster by its name, as in 8xh100")
        arguments.write.write_text(solved.answer.planned.write(), encoding="utf-8")
        print(f"{arguments.write} written", file=sys.stderr)
    return 0 if solved.answer else 1
