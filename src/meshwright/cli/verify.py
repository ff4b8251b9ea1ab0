"""The verb `verify`: compares the recipe's layout with one process, from the same weights on the same data."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from meshwright.cli.common import (
    add_page_argument,
    add_recipe_arguments,
    check_page_name,
    positive,
    read_recipe,
    stoppable,
    write_page,
)
from meshwright.cli.output import add_json_argument, print_json, progress_on_stderr
from meshwright.cli.waiting import waiting
from meshwright.launch.status import CRASH_LOOP, TrainingStopped
from meshwright.machine import find_machine
from meshwright.pages.proof import proof_page
from meshwright.prove.pairs import MOST_RANKS, pair_layouts
from meshwright.prove.shrink import shrink
from meshwright.prove.text import (
    amount,
    conclusion,
    cost_lines,
    format_lines,
    quantized_lines,
    step_lines,
    whole_lines,
)
from meshwright.spec.errors import UserError
from meshwright.spec.precision import FP32, FP64
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.text import counted
from meshwright.spec.training import OptimizerName
from meshwright.trainer.resolve import resolve_run

DIFFERENT = 1
LATE_STEPS = 4
"""Steps of a proof of an asynchronous pipeline (`prove/whole.py`, which loads torch)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `verify`."""
    add_recipe_arguments(parser)
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps to compare (default 2)")
    parser.add_argument(
        "--shrink",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use a small model under the same layout conditions (default), or the recipe's model",
    )
    parser.add_argument(
        "--precision",
        choices=[FP64.name, "recipe"],
        help="fp64 (default) separates rounding from faults; recipe uses the recipe's precision",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the layout runs (default cpu); cuda: on this machine's GPUs, which ranks share if they are too few",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help=f"prove a layout of more than {MOST_RANKS} ranks as a whole instead of by pairs of its axes",
    )
    parser.add_argument(
        "--engine", metavar="NAME", help="compare another engine's program with one process, in fp32: deepspeed, ..."
    )
    parser.add_argument("--python", metavar="PATH", help="with --engine: the Python that runs its program")
    parser.add_argument(
        "--patience",
        type=positive,
        metavar="SECONDS",
        help="with --engine: end a program that completes no step for this long (default 600)",
    )
    parser.add_argument("--checkout", metavar="DIR", type=Path, help="with --engine nanogpt: the folder of its code")
    add_page_argument(parser, "every tensor's difference on the model's graph")
    add_json_argument(parser)
    parser.epilog = (
        "Runs one process per rank, on random tokens.\n"
        "exit status: 0 equal, 1 different, 2 invalid command line, 70 the layout's processes failed,\n"
        "75 stopped by a signal\n\n"
        "examples:\n"
        "  meshwright verify run.yaml\n"
        "  meshwright verify run.yaml layout.cp=2 training.recompute=full --steps 3\n"
        "  meshwright verify run.yaml --no-shrink --precision recipe\n"
        "  meshwright verify run.yaml --engine hf_trainer"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prove the layout and report; the exit status is 1 if it differs."""
    if not 1 <= arguments.steps <= 64:
        raise UserError(f"--steps {arguments.steps} is not allowed: must be from 1 to 64")
    recipe = read_recipe(arguments)
    if arguments.engine:
        return _prove_engine(recipe, arguments)
    if arguments.html:
        check_page_name(arguments.html)
    for option in ("patience", "checkout", "python"):
        if getattr(arguments, option):
            raise UserError(f"--{option} applies only to --engine")
    from meshwright.launch import forkserver

    untouched = forkserver.untouched()
    resolved = _prepare(recipe, arguments)
    if resolved.run.layout.world_size > 1 and untouched:
        forkserver.fork_here()
    if resolved.run.layout.world_size <= MOST_RANKS or arguments.full:
        proved = _prove(recipe, resolved, arguments)
        if arguments.json and proved.data is not None:
            print_json(proved.data)
        _write_page(arguments, [proved])
        return proved.status
    return _prove_pairs(recipe, resolved, arguments)


