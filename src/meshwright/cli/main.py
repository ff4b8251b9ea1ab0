"""The command line: parses one verb and its options, and prints an error as one line with an exit status.

`EXIT` lists the exit statuses; `launch/status.py` lists those of a run.
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
    "import": "convert configuration files of other systems to a recipe",
    "check": "report every error in a recipe, without training",
    "plan": "predict which layouts fit, their speed and cost, without training",
    "verify": "prove that a recipe's layout computes the same as one process",
    "data": "tokenize a corpus, show its samples, prove which tokens a run will see",
    "train": "train a recipe, on one process or many",
    "view": "show runs: one page of curves for one run or many, live or as a file",
    "runs": "list the runs in a folder: state, figures, and what sets their recipes apart",
    "diff": "show what differs between two runs: recipes, versions, data, code",
    "sweep": "train a recipe with several values of its settings, and name the best",
    "compare": "train a recipe in several engines: speed, memory, losses",
    "rehearse": "run the whole job on fake ranks: memory, collectives, what would break",
    "generate": "continue prompts with a trained model",
    "chat": "chat with a trained model in the terminal",
    "serve": "serve a trained model with OpenAI's API and a chat page",
    "eval": "measure a trained model: loss and perplexity on any text, accuracy in tasks",
    "judge": "compare models' answers by a judge model, or by people's votes",
    "export": "write a trained model for Hugging Face or llama.cpp, or its adapters for peft",
    "accept": "try the product on this machine's devices, and write one report",
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
exit status: 0 success; 1 a finding: an error (check, data audit), a difference (verify), a failure (rehearse),
something missing (doctor), or nothing fits (plan); 2 an error in the command line, the recipe or the data;
130 interrupted; train has more
"""

INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit statuses that a shell reports for a program ended by SIGINT or SIGPIPE."""


class UsageError(UserError):
    """An invalid command line."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UsageError` and suggests a name for unknown options."""

    def __init__(self, verb: str) -> None:
        super().__init__(
            prog=f"meshwright {verb}",
            description=f"{VERBS[verb][0].upper()}{VERBS[verb][1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--debug", action="store_true", help="show the stack trace of an error")

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`; argparse calls this on an error."""
        raise UsageError(f"{message}; see '{self.prog} --help'")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse options and operands in any order; raise `UsageError` for unknown ones."""
        arguments, unknown = self.parse_known_intermixed_args(list(self._completed(words)))
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"unexpected '{word}'")
            name = word.lstrip("-").split("=")[0]
            if "setting_called" in arguments and (setting := arguments.setting_called(name)):
                raise UsageError(f"unknown option '{word}'; to change a setting of the recipe, write {setting}=VALUE")
            hint = _did_you_mean(word.split("=")[0], self._option_string_actions) or f"; see '{self.prog} --help'"
            raise UsageError(f"unknown option '{word}'{hint}")
        return arguments

    def _completed(self, words: Sequence[str]) -> Iterator[str]:
        """The words, with the default inserted after an option whose optional value does not follow it.

        In `--resume training.steps=500`, argparse would read the setting as a checkpoint.
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
        os.putenv("PYTHONSAFEPATH", "1")  # child Python processes import nothing from the user's folder
    try:
        with guarded_terminal():
            status = _run(words)
            sys.stdout.flush()  # so that a closed pipe raises here
        return status
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt as stop:
        status = getattr(stop, "status", None)  # a `TrainingStopped` has one, and has printed the reason
        if status is None:
            print("interrupted", file=sys.stderr)
        return INTERRUPTED if status is None else status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's flush at exit succeeds
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
    arguments.command = verb, *words[1:]
    try:
        return module.run(arguments)
    except UserError as error:
        if not getattr(arguments, "recipe", None) or not arguments.recipe.is_file():
            raise
        # Already imported by the verb.
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
    """The error as lines: one per problem of a recipe, else one."""
    if isinstance(error, OSError) and error.filename is not None:
        return [f"{error.filename}: {(error.strerror or 'cannot be used').lower()}"]
    problems = getattr(error, "problems", None)
    return problems or [" ".join(str(error).split()) or type(error).__name__]
