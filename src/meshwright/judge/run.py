"""A judge's work: the prompts for every question, sent to the judge and recorded one by one, so that it can resume."""

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.judge.client import Reply
from meshwright.judge.prompts import JudgePrompts, choice, rating
from meshwright.judge.questions import JudgeQuestion, ModelAnswers
from meshwright.judge.ratings import WINNERS, Rated, Verdict
from meshwright.spec.errors import UserError
from meshwright.storage.jsonl import read_objects

Mode = Literal["pairwise", "single"]
CHARACTERS_PER_TOKEN = 4
"""A rough figure for English text, for estimates before anything is sent."""


@dataclass(frozen=True)
class Item:
    """One prompt to the judge."""

    question: str
    models: tuple[str, ...]
    """The models whose answers it shows, in order: two, or one that is rated."""
    prompt: str
    turn: int = 1
    """The message, by number, that the judged answers respond to; the first is 1."""

    def key(self, judge: str) -> str:
        """Equal for equal prompts to the same judge about the same models."""
        content = json.dumps([self.question, self.models, self.prompt, judge])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass
class TokensUsed:
    """Tokens that the judge read and wrote."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def price(self, price: tuple[float, float] | None) -> float | None:
        """The price, given the prices of a million tokens read and a million written."""
        if price is None:
            return None
        return (self.prompt_tokens * price[0] + self.completion_tokens * price[1]) / 1e6


def items_of(
    questions: Sequence[JudgeQuestion], answers: Sequence[ModelAnswers], mode: Mode, prompts: JudgePrompts
) -> list[Item]:
    """All prompts: for each turn of each question, each pair of answers in both orders, or each answer alone.

    Raises `UserError` if two models have the same name, or there are too few.
    """
    names = [each.model for each in answers]
    if len(set(names)) < len(names):
        raise UserError(f"--answers: two have the same name ({max(names, key=names.count)}); rename a file")
    if len(names) < (2 if mode == "pairwise" else 1):
        raise UserError("--answers: a comparison needs two or more; to rate a single one use --mode single")
    items = []
    for question, turn in ((one, turn) for one in questions for turn in range(1, len(one.turns) + 1)):
        for shown in itertools.permutations(answers, 2 if mode == "pairwise" else 1):
            turns = [one.turns[question.id][:turn] for one in shown]
            prompt = prompts.pairwise(question, *turns) if mode == "pairwise" else prompts.single(question, *turns)
            items.append(Item(question.id, tuple(one.model for one in shown), prompt, turn))
    return items


class VerdictJournal:
    """The file of verdicts: existing ones, and new ones as they arrive."""

    def __init__(self, path: Path, judge: str) -> None:
        self.path, self.judge, self._lock = path, judge, threading.Lock()
        self.records: dict[str, dict[str, Any]] = {}
        """Verdicts by their keys; of several, the last."""
        if path.is_file():
            _cut_unfinished_line(path)
            self.records = {row["key"]: row for _, row in read_objects(path) if isinstance(row.get("key"), str)}

    def record(self, item: Item) -> dict[str, Any]:
        """The record of the reply to this prompt; empty if there is none."""
        return self.records.get(item.key(self.judge), {})

    def has(self, item: Item) -> bool:
        """Whether the judge has given a verdict on this prompt."""
        record = self.record(item)
        return record.get("winner") is not None or record.get("rating") is not None

    def add(self, item: Item, reply: Reply) -> None:
        """Write a reply and its verdict."""
        record: dict[str, Any] = {"key": item.key(self.judge), "time": time.time(), "question_id": item.question}
        record["turn"] = item.turn
        if len(item.models) == 2:
            record |= {"model_a": item.models[0], "model_b": item.models[1], "winner": choice(reply.text)}
        else:
            record |= {"model": item.models[0], "rating": rating(reply.text)}
        record |= {
            "judge": self.judge,
            "judgment": reply.text,
            "prompt": item.prompt,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
        }
        with self._lock:
            self.records[record["key"]] = record
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def judge_all(
    items: Sequence[Item],
    journal: VerdictJournal,
    ask: Callable[[str], Reply],
    *,
    at_once: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TokensUsed:
    """Ask the judge about every item that is not in the journal, `at_once` at a time; returns the tokens spent.

    After an error, requests in progress are still recorded. Raises the first error.
    """
    waiting, cost, lock, stopping = (
        [item for item in items if not journal.has(item)],
        TokensUsed(),
        threading.Lock(),
        [],
    )

    def work(item: Item) -> None:
        if stopping:
            return
        reply = ask(item.prompt)
        journal.add(item, reply)
        with lock:
            cost.requests += 1
            cost.prompt_tokens += reply.prompt_tokens
            cost.completion_tokens += reply.completion_tokens
            progress(cost.requests, len(waiting))

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        futures = [pool.submit(work, item) for item in waiting]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            stopping.append(True)  # after an error or Ctrl-C, waiting requests then do nothing
    return cost


def estimate(items: Iterable[Item], journal: VerdictJournal, most_written: int) -> TokensUsed:
    """Estimated cost of judging the rest: prompts by their length, replies of maximum length."""
    waiting = [item for item in items if not journal.has(item)]
    read = sum(len(item.prompt) for item in waiting) // CHARACTERS_PER_TOKEN
    return TokensUsed(len(waiting), read, len(waiting) * most_written)


def verdicts_of(items: Sequence[Item], journal: VerdictJournal) -> list[Verdict]:
    """The verdicts on pairs, for the items that have one."""
    winners = [(item, journal.record(item).get("winner")) for item in items]
    return [
        Verdict(item.question, item.models[0], item.models[1], WINNERS[winner], item.turn)
        for item, winner in winners
        if winner is not None
    ]


def single_ratings(items: Sequence[Item], journal: VerdictJournal) -> list[Rated]:
    """The ratings of single answers, for the items that have one."""
    rated = [(item, journal.record(item).get("rating")) for item in items]
    return [Rated(item.question, item.models[0], float(given), item.turn) for item, given in rated if given is not None]


def unclear(items: Sequence[Item], journal: VerdictJournal) -> int:
    """Number of items whose reply held no verdict."""
    return sum(not journal.has(item) for item in items)


def _cut_unfinished_line(path: Path) -> None:
    """Remove the last line if a killed process has written only part of it."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
