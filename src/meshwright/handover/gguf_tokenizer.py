"""A Hugging Face tokenizer in GGUF's terms: tokens, their types, merges or scores, and the pre-tokenizer."""

import json
from dataclasses import dataclass
from typing import Any

from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens (`tokenizer.ggml.token_type`)."""

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

WORDS = {
    GPT2_WORDS: "gpt-2",
    _LLAMA_3_WORDS: "llama-bpe",
    _LLAMA_3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2",
}
"""Regular expression that splits words -> the name of llama.cpp's implementation (`tokenizer.ggml.pre`)."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer in GGUF, without its special tokens' ids and its template."""

    model: str
    """gpt2: byte-level BPE; llama: BPE over characters with a byte fallback, as SentencePiece writes it."""
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] | None = None
    """Byte-level BPE: pairs, first merged first."""
    scores: tuple[float, ...] | None = None
    """SentencePiece: of two merges, the one whose token has the higher score comes first."""
    space_prefix: bool = False
    """SentencePiece: whether a space is prepended to a text."""


def vocabulary_of(tokenizer: TextTokenizer, rows: int) -> Vocabulary:
    """The vocabulary of a tokenizer for an embedding of this many rows.

    Raises `UserError` if llama.cpp has no such tokenizer.
    """
    content = json.loads(tokenizer.files["tokenizer.json"])
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise UserError(f"GGUF: the tokenizer is {model.get('type')}; only BPE is supported")
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"GGUF: the tokenizer has {tokenizer.vocab_size} tokens, but the embedding {rows} rows; "
            f"{tokenizer.more_rows}"
        )
    added = {token["id"]: token for token in content.get("added_tokens") or ()}
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id |= {number: token["content"] for number, token in added.items()}
    fallback = bool(model.get("byte_fallback"))

    def type_of(number: int) -> int:
        token = by_id.get(number)
        if token is None:
            return UNUSED
        if token == model.get("unk_token"):
            return UNKNOWN
        if number in added:
            return CONTROL if added[number].get("special") else USER_DEFINED
        return BYTE if fallback and len(token) == 6 and token.startswith("<0x") else NORMAL

    tokens = tuple(by_id.get(number, f"[PAD{number}]") for number in range(rows))
    types = tuple(type_of(number) for number in range(rows))
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    if not fallback:
        pre = _words(content.get("pre_tokenizer"))
        if content.get("normalizer") not in (None, {"type": "NFC"}):
            raise UserError("GGUF: llama.cpp does not support this tokenizer's normalizer")
        pairs = tuple(" ".join(part.replace(" ", "\u0120") for part in merge) for merge in merges)
        return Vocabulary(model="gpt2", pre=pre, tokens=tokens, types=types, merges=pairs)
    rank: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        rank.setdefault(left + right, place)
    scores = tuple(-float(rank.get(token, len(merges))) for token in tokens)
    prefix = "Prepend" in json.dumps(content.get("normalizer")) or _prepends(content.get("pre_tokenizer"))
    return Vocabulary(model="llama", pre="default", tokens=tokens, types=types, scores=scores, space_prefix=prefix)


def composes(tokenizer: TextTokenizer) -> bool:
    """Whether it first normalizes text to Unicode's form NFC, which llama.cpp does not."""
    return json.loads(tokenizer.files["tokenizer.json"]).get("normalizer") == {"type": "NFC"}


def _words(pre_tokenizer: Any) -> str:
    """llama.cpp's name for the way a byte-level tokenizer splits words."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") if step else None for step in steps]
    if kinds == ["ByteLevel"] and not steps[0].get("add_prefix_space") and steps[0].get("use_regex", True):
        return WORDS[GPT2_WORDS]
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = steps[0].get("pattern", {}).get("Regex")
        if pattern in WORDS:
            return WORDS[pattern]
    raise UserError(
        f"GGUF: this tokenizer's pre-tokenizer is none of those known in llama.cpp ({', '.join(WORDS.values())})"
    )


def _prepends(pre_tokenizer: Any) -> bool:
    kind = (pre_tokenizer or {}).get("type")
    return kind == "Metaspace" and (pre_tokenizer or {}).get("prepend_scheme", "always") != "never"
