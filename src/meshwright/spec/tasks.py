"""Evaluation tasks: their names and settings."""

from typing import Any

from pydantic import Field, model_validator

from meshwright.spec.base import Spec


class TaskSpec(Spec):
    """One task: your own questions, or a task of lm-evaluation-harness."""

    task: str = Field(min_length=1)
    """A .jsonl file of questions; a YAML file or the name of a task of lm-evaluation-harness (pip install
    'meshwright[eval]')."""
    shots: int | None = Field(default=None, ge=0)
    """Solved examples before each question. Default 0, or the task's own in lm-evaluation-harness."""
    shots_from: str | None = None
    """A .jsonl file with the examples. Default: the first `shots` questions of the file, which are then not asked."""
    limit: int | None = Field(default=None, ge=1)
    """Ask only the first N questions."""
    chat: bool = False
    """Whether each prompt is a user's message, rendered by the chat template."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"task": value} if isinstance(value, str) else value
