"""Questions with known answers, read from .jsonl files, and the extraction of answers from a model's text.

The columns determine a file's layout. No torch here.
"""

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.storage.jsonl import read_objects

_BEHIND_HASHES = re.compile(r"####\s*(-?[0-9.,]+)")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_ANSWER_IS = re.compile(r"(?:final answer is|the answer is):?\s*(.+?)(?:\.\s|\.?$)", re.IGNORECASE | re.MULTILINE)
_UNITS = re.compile(r"\\(?:text|mbox)\{[^{}]*\}\s*$")
_PLAIN_FRACTION = re.compile(r"^(-?\d+)/(-?\d+)$")

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LAYOUTS = (
    "question, choices, answer (MMLU); question, A, B, C, D, answer (MMLU); question, choices {text, label}, answerKey "
    "(ARC); ctx, endings, label (HellaSwag); problem, solution (MATH); question, answer (GSM8K, or any short answer)"
)
"""The layouts, in words."""

Extract = Callable[[str], str | None]
"""Takes a model's text, returns the answer in it; None if there is none."""


@dataclass(frozen=True)
class Question:
    """One question. The answer is the likeliest of `choices`, or a generated text."""

    prompt: str
    solved: str
    """The answer part of an example."""
    choices: tuple[str, ...] = ()
    """Continuations to choose from; none: the model generates its answer."""
    right: int = 0
    """Index of the right choice."""
    answers: tuple[str, ...] = ()
    """The right answers of a question without choices, normalized."""
    head: str = ""
    """The text before the first example."""


@dataclass(frozen=True)
class Layout:
    """How questions of one layout are answered and scored."""

    name: str
    read: Callable[[Mapping[str, Any]], Question]
    metrics: Mapping[str, Extract] = field(default_factory=dict)
    """For questions without choices: metric -> the function that finds the answer in the model's text."""
    by_length: bool = False
    """Whether choices are also compared per byte (acc_norm)."""
    stops: tuple[str, ...] = ()
    """Texts before which the model's answer ends."""
    max_tokens: int = 256
    """Most tokens of an answer."""


def number_behind_hashes(text: str) -> str | None:
    """The number after `####`, at the end of GSM8K's solutions."""
    match = _BEHIND_HASHES.search(text)
    return match and plain_number(match[1])


def last_number(text: str) -> str | None:
    """The last number of the text."""
    numbers = _NUMBER.findall(text)
    return plain_number(numbers[-1]) if numbers else None


