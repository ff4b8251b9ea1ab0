"""The one entry of a worker process: `python -m meshwright.trainer.worker --resolved FILE [--resume WHICH]`."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from meshwright.trainer.launch import find_worker
from meshwright.trainer.run import train_rank
from meshwright.trainer.signals import StopRequest, end_with
from meshwright.trainer.start import read_resolved
from meshwright.trainer.status import MISUSE, STOPPED, RunError


def main() -> int:
    """Train as one rank; what went wrong goes to the parent, which prints it once for all ranks."""
    parser = argparse.ArgumentParser(prog="meshwright.trainer.worker", description=__doc__)
    parser.add_argument("--resolved", type=Path, required=True, help="resolved.yaml of the run")
    parser.add_argument("--resume", help="newest, auto or a checkpoint's name")
    arguments = parser.parse_args()
    worker = find_worker()
    if worker is None:
        parser.error("it is started by meshwright or torchrun, which tell each worker its rank")
    end_with(worker.parent)
    with StopRequest(raises=False) as stop:
        try:
            resolved = read_resolved(arguments.resolved)
            return STOPPED if train_rank(resolved, worker, stop, resume=arguments.resume) else 0
        except (ValueError, RunError) as error:
            report_to_parent(str(error))
            return error.status if isinstance(error, RunError) else MISUSE


def report_to_parent(message: str) -> None:
    """Leave `message` in the file where torch's elastic launcher looks for a worker's last words."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    else:
        print(f"error: {message}", file=sys.stderr)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads may abort a process that tears itself down in order