class _Proved(NamedTuple):
    """The exit status of a proof; as data, None if nothing was compared; and as lines of text."""

    status: int
    data: dict[str, Any] | None
    lines: Sequence[str] = ()


def _write_page(arguments: argparse.Namespace, proofs: Sequence[_Proved]) -> None:
    compared = [(proof.data, proof.lines) for proof in proofs if proof.data is not None]
    if arguments.html and compared:
        write_page(arguments.html, proof_page(compared))


def _prove_pairs(recipe: Run, whole: ResolvedRun, arguments: argparse.Namespace) -> int:
    """Prove each pair of axes, up to the first difference."""
    layouts, proofs = pair_layouts(whole.run.layout), list[_Proved]()
    stream = sys.stderr if arguments.json else sys.stdout
    what = f"{whole.run.layout.strategy} has {whole.run.layout.world_size} ranks"
    print(f"{what}: {len(layouts)} pairs of its axes are proved one by one (--full: the whole layout)", file=stream)
    began = time.monotonic()
    for number, layout in enumerate(layouts):
        left = (time.monotonic() - began) / number * (len(layouts) - number) if number else None
        estimate = "" if left is None else f"; about {left:.0f} s left"
        print(f"\nproof {number + 1} of {len(layouts)}: {layout.strategy}{estimate}", file=stream, flush=True)
        pair = recipe.model_copy(update={"layout": layout})
        proofs.append(_prove(pair, _prepare(pair, arguments), arguments))
        if proofs[-1].status:
            break
    status = proofs[-1].status
    if arguments.json:
        answers = [proof.data for proof in proofs]
        print_json({"strategy": whole.run.layout.strategy, "equal": status == 0, "pairs": answers})
    _write_page(arguments, proofs)
    return status


def _prove(recipe: Run, resolved: ResolvedRun, arguments: argparse.Namespace) -> _Proved:
    """Prove one layout and report it."""
    # Torch loads here, so that errors in the recipe are reported at once.
    from meshwright.prove.verify import LayoutFailed, verify

    if not arguments.json:
        print(_what(resolved, arguments), flush=True)
    try:
        with progress_on_stderr(arguments.json):
            own, device = _in_own_precision(recipe, resolved, arguments), _device(resolved, arguments)
            with waiting("computing steps on the layout's ranks and on one process"):
                proof = verify(resolved, steps=arguments.steps, own=own, device=device)
    except LayoutFailed:
        print("error: the layout's processes failed, so there is nothing to compare", file=sys.stderr)
        return _Proved(CRASH_LOOP, None)
    except TrainingStopped:
        print("stopped before the proof was complete", file=sys.stderr)
        raise
    steps = (line for comparison in proof.comparisons for line in step_lines(comparison))
    more = (*whole_lines(proof), *format_lines(recipe, proof), *quantized_lines(resolved, proof), *cost_lines(proof))
    lines = [*steps, *more, *conclusion(proof).split("\n")]
    if not arguments.json:
        print("\n".join(lines))
    data = {"strategy": resolved.run.layout.strategy, **proof.as_data()}
    return _Proved(0 if proof.equal else DIFFERENT, data, [*_what(resolved, arguments).split("\n"), *lines])


def _prove_engine(recipe: Run, arguments: argparse.Namespace) -> int:
    """Compare another engine with one process and report; the exit status is 1 if it differs."""
    # Torch loads here, so that errors in the recipe are reported at once.
    from meshwright.engines.parity import PATIENCE, verify_engine
    from meshwright.engines.registry import find_engine

    if arguments.html:
        raise UserError("--html shows this program's own layouts; leave it out with --engine")
    if arguments.precision or arguments.full or arguments.device != "cpu":
        option = "--precision" if arguments.precision else "--full" if arguments.full else "--device"
        raise UserError(f"--engine compares the whole layout in fp32; leave {option} out")
    engine = find_engine(arguments.engine)
    training = recipe.training.computing_in(FP32.name)
    resolved = resolve_run(recipe.model_copy(update={"training": training}), base_dir=arguments.recipe.parent)
    resolved = shrink(resolved) if arguments.shrink else resolved
    if not arguments.json:
        print(f"engine     {engine.name}: {engine.about}\n{_what(resolved, arguments)}", flush=True)
    with progress_on_stderr(arguments.json), stoppable("the proof"):
        python = Path(arguments.python or sys.executable)
        where: dict[str, Any] = {"python": python, "checkout": arguments.checkout}
        patience = arguments.patience or PATIENCE
        proof = verify_engine(resolved, engine, steps=arguments.steps, patience=patience, **where)
    if arguments.json:
        print_json({"engine": engine.name, "strategy": resolved.run.layout.strategy, **proof.as_data()})
    else:
        for step in range(1, arguments.steps + 1):
            worst = [proof.worst(step, what) for what in ("loss", "gradient", "norm", "update")]
            lines = (
                f"  {one.what:<10}differs by {amount(one.difference)}{one.name and ', ' + one.name}" for one in worst
            )
            print("\n".join([f"step {step}, the largest difference of each kind", *lines]))
        print(_engine_conclusion(proof))
    return 0 if proof.first is None else DIFFERENT


