"""Runs all tasks of a list on a model: your own questions, and lm-evaluation-harness's."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.spec.tasks import TaskSpec
from meshwright.tasks.examinee import Examinee
from meshwright.tasks.harness import HarnessTask, find_task, run_harness_task
from meshwright.tasks.own import OwnTask, open_task, run_task
from meshwright.tasks.result import TaskResult

QUESTIONS = ".jsonl"
"""Suffix of a file of questions."""


@dataclass(frozen=True)
class Tasks:
    """Tasks, ready to run."""

    tasks: Sequence[OwnTask | HarnessTask]

    def ask(self, examinee: Examinee) -> list[TaskResult]:
        """The results of every task, and of each task of a group."""
        results = []
        for task in self.tasks:
            results += [run_task(task, examinee)] if isinstance(task, OwnTask) else run_harness_task(task, examinee)
        return results


def open_tasks(specs: Sequence[TaskSpec], base_dir: Path) -> Tasks:
    """The named tasks, with files relative to `base_dir`.

    Raises `UserError` if a task cannot be found, a file cannot be used, or two have the same name.
    """
    tasks = [
        open_task(spec, base_dir) if spec.task.endswith(QUESTIONS) else find_task(spec, base_dir) for spec in specs
    ]
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two tasks are named {twice}; rename a file")
    return Tasks(tasks)
