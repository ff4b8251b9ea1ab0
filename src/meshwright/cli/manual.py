"""Man pages, from the same parsers as `--help`: one for the program, one for each verb."""

import argparse
import importlib
import re
from collections.abc import Iterator

from meshwright.cli.main import ABOUT, EXIT, FIRST_STEPS
from meshwright.cli.parser import VERBS, Parser

PROGRAM = "meshwright"


def pages() -> dict[str, str]:
    """The text of every man page by its file name."""
    return {f"{PROGRAM}.1": _text(_program()), **{f"{PROGRAM}-{verb}.1": _text(_verb(verb)) for verb in VERBS}}


def _program() -> Iterator[str]:
    yield from _opening(PROGRAM, "train language models under any parallel layout, from one recipe")
    yield from (".B meshwright", ".I VERB", "...", ".SH DESCRIPTION", _plain(ABOUT), ".SH VERBS")
    for verb, line in VERBS.items():
        yield from (".TP", rf"\fB{_plain(f'{PROGRAM}-{verb}')}\fR(1)", _plain(line))
    yield from _sections(f"{FIRST_STEPS}\n{EXIT}")


def _verb(verb: str) -> Iterator[str]:
    parser = Parser(verb)
    importlib.import_module(f"meshwright.cli.{verb}").add_arguments(parser)
    yield from _opening(f"{PROGRAM}-{verb}", VERBS[verb])
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    yield from (_plain(usage), ".SH DESCRIPTION", _plain(parser.description or ""))
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if actions:
            yield f".SH {'OPERANDS' if group.title == 'positional arguments' else _plain(group.title or '').upper()}"
        for action in actions:
            yield from (".TP", rf"\fB{_plain(formatter._format_action_invocation(action))}\fR")
            yield _plain(" ".join(formatter._expand_help(action).split()) if action.help else "")
    yield from _sections(parser.epilog or "")
    yield from (".SH SEE ALSO", rf"\fB{PROGRAM}\fR(1)")


def _opening(name: str, about: str) -> Iterator[str]:
    yield f".TH {_plain(name).upper()} 1"
    yield from (".SH NAME", rf"{_plain(name)} \- {_plain(about)}", ".SH SYNOPSIS")


def _sections(text: str) -> Iterator[str]:
    """The parts of an epilog: a title before a colon, then prose, or indented lines that stay as they are."""
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        title, colon, rest = part.partition(":")
        if colon and re.fullmatch(r"[a-z ]+", title):
            yield f".SH {title.upper()}"
        else:
            rest = part
            yield ".PP"
        lines = rest.strip("\n").splitlines()
        if any(line.startswith("  ") for line in lines):
            yield from (".nf", *map(_plain, lines), ".fi")
        else:
            yield _plain(" ".join(" ".join(lines).split()))


def _plain(text: str) -> str:
    """Text that roff prints as it is: hyphens can be copied, and no line is a request."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text[:1] in (".", "'") else text


def _text(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines if line)
