"""Grammars of answers: JSON, JSON schemas, regular expressions and choices, by llguidance.

A grammar is compiled once, outside the engine's thread. Each answer follows it with a `Matcher`, which gives the
allowed next tokens. The library is loaded for the first grammar.

Shapes: V vocabulary of the model.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch

from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install

LARGEST = 2**16
"""Most characters of a schema, an expression or a list of choices: compiling takes a second at this size."""
KEPT = 32
"""Compiled grammars that a model caches."""
WHITESPACE = r" |\n[ \t]{0,20}"
"""Allowed whitespace between two parts of JSON, so that a model cannot write spaces forever (llama.cpp's rule)."""
LIMITS: dict[str, Any] = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""llguidance's limits: milliseconds for a step, and 40 MB for an answer."""

JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": WHITESPACE, "lenient": False}
Kind = Literal["schema", "regex", "choice", "lark"]


class Matcher:
    """One answer's position in its grammar."""

    def __init__(self, inner: Any, vocab: int) -> None:
        """`inner`: an `llguidance.LLMatcher` that nothing else uses."""
        self._inner, self._vocab = inner, vocab
        self._bits = np.zeros(-(-vocab // 32), dtype=np.int32)

    def allowed(self) -> torch.Tensor:
        """The allowed next tokens, bool [V]: ends of the answer exactly where the grammar may end."""
        self._inner.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        allowed = np.unpackbits(self._bits.view(np.uint8), count=self._vocab, bitorder="little")
        return torch.from_numpy(allowed.view(np.bool_))

    def accept(self, token: int) -> None:
        """Continue after this token."""
        self._inner.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def problem(self) -> str | None:
        """Why the grammar cannot be followed any further: it has become too complex."""
        return _reason(self._inner.get_error()) if self._inner.is_error() else None


class Grammar:
    """A compiled grammar."""

    def __init__(self, inner: Any, vocab: int) -> None:
        self._inner, self._vocab = inner, vocab

    def begin(self) -> Matcher:
        """A matcher at the grammar's start."""
        return Matcher(self._inner.deep_copy(), self._vocab)


class Grammars:
    """The grammars of one model's answers. Not thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, vocab: int) -> None:
        """`vocab`: rows of the model's head, some of which may not be tokens."""
        self._tokenizer, self._vocab = tokenizer, vocab
        self._readers: dict[frozenset[int], Any] = {}
        self._kept: OrderedDict[tuple[Kind, str, frozenset[int]], Grammar] = OrderedDict()

    def compile(self, kind: Kind, text: str, ends: Iterable[int]) -> Grammar:
        """The grammar of a JSON schema (as JSON), a regular expression, a JSON list of choices or llguidance's own
        notation; `ends` are the tokens that end answers.

        Raises `UserError` if the text is no grammar, is too large, or the library cannot read the tokenizer.
        """
        if len(text) > LARGEST:
            raise UserError(f"it has {len(text)} characters, more than this server's limit of {LARGEST}")
        key = (kind, text, frozenset(end for end in ends if end < self._tokenizer.vocab_size))
        if key not in self._kept:
            self._kept[key] = self._compiled(*key)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _compiled(self, kind: Kind, text: str, ends: frozenset[int]) -> Grammar:
        library = _library()
        try:
            source = _source(library.LLMatcher, kind, text)
        except ValueError as error:
            raise UserError(_reason(str(error))) from None
        limits = library.LLParserLimits(**LIMITS)
        grammar = Grammar(
            library.LLMatcher(self._reader(library, ends), source, log_level=0, limits=limits), self._vocab
        )
        # An excessively complex grammar is often detected only at the first token, and the first mask takes longest.
        first = grammar.begin()
        if first.problem is None:
            first.accept(int(first.allowed().nonzero()[0]))
        if first.problem is not None:
            raise UserError(first.problem)
        return grammar

    def _reader(self, library: Any, ends: frozenset[int]) -> Any:
        """The tokenizer in llguidance's form."""
        if ends not in self._readers:
            text = self._tokenizer.files["tokenizer.json"].decode()
            try:
                self._readers[ends] = library.LLTokenizer(text, n_vocab=self._vocab, eos_token=sorted(ends))
            except BaseException as error:  # a panic of the library is no Exception
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                    raise
                raise UserError(f"llguidance cannot read the model's tokenizer ({_reason(str(error))})") from None
        return self._readers[ends]


def _source(matcher: Any, kind: Kind, text: str) -> str:
    if kind == "schema":
        return matcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
    if kind == "regex":
        return matcher.grammar_from_regex(text)
    if kind == "lark":
        return matcher.grammar_from_lark(text)
    return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in json.loads(text)))


def _library() -> Any:
    """The package llguidance. Raises `UserError` if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UserError(f"it needs the package llguidance on the server: {install('serve')}") from None
    return llguidance


def _reason(text: str) -> str:
    """The library's reason for a refusal, from its message."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("<")]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next(iter([*errors, *lines]), "no reason was given")
