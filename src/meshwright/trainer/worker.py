"""Entry point of a worker process: `python -m meshwright.trainer.worker --resolved FILE [--resume WHICH]`."""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from meshwright.launch.launcher import find_worker
from meshwright.launch.signals import StopRequest, end_with
from meshwright.launch.status import MISUSE, RunError, exit_with
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import plugged_in
from meshwright.terminal import printable
from meshwright.trainer.folder import read_resolved
from meshwright.trainer.plugins import Plugins, read_plugins
from meshwright.trainer.rank import train_rank


def main() -> int:
    """Train as one rank; errors are reported to the parent, which prints them once for all ranks."""
    parser = argparse.ArgumentParser(prog="meshwright.trainer.worker", description=__doc__)
    parser.add_argument("--resolved", type=Path, required=True, help="resolved.yaml of the run")
    parser.add_argument("--resume", help="newest, auto or a checkpoint's name")
    parser.add_argument("--plugins", type=Path, help="file of objects that Python code passed to train")
    parser.add_argument("--steps-shown", action="store_true", help="the parent shows the steps")
    arguments = parser.parse_args()
    worker = find_worker()
    if worker is None:
        parser.error("start workers with meshwright or torchrun, which set their rank")
    worker = replace(worker, shows_steps=not arguments.steps_shown)
    end_with(worker.parent)
    with StopRequest(raises=False) as stop:
        try:
            resolved = read_resolved(arguments.resolved)
            plugins = read_plugins(arguments.plugins) if arguments.plugins else Plugins()
            with plugged_in(plugins.objects()):
                return train_rank(resolved, worker, stop, arguments.resume, plugins)
        except (UserError, RunError) as error:
            report_to_parent(str(error))
            return error.status if isinstance(error, RunError) else MISUSE
        except OSError as error:
            if error.filename is None:
                raise
            report_to_parent(f"{error.filename}: {(error.strerror or 'cannot be used').lower()}")
            return 1
        except (dist.DistError, RuntimeError) as error:
            if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
                raise
            report_to_parent(
                f"rank {worker.rank} lost the connection to the other ranks: {' '.join(str(error).split())[:200]}"
            )
            return 1


def report_to_parent(message: str) -> None:
    """Write `message` to the file that torch's elastic launcher reads (TORCHELASTIC_ERROR_FILE)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    else:
        print(f"error: {printable(message)}", file=sys.stderr)


if __name__ == "__main__":
    exit_with(main)
