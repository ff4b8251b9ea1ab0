"""The one place that makes tokens of text and of records, and says which of them carry loss."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshwright.data.chat import NO_TEMPLATE, ChatTemplate, Span, find_template
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.data import ChatSpec


class Encoded(NamedTuple):
    """The tokens of one text."""

    documents: tuple[np.ndarray, ...]
    """int32 each; of a record, ~id where a token is only read. Nothing where the record is left out."""
    note: str = ""
    """What happened to a record: nothing, `truncated`, or why it is left out, `overlong` or `unlabelled`."""
    error: str = ""
    """What is wrong with the record; then there are no documents."""


class Encoder(Protocol):
    """Makes tokens of texts, here or in another process."""

    @property
    def settings(self) -> dict[str, Any]:
        """Plain data from which `build_encoder` makes it again."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """One result for each text."""
        ...


class TextEncoder:
    """Text as it is; every token carries loss."""

    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer = tokenizer
        self.settings = {"files": dict(tokenizer.files)}

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """See `Encoder`."""
        return [Encoded((np.asarray(ids, np.int32),)) for ids in self.tokenizer.encode_batch(texts)]


class RecordEncoder:
    """Records as `records.py` writes them; conversations by a chat template."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None, chat: ChatSpec, max_labels: int):
        """`template` may be None where no record is a conversation; a document has at most `max_labels` labels, those
        of a preference's two sides together."""
        self.tokenizer, self.template, self.chat, self.max_labels = tokenizer, template, chat, max_labels
        about = [template and template.source, chat.model_dump(exclude={"template"}), max_labels]
        self.fingerprint = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        """Equal where the same records give the same tokens, for the same tokenizer."""

    @property
    def settings(self) -> dict[str, Any]:
        """See `Encoder`."""
        template = self.template and {"source": self.template.source, "name": self.template.name}
        chat = self.chat.model_dump()
        return {"files": dict(self.tokenizer.files), "template": template, "chat": chat, "labels": self.max_labels}

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """See `Encoder`."""
        return [self._encoded(json.loads(text)) for text in texts]

    def _encoded(self, record: Mapping[str, Any]) -> Encoded:
        sides = (record["chosen"], record["rejected"]) if "chosen" in record else (record,)
        try:
            documents = [self._tokens(side) for side in sides]
        except ValueError as error:
            return Encoded((), error=str(error))
        note = ""
        num_tokens = sum(len(ids) - 1 for ids in documents)
        if num_tokens > self.max_labels:
            note = "truncated" if self.chat.overlong == "truncate" else "overlong"
            documents = [ids[: self.max_labels // len(sides) + 1] for ids in documents]
        if self.chat.overlong == "error" and note:
            return Encoded(
                (),
                error=f"its {num_tokens} tokens are more than data.sequence_length={self.max_labels}; raise that as "
                "far as the model has positions (of eval, --sequence-length), or mend the record; a recipe may say "
                "data.chat.overlong=truncate or drop",
            )
        if note != "overlong" and not all((ids[1:] >= 0).any() for ids in documents):
            note = "unlabelled"
            if self.chat.unlabelled == "error":
                return Encoded((), error="nothing in it carries loss; mend it, or set data.chat.unlabelled=drop")
        return Encoded(() if note in ("overlong", "unlabelled") else tuple(documents), note)

    def _tokens(self, record: Mapping[str, Any]) -> np.ndarray:
        """One side's tokens, ~id where one is only read."""
        if "input_ids" in record:
            ids_T, labels_T = np.array(record["input_ids"], np.int64), np.array(record["labels"])
            outside = ids_T[(ids_T < 0) | (ids_T >= self.tokenizer.vocab_size)]
            if len(outside):
                raise ValueError(f"token {outside[0]} is none of the tokenizer's {self.tokenizer.vocab_size}")
            return np.where(labels_T >= 0, ids_T, ~ids_T).astype(np.int32)
        if "prompt" in record:
            given = self.tokenizer.encode_prompt(record["prompt"])
            answer = [*self.tokenizer.encode(record["completion"]), self.tokenizer.eos_id]
            trained_T = np.arange(len(given) + len(answer)) >= len(given)
            ids_T = np.array(given + answer, np.int32)
            return ids_T if self.chat.train_on == "all" else np.where(trained_T, ids_T, ~ids_T)
        return self._conversation(record)

    def _conversation(self, record: Mapping[str, Any]) -> np.ndarray:
        if self.template is None:
            raise ValueError(NO_TEMPLATE)
        messages = record["messages"]
        self._check_spelling(messages)
        text, spans = self.template.turns(
            messages, tools=record.get("tools"), given=record["given"], last=self.chat.train_on == "last"
        )
        ((ids, offsets),) = self.tokenizer.encode_marked([text])
        ids_T = np.array(ids, np.int32)
        if self.chat.train_on == "all":
            return ids_T
        return np.where(_within(spans, np.array(offsets).reshape(-1, 2)), ids_T, ~ids_T)

    def _check_spelling(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for message in messages:
            for token in self.tokenizer.special_tokens:
                if token in message["content"]:
                    raise ValueError(
                        f"a message of role {message['role']!r} spells the special token {token!r}, which would "
                        "be read as one"
                    )


def _within(spans: Sequence[Span], offsets_T2: np.ndarray) -> np.ndarray:
    """Which tokens stand for a character of a span, bool [T]; one that only begins before it does, too."""
    within_T = np.zeros(len(offsets_T2), bool)
    for start, end in spans:
        within_T |= (offsets_T2[:, 0] < end) & (offsets_T2[:, 1] > start)
    return within_T


def build_encoder(settings: Mapping[str, Any]) -> Encoder:
    """The encoder of these settings."""
    tokenizer = TextTokenizer(settings["files"], where="encoder")
    if "chat" not in settings:
        return TextEncoder(tokenizer)
    template = settings["template"] and ChatTemplate(
        settings["template"]["source"], tokenizer, name=settings["template"]["name"]
    )
    return RecordEncoder(tokenizer, template, ChatSpec(**settings["chat"]), settings["labels"])


def record_encoder(tokenizer: TextTokenizer, chat: ChatSpec, *, base_dir: Path, max_labels: int) -> RecordEncoder:
    """What makes tokens of records as the recipe says; without a template only a conversation is an error.

    Raises ValueError where the recipe names a template that cannot be used.
    """
    template = None
    if chat.template != "auto" or tokenizer.chat_template is not None:
        template = find_template(chat.template, tokenizer, base_dir)
    return RecordEncoder(tokenizer, template, chat, max_labels)
