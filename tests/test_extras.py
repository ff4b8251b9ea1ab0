"""Extras: every message and every page gives the same command, and it installs what is missing."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from meshwright.cli import doctor
from meshwright.data import sources
from meshwright.spec.extras import install

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/meshwright"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def strings(path):
    """(line, text, whether it is documentation) of the strings of a program, f-strings as far as they are written."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in documentation


def test_no_message_writes_the_command_itself():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text[:80]}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "extras.py"
        for line, text, documentation in strings(path)
        if "meshwright[" in text and not documentation
    ]
    assert not wrong, "use meshwright.spec.extras.install"


@pytest.mark.parametrize("path", [*PAGES, *sorted(SOURCE.rglob("*.py"))], ids=lambda path: path.name)
def test_extras_that_are_named_exist(path):
    every = re.findall(r"meshwright\[([a-z,]+)\]", path.read_text())
    assert {extra for names in every for extra in names.split(",")} <= set(EXTRAS)


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_is_one(extra):
    assert install(extra) == f"pip install 'meshwright[{extra}]'"
    assert install(extra, python="/x/python") == f"/x/python -m pip install 'meshwright[{extra}]'"


def test_what_is_missing_is_in_the_extra_that_is_named():
    missing = {package: extra for package, (extra, _) in doctor.EXTRAS.items()} | sources.EXTRAS
    for package, extra in missing.items():
        assert package in {re.match(r"[\w-]+", requirement)[0] for requirement in EXTRAS[extra]}
