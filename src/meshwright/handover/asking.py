"""Queries to another program about an export: questions go as JSON to a separate process, answers come back as JSON."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError

PATIENCE = 1800.0
"""Seconds that a program may take for all questions."""


@dataclass(frozen=True, kw_only=True)
class ProgramAnswers:
    """A program's results for an export."""

    version: str
    logprobs: list[list[float]]
    """For each prompt: the log-probability of every possible next token, natural logarithms."""
    texts: list[list[int]]
    """Tokens of each text, including those that are put before a text."""
    conversations: list[list[int] | None]
    """Tokens of each conversation up to the assistant's turn; None if its template was refused."""


def ask(program: str, command: Sequence[str], questions: Mapping[str, Any]) -> ProgramAnswers:
    """The answers of `command`, which receives the paths of the questions' and the answers' files.

    Raises `UserError`, naming the `program`, if it fails or takes longer than half an hour.
    """
    with tempfile.TemporaryDirectory() as folder:
        input_file, answered = Path(folder, "questions.json"), Path(folder, "answers.json")
        input_file.write_text(json.dumps(questions))
        run = [*command, str(input_file), str(answered)]
        try:
            ended = subprocess.run(run, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise UserError(f"the export was refused: {program} did not read it within {PATIENCE:.0f} s") from None
        except OSError as error:
            raise UserError(f"the export was refused: {program} does not start ({error})") from None
        if ended.returncode or not answered.exists():
            raise UserError(f"the export was refused: {program} cannot read it ({_reason(ended.stderr)})")
        return ProgramAnswers(**json.loads(answered.read_text()))


def _reason(stderr: bytes) -> str:
    """The message of a program that failed: the last line of a Python traceback, or else the first about an error."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    if any(line.endswith("Traceback (most recent call last):") for line in lines):
        raised = [line for line in lines if ("Error: " in line or line.endswith("Error")) and "/" not in line[:1]]
        lines = raised[-1:] or lines[-1:]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it printed nothing")
