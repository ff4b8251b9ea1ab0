"""The verbs, and the parser of their options and operands."""

import argparse
import difflib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from meshwright.spec.errors import UserError
from meshwright.terminal import USUAL_COLUMNS, folded

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

INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit statuses that a shell reports for a program ended by SIGINT or SIGPIPE."""


LONG_PROSE = 72
"""Columns from which a line of help continues in the next one."""


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

    def format_help(self) -> str:
        """The help in lines of at most 80 columns."""
        return "".join(f"{line}\n" for line in help_lines(super().format_help()))

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse options and operands in any order; raise `UsageError` for unknown ones."""
        arguments, unknown = self.parse_known_intermixed_args(list(self._completed(words)))
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"unexpected '{word}'")
            name = word.lstrip("-").split("=")[0]
            if "setting_called" in arguments and (setting := arguments.setting_called(name)):
                raise UsageError(f"unknown option '{word}'; to change a setting of the recipe, write {setting}=VALUE")
            hint = similar_word(word.split("=")[0], self._option_string_actions) or f"; see '{self.prog} --help'"
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


def help_lines(text: str) -> Iterator[str]:
    """A help text's lines, folded; prose that is broken already is joined first, and commands are broken by a
    backslash."""
    prose = ""
    for line in [*text.splitlines(), ""]:
        if len(prose) >= LONG_PROSE and line[:1].strip() and not line.startswith("exit status"):
            prose += f" {line}"
            continue
        yield from folded(prose, USUAL_COLUMNS) if prose else ()
        prose = line if line[:1].strip() else ""
        if line.startswith("  meshwright ") and len(line) > USUAL_COLUMNS:
            yield " \\\n".join(
                textwrap.wrap(line, USUAL_COLUMNS - 2, subsequent_indent=" " * 6, break_on_hyphens=False)
            )
        elif not prose:
            yield from folded(line, USUAL_COLUMNS)


def _accepted(convert: Any, word: str) -> bool:
    """Whether a word is meant for an option; a number out of range is, so that the error names the option."""
    try:
        convert(word)
    except ValueError:
        return False
    except argparse.ArgumentTypeError:
        return word[:1].isdigit()
    return True


def similar_word(word: str, known: Sequence[str] | dict) -> str:
    """A suggestion to append to an error about an unknown word; empty if no known word is similar."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
