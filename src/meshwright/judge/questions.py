"""Questions for models, and the answers to be judged, read from .jsonl files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.storage.jsonl import read_objects


@dataclass(frozen=True)
class JudgeQuestion:
    """A user's messages, asked one after another."""

    id: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()
    """Correct answers for the judge: one for each turn, or any number for all turns."""
    category: str = ""
    """A category with separate results, such as `math`."""


@dataclass(frozen=True)
class ModelAnswers:
    """One model's answers."""

    model: str
    turns: Mapping[str, tuple[str, ...]]
    """Question's id -> the answer to each of its messages."""


def read_questions(path: Path, limit: int | None = None) -> list[JudgeQuestion]:
    """The questions of a file: `turns` and `question_id` as in MT-bench, or `question` (or `prompt`).

    Raises `UserError` if a line is not a question, or two have the same id.
    """
    questions: dict[str, JudgeQuestion] = {}
    for place, row in read_objects(path):
        turns = row.get("turns", row.get("question", row.get("prompt")))
        turns, reference = _texts(turns), _texts(row.get("reference") or [])
        if not turns:
            raise UserError(f"{place}: is not a question: give question (text), or turns (a list of texts)")
        if reference is None:
            raise UserError(f"{place}: reference must be a text, or a list of texts")
        number = str(row.get("question_id", row.get("id", len(questions) + 1)))
        if number in questions:
            raise UserError(f"{place}: question {number} occurs twice; give each its own question_id")
        questions[number] = JudgeQuestion(number, turns, reference, str(row.get("category") or ""))
    if not questions:
        raise UserError(f"{path}: contains no question")
    return list(questions.values())[:limit]


def read_answers(path: Path, questions: Sequence[JudgeQuestion], model: str | None = None) -> ModelAnswers:
    """A model's answers to the questions: `choices[0].turns` and `question_id` as in MT-bench, or `answer`, with an
    `id` or in the questions' order.

    Raises `UserError` if an answer is missing, or has too few turns.
    """
    answers: dict[str, tuple[str, ...]] = {}
    for index, (place, row) in enumerate(read_objects(path)):
        choices = row.get("choices")
        turns = choices[0].get("turns") if isinstance(choices, list) and choices else row.get("answer")
        turns = _texts(turns)
        if not turns:
            raise UserError(f"{place}: is not an answer: give answer (text), or choices[0].turns (a list of texts)")
        order = questions[index].id if index < len(questions) else str(index + 1)
        answers[str(row.get("question_id", row.get("id", order)))] = tuple(turns)
        model = model or row.get("model_id")
    for question in questions:
        if len(answers.get(question.id, ())) < len(question.turns):
            raise UserError(f"{path}: question {question.id} has no answer to each of its {len(question.turns)} turns")
    return ModelAnswers(str(model or path.stem), answers)


def answer_record(question: JudgeQuestion, model: str, turns: Sequence[str]) -> dict[str, Any]:
    """One answer in MT-bench's form."""
    return {"question_id": question.id, "model_id": model, "choices": [{"index": 0, "turns": list(turns)}]}


def _texts(value: Any) -> tuple[str, ...] | None:
    """A text, or a list of texts, as a tuple; None if it is neither."""
    value = [value] if isinstance(value, str) else value
    return tuple(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else None
