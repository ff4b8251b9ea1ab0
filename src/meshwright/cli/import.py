"""The verb `import`: configuration files of other systems become a recipe; nothing in them is dropped in silence."""

import argparse
import sys
from pathlib import Path

from meshwright.cli.common import positive
from meshwright.cli.output import add_json_argument, print_json
from meshwright.imports.recipe import FORMATS, import_files
from meshwright.spec.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Operands and options of `import`."""
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="files that describe one training together")
    parser.add_argument("--ranks", type=positive, metavar="N", help="processes in all, where no file says it")
    parser.add_argument("--model", metavar="NAME", help="a published name or a Hugging Face directory, likewise")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the recipe there (default: print it)")
    add_json_argument(parser)
    parser.epilog = (
        f"It reads {FORMATS}.\n"
        "Every line of the recipe says where it comes from; what has no counterpart is listed at its top and told on\n"
        "standard error. No file is run.\n\n"
        "examples:\n"
        "  meshwright import ds_config.json training_args.json --model llama-3.2-1b --ranks 8 > run.yaml\n"
        "  meshwright import axolotl.yml --ranks 4 --write run.yaml\n"
        "  meshwright import pretrain_gpt.sh --ranks 64 > run.yaml"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print or write the recipe, and tell what has no counterpart."""
    for path in arguments.files:
        if not path.is_file():
            raise UserError(f"{path}: no such file")
    if arguments.write and arguments.write.exists():
        raise UserError(f"{arguments.write} exists already; give another --write, or remove it")
    text, reading = import_files(arguments.files, ranks=arguments.ranks, model=arguments.model)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    if arguments.json:
        origins = {path: origin for path, (_, origin) in reading.settings.items()}
        print_json({"recipe": text, "origins": origins, "without": reading.without, "notes": reading.notes})
        return 0
    if not arguments.write:
        print(text, end="")
    for note in reading.notes:
        print(f"assumed: {note}", file=sys.stderr)
    for origin, why in reading.without:
        print(f"no counterpart: {origin}: {why}", file=sys.stderr)
    return 0
