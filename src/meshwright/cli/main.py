"""The command line: parses one verb and its options, and prints an error as one line with an exit status.

Exit status: as `EXIT` says, and 130 interrupted; a run's are in `launch/status.py`.
"""

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import meshwright
from meshwright.spec.errors import UserError
from meshwright.terminal import guarded_terminal, printable

VERBS = {
    "init": "list the preset recipes, or print one to start from",
    "import": "turn configuration files of other systems into a recipe",
    "check": "find what is wrong with a recipe, without training",
    "plan": "predict what fits, how fast and at what cost, without training",
    "verify": "prove that a recipe's layout computes what one process computes",
    "data": "tokenize a corpus, show its samples, prove what a run will see",
    "train": "train what a recipe says, on one process or many",
    "compare": "train a recipe in several engines in turns: speed, memory, losses",
    "rehearse": "run the whole job on fake ranks: memory, collectives, what would break",
    "generate": "continue prompts with a trained model",
    "chat": "talk to a trained model in the terminal",
    "serve": "put a trained model behind OpenAI's API, with a chat page",
    "eval": "loss and perplexity of a trained model on any text",
    "export": "write a trained model for Hugging Face, or its adapters for peft",
    "doctor": "show what this machine has and what is missing",
    "demo": "train, evaluate and sample a small model on this machine",
}
"""Every verb lives in `meshwright/cli/VERB.py`, imported only when it is used: `--help` never loads torch."""

FIRST_STEPS = """\
first steps:
  meshwright init demo > run.yaml
  meshwright check run.yaml
  meshwright train run.yaml

'meshwright VERB --help' explains a verb.
"""

EXIT = """\
exit status: 0 done; 1 something was found: wrong (check, data audit), different (verify), breaking (rehearse),
missing (doctor), or nothing fits (plan); 2 a mistake in the command line, the recipe or the data; train has more
"""

INTERRUPTED = 130
BROKEN_PIPE = 141
"""What a shell reports for a program that SIGINT or SIGPIPE ended."""


class UsageError(UserError):
    """A command line that makes no sense."""


class Parser(argparse.ArgumentParser):
    """Argparse, but mistakes are raised as `UsageError` and unknown options get a suggestion."""

    def __init__(self, verb: str) -> None:
        super().__init__(
            prog=f"meshwright {verb}",
            description=f"{VERBS[verb][0].upper()}{VERBS[verb][1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--debug", action="store_true", help="show the stack trace of an error")

    def error(self, message: str) -> NoReturn:
        """Called by argparse where it cannot go on."""
        raise UsageError(f"{message}; see '{self.prog} --help'")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Options and operands in any order; everything must be known."""
        arguments, unknown = self.parse_known_intermixed_args(list(self._completed(words)))
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"unexpected '{word}'")
            name = word.lstrip("-").split("=")[0]
            if "setting_called" in arguments and (setting := arguments.setting_called(name)):
                raise UsageError(f"unknown option '{word}'; a setting of the recipe is changed by {setting}=VALUE")
            hint = _did_you_mean(word.split("=")[0], self._option_string_actions) or f"; see '{self.prog} --help'"
            raise UsageError(f"unknown option '{word}'{hint}")
        return arguments

    def _completed(self, words: Sequence[str]) -> Iterator[str]:
        """The words, in which an option whose value may be left out takes only what can be its value.

        In `--resume training.steps=500`, argparse would take the setting for a checkpoint.
        """
        for word, following in zip(words, [*words[1:], ""], strict=False):
            action = self._option_string_actions.get(word)
            if action is not None and action.nargs == "?" and not _accepted(action.type, following):
                word = f"{word}={action.const}"
            yield word


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        os.putenv("PYTHONSAFEPATH", "1")  # whatever Python this process starts imports nothing from the user's folder
    try:
        with guarded_terminal():
            status = _run(words)
            sys.stdout.flush()  # here, so that a reader that has gone is noticed here
        return status
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt as stop:
        status = getattr(stop, "status", None)  # a `TrainingStopped` has one, and has said what happened
        if status is None:
            print("interrupted", file=sys.stderr)
        return INTERRUPTED if status is None else status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more can be said at exit either
        return BROKEN_PIPE
    except (UserError, OSError) as error:
        if "--debug" in words:
            traceback.print_exc()
        for line in _lines(error):
            print(f"error: {printable(line)}", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--debug" and len(words) > 1:
        words = words[1:]
    if words[0] == "--version":
        print(f"meshwright {meshwright.__version__}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        what = "option" if verb.startswith("-") else "verb"
        known = ["--help", "--version"] if what == "option" else VERBS
        hint = _did_you_mean(verb, known) or "; see 'meshwright --help'"
        raise UsageError(f"unknown {what} '{verb}'{hint}")
    module = importlib.import_module(f"meshwright.cli.{verb}")
    parser = Parser(verb)
    module.add_arguments(parser)
    arguments = parser.parse(words[1:])
    try:
        return module.run(arguments)
    except UserError as error:
        if not getattr(arguments, "recipe", None) or not arguments.recipe.is_file():
            raise
        # The verb has imported both.
        from meshwright.cli.common import with_place
        from meshwright.spec.recipe import RecipeError

        raise RecipeError([with_place(line, arguments) for line in _lines(error)]) from error


def _accepted(convert: Any, word: str) -> bool:
    try:
        convert(word)
    except ValueError:
        return False
    return True


def _help() -> str:
    verbs = "\n".join(f"  {verb:<10}{line}" for verb, line in VERBS.items())
    about = (meshwright.__doc__ or "").splitlines()[0]
    return f"usage: meshwright VERB ...\n\n{about}\n\nverbs:\n{verbs}\n\n{FIRST_STEPS}\n{EXIT}"


def _did_you_mean(word: str, known: Sequence[str] | dict) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _lines(error: UserError | OSError) -> list[str]:
    """What went wrong: one line per problem of a recipe, else one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return [f"{error.filename}: {(error.strerror or 'cannot be used').lower()}"]
    problems = getattr(error, "problems", None)
    return problems or [" ".join(str(error).split()) or type(error).__name__]
