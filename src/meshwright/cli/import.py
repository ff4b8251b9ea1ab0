"""The verb `import`: converts configuration files of other systems to a recipe; no key is dropped silently."""

import argparse
import sys
from pathlib import Path

from meshwright.cli.common import positive
from meshwright.cli.output import add_json_argument, print_json
from meshwright.imports.recipe import import_files
from meshwright.imports.systems import FORMATS
from meshwright.spec.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `import`."""
    parser.add_argument(
        "files", metavar="FILE", nargs="+", type=Path, help="all configuration files of one training job"
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="number of processes, if no file gives it")
    parser.add_argument("--model", metavar="NAME", help="published name or Hugging Face directory, if no file gives it")
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="DIR",
        help="write the weights of a checkpoint among the files as a Hugging Face directory: nanoGPT's ckpt.pt, "
        "LitGPT's lit_model.pth, or, with --model, a folder of DeepSpeed (ZeRO), torchtitan or Megatron-core",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the recipe to FILE (default: print it)")
    add_json_argument(parser)
    parser.epilog = (
        f"Reads {FORMATS}.\n"
        "A comment on every line of the recipe names its origin. Keys without a counterpart are listed at the top and\n"
        "on standard error. No file is executed.\n\n"
        "examples:\n"
        "  meshwright import ds_config.json training_args.json --model llama-3.2-1b --ranks 8 > run.yaml\n"
        "  meshwright import axolotl.yml --ranks 4 --write run.yaml\n"
        "  meshwright import pretrain_gpt.sh --ranks 64 > run.yaml\n"
        "  meshwright import out/ckpt.pt --weights gpt2-mine\n"
        "  meshwright import checkpoints/ --model llama-3.2-1b --weights mine"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print or write the recipe, and report keys without a counterpart."""
    for path in arguments.files:
        if not path.exists():
            raise UserError(f"{path}: no such file")
    if arguments.write and arguments.write.exists():
        raise UserError(f"{arguments.write} already exists; give another --write, or remove it")
    if checkpoints := [path for path in arguments.files if path.is_dir() or path.suffix in (".pt", ".pth")]:
        _convert(arguments, checkpoints)
        if not arguments.files:
            return 0
    elif arguments.weights:
        raise UserError(
            "--weights needs a checkpoint among the files: nanoGPT's ckpt.pt, LitGPT's lit_model.pth, or a folder"
        )
    text, reading = import_files(arguments.files, ranks=arguments.ranks, model=arguments.model)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    if arguments.json:
        origins = {path: origin for path, (_, origin) in reading.settings.items()}
        print_json(
            {
                "recipe": text,
                "origins": origins,
                "without": reading.without,
                "notes": reading.notes,
                "no_effect": reading.no_effect,
                "already_so": reading.already_so,
            }
        )
        return 0
    if not arguments.write:
        print(text, end="")
    for note in reading.notes:
        print(f"assumed: {note}", file=sys.stderr)
    for origin, reason in reading.without:
        print(f"no counterpart: {origin}: {reason}", file=sys.stderr)
    return 0


def _convert(arguments: argparse.Namespace, checkpoints: list[Path]) -> None:
    """Write the weights. The recipe from the other files, if there are any, starts from them."""
    if len(checkpoints) > 1:
        raise UserError(f"{checkpoints[1]}: a second checkpoint; give one")
    if not arguments.weights:
        kind = "a folder, which is read as a checkpoint" if checkpoints[0].is_dir() else "a checkpoint"
        raise UserError(
            f"{checkpoints[0]}: {kind}; give --weights DIR for the directory to write, or name a configuration file"
        )
    # Torch loads here, because configuration files do not need it.
    from meshwright.checkpoint.takeover.convert import convert

    notes = convert(checkpoints[0], arguments.weights, arguments.model)
    print(f"{checkpoints[0]} written to {arguments.weights}", file=sys.stderr)
    for note in notes:
        print(f"not the same: {note}", file=sys.stderr)
    arguments.files = [path for path in arguments.files if path not in checkpoints]
    arguments.model = str(arguments.weights)
