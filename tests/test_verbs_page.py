"""The page of the verbs names every verb and every option, and none that does not exist."""

import importlib
import re
from pathlib import Path

import pytest

from meshwright.cli.parser import VERBS, Parser

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "verbs.md").read_text()
COMMON = {"-h", "--help", "--debug"}


def test_every_verb_has_its_line_and_its_section():
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == list(VERBS)
    for verb, line in VERBS.items():
        assert f"| [`{verb}`](#{verb}) | {line} |" in PAGE


@pytest.mark.parametrize("verb", VERBS)
def test_the_usage_of_a_verb_has_exactly_its_options(verb):
    parser = Parser(verb)
    importlib.import_module(f"meshwright.cli.{verb}").add_arguments(parser)
    (usage,) = re.findall(
        rf"^    meshwright {verb}\b(.*?)\n\n", PAGE.split(f"## {verb}\n")[1], re.MULTILINE | re.DOTALL
    )
    assert set(re.findall(r"--[\w-]+", usage)) == set(parser._option_string_actions) - COMMON
