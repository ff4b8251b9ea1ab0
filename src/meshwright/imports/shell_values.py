"""Variables of a shell script: their values, and words with the values put in."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.imports.shell_words import QuotedPart, Word, inner_end, read_word
from meshwright.spec.errors import UserError

USE = re.compile(r"\$(\w+|[@*])|\$[{(]|`")
BRACES = re.compile(r"\$\{(\w+|[@*])(\[[@*]\])?(?:(:?[-=+])(.*))?\}", flags=re.DOTALL)
SUM = re.compile(r"[\d\s+\-*/%()]{1,200}")
LONGEST = 2**20
"""Characters of a script with its variables put in."""
DEEPEST = 20
"""Levels of defaults in defaults."""


@dataclass(frozen=True)
class _Part:
    """A part of a word with its variables put in."""

    text: str
    splits: bool = False
    """Whether its spaces separate words."""


class Values:
    """The variables that a script has set so far."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.words: dict[str, list[str]] = {}
        """Name -> the words of its value."""
        self.put_in: set[str] = set()
        """Variables whose value the script has used since it set them."""
        self._length = 0
        self._depth = 0

    def known(self, name: str) -> str | None:
        """A variable's value; None if the script has not set it."""
        return " ".join(self.words[name]) if name in self.words else None

    def assign(self, name: str, word: Word, *, more: bool) -> None:
        """Set a variable to the value of NAME=value or NAME=(list), or extend it."""
        if word.items is not None:
            words = [one for item in word.items for one in self.fields(item)]
            self.words[name] = [*self.words.get(name, []), *words] if more else words
            self.put_in.discard(name)
            return
        first, *rest = word.pieces
        pieces = [QuotedPart(first.text.partition("=")[2], first.quote), *rest]
        text = self._joined([part for piece in pieces for part in self._parts(piece)])
        before, *others = self.words.get(name) or [""]
        self.words[name] = [before + text, *others] if more else [text]
        self.put_in.discard(name)

    def fields(self, word: Word) -> list[str]:
        """The words that a word becomes."""
        words: list[str | None] = [None]  # the last one grows; None: it has no text yet, not even an empty one
        for part in (part for piece in word.pieces for part in self._parts(piece)):
            if part is None:
                words.append(None)
            elif not part.splits:
                words[-1] = f"{words[-1] or ''}{part.text}"
            else:
                for index, text in enumerate(re.split(r"\s+", part.text)):
                    if index:
                        words.append(None)
                    if text:
                        words[-1] = f"{words[-1] or ''}{text}"
        return [text for text in words if text is not None]

    def _parts(self, piece: QuotedPart) -> list[_Part | None]:
        """The parts of a piece; None between two items of a list."""
        if piece.quote == "'":
            return [_Part(piece.text)]
        parts: list[_Part | None] = []
        at = 0
        while match := USE.search(piece.text, at):
            if match.start() > at:
                parts.append(_Part(_plain(piece.text[at : match.start()])))
            end = match.end() if match[1] else inner_end(piece.text, match.start()) or len(piece.text)
            parts += self._value(piece.text[match.start() : end], quoted=bool(piece.quote))
            at = end
        return [*parts, _Part(_plain(piece.text[at:]))] if at < len(piece.text) or piece.quote else parts

    def _value(self, use: str, *, quoted: bool) -> list[_Part | None]:
        """The value of a $NAME, ${NAME...}, $((...)) or another substitution, which stays as it is if unknown."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise UserError(f"{self._file}: a variable's default is nested too deeply")
        parts = self._substituted(use, quoted=quoted)
        self._depth -= 1
        self._length += sum(len(part.text) for part in parts if part)
        if self._length > LONGEST:
            raise UserError(f"{self._file}: is longer than {LONGEST} characters once its variables are substituted")
        return parts

    def _substituted(self, use: str, *, quoted: bool) -> list[_Part | None]:
        if use.startswith("$((") and use.endswith("))"):
            return [_Part(self._sum(use), splits=False)]
        braces = BRACES.fullmatch(use)
        name, items, operator, word = braces.groups("") if braces else (use[1:], "", "", "")
        known = self.words.get(name)
        empty = known is not None and not "".join(known)
        if operator and operator[-1] == "+":
            if known is None:
                return [_Part(use)]
            return [] if empty and ":" in operator else self._default(word, quoted=quoted)
        if operator and (known is None or (empty and ":" in operator)):
            parts = self._default(word, quoted=quoted)
            if "=" in operator:
                self.words[name] = [self._joined(parts)]
            return parts
        if known is None:
            return [_Part(use)]
        self.put_in.add(name)
        if items and quoted:
            return [part for one in known for part in (None, _Part(one))][1:]
        return [_Part(" ".join(known), splits=not quoted)]

    @staticmethod
    def _joined(parts: list[_Part | None]) -> str:
        """The text of a value: items of a list have a space between them."""
        return "".join(" " if part is None else part.text for part in parts)

    def _default(self, word: str, *, quoted: bool) -> list[_Part | None]:
        parts = [part for piece in read_word(word, self._file).pieces for part in self._parts(piece)]
        return [part and _Part(part.text, splits=part.splits or not quoted) for part in parts]

    def _sum(self, use: str) -> str:
        """The value of $((...)); as it is, if a name in it is unknown or it is not a plain sum of whole numbers."""
        text = re.sub(r"\$\{(\w+)\}|\$?\b([A-Za-z_]\w*)", self._number, use[3:-2])
        if not SUM.fullmatch(text) or "**" in text:
            return use
        try:
            return str(_computed(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return use

    def _number(self, match: re.Match[str]) -> str:
        known = self.known(match[1] or match[2])
        return match[0] if known is None else f"({known})"


def is_unset(word: str) -> bool:
    """Whether a word is nothing but variables and substitutions that the script does not set."""
    at = 0
    while at < len(word) and (match := USE.match(word, at)):
        at = match.end() if match[1] else inner_end(word, at) or len(word)
    return bool(word) and at == len(word)


def _plain(text: str) -> str:
    """A quoted text without the backslashes before marks of the shell."""
    return re.sub(r"\\([\"`$\\])", r"\1", text)


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        return ARITHMETIC[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError("not a sum")


def _quotient(left: int, right: int) -> int:
    """The shell rounds a quotient towards 0."""
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - _quotient(left, right) * right,
}