def _engine_conclusion(proof: Any) -> str:
    first = proof.first
    if first is None:
        return f"\nequal: every difference is within {proof.relative:.1e} in the first step, which rounding explains"
    name = f" of {first.name}" if first.name else ""
    return f"\ndifferent; first in step {first.step}, the {first.what}{name}\n           by {amount(first.difference)}"


def _device(resolved: ResolvedRun, arguments: argparse.Namespace) -> str:
    """The recipe's word for the devices of the layout. Raises `UserError` for a GPU if there is none."""
    shared = find_machine(arguments.device).devices < resolved.run.layout.world_size
    return f"{arguments.device}_shared" if shared and arguments.device != "cpu" else arguments.device


def _prepare(recipe: Run, arguments: argparse.Namespace) -> ResolvedRun:
    if arguments.precision != "recipe":
        recipe = recipe.model_copy(update={"training": recipe.training.computing_in(FP64.name)})
    resolved = resolve_run(recipe, base_dir=arguments.recipe.parent)
    return shrink(resolved) if arguments.shrink else resolved


def _in_own_precision(recipe: Run, resolved: ResolvedRun, arguments: argparse.Namespace) -> ResolvedRun | None:
    """The same run in the recipe's precision, under the layout that was resolved; None if it is not another one."""
    if arguments.precision == "recipe" or not recipe.training.dtypes.narrow:
        return None
    own = resolve_run(recipe.model_copy(update={"layout": resolved.run.layout}), base_dir=arguments.recipe.parent)
    return shrink(own) if arguments.shrink else own


def _what(resolved: ResolvedRun, arguments: argparse.Namespace) -> str:
    run, model = resolved.run, resolved.model
    how, optimizer = "shrunk: " if arguments.shrink else "", run.training.optimizer.name
    against = f"one process, {arguments.steps} steps"
    if run.layout.asynchronous:
        against = f"its definition on one process: {LATE_STEPS} steps with the gradient of the batch before"
    plugged = "" if optimizer in get_args(OptimizerName) else f"optimizer  adamw instead of {optimizer}\n"
    return (
        f"{plugged}"
        f"layout     {run.layout.strategy}; processes: {run.layout.world_size}{_where(resolved, arguments)}\n"
        f"against    {against}, {run.training.arithmetic}\n"
        f"model      {how}{model.family}, {model.num_layers} layers, width {model.hidden}, {model.num_heads} heads, "
        f"{model.num_kv_heads} key/value heads, vocabulary {model.vocab}\n"
        f"batch      {counted(resolved.global_batch, 'sequence')} of {run.data.sequence_length} = "
        f"{counted(run.layout.data_parallel, 'data-parallel rank')} x {counted(resolved.accumulation, 'microbatch')} x "
        f"{resolved.micro_batch}"
    )


def _where(resolved: ResolvedRun, arguments: argparse.Namespace) -> str:
    if arguments.device == "cpu" or arguments.engine:
        return ""
    machine = find_machine(arguments.device)
    shared = "; ranks share them, messages go through host memory" if _device(resolved, arguments) != "cuda" else ""
    return f" on {machine.devices} x {machine.name}{shared}"
