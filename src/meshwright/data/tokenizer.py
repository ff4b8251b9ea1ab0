"""Tokenizers, read from files or trained on the corpus."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.durable import write_durably

END_OF_TEXT = "<|endoftext|>"
"""End-of-text token of the tokenizers trained here."""

END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Its names in published tokenizers, tried in this order if their files do not give it."""

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    CHAT_TEMPLATE,
)
"""The files of a tokenizer in a Hugging Face directory (config.json is the model's)."""

PIECE = 1 << 16
"""Characters after which a long document may be cut for encoding."""
WINDOW = 256
"""Characters on both sides of a cut that are encoded to check that the cut does not change the tokens."""
_WORD_END = re.compile(r"[^\W_](?=\s)")


class TextTokenizer:
    """A tokenizer with its end-of-text token, built from the content of its files.

    Only `encode_prompt` adds tokens. Text that contains a special token's name is encoded as ordinary text, so no
    document can end itself early. Truncation and padding from the files are switched off.
    """

    def __init__(self, files: Mapping[str, bytes], *, where: str):
        """`files` maps names of TOKENIZER_FILES to content; `where` is their location in error messages.

        Raises UserError if they are not a valid tokenizer, or have no end-of-text token.
        """
        self._files = dict(files)
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{where}: tokenizer.json cannot be read: {error}") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values(), default=0) + 1
        """Rows that an embedding needs: the largest id plus one."""
        self.eos_id: int = _end_of_text(self._files, ids, where)
        """Id of the end-of-text token."""
        self.special_tokens: tuple[str, ...] = tuple(
            token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special
        )
        """Tokens without text."""
        self.special_pattern: re.Pattern[str] = any_of(self.special_tokens)
        """Finds them in text."""
        config = _read_json(self._files, "tokenizer_config.json", where)
        self.named_tokens: dict[str, str] = {"eos_token": self.decode([self.eos_id]), **_named(config)}
        """Special tokens by their names in chat templates, such as `bos_token`."""
        self.chat_template: str | None = _chat_template(self._files, config, where)
        """The Jinja chat template in the tokenizer's files."""
        identity = self._files["tokenizer.json"] + str(self.eos_id).encode()
        self.fingerprint: str = hashlib.sha256(identity).hexdigest()
        """Equal for tokenizers that encode every document to the same tokens."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Its files, from which another process can rebuild it."""
        return self._files

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        with _panics_told():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, on all cores."""
        with _panics_told():
            return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_marked(
        self, texts: Sequence[str], *, add_special_tokens: bool = False
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """(token ids, characters covered by each) of texts whose special tokens are meant as such, because a chat
        template wrote them. `add_special_tokens`: also add those that the tokenizer puts around every text."""
        self._tokenizer.encode_special_tokens = False
        try:
            with _panics_told():
                found = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        finally:
            self._tokenizer.encode_special_tokens = True
        return [(encoding.ids, encoding.offsets) for encoding in found]

    def encode_conversation(
        self, text: str, texts: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode_marked` of one text, but special tokens spelled out inside `texts` (characters from, to) are encoded
        as letters.

        Raises UserError if this tokenizer would encode the text around it differently.
        """
        special = list(self.special_pattern.finditer(text))
        spelled = [found for found in special if any(a <= found.start() and found.end() <= b for a, b in texts)]
        if not spelled:
            return self.encode_marked([text])[0]
        written = [found for found in special if found not in spelled]
        cuts = []
        for found in spelled:  # from the template's token before it to the one after it
            start = max((token.end() for token in written if token.end() <= found.start()), default=0)
            end = min((token.start() for token in written if token.start() >= found.end()), default=len(text))
            if not cuts or cuts[-1] != (start, end):
                cuts.append((start, end))
        harmless = text
        for found in spelled:
            harmless = harmless[: found.start()] + "x" * len(found[0]) + harmless[found.end() :]
        if self._encode_parts(harmless, cuts) != self.encode_marked([harmless])[0]:
            raise UserError("it contains the text of a special token, which this tokenizer cannot escape")
        return self._encode_parts(text, cuts)

    def _encode_parts(self, text: str, plain: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a text; inside its `plain` parts, special tokens are letters."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        borders = [0, *(border for part in plain for border in part), len(text)]
        for number, (start, end) in enumerate(pairwise(borders)):
            if number % 2:
                with _panics_told():
                    found = self._tokenizer.encode(text[start:end], add_special_tokens=False)
                part = (found.ids, found.offsets)
            else:
                part = self.encode_marked([text[start:end]])[0]
            ids += part[0]
            offsets += [(a + start, b + start) for a, b in part[1]]
        return ids, offsets

    def token_id(self, token: str) -> int | None:
        """Id of a token of the vocabulary; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def extends(self, other: "TextTokenizer") -> bool:
        """Whether every token of `other` has the same number here; there may be more."""
        ours = self._tokenizer.get_vocab(with_added_tokens=True)
        return other._tokenizer.get_vocab(with_added_tokens=True).items() <= ours.items()

    def with_chat_template(self, source: str) -> "TextTokenizer":
        """The same tokenizer with another chat template in its files."""
        return TextTokenizer({**self._files, CHAT_TEMPLATE: source.encode()}, where="tokenizer")

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokens that the tokenizer's own template puts before a text (Llama's
        begin-of-text), without an end-of-text token."""
        ids = self._tokenizer.encode(text, add_special_tokens=True).ids
        while ids and ids[-1] == self.eos_id:
            ids.pop()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens by their names; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def decode_text(self, ids: Iterable[int]) -> str:
        """The text of token ids without special tokens."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def pieces(self, text: str) -> list[str]:
        """Cut a long text into pieces whose joined tokens equal the tokens of the whole text, so that one big file is
        encoded on all cores in bounded memory.

        A cut is made after a word when a piece has PIECE characters, if the WINDOW around it has the same tokens with
        and without the cut. Tokenizers that mark the start of every text (Llama 2's) get their text whole.
        """
        if len(text) <= PIECE or not self._invisible("a word", cut=1):
            return [text]
        pieces, start = [], 0
        while (cut := self._next_cut(text, start + PIECE)) is not None:
            pieces.append(text[start:cut])
            start = cut
        return [*pieces, text[start:]]

    def _next_cut(self, text: str, start: int) -> int | None:
        ends = (match.end() for match in _WORD_END.finditer(text, start))
        return next((end for end in ends if self._invisible(text, end)), None)

    def _invisible(self, text: str, cut: int) -> bool:
        left, right = text[max(0, cut - WINDOW) : cut], text[cut : cut + WINDOW]
        return self.encode(left + right) == self.encode(left) + self.encode(right)

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


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json names."""
    given = {key: value for key, value in config.items() if key.endswith("_token")}
    found = {key: value.get("content") if isinstance(value, dict) else value for key, value in given.items()}
    return {key: token for key, token in found.items() if isinstance(token, str)}


def _chat_template(files: Mapping[str, bytes], config: Mapping[str, Any], where: str) -> str | None:
    if CHAT_TEMPLATE in files:
        try:
            return files[CHAT_TEMPLATE].decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: {CHAT_TEMPLATE} is not UTF-8 at byte {error.start}") from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = [template for template in found if isinstance(template, dict) and "template" in template]
        if len(named) != len(found):
            raise UserError(
                f"{where}: chat_template in tokenizer_config.json is a list with entries other than name and template"
            )
        found = {template.get("name"): template["template"] for template in named}.get("default")
    if not isinstance(found, str | None):
        raise UserError(f"{where}: chat_template in tokenizer_config.json is not text but {type(found).__name__}")
    return found


def _end_of_text(files: Mapping[str, bytes], ids: Mapping[str, int], where: str) -> int:
    """Id of the end-of-text token: from the files, else a published name that occurs in the vocabulary."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_json(files, name, where).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if not isinstance(token, str) or token not in ids:
                raise UserError(f"{where}: {name} has eos_token {token!r}, which is not in tokenizer.json")
            return ids[token]
    found = _read_json(files, "generation_config.json", where).get("eos_token_id")
    if isinstance(found, list):
        found = found[0] if found else None
    if found is not None:
        if not isinstance(found, int) or found not in ids.values():
            raise UserError(f"{where}: generation_config.json has eos_token_id {found}, which is not in tokenizer.json")
        return found
    for token in END_OF_TEXT_NAMES:
        if token in ids:
            return ids[token]
    raise UserError(
        f"{where}: no end-of-text token (none of {', '.join(END_OF_TEXT_NAMES)} is in the vocabulary); set "
        "eos_token in a tokenizer_config.json beside tokenizer.json"
    )


def _read_json(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: {name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{where}: {name} is not a JSON object")
    return content