def plain_number(text: str) -> str:
    """A number without currency, thousands separators and final dot: `$1,234.` is `1234`."""
    return text.strip().replace("$", "").replace(",", "").rstrip(".")


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\boxed 5`, or the text after "the answer is"; normalized."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        answers = _ANSWER_IS.findall(text)
        return plain_math(answers[-1]) if answers else None
    rest = text[text.index("box", start) :].removeprefix("boxed").removeprefix("box")
    if not rest.startswith("{"):
        return plain_math(rest.split("$")[0]) if rest.startswith(" ") else None
    depth = 0
    for place, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return plain_math(rest[1:place])
    return None


def plain_math(text: str) -> str:
    r"""An expression in a normal form, after Hendrycks et al. (2021): without spaces, units, `\left` and `\right`, with
    `\frac{a}{b}` for its short forms and for `a/b`."""
    for old, new in (("\n", ""), ("\\!", ""), ("\\,", ""), ("\\;", ""), ("tfrac", "frac"), ("dfrac", "frac")):
        text = text.replace(old, new)
    for old in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$", "\\%", "%"):
        text = text.replace(old, "")
    text = _UNITS.sub("", text.strip().rstrip(".")).replace(" ", "")
    text = re.sub(r"(?<![\d])\.(\d)", r"0.\1", text)
    name, _, value = text.partition("=")
    text = value if value and len(name) <= 2 else text
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\w)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac(\{[^{}]*\})(\w)", r"\\frac\1{\2}", text)
    return _PLAIN_FRACTION.sub(r"\\frac{\1}{\2}", text)


def plain_text(text: str) -> str:
    """Text without case, punctuation and repeated spaces."""
    return " ".join("".join(letter for letter in text.casefold() if letter not in string.punctuation).split())


def _letters(prompt: str, texts: Any, right: int, subject: Any) -> Question:
    texts = [str(text) for text in texts]
    if not 0 <= right < len(texts) <= len(LETTERS):
        raise ValueError(f"the answer is number {right} of {len(texts)} choices")
    listed = "".join(f"\n{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))
    about = f" about {str(subject).replace('_', ' ')}" if subject else ""
    return Question(
        prompt=f"{prompt.strip()}{listed}\nAnswer:",
        solved=f" {LETTERS[right]}",
        choices=tuple(f" {letter}" for letter in LETTERS[: len(texts)]),
        right=right,
        head=f"The following are multiple choice questions (with answers){about}.\n\n",
    )


def _index(answer: Any, texts: list[str]) -> int:
    """The right choice, given by its number, its letter or its text."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer
    if str(answer) in texts:
        return texts.index(str(answer))
    if len(str(answer).strip()) == 1 and str(answer).strip().upper() in LETTERS:
        return LETTERS.index(str(answer).strip().upper())
    if str(answer).strip().isdigit():
        return int(str(answer))
    raise ValueError(f"answer {str(answer)[:40]!r} is neither a choice's number, nor its letter, nor its text")


def _mmlu(row: Mapping[str, Any]) -> Question:
    texts = [str(text) for text in row["choices"]]
    return _letters(row["question"], texts, _index(row["answer"], texts), row.get("subject"))


def _mmlu_columns(row: Mapping[str, Any]) -> Question:
    texts = [str(row[letter]) for letter in "ABCD"]
    return _letters(row["question"], texts, LETTERS.index(str(row["answer"]).strip().upper()), row.get("subject"))


def _texts(prompt: str, texts: Any, right: int) -> Question:
    choices = tuple(f" {str(text).strip()}" for text in texts)
    if not 0 <= right < len(choices):
        raise ValueError(f"the answer is number {right} of {len(choices)} choices")
    return Question(prompt=prompt, solved=choices[right], choices=choices, right=right)


def _arc(row: Mapping[str, Any]) -> Question:
    right = list(row["choices"]["label"]).index(row["answerKey"])
    return _texts(f"Question: {row['question']}\nAnswer:", row["choices"]["text"], right)


def _hellaswag(row: Mapping[str, Any]) -> Question:
    return _texts(row["ctx"].strip(), row["endings"], int(row["label"]))


def _gsm8k(row: Mapping[str, Any]) -> Question:
    answer = number_behind_hashes(row["answer"])
    if answer is None:
        raise ValueError("answer has no #### followed by a number")
    return Question(f"Question: {row['question']}\nAnswer:", f" {row['answer']}", answers=(answer,))


def _math(row: Mapping[str, Any]) -> Question:
    answer = plain_math(str(row["answer"])) if row.get("answer") else boxed(row["solution"])
    if answer is None:
        raise ValueError("solution has no \\boxed{} answer")
    return Question(f"Problem:\n{row['problem']}\n\nSolution:", f" {row['solution']}", answers=(answer,))


def _short(row: Mapping[str, Any]) -> Question:
    given = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    if not given:
        raise ValueError("answer is an empty list")
    texts = [str(one) for one in given]
    return Question(f"Question: {row['question']}\nAnswer:", f" {texts[0]}", answers=tuple(map(plain_text, texts)))


MMLU = Layout("MMLU", _mmlu)
MMLU_COLUMNS = Layout("MMLU", _mmlu_columns)
ARC = Layout("ARC", _arc, by_length=True)
HELLASWAG = Layout("HellaSwag", _hellaswag, by_length=True)
GSM8K = Layout(
    "GSM8K", _gsm8k, {"exact_match": number_behind_hashes, "exact_match_flexible": last_number}, stops=("Question:",)
)
MATH = Layout("MATH", _math, {"exact_match": boxed}, stops=("Problem:",), max_tokens=512)
SHORT = Layout("short answers", _short, {"exact_match": plain_text}, stops=("\n",), max_tokens=64)


def layout_of(row: Mapping[str, Any]) -> Layout | None:
    """The layout of a record with these columns; None if no layout matches."""
    has = row.keys().__ge__
    if has({"question", "choices", "answerKey"}) and isinstance(row["choices"], dict):
        return ARC
    if has({"question", "choices", "answer"}):
        return MMLU
    if has({"question", "answer", *"ABCD"}):
        return MMLU_COLUMNS
    if has({"ctx", "endings", "label"}):
        return HELLASWAG
    if has({"problem", "solution"}):
        return MATH
    if has({"question", "answer"}):
        return GSM8K if isinstance(row["answer"], str) and "####" in row["answer"] else SHORT
    return None


def read_questions(path: Path) -> tuple[Layout, list[Question]]:
    """The layout and the questions of a .jsonl file.

    Raises `UserError` if a line is not a question of the layout of the first.
    """
    layout, questions = None, []
    for place, row in read_objects(path):
        row_layout = layout_of(row)
        if row_layout is None:
            raise UserError(f"{place}: no known format has the columns {', '.join(row)}; known are {LAYOUTS}")
        layout = layout or row_layout
        if row_layout is not layout:
            raise UserError(
                f"{place}: has the columns of {row_layout.name}, but the first line has those of {layout.name}"
            )
        try:
            questions.append(layout.read(row))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise UserError(f"{place}: is not a question in the format {layout.name}: {error}") from error
    if layout is None:
        raise UserError(f"{path}: contains no questions")
    return layout, questions
