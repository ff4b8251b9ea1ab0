"""The verb `view`: one page of one run or many, as a file, live in a browser, or as curves in the terminal."""

import argparse
import sys
from pathlib import Path

from meshwright.cli.common import PORTS, add_page_argument, check_page_name, serve_until_interrupted
from meshwright.pages.live import ADDRESS, serve_page
from meshwright.pages.runs import find_runs
from meshwright.pages.terminal_curves import terminal_view
from meshwright.pages.view import RunsPage
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `view`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run directory, or a folder of runs")
    add_page_argument(parser, "the runs")
    parser.add_argument("--terminal", action="store_true", help="draw the curves in the terminal")
    parser.add_argument(
        "--port", metavar="N", type=PORTS, default=0, help="port of the live page (default: a free one)"
    )
    parser.epilog = (
        f"Without --html and --terminal, serves a live page on {ADDRESS} until Ctrl-C; it needs uPlot:\n"
        f"{install('view')}.\n\nexamples:\n  meshwright view runs/first\n"
        "  meshwright view runs/a runs/b --html both.html\n  meshwright view runs/first --terminal"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write, draw or serve the page."""
    run_dirs = find_runs(arguments.runs)
    if arguments.terminal:
        _check_encoding()
        print(terminal_view(run_dirs))
    elif arguments.html:
        check_page_name(arguments.html)
        print(f"{RunsPage(run_dirs).save(arguments.html)} written")
    else:
        serve_until_interrupted(serve_page(run_dirs, arguments.port))
    return 0


def _check_encoding() -> None:
    """Raise `UserError` if standard output has no braille."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        "\u28ff".encode(encoding)
    except UnicodeEncodeError as error:
        raise UserError(f"--terminal: the encoding {encoding} has no braille dots; set LC_ALL=C.UTF-8") from error
