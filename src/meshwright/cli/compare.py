"""The verb `compare`: measures a recipe in several engines or layouts, or several recipes, alternating."""

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from meshwright.cli.common import positive, read_recipe, stoppable, unused_folder
from meshwright.cli.output import add_json_argument, print_result, progress_on_stderr
from meshwright.cli.parser import INTERRUPTED
from meshwright.spec.errors import UserError
from meshwright.spec.problems import setting_called
from meshwright.spec.run import Run

NOT_MEASURED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `compare`."""
    parser.set_defaults(setting_called=partial(setting_called, spec=Run))
    parser.add_argument("recipes", metavar="RECIPE", nargs="+", help="recipe files, and overrides of settings: a.b=c")
    parser.add_argument("--engines", metavar="A,B", help="engines (default: all, or only ours with --layouts)")
    parser.add_argument("--layouts", metavar="A,B", help="layouts to compare: ddp, zero2, zero3:4, tp2, ...")
    parser.add_argument("--rounds", type=positive, metavar="N", help="turns of each engine (default 5)")
    parser.add_argument("--turn", type=positive, metavar="N", help="steps per turn (default 4)")
    parser.add_argument("--warm-up", type=positive, metavar="N", help="steps before timing (default 3)")
    parser.add_argument("--quick", action="store_true", help="by default 3 rounds of 3 steps after 2 of warm-up")
    parser.add_argument(
        "--patience",
        type=positive,
        default=300,
        metavar="SECONDS",
        help="end an engine that completes no step for this long (default 300)",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="the Python that runs an engine's program, for an engine in a separate environment",
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="install an engine that is missing into an environment of its own, once (~/.cache/meshwright/engines)",
    )
    parser.add_argument(
        "--checkout",
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="the folder of an engine that is not a package (nanogpt)",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder to write to (default: runs/compare, -2, ...)")
    add_json_argument(parser)
    parser.epilog = (
        "Writes DIR/compare.md, compare.html and compare.json, and each engine's program into a folder of DIR.\n"
        "exit status: 0 all engines were measured (without --engines: all that are installed and support the recipe),\n"
        "1 one was not, 2 invalid command line, 75 stopped by a signal\n\n"
        "examples:\n"
        "  meshwright compare run.yaml\n"
        "  meshwright compare run.yaml --engines meshwright,bare,hf_trainer --quick\n"
        "  meshwright compare run.yaml --layouts ddp,zero1,zero2,zero3,tp2\n"
        "  meshwright compare a.yaml b.yaml training.steps=100 --json"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare, print the table and write the pages."""
    recipes = read_recipes(arguments)
    # Torch loads here, so that errors in a recipe are reported at once.
    from meshwright.engines.compare import ComparisonStopped, Pace, compare
    from meshwright.engines.contest import checkouts, contestants, installed, pythons
    from meshwright.engines.page import comparison_page
    from meshwright.engines.report import as_data, as_json, describe, markdown, text

    rounds, turn, warm_up = (3, 3, 2) if arguments.quick else (5, 4, 3)
    pace = Pace(arguments.rounds or rounds, arguments.turn or turn, arguments.warm_up or warm_up)
    layouts = arguments.layouts.split(",") if arguments.layouts else []
    names = arguments.engines.split(",") if arguments.engines else []
    with progress_on_stderr(arguments.json):
        say = partial(print, file=sys.stderr, flush=True)
        places = {"pythons": pythons(arguments.python), "checkouts": checkouts(arguments.checkout)}
        if arguments.install:
            places["pythons"] = installed(names, places["pythons"], say)
        entered = contestants(recipes, engines=names, layouts=layouts, **places)
        if arguments.out is not None and arguments.out.exists():
            raise UserError(f"{arguments.out} already exists; give another --out, or remove it")
        folder = arguments.out or unused_folder(Path("runs/compare"))
        folder.mkdir(parents=True)
        stopped = None
        try:
            with stoppable("the comparison"), _removed_if_empty(folder):
                rows = compare(entered, folder, pace=pace, patience=arguments.patience, say=say)
        except ComparisonStopped as stop:
            stop.status = stopped = INTERRUPTED
            if not any(row.turns for row in stop.rows):
                raise
            rows = stop.rows
    about = describe(pace, shlex.join(["meshwright", *sys.argv[1:]]), entered)
    if stopped:
        about["steps"] += "; stopped before the last"
    (folder / "compare.json").write_text(json.dumps(as_data(rows, about), indent=1) + "\n")
    (folder / "compare.md").write_text(markdown(rows, about))
    (folder / "compare.html").write_text(comparison_page(rows, about))
    summary = f"\n{text(rows)}\n\n{folder}/compare.md, compare.html and compare.json; programs beside them"
    print_result(arguments, as_json(rows), [summary])
    if stopped:
        return stopped
    return NOT_MEASURED if any(row.error and (names or not row.absent) for row in rows) else 0


def read_recipes(arguments: argparse.Namespace) -> dict[Path, Run]:
    """Every recipe of the command line, with the overrides applied to each."""
    paths = [Path(word) for word in arguments.recipes if "=" not in word]
    if not paths:
        raise UserError("compare needs a recipe: meshwright compare run.yaml")
    if len(set(paths)) < len(paths):
        raise UserError("a recipe is named twice; name each once")
    arguments.overrides, recipes = [word for word in arguments.recipes if "=" in word], {}
    for path in paths:
        arguments.recipe = path
        recipes[path] = read_recipe(arguments)
    return recipes


@contextlib.contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove `folder` if a user's error ends the block before anything is written."""
    try:
        yield
    except UserError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise
