"""The judge's prompts, from text files, and the verdicts in its replies.

After Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena" (2023).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.judge.questions import JudgeQuestion
from meshwright.spec.errors import UserError

SHIPPED = Path(__file__).with_name("prompts")
"""Folder of the default prompts."""
FIELDS = {
    "pairwise": ("conversation_a", "conversation_b"),
    "single": ("conversation",),
    "reference": ("text",),
}
"""Prompt -> its required placeholders; `{reference}` may be left out."""

_FIELD = re.compile(r"\{(\w+)\}")
_CHOICE = re.compile(r"\[\[([ABC])\]\]")
_RATING = re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]")


@dataclass(frozen=True)
class JudgePrompts:
    """The texts of the prompts, with fields in braces."""

    texts: Mapping[str, str]

    def pairwise(self, question: JudgeQuestion, first: Sequence[str], second: Sequence[str]) -> str:
        """The prompt that asks which of the two last answers is better; each message so far has one answer."""
        return self._filled(
            "pairwise",
            question,
            len(first),
            conversation_a=_conversation(question, first, "assistant A"),
            conversation_b=_conversation(question, second, "assistant B"),
        )

    def single(self, question: JudgeQuestion, answer: Sequence[str]) -> str:
        """The prompt that asks for a rating of the last answer; each message so far has one answer."""
        conversation = _conversation(question, answer, "assistant")
        return self._filled("single", question, len(answer), conversation=conversation)

    def _filled(self, name: str, question: JudgeQuestion, turn: int, **values: str) -> str:
        shown, reference = "", question.reference
        if len(reference) == len(question.turns):
            reference = reference[:turn]  # one per turn, as in MT-bench: later ones would reveal the next turns
        if reference:
            shown = _fill(self.texts["reference"], {"text": "\n\n".join(reference)})
        return _fill(self.texts[name], {"reference": shown, **values})


def read_prompts(folder: Path | None) -> JudgePrompts:
    """The prompts in a folder (`pairwise.txt`, `single.txt`, `reference.txt`), and ours for missing ones.

    Raises `UserError` if one has no placeholder for an answer.
    """
    texts = {}
    for name, fields in FIELDS.items():
        own = None if folder is None else folder / f"{name}.txt"
        path = own if own is not None and own.is_file() else SHIPPED / f"{name}.txt"
        texts[name] = path.read_text(encoding="utf-8")
        missing = [field for field in fields if f"{{{field}}}" not in texts[name]]
        if missing:
            raise UserError(f"{path}: does not use {missing[0]}; write {{{missing[0]}}} where it belongs")
    return JudgePrompts(texts)


def choice(reply: str) -> str | None:
    """`model_a`, `model_b` or `tie`, from the last verdict in the reply; None if there is none."""
    choices = _CHOICE.findall(reply)
    return {"A": "model_a", "B": "model_b", "C": "tie"}[choices[-1]] if choices else None


def rating(reply: str) -> float | None:
    """The last rating from 1 to 10 in the reply; None if there is none."""
    ratings = [float(one) for one in _RATING.findall(reply)]
    return ratings[-1] if ratings and 1 <= ratings[-1] <= 10 else None


def _fill(text: str, values: Mapping[str, str]) -> str:
    """The text with its fields filled in; braces in values are unchanged."""
    return _FIELD.sub(lambda match: values.get(match[1], match[0]), text)


def _conversation(question: JudgeQuestion, answers: Sequence[str], name: str) -> str:
    turns = zip(question.turns, answers, strict=False)
    return "\n\n".join(f"### User:\n{turn}\n\n### {name[0].upper()}{name[1:]}:\n{answer}" for turn, answer in turns)
