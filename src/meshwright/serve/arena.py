"""The arena's votes: which of two answers people prefer, one line of a .jsonl file each; `judge --votes` reads them."""

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LONGEST = 64
"""Most messages of a conversation."""
_lock = threading.Lock()


class ArenaMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class Vote(BaseModel):
    """A vote in the form of the published ones (Zheng et al., 2023)."""

    model_config = ConfigDict(extra="forbid")

    model_a: str = Field(min_length=1, max_length=200)
    model_b: str = Field(min_length=1, max_length=200)
    winner: Literal["model_a", "model_b", "tie", "tie (bothbad)"]
    conversation_a: list[ArenaMessage] = Field(min_length=1, max_length=LONGEST)
    conversation_b: list[ArenaMessage] = Field(min_length=1, max_length=LONGEST)

    @model_validator(mode="after")
    def _of_two(self) -> "Vote":
        if self.model_a == self.model_b:
            raise ValueError("model_a and model_b are the same")
        return self


def add_vote(file: Path, vote: Vote) -> None:
    """Append a vote and its time; equal questions have equal ids."""
    questions = [message.content for message in vote.conversation_a if message.role == "user"]
    number = hashlib.sha256(json.dumps(questions).encode()).hexdigest()[:16]
    record: dict[str, Any] = {"question_id": number, "time": time.time(), **vote.model_dump()}
    line = json.dumps(record, ensure_ascii=False) + "\n"
    with _lock, file.open("a", encoding="utf-8") as votes:
        votes.write(line)
        votes.flush()
        os.fsync(votes.fileno())
