"""The one place that says what a run reads: sources of text or tokens, the tokenizer, and how tokens become samples."""

from typing import Any, Literal

from pydantic import Field, field_validator

from meshwright.spec.base import Spec

STDLIB = "stdlib"
"""The path that stands for the embedded default corpus."""

HUB = "hub:"
"""What a path begins with that names a dataset on the Hugging Face hub."""


Format = Literal["auto", "text", "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "tokenized"]
"""What a record of a source is."""


SMALLEST_VOCAB = 257
"""All bytes, and the end of a text."""


class SourceSpec(Spec):
    """One source of documents. A string is short for `{path: string}`."""

    path: str = Field(min_length=1)
    """A file or a glob (`**` goes down), relative to the recipe; its ending says what it is. .jsonl, .csv, .parquet and
    .arrow hold one document per line or row, .json a list of them; .idx, or .bin beside one, holds tokens as Megatron
    stores them; .bin alone is a raw file of `tokens`; any other file is one document of UTF-8 text. Text, .json, .jsonl
    and .csv may be compressed (.gz, .zst). Also the folder of a dataset that `datasets` saved, `hub:owner/name` on the
    Hugging Face hub, or `stdlib`, the standard library of this Python."""
    name: str | None = Field(default=None, min_length=1)
    """What reports call this source. A source with a name is evaluated by itself, as one with a weight is."""
    format: Format = "auto"
    """What a line or row holds: text; messages (roles and contents); sharegpt (conversations of from and value); alpaca
    (instruction, input, output); prompt_completion; preference (chosen, rejected); tokenized (input_ids, labels).
    auto: what its columns say."""
    text_key: str = Field(default="text", min_length=1)
    """Key or column of the text in .jsonl, .csv, .parquet, .arrow and datasets."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the tokens that are trained on, relative to the other sources' weights; every source has one or none
    has. Without weights every document is seen equally often."""
    split: str = Field(default="train", min_length=1)
    """Split of a dataset."""
    subset: str | None = None
    """Subset (configuration) of a dataset on the hub."""
    tokens: Literal["uint16", "uint32"] | None = None
    """Integers of a raw token file."""


class ChatSpec(Spec):
    """How records of conversations, prompts and preferences become tokens, and which of these carry loss."""

    template: str = Field(default="auto", min_length=1)
    """How a conversation is written down: chatml, llama3, mistral, qwen, plain, or a Jinja file relative to the recipe.
    auto: the tokenizer's own chat template."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """What carries loss: the assistant's turns (of a prompt and its completion, the completion), the last one only, or
    everything."""
    overlong: Literal["error", "truncate", "drop"] = "error"
    """What happens to a record of more tokens than a sample has: an error, its end is cut off, or it is left out."""
    unlabelled: Literal["error", "drop"] = "error"
    """What happens to a record in which nothing carries loss: an error, or it is left out."""


class DataSpec(Spec):
    """What to train on and how it is cut into samples."""

    sources: tuple[SourceSpec, ...] = Field(default=(SourceSpec(path=STDLIB),), min_length=1)
    """Where documents come from: a list of sources, or one source alone (`sources: stdlib`)."""
    tokenizer: str = Field(default="auto", min_length=1)
    """A tokenizer.json, or a directory that holds one, relative to the recipe, or the hub's id of a model in the local
    cache. auto: the tokenizer of the model's Hugging Face directory; for other models a byte-level BPE is trained on
    the training documents."""
    tokenizer_vocab: int = Field(default=4096, ge=SMALLEST_VOCAB)
    """Vocabulary of a tokenizer that is trained: 256 bytes, the end-of-text token, and merges."""
    sequence_length: int = Field(default=1024, ge=1)
    """Tokens per sample."""
    packing: Literal["concatenated", "best_fit", "padded"] = "concatenated"
    """How documents become samples. concatenated: one stream, an end-of-text token after every document, cut
    every sequence_length tokens. best_fit: documents are put whole into the fullest sample that has room, the longest
    first; only those longer than a sample are cut. padded: every document is a sample of its own."""
    separate_documents: bool = False
    """Whether documents of one sample are kept apart: no token sees another document's, positions count from each
    document's first token, and no label crosses a border."""
    chat: ChatSpec = ChatSpec()
    """Conversations, prompts and preferences."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the documents kept for evaluation, chosen by a hash of their text; at least one document, and
    of a single document its last part. Of files of tokens the last documents. 0 keeps none."""
    cache_dir: str = Field(default="runs/cache", min_length=1)
    """Folder for tokens and trained tokenizers, relative to the working directory. It may be deleted."""

    @field_validator("sources", mode="before")
    @classmethod
    def _one_source_alone(cls, value: Any) -> Any:
        sources = value if isinstance(value, list | tuple) else [value]
        return tuple({"path": source} if isinstance(source, str) else source for source in sources)

    @field_validator("sources")
    @classmethod
    def _all_weights_or_none(cls, sources: tuple[SourceSpec, ...]) -> tuple[SourceSpec, ...]:
        bare = [source.path for source in sources if source.weight is None]
        if 0 < len(bare) < len(sources):
            raise ValueError(f"source {bare[0]} has no weight but others have; give every source one, or none")
        return sources
