"""Verbs that run over several processes: `layout.tp=N` splits a trained model over N processes by tensor parallelism.

`python -m meshwright.cli.ranks VERB WORDS...` is one of these processes, and runs the verb itself.
"""

import argparse
import importlib
import os
import signal
import sys
from typing import Any

from meshwright.cli.parser import INTERRUPTED, Parser
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.terminal import guarded_terminal

SETTING = "layout.tp="


def add_layout_argument(parser: argparse.ArgumentParser) -> None:
    """Add the operand `layout.tp=N`."""
    parser.add_argument(
        "layout",
        metavar="layout.tp=N",
        nargs="*",
        default=[],
        help="split the model over N processes of this machine by tensor parallelism",
    )


def degree_of(arguments: argparse.Namespace) -> int:
    """The number of processes that the command line asks for. Raises `UserError` for any other setting."""
    degrees = [1]
    for word in arguments.layout:
        number = word.removeprefix(SETTING)
        if number == word or not number.isdecimal() or not int(number):
            raise UserError(
                f"'{word}' is not allowed here: a model in use is split only by tensor parallelism, as in {SETTING}2"
            )
        degrees.append(int(number))
    if degrees[-1] > 1 and arguments.weights_from_disk:
        raise UserError(
            f"--weights-from-disk: cannot be combined with {SETTING}{degrees[-1]}, which keeps weights in memory; "
            "leave one out"
        )
    if degrees[-1] > 1 and getattr(arguments, "compile", False):
        raise UserError(f"--compile: cannot be combined with {SETTING}{degrees[-1]}; leave one out")
    return degrees[-1]


def started(arguments: argparse.Namespace) -> int | None:
    """Run the verb on several processes if the command line asks for them and this is none of them, and return the exit
    status. None: this process runs the verb."""
    degree = degree_of(arguments)
    if degree == 1 or "ranks" in arguments:
        return None
    from meshwright.launch import forkserver

    untouched = forkserver.untouched()
    from meshwright.launch.launcher import Nodes, RankJob, start_workers
    from meshwright.launch.signals import StopRequest
    from meshwright.launch.status import STOPPED, TrainingStopped
    from meshwright.launch.supervise import RestartPolicy

    if untouched:
        forkserver.fork_here()
    words = ["meshwright.cli.ranks", *arguments.command]
    try:
        with StopRequest(raises=True) as stop:
            status = start_workers(RankJob(LayoutSpec(tp=degree)), Nodes(), words, stop, RestartPolicy(run_dir=None))
    except TrainingStopped:
        status = STOPPED
    if status == STOPPED:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def weights_of(arguments: argparse.Namespace) -> Any:
    """The place of the weights (`Weights` in `serve/trained.py`)."""
    if "ranks" in arguments:
        return arguments.ranks.mesh
    return "disk" if arguments.weights_from_disk else "auto"


def follows(arguments: argparse.Namespace, model: Any) -> bool:
    """Repeat the first process's use of `model` until it ends, and return True. The first process itself leads from
    here on, and gets False, as does a single process."""
    if "ranks" not in arguments:
        return False
    if arguments.ranks.leads:
        arguments.ranks.lead(model)
        return False
    arguments.ranks.follow(model)
    return True


def main() -> int:
    """Run a verb as one process of several."""
    from meshwright.launch.launcher import find_worker, leave_group
    from meshwright.launch.status import MISUSE, STOPPED
    from meshwright.trainer.worker import report_to_parent

    verb, *words = sys.argv[1:]
    worker = find_worker()
    if worker is None:
        raise SystemExit(f"internal: meshwright {verb} starts this process")
    # The first process decides when all end.
    signal.signal(signal.SIGINT, signal.default_int_handler if worker.rank == 0 else signal.SIG_IGN)
    if worker.rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the first prints for all
    try:
        with guarded_terminal():
            module, parser = importlib.import_module(f"meshwright.cli.{verb}"), Parser(verb)
            module.add_arguments(parser)
            arguments = parser.parse(words)
            arguments.ranks = _joined(worker, degree_of(arguments), arguments.device)
            status = module.run(arguments)
            arguments.ranks.dismiss()
            leave_group()
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return STOPPED
    except (UserError, OSError) as error:
        report_to_parent(str(error))
        return MISUSE


def _joined(worker: Any, degree: int, device_name: str) -> Any:
    import torch

    from meshwright.launch.launcher import RankJob, join_group, threads_per_rank
    from meshwright.machine import find_machine
    from meshwright.parallel import build_meshes
    from meshwright.serve.ranks import Ranks
    from meshwright.trainer.device import choose_device
    from meshwright.trainer.worker import report_to_parent

    def lost(error: BaseException) -> Any:
        report_to_parent(f"process {worker.rank} of {degree} failed: {' '.join(str(error).split())[:200]}")
        os._exit(1)

    job = RankJob(LayoutSpec(tp=degree))
    device = choose_device(find_machine(device_name), worker.local_rank)
    torch.set_num_threads(threads_per_rank(worker.local_world_size))
    join_group(worker, job, device)
    mesh = build_meshes(job.layout, device.type).axis("tp")
    assert mesh is not None
    return Ranks(mesh, lost)


if __name__ == "__main__":
    from meshwright.launch.status import exit_with

    exit_with(main)
