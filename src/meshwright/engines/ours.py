"""Engine `meshwright`: Meshwright's own trainer, as a user starts it."""

from meshwright.engines.engine import Engine
from meshwright.engines.settings import Setting
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import EvaluationSpec

PROGRAM = '''"""{title}: the recipe beside this file, trained by Meshwright.

    {command}

Written by meshwright beside the programs of other engines; `meshwright train recipe.yaml` does the same.
"""

import argparse
from pathlib import Path

from meshwright import load_recipe, train
from meshwright.engines.turns import TakeTurns

HERE = Path(__file__).resolve().parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--inputs", type=Path, default=HERE, help="ignored: the recipe names all inputs")
parser.add_argument("--journal", type=Path, default=HERE / "metrics.jsonl", help="file that receives one line per step")
parser.add_argument("--pause", type=int, nargs="*", default=[], help="steps after which to wait for a line of input")
options = parser.parse_args()
run = load_recipe(HERE / "recipe.yaml", [f"run_dir={{options.journal.with_name('run')}}"])
train(run, base_dir="{base_dir}", callbacks=[TakeTurns(options.journal, options.pause)])
'''


class Ours(Engine):
    """Meshwright's trainer, from the recipe; only features that the other programs lack too are switched off."""

    name = "meshwright"
    about = "Meshwright"

    def files(self, resolved: ResolvedRun) -> tuple[str, dict[str, str]]:
        """The recipe, and a few lines that train it and take turns."""
        ranks = resolved.run.layout.world_size
        name = "run_meshwright.py"
        command = f"python {name}" if ranks == 1 else f"torchrun --nproc-per-node {ranks} {name}"
        program = PROGRAM.format(title=resolved.run.layout.strategy, command=command, base_dir=resolved.base_dir)
        return name, {name: program, "recipe.yaml": dump_recipe(alone(resolved))}

    def settings(self, resolved: ResolvedRun) -> tuple[Setting, ...]:
        """None: the program trains the recipe itself."""
        return ()


def alone(resolved: ResolvedRun) -> Run:
    """The recipe with only training: no evaluation, no intermediate checkpoints, no trackers; and no hang guard, which
    would report a rank that waits for its turn. Microbatches are the other engines'."""
    run = resolved.run
    training = run.training.model_copy(
        update={"evaluation": EvaluationSpec(batches=0), "samples": None, "micro_batch": resolved.micro_batch}
    )
    guards = run.guards.model_copy(update={"stuck_after": 0.0, "verify_every": 0})
    checkpoint = CheckpointSpec(start_from=run.checkpoint.start_from)
    update = {"training": training, "guards": guards, "checkpoint": checkpoint, "trackers": (), "callbacks": ()}
    return run.model_copy(update=update)
