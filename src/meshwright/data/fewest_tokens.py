"""The fewest tokens that a text can have, from its bytes alone: a text that cannot fit is refused before it is encoded.

Every byte is part of one token. If no token with the byte b is longer than L(b) bytes, then b is at least 1 / L(b) of a
token, and the sum over a text's bytes is at most the number of its tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args
from unicodedata import normalize

import numpy as np
from tokenizers import pre_tokenizers

UnicodeForm = Literal["NFC", "NFD", "NFKC", "NFKD"]
SPACE, MARKED_SPACE = " ", "\u2581"
"""A space in a text, and in the tokens of SentencePiece's kind."""
WHITESPACE = "".join(map(chr, [*range(9, 14), *range(28, 33), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)]))
WHITESPACE += "\u2028\u2029\u202f\u205f\u3000"
ROUNDING = 1e-9


class FewestTokens:
    """The lower bound for one tokenizer. It is 0 where texts may lose parts before they become tokens, or any number of
    unknown characters may become one token."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        """`content`: of its tokenizer.json."""
        model, splits = content["model"], list(_steps(content.get("pre_tokenizer"), "pretokenizers"))
        self._forms = _forms(list(_steps(content.get("normalizer"), "normalizers")))
        self._shares_256: np.ndarray | None = None
        if self._forms is None or model.get("type", "BPE") != "BPE" or not all(map(_keeps_everything, splits)):
            return
        added = content.get("added_tokens") or ()
        if any(step["type"] == "ByteLevel" for step in splits):
            letters, tokens = _letters(), list(model["vocab"])
            if letters.keys() <= model["vocab"].keys():
                ours = [bytes(letters[one] for one in token if one in letters) for token in tokens]
                self._shares_256 = _shares([(token, token) for token in ours], added, self._forms)
        elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
            both = [(token.encode(), token.replace(MARKED_SPACE, SPACE).encode()) for token in model["vocab"]]
            self._shares_256 = _shares(both, added, self._forms)

    def of(self, text: str) -> int:
        """A number of tokens that the text has at least."""
        if self._shares_256 is None or self._forms is None:
            return 0
        for form in self._forms:
            text = normalize(form, text)
        counts_256 = np.bincount(np.frombuffer(text.encode(errors="ignore"), np.uint8), minlength=256)
        return int(counts_256 @ self._shares_256 * (1 - ROUNDING))


def _shares(tokens: list[tuple[bytes, bytes]], added: Any, forms: Sequence[UnicodeForm]) -> np.ndarray:
    """1 / L(b) for each byte, from the two readings of each token, of which the first is the longer one."""
    for token in added:
        text = token["content"]
        for form in forms:
            text = normalize(form, text)
        tokens.append((text.encode(), text.encode()))
    longest_256 = np.ones(256)
    for one, other in sorted(tokens, key=lambda pair: len(pair[0])):
        longest_256[list({*one, *other})] = max(1, len(one))
    shares_256 = 1 / longest_256
    if any(token.get("lstrip") or token.get("rstrip") for token in added):  # such a token takes all space around it
        shares_256[list(set(WHITESPACE.encode()))] = 0
    return shares_256


def _steps(step: Mapping[str, Any] | None, inside: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, in order."""
    if step is not None and step.get("type") == "Sequence":
        for one in step[inside]:
            yield from _steps(one, inside)
    elif step is not None:
        yield step


def _forms(steps: Sequence[Mapping[str, Any]]) -> list[UnicodeForm] | None:
    """The Unicode forms among the steps of a normalizer; None if another step may shorten a text."""
    spaces = {"pattern": {"String": SPACE}, "content": MARKED_SPACE}
    others = [step for step in steps if step["type"] not in (*get_args(UnicodeForm), "Prepend")]
    if any(step["type"] != "Replace" or {**step, **spaces} != step for step in others):
        return None
    return [step["type"] for step in steps if step["type"] in get_args(UnicodeForm)]


def _keeps_everything(step: Mapping[str, Any]) -> bool:
    """Whether a step of a pre-tokenizer removes nothing."""
    if step["type"] in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    return step["type"] in ("ByteLevel", "Metaspace", "Digits")


def _letters() -> dict[str, int]:
    """The letter of a byte-level tokenizer -> its byte: printable bytes are their own letters, the others follow from
    256 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
    assert letters.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
