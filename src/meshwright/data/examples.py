"""Encoding of texts and records to tokens, with the trained ones marked."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.data import thoughts
from meshwright.data.chat import NO_TEMPLATE, ChatTemplate, find_template
from meshwright.data.marks import Span
from meshwright.data.sources import SourceFile
from meshwright.data.tokenizer import TextTokenizer
from meshwright.data.turns import Conversation, Message
from meshwright.spec.data import ChatSpec
from meshwright.spec.errors import UserError


class EncodedText(NamedTuple):
    """The tokens of one text."""

    documents: tuple[np.ndarray, ...]
    """int32 each; in a record, a token without loss is stored as ~id. Empty if the record is left out."""
    note: str = ""
    """The treatment of a record: empty, `truncated`, or the reason why it is left out: `overlong`, `unlabelled`,
    `unweighted` or `spelled`."""
    error: str = ""
    """The error in the record; then there are no documents."""


class TextEncoder:
    """Encodes plain text; every token carries loss."""

    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer = tokenizer
        self.settings = {"files": dict(tokenizer.files), "rows": tokenizer.rows}
        """Plain data from which `build_encoder` rebuilds it in another process."""

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """One result for each text."""
        try:
            return [EncodedText((np.asarray(ids, np.int32),)) for ids in self.tokenizer.encode_batch(texts)]
        except UserError as error:
            if len(texts) == 1:
                return [EncodedText((), error=str(error))]
            return [self.encode([text])[0] for text in texts]


class RecordEncoder:
    """Encodes records in the form of `records.py`; conversations are rendered by a chat template."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None, chat: ChatSpec, max_labels: int):
        """`template` may be None if no record is a conversation. A document has at most `max_labels` labels; the two
        sides of a preference count together."""
        self.tokenizer, self.template, self.chat, self.max_labels = tokenizer, template, chat, max_labels
        self._special = tokenizer.special_pattern
        about = [template and template.source, chat.model_dump(mode="json", exclude={"template"}), max_labels]
        self.fingerprint = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        """A hash of the settings; with equal hash and tokenizer, the same records give the same tokens."""

    @property
    def settings(self) -> dict[str, Any]:
        """As in `TextEncoder`."""
        template = self.template and {"source": self.template.source, "name": self.template.name}
        chat = self.chat.model_dump(mode="json")
        files, rows = dict(self.tokenizer.files), self.tokenizer.rows
        return {"files": files, "rows": rows, "template": template, "chat": chat, "labels": self.max_labels}

    def note(self, files: Sequence[SourceFile]) -> str:
        """A remark about conversations among the files whose ends of turns are not trained; empty if there are none."""
        rendered = any(file.is_records and file.format != "tokenized" for file in files)
        return self.template.without_end() if self.template and rendered and self.chat.train_on_eos != "none" else ""

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """One result for each record."""
        return [self._encoded(json.loads(text)) if text else EncodedText(()) for text in texts]

    def _encoded(self, record: Mapping[str, Any]) -> EncodedText:
        if record.get("weight") == 0:
            return EncodedText((), "unweighted")
        sides = (record["chosen"], record["rejected"]) if "chosen" in record else (record,)
        if self.chat.special_tokens == "drop" and any("messages" in side and self._spelled(side) for side in sides):
            return EncodedText((), "spelled")
        try:
            documents = [self._tokens(side) for side in sides]
        except UserError as error:
            return EncodedText((), error=str(error))
        note = ""
        num_tokens = sum(len(ids) - 1 for ids in documents)
        if num_tokens > self.max_labels:
            note = "truncated" if self.chat.overlong == "truncate" else "overlong"
            documents = [ids[: self.max_labels // len(sides) + 1] for ids in documents]
        if self.chat.overlong == "error" and note:
            return EncodedText(
                (),
                error=f"its {num_tokens} tokens are more than data.sequence_length={self.max_labels}; raise it (in "
                "eval, --sequence-length) up to the model's positions, shorten the record, or set "
                "data.chat.overlong=truncate or drop",
            )
        if note != "overlong" and not all((ids[1:] >= 0).any() for ids in documents):
            note = "unlabelled"
            if self.chat.unlabelled == "error":
                return EncodedText((), error="it has no trained tokens; fix it, or set data.chat.unlabelled=drop")
        return EncodedText(() if note in ("overlong", "unlabelled") else tuple(documents), note)

    def _tokens(self, record: Mapping[str, Any]) -> np.ndarray:
        """One side's tokens, ~id for a token without loss."""
        if "input_ids" in record:
            ids_T, labels_T = np.array(record["input_ids"], np.int64), np.array(record["labels"])
            outside = ids_T[(ids_T < 0) | (ids_T >= self.tokenizer.vocab_size)]
            if len(outside):
                raise UserError(
                    f"token {outside[0]} is outside the tokenizer's vocabulary of {self.tokenizer.vocab_size}"
                )
            self.tokenizer.checked(record["input_ids"])
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
            raise UserError(NO_TEMPLATE)
        spelled = self._spelled(record)
        if spelled and self.chat.special_tokens != "text":
            raise UserError(
                f"a message of role {spelled[0]!r} contains the special token {spelled[1]!r} as text; set "
                "data.chat.special_tokens=text to encode it as ordinary text, or drop to leave the record out"
            )
        conversation = self._written(record, self._wanted(record))
        ids, offsets = self.tokenizer.encode_conversation(conversation.text, conversation.texts if spelled else ())
        ids_T = np.array(ids, np.int32)
        offsets_T2 = np.array(offsets).reshape(-1, 2)
        if self.chat.train_on == "all":
            left_out = [span for turn in conversation.turns.values() for span in turn.parts]
            return np.where(_within(left_out, offsets_T2), ~ids_T, ids_T)
        return np.where(_within(self._trained(conversation), offsets_T2), ids_T, ~ids_T)

    def _written(self, record: Mapping[str, Any], wanted: Sequence[int]) -> Conversation:
        """The rendered conversation, with thoughts according to the recipe."""
        template = self.template
        assert template is not None
        messages: Sequence[Message] = record["messages"]
        find = partial(template.turns, tools=record.get("tools"), variables=record.get("variables", {}))
        if self.chat.thinking == "drop":
            messages = thoughts.without(messages)
        if self.chat.thinking != "keep":
            return find(messages, wanted)
        if not template.writes_thoughts:
            messages = thoughts.in_answers(messages)
        return thoughts.kept(messages, wanted, find)

    def _wanted(self, record: Mapping[str, Any]) -> list[int]:
        """Indices of the messages that carry loss; if everything does, of those that do not."""
        weights = [message.get("weight") for message in record["messages"]]
        if self.chat.train_on == "all":
            return [number for number, weight in enumerate(weights) if weight == 0]
        numbers = range(record["given"], len(weights))
        places = [number for number in numbers if record["messages"][number]["role"] in self.chat.roles_to_train]
        places = places[-1:] if self.chat.train_on == "last" else places
        return [number for number in numbers if weights[number] or (weights[number] is None and number in places)]

    def _trained(self, conversation: Conversation) -> list[Span]:
        """The characters that carry loss."""
        turns = list(conversation.turns.values())
        whole = {"turn": turns, "last": turns[-1:], "none": []}[self.chat.train_on_eos]
        spans = [span for turn in turns for span in turn.parts[:-1]]
        return spans + [turn.parts[-1] if turn in whole else Span(turn.parts[-1].start, turn.end) for turn in turns]

    def _spelled(self, record: Mapping[str, Any]) -> tuple[str, str] | None:
        """(role, special token) of the first message whose text contains one."""
        texts = [(message["role"], json.dumps(message, ensure_ascii=False)) for message in record["messages"]]
        for name in ("tools", "variables"):
            texts.append((name, json.dumps(record.get(name), ensure_ascii=False)))
        matches = ((role, self._special.search(text)) for role, text in texts)
        return next(((role, match[0]) for role, match in matches if match), None)


Encoder = TextEncoder | RecordEncoder


def _within(spans: Sequence[Span], offsets_T2: np.ndarray) -> np.ndarray:
    """Which tokens overlap a span, bool [T]."""
    within_T = np.zeros(len(offsets_T2), bool)
    for start, end in spans:
        within_T |= (offsets_T2[:, 0] < end) & (offsets_T2[:, 1] > start)
    return within_T


def build_encoder(settings: Mapping[str, Any]) -> Encoder:
    """The encoder of these settings."""
    tokenizer = TextTokenizer(settings["files"], where="encoder").for_rows(settings["rows"])
    if "chat" not in settings:
        return TextEncoder(tokenizer)
    chat = ChatSpec(**settings["chat"])
    template = settings["template"] and ChatTemplate(
        settings["template"]["source"], tokenizer, name=settings["template"]["name"], chat=chat
    )
    return RecordEncoder(tokenizer, template, chat, settings["labels"])


def record_encoder(tokenizer: TextTokenizer, chat: ChatSpec, *, base_dir: Path, max_labels: int) -> RecordEncoder:
    """The encoder of records for a recipe; without a template, conversations are an error.

    Raises UserError if the recipe names a template that cannot be used.
    """
    template = None
    if chat.template != "auto" or tokenizer.chat_template is not None:
        template = find_template(chat.template, tokenizer, base_dir, chat)
    return RecordEncoder(tokenizer, template, chat, max_labels)
