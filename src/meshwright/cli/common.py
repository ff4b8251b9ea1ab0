"""Arguments that verbs share, and the preset recipes."""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

from meshwright.cli.ranks import add_layout_argument, weights_of
from meshwright.launch.signals import StopRequest
from meshwright.launch.status import TrainingStopped
from meshwright.spec.errors import UserError
from meshwright.spec.precision import ComputeName
from meshwright.spec.problems import RecipeError, did_you_mean, setting_called
from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import Run
from meshwright.spec.text import quoted
from meshwright.storage.durable import write_durably

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
"""Folder of the preset recipes."""


def presets() -> dict[str, Path]:
    """Every preset recipe by name."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands `RECIPE [a.b=c ...]`."""
    parser.set_defaults(setting_called=partial(setting_called, spec=Run))  # for a setting written as an option
    parser.add_argument("recipe", metavar="RECIPE", type=Path, help="recipe file (YAML)")
    parser.add_argument(
        "overrides",
        metavar="a.b=c",
        nargs="*",
        default=[],
        help="override a setting of the recipe, as in training.steps=100 or 'layout={dp_shard: 2}'",
    )


def whole_number(must: str, *, least: int = 0, most: float = math.inf) -> Callable[[str], int]:
    """A parser of an option's whole number; its error, which argparse reports with the option's name, says `must`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is not allowed: must be {must}")
        return int(text)

    return parse


positive = whole_number("a whole number, at least 1", least=1)
whole = whole_number("a whole number of at least 0")
PORTS = whole_number("a port, 0 to 65535 (0: any free one)", most=65535)


def serve_until_interrupted(server: ThreadingHTTPServer) -> None:
    """Print a local page's address, and serve it until Ctrl-C."""
    print(f"http://{server.server_address[0]}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()


def add_page_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option `--html`; `what` is on the page."""
    parser.add_argument("--html", metavar="FILE", type=Path, help=f"write {what} as one page that needs no other file")


def write_page(path: Path, page: str) -> None:
    """Write the page of `--html`, and say so beside the results."""
    write_durably(path, page)
    print(f"{path} written", file=sys.stderr)


def check_page_name(path: Path) -> None:
    """Raise `UserError` if the page's file would be a folder or in none, or is a file of another kind that exists."""
    if path.is_dir():
        raise UserError(f"--html {path} is a folder; give the name of a file, as in {path / 'page.html'}")
    if path.exists() and path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--html {path} exists and is not a page; give a name that ends with .html")
    check_folder_of("--html", path)


def check_folder_of(option: str, path: Path) -> None:
    """Raise `UserError` if there is no folder for an option's file."""
    if not path.parent.is_dir():
        make = f"mkdir -p {quoted(path.parent)}"
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it first: {make}")


@contextlib.contextmanager
def stoppable(work: str) -> Iterator[None]:
    """Raise `TrainingStopped` on a signal inside the block, so that the block ends the processes it has started; print
    that `work` is incomplete."""
    try:
        with StopRequest(raises=True):
            yield
    except TrainingStopped:
        print(f"stopped before {work} was complete", file=sys.stderr)
        raise


def add_model_arguments(parser: argparse.ArgumentParser, *, family: bool = False, compiles: bool = False) -> None:
    """Add the operands MODEL and `layout.tp=N`, and the options of opening a model; --family and --compile if asked."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="run directory, checkpoint or Hugging Face directory")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(ComputeName),
        help="default: the run's precision; else bf16 on a GPU",
    )
    add_ema_argument(parser)
    if family:
        add_family_argument(parser)
    parser.add_argument(
        "--weights-from-disk",
        action="store_true",
        default=None,
        help="read each layer's weights from disk when it computes (default: only if they exceed free memory)",
    )
    if compiles:
        parser.add_argument(
            "--compile",
            action=argparse.BooleanOptionalAction,
            help="generate with steps that a C++ compiler builds once for this machine's processor (default: on CPUs, "
            "for supported models in fp32 and bf16)",
        )
    add_layout_argument(parser)


def open_model(arguments: argparse.Namespace, path: Path | None = None) -> Any:
    """The trained model at `path`, by default MODEL, opened as the options say."""
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.serve.trained import open_trained

    trained = open_trained(
        path or arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        averaged=arguments.ema,
        family=getattr(arguments, "family", None),
        weights=weights_of(arguments),
    )
    note_weights(trained)
    return trained


def note_weights(trained: Any) -> None:
    """Print what a user should know about the weights of an opened model: where they are, what was left out."""
    from meshwright.checkpoint.hf import about_left_out
    from meshwright.serve.from_disk import about_disk

    left_out = "" if trained.run else about_left_out(trained.source, trained.spec)
    for line in filter(None, (about_disk(trained.model), left_out)):
        note(line)


def compile_steps(arguments: argparse.Namespace, *models: Any) -> None:
    """Compile the steps of generation if the option asks for it; without it, for models that support it."""
    if arguments.compile is False:
        return
    from meshwright.models.compiled import compile_step, compile_where_possible

    for model in models:
        (compile_step if arguments.compile else compile_where_possible)(model, note)


def note(line: str) -> None:
    """Print a line about the model to standard error."""
    print(f"note: {line}", file=sys.stderr, flush=True)


def add_family_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that makes transformers compute the model."""
    parser.add_argument(
        "--family",
        choices=["transformers"],
        help="compute a Hugging Face directory's model with transformers, even if its family is one of ours",
    )


SAMPLING: dict[str, tuple[str, float, str]] = {
    "temperature": ("T", 0.8, "0: always the most likely token (default 0.8)"),
    "top_k": ("K", 0, "sample from the K most likely tokens"),
    "top_p": ("P", 1.0, "sample from the most likely tokens with total probability P"),
    "min_p": ("P", 0.0, "sample from tokens at least P times as likely as the most likely one"),
    "repetition_penalty": ("R", 1.0, "above 1: makes repeated tokens less likely"),
    "seed": ("N", 0, "seed of sampling (default 0)"),
}
"""Options of sampling: placeholder, default value, help. An option's values have the type of its default."""


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of sampling and the stop texts."""
    for name, (placeholder, default, meaning) in SAMPLING.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, metavar=placeholder, type=type(default), default=default, help=meaning)
    parser.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="stop before this text; may be repeated"
    )


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the sampling options."""
    return {name: getattr(arguments, name) for name in SAMPLING}


def add_ema_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for averaged weights."""
    parser.add_argument(
        "--ema", action="store_true", help="use the moving average of the weights (of a run with the callback ema)"
    )


def next_commands(commands: Iterable[str]) -> str:
    """The commands to try next, as lines of text."""
    return "next        " + "\n            ".join(commands)


def unused_folder(wanted: Path) -> Path:
    """`wanted`; if it exists, `wanted-2`, `wanted-3` and so on."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def example_prompt(*, has_template: bool) -> str:
    """Arguments of `generate` for a model with or without a chat template."""
    return "--chat --prompt 'What is a tuple?'" if has_template else "--prompt 'Once upon a time'"


def read_recipe(arguments: argparse.Namespace) -> Run:
    """The recipe of the command line, with overrides applied.

    Raises UserError for an invalid recipe, and if the name is a preset's instead of a file's.
    """
    path: Path = arguments.recipe
    if not path.exists():
        raise UserError(no_recipe_at(path))
    with foreign_files_named(path):
        return load_recipe(path, arguments.overrides)


def no_recipe_at(path: Path) -> str:
    """The error for a recipe's path where nothing is, with a hint at what is near it."""
    if str(path) in presets():
        return f"'{path}' is a preset, not a file; save it first: meshwright init {path} > {path}.yaml"
    there = [one.name for one in path.parent.glob("*.y*ml")]
    return f"{path}: no such file or directory{did_you_mean(path.name, there, likeness=0.75)}"


@contextlib.contextmanager
def foreign_files_named(path: Path) -> Iterator[None]:
    """Where the recipe at `path` is invalid because it is another system's file, say how to convert it."""
    try:
        yield
    except RecipeError as error:
        from meshwright.imports.systems import describe_foreign

        if foreign := describe_foreign(path):
            raise UserError(foreign) from error
        raise
