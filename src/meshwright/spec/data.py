"""Data settings: sources of text or tokens, the tokenizer, and how tokens become samples."""

import datetime
from typing import Any, Literal

from pydantic import Field, field_validator

from meshwright.spec.base import Spec
from meshwright.spec.errors import UserError

STDLIB = "stdlib"
"""The path of the embedded default corpus."""

DATASET = "dataset:"
"""The prefix of a path that names a plugged-in dataset."""

HUB = "hub:"
"""The prefix of a path that names a dataset on the Hugging Face hub."""


Format = Literal["auto", "text", "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "tokenized"]
"""The format of a source's records."""


Column = Literal[
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "history",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "input_ids",
    "labels",
    "system",
    "tools",
    "functions",
    "weight",
    "train",
    "documents",
    "chat_template_kwargs",
    "completion_mask",
    "assistant_masks",
    "loss_mask",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "seq_lengths",
    "rejected_response",
    "rejected_messages",
    "rejected_tools",
    "rejected_image",
    "rejected_images",
    "rejected_audio",
    "rejected_audios",
    "rejected_video",
    "rejected_videos",
    "label",
    "kto_tag",
    "image",
    "images",
    "audio",
    "audios",
    "video",
    "videos",
]
"""The record columns that have a meaning."""


SMALLEST_VOCAB = 257
"""All bytes, and the end-of-text token."""


class SourceSpec(Spec):
    """One source of documents. A string is short for `{path: string}`."""

    path: str = Field(min_length=1)
    """A file or a glob (`**` matches folders), relative to the recipe. The extension determines the format: .jsonl,
    .csv, .parquet and .arrow hold one document per line or row, .json a list of them; .idx, or .bin beside an .idx,
    holds tokens as Megatron stores them; .bin alone is a raw file of `tokens`; any other file is one document of UTF-8
    text. Text, .json, .jsonl and .csv may be compressed (.gz, .zst). Or a folder saved by `datasets`; `hub:owner/name`
    on the Hugging Face hub; `stdlib`, the standard library of this Python; or `dataset:NAME`, an entry point of the
    group meshwright.datasets that yields texts, records or token ids."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of a plugged-in dataset."""
    name: str | None = Field(default=None, min_length=1)
    """Name in reports. A source with a name, like one with a weight, is evaluated separately."""
    format: Format = "auto"
    """Format of a line or row: text; messages (roles and contents); sharegpt (conversations of from and value); alpaca
    (instruction, input, output); prompt_completion; preference (chosen, rejected); tokenized (input_ids, and labels or
    masks). auto: detected from the columns."""
    text_key: str = Field(default="text", min_length=1)
    """Key or column of the text in .jsonl, .csv, .parquet, .arrow and datasets."""
    columns: dict[Column, str | None] = Field(default={})
    """Other names of a record's columns: format's name -> file's name, as in `{instruction: question}`. null ignores
    the column."""
    weight: float | None = Field(default=None, ge=1e-9, le=1e9)
    """Share of the trained tokens, relative to the other sources' weights; set it for every source or for none. Without
    weights, every document is seen equally often."""
    split: str = Field(default="train", min_length=1)
    """Split of a dataset."""
    subset: str | None = None
    """Subset (configuration) of a dataset on the hub."""
    tokens: Literal["uint16", "uint32"] | None = None
    """Integer type of a raw token file."""


Role = Literal["system", "developer", "user", "assistant", "tool"]
"""The roles in a conversation."""
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
"""Roles in sharegpt and older data -> OpenAI's names."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message for the thoughts before the answer, as in transformers."""


class ChatSpec(Spec):
    """How records of conversations, prompts and preferences become tokens, and which of these carry loss."""

    template: str = Field(default="auto", min_length=1)
    """Chat template: chatml, llama3, mistral, qwen, plain, or a Jinja file relative to the recipe. auto: the
    tokenizer's own."""
    template_arguments: dict[str, bool | int | float | str] = Field(default={})
    """Further variables of the template, such as `{enable_thinking: false}`."""
    date: str = Field(default="2025-01-01", pattern=r"^\d{4}-\d{2}-\d{2}$")
    """The date for templates that use it (`strftime_now`), so that tokens do not depend on the day."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens that carry loss: the turns of `roles_to_train` (of a prompt and its completion, the completion), only the
    last of these turns, or everything."""
    roles_to_train: tuple[Role, ...] = Field(default=("assistant",), min_length=1)
    """Roles whose turns carry loss."""
    train_on_eos: Literal["turn", "last", "none"] = "turn"
    """Which end-of-turn tokens of trained turns carry loss: all, the last turn's, or none."""
    thinking: Literal["template", "keep", "drop"] = "template"
    """Treatment of thoughts (`reasoning_content`, or `<think>` in an answer). template: as the template does, which
    often omits thoughts of earlier turns. keep: each turn is rendered as if it were the newest. drop: thoughts are
    removed."""
    special_tokens: Literal["error", "text", "drop"] = "error"
    """Treatment of a record whose messages contain a special token as text, such as <|im_end|>: raise an error, encode
    it as ordinary text, or drop the record."""
    overlong: Literal["error", "truncate", "drop"] = "error"
    """Treatment of a record longer than a sample: raise an error, truncate it, or drop it."""
    unlabelled: Literal["error", "drop"] = "error"
    """Treatment of a record without trained tokens: raise an error, or drop it."""

    @field_validator("date")
    @classmethod
    def _a_day(cls, value: str) -> str:
        try:
            datetime.date.fromisoformat(value)
        except ValueError as error:
            raise UserError(f"{value} is not a date: {error}") from error
        return value


class DataSpec(Spec):
    """The training data and how they are split into samples."""

    sources: tuple[SourceSpec, ...] = Field(default=(SourceSpec(path=STDLIB),), min_length=1)
    """Sources of documents: a list, or a single source (`sources: stdlib`)."""
    exclude: tuple[str, ...] = ()
    """Files that the sources leave out: a path or glob relative to the recipe, or several (`exclude: [drafts/**,
    bad.txt]`)."""
    undecodable: Literal["error", "skip"] = "error"
    """Treatment of a text file, or a line of a .jsonl file, that is not UTF-8: raise an error, or skip and count it."""
    tokenizer: str = Field(default="auto", min_length=1)
    """A tokenizer.json, or a directory that holds one, relative to the recipe, or the hub's id of a model in the local
    cache. auto: the tokenizer of the model's Hugging Face directory; for other models a byte-level BPE is trained on
    the training documents."""
    tokenizer_vocab: int = Field(default=4096, ge=SMALLEST_VOCAB)
    """Vocabulary size of a trained tokenizer: 256 bytes, the end-of-text token, and merges."""
    sequence_length: int = Field(default=1024, ge=1)
    """Tokens per sample."""
    packing: Literal["concatenated", "best_fit", "padded"] = "concatenated"
    """How documents become samples. concatenated: one stream, an end-of-text token after every document, cut every
    sequence_length tokens. best_fit: whole documents are packed into the fullest sample with room, longest first; only
    documents longer than a sample are cut. padded: every document is its own sample."""
    separate_documents: bool = False
    """Whether documents in one sample are isolated: no token attends to another document, positions restart at each
    document, and no label crosses a boundary."""
    chat: ChatSpec = ChatSpec()
    """Conversations, prompts and preferences."""
    order: Literal["shuffled", "given"] = "shuffled"
    """Order of samples: reshuffled in every epoch, or as in the data."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the documents held out for evaluation, chosen by a hash of their text: at least one document, or the
    last part of a single one. From token files, the last documents. 0 holds out none."""
    cache_dir: str = Field(default="runs/cache", min_length=1)
    """Folder for tokens and trained tokenizers, relative to the working directory. It may be deleted."""

    @field_validator("sources", mode="before")
    @classmethod
    def _one_source_alone(cls, value: Any) -> Any:
        sources = value if isinstance(value, list | tuple) else [value]
        return tuple({"path": source} if isinstance(source, str) else source for source in sources)

    @field_validator("exclude", mode="before")
    @classmethod
    def _one_glob_alone(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    @field_validator("sources")
    @classmethod
    def _all_weights_or_none(cls, sources: tuple[SourceSpec, ...]) -> tuple[SourceSpec, ...]:
        bare = [source.path for source in sources if source.weight is None]
        if 0 < len(bare) < len(sources):
            raise UserError(f"source {bare[0]} has no weight, but others have; give all sources a weight, or none")
        return sources
