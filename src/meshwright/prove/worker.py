"""Entry point of a rank of a proof: `python -m meshwright.prove.worker --folder DIR --steps N`."""

import argparse
import pickle
from pathlib import Path

from meshwright.launch.launcher import Worker, find_worker, leave_group
from meshwright.launch.signals import end_with
from meshwright.launch.status import MISUSE, exit_with
from meshwright.prove.inputs import proof_weights
from meshwright.prove.verify import OWN, PROOF, RESOLVED, prove_rank
from meshwright.spec.errors import UserError
from meshwright.spec.pieces import pieces_of
from meshwright.trainer.folder import read_resolved
from meshwright.trainer.setup import build_trainer, find_place
from meshwright.trainer.worker import report_to_parent


def main() -> int:
    """Compare as one rank; user errors are reported to the parent."""
    parser = argparse.ArgumentParser(prog="meshwright.prove.worker", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the proof's folder, with the run and the reference")
    parser.add_argument("--steps", type=int, required=True, help="steps to compare")
    parser.add_argument("--trace", type=int, default=0, help="the step to find the first difference of")
    arguments = parser.parse_args()
    worker = find_worker() or Worker()
    end_with(worker.parent)
    try:
        resolved, own = read_resolved(arguments.folder / RESOLVED), arguments.folder / OWN
        with pieces_of(shrunk=resolved.shrunk):
            trainer = build_trainer(resolved, find_place(resolved.run, worker), proof_weights(resolved))
            proof = prove_rank(
                trainer,
                arguments.folder,
                arguments.steps,
                arguments.trace,
                read_resolved(own) if own.is_file() else None,
            )
    except UserError as error:
        report_to_parent(str(error))
        return MISUSE
    if worker.rank == 0:
        (arguments.folder / PROOF).write_bytes(pickle.dumps(proof))
    leave_group()
    return 0


if __name__ == "__main__":
    exit_with(main)
