"""Engine `meshwright`: Meshwright's own trainer, as a user starts it."""

from meshwright.engines.engine import Engine
from meshwright.engines.settings import Setting
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.run import ResolvedRun

PROGRAM = '''"""{title}: the recipe beside this file, trained by Meshwright.

    {command}

Written by meshwright beside the programs of other engines; `meshwright train recipe.yaml` does the same.
"""

from pathlib import Path

from meshwright import load_recipe, train

HERE = Path(__file__).resolve().parent
train(load_recipe(HERE / "recipe.yaml", [f"run_dir={{HERE / 'run'}}"]), base_dir="{base_dir}")
'''

MEASURE = '''"""Measures what Meshwright computes from the recipe beside this file in every step, and in what time."""

import argparse
from pathlib import Path

from meshwright import load_recipe, train
from meshwright.engines.turns import TakeTurns, only_training

HERE = Path(__file__).resolve().parent
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--inputs", type=Path, help="ignored: the recipe names all inputs")
parser.add_argument("--save-every", type=int, help="ignored: the last step alone is saved")
parser.add_argument("--journal", type=Path, default=HERE / "journal.jsonl", help="file that receives a line a step")
parser.add_argument("--pause", type=int, nargs="*", default=[], help="steps after which to wait for a line of input")
options = parser.parse_args()
overrides = [f"run_dir={{options.journal.with_name('run')}}", "training.micro_batch={micro_batch}"]
run = only_training(load_recipe(HERE / "recipe.yaml", overrides))
train(run, base_dir="{base_dir}", callbacks=[TakeTurns(options.journal, options.pause)])
'''


class Ours(Engine):
    """Meshwright's trainer, from the recipe."""

    name = "meshwright"
    about = "Meshwright"

    def files(self, resolved: ResolvedRun) -> tuple[str, dict[str, str]]:
        """The recipe, and a few lines that train it."""
        ranks = resolved.run.layout.world_size
        name = "run_meshwright.py"
        command = f"python {name}" if ranks == 1 else f"torchrun --nproc-per-node {ranks} {name}"
        program = PROGRAM.format(title=resolved.run.layout.strategy, command=command, base_dir=resolved.base_dir)
        return name, {name: program, "recipe.yaml": dump_recipe(resolved.run)}

    def measure(self, resolved: ResolvedRun, program: str) -> str:
        """A program of its own: it switches off what the other programs lack."""
        return MEASURE.format(base_dir=resolved.base_dir, micro_batch=resolved.micro_batch)

    def settings(self, resolved: ResolvedRun) -> tuple[Setting, ...]:
        """None: the program trains the recipe itself."""
        return ()
