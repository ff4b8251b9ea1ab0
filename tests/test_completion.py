"""Completion of the command line, asked for as a shell does."""

import os
import subprocess
import sys

import pytest

from meshwright.cli.completion import settings
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import Run


def completed(line: str) -> list[str]:
    """The words that a shell offers for the end of a line."""
    asks = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    answers, writes = os.pipe()
    code = f"import os, sys; os.dup2({writes}, 8); os.dup2(os.open(os.devnull, os.O_WRONLY), 9)\n"
    code += "from meshwright.cli.main import main; main(); print('went on')"
    command = [sys.executable, "-P", "-c", code]
    program = subprocess.run(command, env={**os.environ, **asks}, pass_fds=[writes], capture_output=True, text=True)
    os.close(writes)
    with os.fdopen(answers) as file:
        words = file.read().split("\n")
    assert program.stdout == "", "the process ends after its answer"
    assert program.stderr == ""
    return [word.strip() for word in words if word]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("meshwright pl", ["plan"]),
        ("meshwright train run.yaml training.clip", ["training.clip="]),
        ("meshwright train run.yaml layout=", ["layout=auto"]),
        ("meshwright train run.yaml training.compile=", ["training.compile=true", "training.compile=false"]),
        ("meshwright init chat", ["chat-qlora"]),
        ("meshwright import ds.json --model qwen3-23", ["qwen3-235b-a22b"]),
        ("meshwright plan run.yaml --cluster 8xh20", ["8xh20", "8xh200"]),
        ("meshwright plan llama-3.2-1", ["llama-3.2-1b"]),
        ("meshwright train --retry", ["--retry-oom"]),
    ],
)
def test_a_shell_is_offered_verbs_settings_values_and_names(line: str, expected: list[str]) -> None:
    assert completed(line) == expected


def test_every_offered_setting_exists_and_every_offered_value_is_of_its_kind() -> None:
    paths = list(settings(""))
    assert len(paths) > 150
    assert "training.optimizer.lr=" in paths
    errors = {word: problem(word) for path in paths for word in settings(path)}
    assert [word for word, text in errors.items() if "unknown key" in text] == []
    # A value that needs another setting is no mistake of the completion.
    wrong = [word for word, text in errors.items() if "is not allowed: must be" in text and "offload" not in word]
    assert wrong == []


def problem(word: str) -> str:
    """The error of a recipe with this setting; empty if there is none."""
    try:
        parse_spec("model: {family: gpt2}", Run, [word])
    except UserError as error:
        return str(error)
    return ""
