"""The one place that says what a run reads: sources of text, the tokenizer, and how tokens become samples."""

from typing import Any, Literal

from pydantic import Field, field_validator

from meshwright.spec.base import Spec

STDLIB = "stdlib"
"""The path that stands for the embedded default corpus."""


class SourceSpec(Spec):
    """One source of documents. A string is short for `{path: string}`."""

    path: str = Field(min_length=1)
    """A file or a glob (`**` goes down), relative to the recipe. A .jsonl file holds one document per line,
    any other file is one document of UTF-8 text. `stdlib` is the standard library of this Python."""
    text_key: str = Field(default="text", min_length=1)
    """Key of the text in every line of a .jsonl file."""


class DataSpec(Spec):
    """What to train on and how it is cut into samples."""

    sources: tuple[SourceSpec, ...] = Field(default=(SourceSpec(path=STDLIB),), min_length=1)
    """Where documents come from: a list of sources, or one source alone (`sources: stdlib`)."""
    tokenizer: str = Field(default="auto", min_length=1)
    """A tokenizer.json, or a directory that holds one, relative to the recipe. auto: the tokenizer of the
    model's Hugging Face directory; for other models a byte-level BPE is trained on the training documents."""
    tokenizer_vocab: int = Field(default=4096, ge=257)
    """Vocabulary of a tokenizer that is trained: 256 bytes, the end-of-text token, and merges."""
    sequence_length: int = Field(default=1024, ge=1)
    """Tokens per sample."""
    packing: Literal["concatenated"] = "concatenated"
    """How documents become samples. concatenated: one stream, an end-of-text token after every document, cut
    every sequence_length tokens."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the documents kept for evaluation, chosen by a hash of their text; at least one document, and
    of a corpus of a single document its last part. 0 keeps none."""
    cache_dir: str = Field(default="runs/cache", min_length=1)
    """Folder for tokens and trained tokenizers, relative to the working directory. It may be deleted."""

    @field_validator("sources", mode="before")
    @classmethod
    def _one_source_alone(cls, value: Any) -> Any:
        sources = value if isinstance(value, list | tuple) else [value]
        return tuple({"path": source} if isinstance(source, str) else source for source in sources)
