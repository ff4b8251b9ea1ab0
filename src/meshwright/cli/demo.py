"""The verb `demo`: trains, evaluates and samples a small model on this machine; `make demo` runs it."""

import argparse
import math
from pathlib import Path

from meshwright.cli.common import presets, unused_folder
from meshwright.spec.recipe import load_recipe
from meshwright.spec.text import command

PROMPTS = ("def main(", "import os\n", "class Error(Exception):\n", "# Return the ")
"""Beginnings of Python code, on which the demo's model is trained."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands of `demo`."""
    parser.add_argument(
        "overrides", metavar="a.b=c", nargs="*", default=[], help="override a setting of the demo's recipe"
    )
    parser.epilog = "examples:\n  meshwright demo\n  meshwright demo training.steps=100"


def run(arguments: argparse.Namespace) -> int:
    """Train the recipe `demo`, evaluate it on held-out text, generate, and print the next commands."""
    recipe = load_recipe(presets()["demo"], arguments.overrides)
    run_dir = unused_folder(Path(recipe.run_dir))
    recipe = recipe.model_copy(update={"run_dir": str(run_dir)})
    print(
        "A small Llama learns Python from the standard library of this Python, over 2 processes.\n",
        flush=True,
    )
    # Torch loads here, so that the first line appears at once.
    from meshwright.launch.status import TrainingFailed
    from meshwright.models.generate import Sampling
    from meshwright.serve.trained import Settings, continue_texts, open_trained
    from meshwright.trainer.run import train

    try:
        result = train(recipe)
    except TrainingFailed as failure:
        return failure.status
    trained = open_trained(run_dir)
    settings = Settings(sampling=Sampling(temperature=0.7, top_p=0.95), max_tokens=64)
    texts = continue_texts(trained, PROMPTS, settings)
    if result.held_out_loss is not None:
        perplexity, guessing = math.exp(result.held_out_loss), trained.spec.vocab
        print(f"\nPerplexity on held-out files: {perplexity:.1f}; random guessing would have {guessing}.")
    print("\nGenerated text:")
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print("\n" + "\n".join(f"    {line}" for line in (prompt + text).splitlines()))
    print(_whats_next(run_dir))
    return 0


def _whats_next(run_dir: Path) -> str:
    return f"""
{run_dir}
  recipe.yaml, resolved.yaml   the recipe, as given and with every setting
  metrics.jsonl                the metrics of every step
  checkpoints/                 weights, optimizer and position, to resume from
  tokenizer/                   the tokenizer trained on this text

Try next:
  {command("view", run_dir)}
  {command("generate", run_dir, "--prompt", "def main(")}
  {command("export", run_dir, "--hf", run_dir / "export")}
  meshwright init demo > run.yaml    then change it: model, data, layout
  meshwright train run.yaml run_dir=runs/mine training.steps=1000"""
