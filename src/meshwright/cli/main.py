"""The command line: parses one verb and its options, and prints an error as one line with an exit status.

`EXIT` lists the exit statuses; `launch/status.py` lists those of a run.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from meshwright.cli.completion import complete
from meshwright.cli.output import Printed, print_json_error
from meshwright.cli.parser import BROKEN_PIPE, INTERRUPTED, VERBS, Parser, UsageError, help_lines, similar_word
from meshwright.spec.errors import UserError
from meshwright.terminal import columns, folded, guarded_terminal, printable
from meshwright.version import __version__

ABOUT = "Meshwright trains and fine-tunes language models with any parallel strategy from one recipe."

FIRST_STEPS = """\
first steps:
  meshwright init demo > run.yaml
  meshwright check run.yaml
  meshwright train run.yaml

'meshwright VERB --help' explains a verb.
"""

VERBATIM = ("chat", "generate", "import", "init", "demo")
"""Verbs whose output is a model's, or a recipe."""
EXIT = """\
exit status: 0 success; 1 a finding: an error (check, data audit), a difference (verify), a failure (rehearse),
something missing (doctor), or nothing fits (plan); 2 an error in the command line, the recipe or the data;
130 interrupted; train has more
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return the exit status."""
    words, before = list(sys.argv[1:] if argv is None else argv), Printed.objects

    def ended(status: int, reason: str) -> int:
        """The status; with `--json`, the reason is an object where none is printed yet."""
        if status and "--json" in words and Printed.objects == before:
            print_json_error(reason, status)
        return status

    if argv is None:
        complete()
        os.putenv("PYTHONSAFEPATH", "1")  # child Python processes import nothing from the user's folder
    try:
        with guarded_terminal(folds="--json" not in words and (words[:1] or [""])[0] not in VERBATIM):
            status = _run(words)
            sys.stdout.flush()  # so that a closed pipe raises here
        return ended(status, "failed; standard error says why")
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt as stop:
        status = getattr(stop, "status", None)  # a `TrainingStopped` has one; without a message, the reason is printed
        if status is None or str(stop):
            print("interrupted" if status is None else stop, file=sys.stderr)
        return ended(INTERRUPTED if status is None else status, str(stop) or "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's flush at exit succeeds
        return BROKEN_PIPE
    except (UserError, OSError) as error:
        if "--debug" in words:
            traceback.print_exc()
        for line in _lines(error):
            print(*folded(f"error: {printable(line)}", columns(sys.stderr)), sep="\n", file=sys.stderr)
        return ended(2, "\n".join(_lines(error)))


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print("\n".join(help_lines(_help())))
        return 0
    if words[0] == "--debug" and len(words) > 1:
        words = words[1:]
    if words[0] == "--version":
        print(f"meshwright {__version__}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        what = "option" if verb.startswith("-") else "verb"
        known = ["--help", "--version"] if what == "option" else VERBS
        hint = similar_word(verb, known) or "; see 'meshwright --help'"
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
        from meshwright.spec.problems import RecipeError
        from meshwright.spec.recipe import with_place
        from meshwright.spec.run import RecipeFile

        file = RecipeFile(arguments.recipe, tuple(arguments.overrides))
        raise RecipeError([with_place(line, file) for line in _lines(error)]) from error


def _help() -> str:
    verbs = "\n".join(f"  {verb:<10}{line}" for verb, line in VERBS.items())
    return f"usage: meshwright VERB ...\n\n{ABOUT}\n\nverbs:\n{verbs}\n\n{FIRST_STEPS}\n{EXIT}"


def _lines(error: UserError | OSError) -> list[str]:
    """The error as lines: one per problem of a recipe, else one."""
    if isinstance(error, OSError) and error.filename is not None:
        return [f"{error.filename}: {(error.strerror or 'cannot be used').lower()}"]
    problems = getattr(error, "problems", None)
    return problems or [" ".join(str(error).split()) or type(error).__name__]
