"""The man pages: those that the parsers make now, installed with the package, and readable by `man`."""

import importlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from meshwright.cli.manual import pages
from meshwright.cli.parser import VERBS, Parser

ROOT = Path(__file__).resolve().parents[1]
MAN = ROOT / "man"


def test_the_pages_in_the_repository_are_those_of_the_parsers():
    written = {path.name: path.read_text() for path in MAN.iterdir()}
    assert written == pages(), "run python docs/make_man.py"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["data-files"]["share/man/man1"] == ["man/*.1"]


@pytest.mark.parametrize("name", pages())
def test_every_line_is_roff(name):
    """Known requests alone, and no text that roff would read as one."""
    for line in pages()[name].splitlines():
        if line.startswith("."):
            assert re.match(r"\.(TH|SH|TP|PP|B|I|nf|fi)\b|\.{3}$", line), line
        assert not line.startswith("'")
        assert not re.search(r"\\(?![e&fs-])", line), line


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_s_page_has_its_options_and_its_examples(verb):
    parser = Parser(verb)
    importlib.import_module(f"meshwright.cli.{verb}").add_arguments(parser)
    shown = _shown(MAN / f"meshwright-{verb}.1")
    for option in parser._option_string_actions:
        assert re.search(rf"^ +(\S+, )*{option}\b", shown, re.MULTILINE), option
    assert VERBS[verb].split(",")[0] in " ".join(shown.split())
    examples = (parser.epilog or "").partition("examples:\n")[2].splitlines()
    assert all(line.strip() in shown for line in examples if line.startswith("  "))


def _shown(page: Path) -> str:
    """A page as `man` prints it; without `man`, as this project reads roff."""
    if shutil.which("man") and shutil.which("groff"):
        environment = {"PATH": "/usr/bin:/bin", "MANWIDTH": "200", "LC_ALL": "C", "MAN_KEEP_FORMATTING": ""}
        words = ["man", "--warnings", "-l", str(page)]
        result = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
        assert not result.stderr
        return result.stdout
    text = re.sub(r"\\f[BIR]|\\&", "", page.read_text())
    return re.sub(r"^\.TP\n", "    ", text.replace(r"\-", "-").replace(r"\e", "\\"), flags=re.MULTILINE)
