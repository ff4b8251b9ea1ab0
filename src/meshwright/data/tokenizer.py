"""Tokenizers, read from files or trained on the corpus."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from itertools import compress, pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.data.spelled import between, inside, replaced
from meshwright.data.tokenizer_files import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    TOKENIZER_FILES,
    chat_template,
    end_of_text,
    named_tokens,
    read_json,
)
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.durable import write_durably

PIECE = 1 << 16
"""Characters after which a long document may be cut for encoding."""
WINDOW = 256
"""Characters on both sides of a cut that are encoded to check that the cut does not change the tokens."""
Encoded = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and the characters covered by each."""
Progress = Callable[[int], object]
"""Called with the number of tokens so far; it may raise an error to end the work."""
_WORD_END = re.compile(r"[^\W_](?=\s)")


class TextTokenizer:
    """A tokenizer with its end-of-text token, built from the content of its files.

    Only `encode_prompt` adds tokens. Text that contains a special token's name is encoded as ordinary text, so no
    document can end itself early. Truncation and padding from the files are switched off.
    """

    rows: int | None = None
    """The model's rows, if they are fewer than the tokens: encoding raises UserError at a token without a row."""

    def __init__(self, files: Mapping[str, bytes], *, where: str):
        """`files` maps names of TOKENIZER_FILES to content; `where` is their location in error messages.

        Raises UserError if they are not a valid tokenizer, or have no end-of-text token.
        """
        self._files = dict(files)
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{where}: tokenizer.json cannot be read: {error}") from error
        self._lock = threading.Lock()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values(), default=0) + 1
        """Rows that an embedding needs: the largest id plus one."""
        self.eos_id: int = end_of_text(self._files, ids, where)
        """Id of the end-of-text token."""
        self.special_tokens: tuple[str, ...] = tuple(
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        )
        """Tokens without text."""
        self.special_pattern: re.Pattern[str] = any_of(self.special_tokens)
        """Finds them in text."""
        config = read_json(self._files, "tokenizer_config.json", where)
        self.named_tokens: dict[str, str] = {"eos_token": self.decode([self.eos_id]), **named_tokens(config)}
        """Special tokens by their names in chat templates, such as `bos_token`."""
        self.chat_template: str | None = chat_template(self._files, config, where)
        """The Jinja chat template in the tokenizer's files."""
        identity = self._files["tokenizer.json"] + str(self.eos_id).encode()
        self.fingerprint: str = hashlib.sha256(identity).hexdigest()
        """Equal for tokenizers that encode every document to the same tokens."""

    def for_rows(self, rows: int | None) -> "TextTokenizer":
        """This tokenizer for a model with that many embedding rows.

        Raises UserError if its end-of-text token has no row.
        """
        if rows is None or rows >= self.vocab_size:
            return self
        limited = copy(self)
        limited.rows = rows
        limited.checked([self.eos_id])
        return limited

    def checked(self, ids: list[int]) -> list[int]:
        """The token ids; raises UserError if the model has no row for one of them."""
        if self.rows is not None and ids and max(ids) >= self.rows:
            raise UserError(
                f"token {max(ids)} ({self.decode([max(ids)])!r}) has no row in the model, which has {self.rows} rows "
                f"for the tokenizer's {self.vocab_size} tokens; {self.more_rows}"
            )
        return ids

    @property
    def more_rows(self) -> str:
        """The remedy if a model has fewer rows than this tokenizer has tokens."""
        return (
            f"add rows to the weights (in transformers: model.resize_token_embeddings({self.vocab_size}), then "
            "model.save_pretrained), or use the tokenizer that they were trained with"
        )

    @property
    def files(self) -> Mapping[str, bytes]:
        """Its files, from which another process can rebuild it."""
        return self._files

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self._ids(text, marked=False)

    def _ids(self, text: str, *, marked: bool) -> list[int]:
        with self._reading(marked=marked):
            return self.checked(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, on all cores."""
        with self._reading(marked=False):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [self.checked(encoding.ids) for encoding in encodings]

    def encode_marked(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[Encoded]:
        """Texts whose special tokens are meant as such, because a chat template wrote them. `add_special_tokens`: also
        add those that the tokenizer puts around every text."""
        with self._reading(marked=True):
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return [(self.checked(encoding.ids), encoding.offsets) for encoding in encodings]

    def encode_conversation(
        self, text: str, texts: Sequence[tuple[int, int]] = (), progress: Progress = lambda tokens: None
    ) -> Encoded:
        """`encode_marked` of one text, but special tokens spelled out inside `texts` (characters from, to) are encoded
        as letters. `progress` is called with the number of tokens after each piece of the text.

        Raises UserError if this tokenizer would encode the text around it differently.
        """
        special = [match.span() for match in self.special_pattern.finditer(text)]
        spelled = list(inside(special, texts))
        if not any(spelled):
            return self._encode_parts(text, (), progress)
        cuts = list(between(special, spelled, len(text)))
        covers = ("x" * (end - start) for (start, end), is_spelled in zip(special, spelled, strict=True) if is_spelled)
        harmless = replaced(text, list(compress(special, spelled)), covers)
        if self._encode_parts(harmless, cuts, progress) != self._encode_parts(harmless, (), progress):
            raise UserError("it contains the text of a special token, which this tokenizer cannot escape")
        return self._encode_parts(text, cuts, progress)

    def _encode_parts(self, text: str, plain: Sequence[tuple[int, int]], progress: Progress) -> Encoded:
        """Tokens of a text; inside its `plain` parts, special tokens are letters."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        borders = [0, *(border for part in plain for border in part), len(text)]
        for number, (start, end) in enumerate(pairwise(borders)):
            marked = number % 2 == 0
            for piece in self.pieces(text[start:end], marked=marked):
                with self._reading(marked=marked):
                    (encoding,) = self._tokenizer.encode_batch([piece], add_special_tokens=False)
                ids += self.checked(encoding.ids)
                offsets += [(a + start, b + start) for a, b in encoding.offsets]
                start += len(piece)
                progress(len(ids))
        return ids, offsets

    @contextmanager
    def _reading(self, *, marked: bool) -> Iterator[None]:
        """Inside, special tokens in texts are read as such if `marked`, otherwise as letters. The library has one
        setting for all threads."""
        with self._lock, _panics_told():
            self._tokenizer.encode_special_tokens = not marked
            yield

    def token_id(self, token: str) -> int | None:
        """Id of a token of the vocabulary; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def token(self, number: int) -> str | None:
        """The token of this id, in the vocabulary's spelling; None if there is none."""
        return self._tokenizer.id_to_token(number)

    def extends(self, other: "TextTokenizer") -> bool:
        """Whether every token of `other` has the same number here; there may be more."""
        ours = self._tokenizer.get_vocab(with_added_tokens=True)
        return other._tokenizer.get_vocab(with_added_tokens=True).items() <= ours.items()

    def with_chat_template(self, source: str) -> "TextTokenizer":
        """The same tokenizer with another chat template in its files."""
        return TextTokenizer({**self._files, CHAT_TEMPLATE: source.encode()}, where="tokenizer").for_rows(self.rows)

    def encode_long(self, text: str, progress: Progress, *, around: bool = False) -> list[int]:
        """`encode` in pieces; `progress`: see `encode_conversation`. `around`: with the tokens that the tokenizer's own
        template puts around a text."""
        pieces, ids = self.pieces(text), list[int]()
        for piece in pieces:
            with self._reading(marked=False):
                (encoding,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=around and len(pieces) == 1)
            ids += self.checked(encoding.ids)
            progress(len(ids))
        before, after = self._around if around and len(pieces) > 1 else ([], [])
        return [*before, *ids, *after]

    def encode_prompt(self, text: str, progress: Progress = lambda tokens: None) -> list[int]:
        """Token ids of a prompt, with the tokens that the tokenizer's own template puts before a text (Llama's
        begin-of-text), without an end-of-text token. `progress`: see `encode_conversation`."""
        ids = self.encode_long(text, progress, around=True)
        while ids and ids[-1] == self.eos_id:
            ids.pop()
        return ids

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer's own template puts before and after a text."""
        word = self.encode("a")
        (encoding,) = self._tokenizer.encode_batch_fast(["a"], add_special_tokens=True)
        start = next(place for place in range(len(encoding.ids)) if encoding.ids[place : place + len(word)] == word)
        return encoding.ids[:start], encoding.ids[start + len(word) :]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens by their names; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def decode_text(self, ids: Iterable[int]) -> str:
        """The text of token ids without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def pieces(self, text: str, *, marked: bool = False) -> list[str]:
        """Cut a long text into pieces whose joined tokens equal the tokens of the whole text, so that one big file is
        encoded on all cores in bounded memory.

        A cut is made after a word when a piece has PIECE characters, if the WINDOW around it has the same tokens with
        and without the cut. Tokenizers that mark the start of every text (Llama 2's) get their text whole. `marked`:
        special tokens are meant as such.
        """
        if len(text) <= PIECE or not self._invisible("a word", 1, marked=marked):
            return [text]
        pieces, start = [], 0
        while (cut := self._next_cut(text, start + PIECE, marked=marked)) is not None:
            pieces.append(text[start:cut])
            start = cut
        return [*pieces, text[start:]]

    def _next_cut(self, text: str, start: int, *, marked: bool) -> int | None:
        ends = (match.end() for match in _WORD_END.finditer(text, start))
        return next((end for end in ends if self._invisible(text, end, marked=marked)), None)

    def _invisible(self, text: str, cut: int, *, marked: bool) -> bool:
        sides = [text[max(0, cut - WINDOW) : cut], text[cut : cut + WINDOW]]
        left, right, whole = (self._ids(part, marked=marked) for part in (*sides, "".join(sides)))
        return whole == left + right

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files, byte for byte as read, for Hugging Face's tools."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            write_durably(directory / name, content)


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of these tokens, the longest first; nothing if there are none."""
    ordered = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a tokenizer.json file, or of the directory that contains one, with the files next to it.

    Raises UserError if there is none, it cannot be read, or its end-of-text token cannot be found.
    """
    where = f"tokenizer {path}"
    if not path.exists():
        raise UserError(f"{where}: no such file; give a tokenizer.json, the folder that holds it, or auto")
    if not path.is_dir() and path.name != "tokenizer.json":
        return TextTokenizer({"tokenizer.json": regular(path).read_bytes()}, where=where)
    directory = path if path.is_dir() else path.parent
    given = {name: directory / name for name in TOKENIZER_FILES if (directory / name).exists()}
    files = {name: regular(file).read_bytes() for name, file in given.items()}
    if "tokenizer.json" not in files:
        raise UserError(f"{where}: this folder has no tokenizer.json")
    return TextTokenizer(files, where=where)


@contextmanager
def _panics_told() -> Iterator[None]:
    """Turn a panic of the library into a `UserError`, for example when a regular expression of tokenizer.json takes
    more than its ten million attempts."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # it cannot be imported
            raise
        raise UserError(f"tokenizer.json cannot be used: the library failed on a text ({error})") from None


LONG_WORD = r"\S{1000}|\s{1000}"
"""Longer words are learnt piece by piece: training time is quadratic in a word's length."""


def train_tokenizer(texts: Iterable[str], vocab: int) -> TextTokenizer:
    """Train a byte-level BPE (GPT-2's kind: any text, no unknown token) of at most `vocab` tokens.

    The same texts give the same tokenizer. Few texts give fewer tokens than `vocab`.
    """
    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = pre_tokenizers.Split(Regex(LONG_WORD), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, by_bytes])  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = by_bytes  # pyright: ignore
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
    }
    return TextTokenizer(files, where="trained tokenizer")


def numbers_tokenizer(vocab: int) -> TextTokenizer:
    """The tokenizer of plain token ids: id 5 is written `5`, ids are separated by spaces, and the last id means end of
    text."""
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(vocab)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": str(vocab - 1)}).encode(),
    }
    return TextTokenizer(files, where="tokenizer of numbers")
