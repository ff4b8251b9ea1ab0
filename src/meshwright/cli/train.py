"""The verb `train`: trains a recipe to its last step, or resumes a run."""

import argparse
import re

from meshwright.cli.common import add_recipe_arguments, example_prompt, next_commands, read_recipe
from meshwright.cli.output import add_json_argument, print_json, progress_on_stderr
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FullSpec
from meshwright.spec.plugins import PluginSpec
from meshwright.spec.run import Run
from meshwright.spec.text import command

TIMELINE = "memory"
"""The callback of `--memory`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `train`."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        type=checkpoint,
        metavar="CHECKPOINT",
        help="resume from the newest checkpoint, or from the named one (step-00000400); auto: from the newest "
        "undamaged one, or from the start if there is none",
    )
    parser.add_argument(
        "--wait-for-lock",
        nargs="?",
        const=float("inf"),
        default=0.0,
        type=seconds,
        metavar="SECONDS",
        help="if another process uses run_dir, wait up to this long for it to end (default: refuse)",
    )
    parser.add_argument(
        "--retry-oom",
        action="store_true",
        help="after an out-of-memory error, restart from the newest checkpoint with the first change that would fit",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="plot the memory of a step by kind, as a page (the callback memory, docs/memory.md)",
    )
    add_json_argument(parser)
    parser.epilog = (
        "Starts the processes that the layout needs; under torchrun, Slurm or Kubeflow it is one of them.\nexit "
        "status: 0 trained, 2 an error in recipe or data, 71 out of memory, 75 stopped by a signal after\nsaving; "
        "all others are failures (docs/stopping.md)\n\nexamples:\n  meshwright train run.yaml\n  meshwright train "
        "run.yaml training.steps=500 layout.dp_shard=4\n  meshwright train run.yaml --resume\n  meshwright train "
        "run.yaml --resume step-00000400\n  torchrun --nproc-per-node 8 -m meshwright train run.yaml"
    )


def checkpoint(word: str) -> str:
    """The value of `--resume`: newest, auto, or a checkpoint's name or step; raises `UserError` for anything else."""
    if not re.fullmatch(r"newest|auto|(step-)?\d+", word):
        raise UserError(f"{word} is not a checkpoint")
    return word


def seconds(word: str) -> float:
    """The value of `--wait-for-lock`; raises `UserError` for anything but a number."""
    if not re.fullmatch(r"\d+(\.\d*)?|inf", word):
        raise UserError(f"{word} is not a number of seconds")
    return float(word)


def run(arguments: argparse.Namespace) -> int:
    """Train, then print the result and the next commands."""
    if arguments.resume and (strange := [word for word in arguments.overrides if "=" not in word]):
        raise UserError(
            f"'{strange[0]}' is neither a checkpoint nor a setting: --resume takes auto, or a step such as "
            "step-00000400 or 400 (without one, the newest checkpoint); a setting is written training.steps=100"
        )
    recipe = read_recipe(arguments)
    if arguments.memory and not any(callback.name == TIMELINE for callback in recipe.callbacks):
        recipe = recipe.model_copy(update={"callbacks": (*recipe.callbacks, PluginSpec(name=TIMELINE))})
    # Torch loads here, so that errors in the recipe are reported at once.
    from meshwright.launch import forkserver

    untouched = forkserver.untouched()
    from meshwright.data.tokenizer import load_tokenizer
    from meshwright.launch.launcher import find_worker
    from meshwright.launch.status import TrainingFailed
    from meshwright.trainer.folder import TOKENIZER
    from meshwright.trainer.run import train

    if recipe.layout.world_size > 1 and find_worker() is None and untouched:
        forkserver.fork_here()
    try:
        with progress_on_stderr(arguments.json):
            result = train(
                recipe,
                resume=arguments.resume or False,
                base_dir=arguments.recipe.parent,
                wait_for_lock=arguments.wait_for_lock,
                retry_oom=arguments.retry_oom,
            )
    except TrainingFailed as failure:
        return failure.status  # a worker has printed the error
    worker = find_worker()
    if worker is not None and worker.rank > 0:
        return 0
    if arguments.json:
        figures = {name: getattr(result, name) for name in ("step", "loss", "held_out_loss")}
        print_json({"run_dir": str(result.run_dir), "checkpoint": str(result.checkpoint), **figures})
        return 0
    held_out = "" if result.held_out_loss is None else f", held-out loss {result.held_out_loss:.3f}"
    print(
        f"\ntrained to step {result.step}: loss {result.loss:.3f}{held_out}\n"
        f"checkpoint  {result.checkpoint}\n"
        + whats_next(recipe, has_template=load_tokenizer(result.run_dir / TOKENIZER).chat_template is not None)
    )
    return 0


def whats_next(run: Run, *, has_template: bool) -> str:
    """Commands to try on a trained run; `has_template`: its tokenizer has a chat template."""
    place = run.run_dir
    lines = [f"{command('generate', place)} {example_prompt(has_template=has_template)}"]
    if run.data.held_out and run.training.preference is None:
        lines.append(command("eval", place))
    if run.finetune is None or isinstance(run.finetune, FullSpec):
        lines.append(command("export", place, "--hf", f"{place}/export"))
    else:
        lines.append(command("export", place, "--adapter", f"{place}/adapter"))
        lines.append(command("export", place, "--hf", f"{place}/merged", "--merge"))
    return next_commands(lines)
