"""The verb `accept`: tries the product on this machine's devices and writes one report."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.accept.check import Place
from meshwright.accept.report import as_data, machine_facts, step_lines, summary, write_report
from meshwright.accept.run import WORK, StepOutcome, run_steps
from meshwright.accept.steps import STEPS, named
from meshwright.cli.common import positive, stoppable
from meshwright.cli.output import add_json_argument, print_json
from meshwright.machine import find_machine
from meshwright.spec.errors import UserError

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `accept`."""
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs/accept"), help="folder of the report")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument("--seconds", type=positive, default=400, metavar="N", help="limit of all steps (default 400)")
    parser.add_argument("--steps", metavar="A,B", help="some of the steps below only")
    parser.add_argument(
        "--references",
        metavar="FILE",
        type=Path,
        help="figures of a CPU, made by --write-references; default: made here",
    )
    parser.add_argument(
        "--write-references", metavar="FILE", type=Path, help="make that file on this CPU, and no report"
    )
    parser.add_argument("--nanogpt", metavar="DIR", type=Path, help="nanoGPT's code, to compare speed with")
    add_json_argument(parser)
    parser.epilog = (
        "Needs no network. On a CPU the steps rehearse themselves with tiny shapes; on a GPU each has a\n"
        "time limit. A step that fails does not stop the next. After each step, DIR/report.txt, report.json\n"
        "and report.html are written anew.\n"
        "exit status: 0 every step that ran has passed, 1 one failed, 2 invalid command line,\n"
        "75 stopped by a signal\n\n"
        "steps:\n" + "".join(f"  {step.name:<13}{step.about}\n" for step in STEPS) + "\nexamples:\n"
        "  meshwright accept\n"
        "  meshwright accept --steps layouts,kernels --seconds 120\n"
        "  meshwright accept --device cpu --seconds 1200"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the steps; the exit status is 1 if one failed."""
    machine = find_machine(arguments.device)
    place = Place(
        device="cuda" if machine.is_gpu else "cpu",
        work=(arguments.out / WORK).absolute(),
        references=arguments.references and arguments.references.absolute(),
        nanogpt=arguments.nanogpt and arguments.nanogpt.absolute(),
    )
    steps = named(arguments.steps.split(",") if arguments.steps else None)
    for path in (place.references, place.nanogpt):
        if path is not None and not path.exists():
            raise UserError(f"{path} does not exist")
    place.work.mkdir(parents=True, exist_ok=True)
    if arguments.write_references:
        return _write_references(place, arguments.write_references)
    facts = machine_facts(arguments.device)

    def report(outcomes: Sequence[StepOutcome]) -> None:
        write_report(outcomes, facts, arguments.out)
        lines = step_lines(outcomes[-1])
        print("\n".join(lines), file=sys.stderr if arguments.json else sys.stdout, flush=True)

    with stoppable("the acceptance"):
        outcomes = run_steps(steps, place, arguments.out, arguments.seconds, report)
    if arguments.json:
        print_json(as_data(outcomes, facts))
    else:
        print(f"\n{summary(outcomes)}\n{arguments.out}/report.txt, report.json and report.html")
    return FAILED if any(outcome.state == "failed" for outcome in outcomes) else 0


def _write_references(place: Place, file: Path) -> int:
    from meshwright.accept.train import cpu_losses

    file.write_text(json.dumps({"losses": cpu_losses(place)}) + "\n", encoding="utf-8")
    print(f"wrote {file}")
    return 0
