"""The lower bound of a text's tokens, and special tokens spelled out in texts: one pass, and the right tokens."""

import json
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from conversations import chat_tokenizer
from meshwright.data import tokenizer as tokenizer_module
from meshwright.data.fewest_tokens import FewestTokens
from meshwright.data.tokenizer import TextTokenizer, numbers_tokenizer, train_tokenizer

CORPUS = [f"def add_{n}(x):\n    return x + {n}   # é ü \u212a{'=' * (n % 9)}\n" for n in range(80)]
LETTERS = "abcdefx_=+() \n\t\u3000é\u0301\u212a\u1fef\uac00\u1100\u1161🙂\u2581<|>"


def byte_level(normalizer: Any = None, *added: AddedToken) -> TextTokenizer:
    inner = Tokenizer.from_str(train_tokenizer(CORPUS, 340).files["tokenizer.json"].decode())
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.add_special_tokens(["<|im_end|>", *added])
    return read(inner)


def sentencepiece() -> TextTokenizer:
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.ByteFallback()
    special = ["<unk>", "<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=450, special_tokens=special, show_progress=False))
    content = json.loads(inner.to_str())
    content["added_tokens"] = content["added_tokens"][:2]
    return TextTokenizer({"tokenizer.json": json.dumps(content).encode()}, where="test")


def read(inner: Tokenizer) -> TextTokenizer:
    return TextTokenizer({"tokenizer.json": inner.to_str().encode()}, where="test")


KINDS: dict[str, Callable[[], TextTokenizer]] = {
    "byte-level": byte_level,
    "composed": lambda: byte_level(normalizers.NFC()),
    "compatible": lambda: byte_level(normalizers.Sequence([normalizers.NFKC()])),
    "taking space": lambda: byte_level(None, AddedToken("<|end|>", rstrip=True, special=True)),
    "bytes as a fallback": sentencepiece,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens(kind: str) -> None:
    """Random texts, whole tokens in random order, and runs of the longest tokens, which the bound nearly reaches."""
    tokenizer, draw = KINDS[kind](), random.Random(0)
    bound = FewestTokens(json.loads(tokenizer.files["tokenizer.json"]))
    tokens = [tokenizer.decode([number]) for number in range(tokenizer.vocab_size)]
    longest = max(tokens, key=lambda token: len(token.encode()))
    texts = ["".join(draw.choices(LETTERS, k=draw.randrange(200))) for _ in range(200)]
    texts += ["".join(draw.choices(tokens, k=draw.randrange(60))) for _ in range(200)]
    texts += ["K\u0301" * 50, "\u212a" * 50, "\u1100\u1161" * 50, "<|end|>" + " " * 500, "\u2581 " * 50, longest * 100]
    for text in texts:
        for ids, _ in (tokenizer.encode_marked([text])[0], (tokenizer.encode(text), None)):
            assert bound.of(text) <= len(ids), text
    assert bound.of(longest * 100) >= 50


def test_a_text_that_may_lose_parts_has_no_bound() -> None:
    """Or whose unknown characters become one token."""
    lossy = Tokenizer(models.BPE({"a": 0, "<|endoftext|>": 1}, []))
    unigram = Tokenizer(models.Unigram([("<|endoftext|>", 0.0), ("a", -1.0)]))
    removing = Tokenizer.from_str(byte_level().files["tokenizer.json"].decode())
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    stripping = byte_level(normalizers.Strip())
    for tokenizer in (numbers_tokenizer(9), read(lossy), read(unigram), read(removing), stripping):
        assert FewestTokens(json.loads(tokenizer.files["tokenizer.json"])).of(" " * 9999) == 0


TOKENIZER = chat_tokenizer()


def slowly(text: str, texts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of a conversation whose special tokens are letters, by looking at every pair of places."""
    special = list(TOKENIZER.special_pattern.finditer(text))
    spelled = [found for found in special if any(a <= found.start() and found.end() <= b for a, b in texts)]
    written = [found for found in special if found not in spelled]
    cuts: list[tuple[int, int]] = []
    for found in spelled:
        start = max((token.end() for token in written if token.end() <= found.start()), default=0)
        end = min((token.start() for token in written if token.start() >= found.end()), default=len(text))
        if (start, end) not in cuts:
            cuts.append((start, end))
    return cuts


def test_spelled_tokens_are_letters_between_the_templates_tokens() -> None:
    draw, words = random.Random(1), ["<|im_start|>", "<|im_end|>", "<|eot_id|>", " x", "def", "\n", "<|im_"]
    for _ in range(100):
        parts = draw.choices(words, k=draw.randrange(1, 20))
        text, borders = "".join(parts), [0]
        for part in parts:
            borders.append(borders[-1] + len(part))
        texts = [tuple(sorted(draw.sample(borders, 2))) for _ in range(draw.randrange(4))]
        expected: list[int] = []
        edges = [0, *(edge for cut in slowly(text, texts) for edge in cut), len(text)]
        for number, (start, end) in enumerate(pairwise(edges)):
            part = text[start:end]
            expected += TOKENIZER.encode(part) if number % 2 else TOKENIZER.encode_marked([part])[0][0]
        ids, offsets = TOKENIZER.encode_conversation(text, texts)
        assert ids == expected
        assert "".join(text[a:b] for a, b in offsets).replace(" ", "") == text.replace(" ", "")


def test_the_work_grows_with_the_text_not_with_its_square() -> None:
    def lines(messages: int) -> int:
        """Lines of Python that are executed."""
        count = 0

        def trace(frame: Any, event: str, _: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        turn = "<|im_start|>user\nx<|im_end|><|im_end|>\n"
        texts = [(start, start + 11) for start in range(17, messages * len(turn), len(turn))]
        sys.settrace(trace)
        try:
            TOKENIZER.encode_conversation(turn * messages, texts)
        finally:
            sys.settrace(None)
        return count

    assert lines(400) < 2.5 * lines(200)


def test_long_texts_are_encoded_in_pieces_that_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE", 60)
    text = "".join(CORPUS) + "<|im_end|>" + "".join(CORPUS)
    whole = TextTokenizer(TOKENIZER.files, where="test").encode_marked([text])[0]
    seen: list[int] = []
    assert TOKENIZER.encode_conversation(text, (), seen.append) == whole
    assert len(seen) > 50
    assert seen == sorted(seen)
    spelled = TOKENIZER.encode_conversation(text, [(0, len(text))])[0]
    assert spelled == TOKENIZER.encode_prompt(text, seen.append) == TOKENIZER.encode(text) != whole[0]

    def stop(tokens: int) -> None:
        if tokens > 100:
            raise TimeoutError

    for encode in (
        lambda: TOKENIZER.encode_prompt(text, stop),
        lambda: TOKENIZER.encode_conversation(text, [(0, len(text))], stop),
    ):
        with pytest.raises(TimeoutError):
            encode()


def test_a_text_in_pieces_has_the_tokens_around_a_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers.processors import TemplateProcessing

    inner = Tokenizer.from_str(TOKENIZER.files["tokenizer.json"].decode())
    begin, end = (TOKENIZER.token_id(token) for token in ("<|begin_of_text|>", "<|eot_id|>"))
    special = [("<|begin_of_text|>", begin), ("<|eot_id|>", end)]
    inner.post_processor = TemplateProcessing("<|begin_of_text|> $A <|eot_id|>", special_tokens=special)
    tokenizer = TextTokenizer({**TOKENIZER.files, "tokenizer.json": inner.to_str().encode()}, where="test")
    text = "".join(CORPUS)
    expected = tokenizer.encode_prompt(text)
    assert [expected[0], expected[-1]] == [begin, end]
    monkeypatch.setattr(tokenizer_module, "PIECE", 60)
    assert len(tokenizer.pieces(text)) > 50
    assert tokenizer.encode_prompt(text) == expected
