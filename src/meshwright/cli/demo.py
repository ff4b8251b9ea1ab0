"""The verb `demo`: the whole of training, small, on this machine: what `make demo` runs."""

import argparse
import math
from pathlib import Path

from meshwright.cli.common import presets
from meshwright.spec.recipe import load_recipe

PROMPTS = ("def main(", "import os\n", "class Error(Exception):\n", "# Return the ")
"""The demo's model has read Python."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Operands of `demo`."""
    parser.add_argument(
        "overrides", metavar="a.b=c", nargs="*", default=[], help="change one setting of the demo's recipe"
    )
    parser.epilog = "examples:\n  meshwright demo\n  meshwright demo training.steps=100"


def run(arguments: argparse.Namespace) -> int:
    """Train the recipe `demo`, measure it on text it has not seen, let it write, and say what to try next."""
    recipe = load_recipe(presets()["demo"], arguments.overrides)
    run_dir = _new_run_dir(Path(recipe.run_dir))
    recipe = recipe.model_copy(update={"run_dir": str(run_dir)})
    print(
        "A small Llama learns Python from the standard library of this Python, over 2 processes.\n",
        flush=True,
    )
    # Torch loads here, so that the first line comes at once.
    from meshwright.launch.status import TrainingFailed
    from meshwright.models.generate import Sampling
    from meshwright.serve.trained import continue_texts, open_trained
    from meshwright.trainer.run import train

    try:
        result = train(recipe)
    except TrainingFailed as failure:
        return failure.status
    trained = open_trained(run_dir)
    texts = continue_texts(trained, PROMPTS, max_tokens=64, sampling=Sampling(temperature=0.7, top_p=0.95))
    if result.held_out_loss is not None:
        perplexity, guessing = math.exp(result.held_out_loss), trained.spec.vocab
        print(f"\nOn files it has not seen, its perplexity is {perplexity:.1f}; guessing would have {guessing}.")
    print("\nIt writes:")
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print("\n" + "\n".join(f"    {line}" for line in (prompt + text).splitlines()))
    print(_whats_next(run_dir))
    return 0


def _new_run_dir(wanted: Path) -> Path:
    """`wanted`, or where an earlier demo lies there, `wanted-2`, `wanted-3` and so on."""
    run_dir, number = wanted, 1
    while run_dir.exists():
        number += 1
        run_dir = wanted.with_name(f"{wanted.name}-{number}")
    return run_dir


def _whats_next(run_dir: Path) -> str:
    return f"""
{run_dir}
  recipe.yaml, resolved.yaml   what was trained, as given and with every setting
  metrics.jsonl                every step's figures
  checkpoints/                 weights, optimizer and position, to continue from
  tokenizer/                   the tokenizer it learned

Try next:
  meshwright generate {run_dir} --prompt 'def main('
  meshwright export {run_dir} --hf {run_dir}/export
  meshwright init demo > run.yaml    then change it: model, data, layout
  meshwright train run.yaml run_dir=runs/mine training.steps=1000"""
