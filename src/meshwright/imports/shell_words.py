"""Words of a shell script: commands, lists of arguments, quotations. Nothing is run or substituted here."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.spec.errors import UserError

PLAIN = re.compile(r"[^\s'\"\\`$;|&()<>]+")
REDIRECTION = re.compile(r"&>>?|<<<|<<-?|<>|[<>]&|>>|>\||[<>]")
END = re.compile(r"\n|;;?&?|&&|\|\||\|&|[|&()]")
OPENS_LIST = re.compile(r"\w+\+?=")
SPACES = re.compile(r"(?:\\\n|[^\S\n])*(?:#[^\n]*)?")
SPACES_AND_LINES = re.compile(r"(?:\\\n|\s|#[^\n]*)*")
NAME = re.compile(r"\$\w+|\$[@*#?$!-]")


@dataclass(frozen=True)
class QuotedPart:
    """A part of a word with one kind of quotation."""

    text: str
    quote: str = ""
    """`'`: the text is meant as it is. `"`: variables are substituted. Empty: and their values become several words."""


@dataclass
class Word:
    """A word of a command."""

    pieces: list[QuotedPart] = field(default_factory=list)
    items: "list[Word] | None" = None
    """The words of a list: NAME=(...)."""

    @property
    def text(self) -> str:
        """The word without its quotation marks."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def substituted(self) -> Iterator[str]:
        """The texts that may hold variables."""
        for word in (self, *(self.items or ())):
            yield from (piece.text for piece in word.pieces if piece.quote != "'")


@dataclass
class Command:
    """A command's words, without redirections."""

    words: list[Word]
    end: str
    """The operator or newline after it."""


def read_commands(text: str, file: str) -> Iterator[Command]:
    """The commands of a script, in its order. Raises `UserError` where a quotation or a list does not end."""
    return _Lexer(text.replace("\r\n", "\n"), file).commands()


def read_word(text: str, file: str) -> Word:
    """A text as one word: spaces separate nothing."""
    pieces = []
    lexer = _Lexer(text, file)
    while lexer.at < len(text):
        piece = lexer.piece()
        pieces.append(piece or QuotedPart(text[lexer.at]))
        lexer.at += 0 if piece else 1
    return Word(pieces)


def inner_end(text: str, start: int) -> int | None:
    """The position after the quotation or substitution that begins at `start`; None if it does not end."""
    waiting: list[str] = []
    at = start
    while at < len(text):
        char, inner = text[at], waiting[-1] if waiting else ""
        if inner != "'" and char == "\\":
            at += 1
        elif char == inner:
            waiting.pop()
        elif inner == "'":
            pass
        elif text.startswith(("$(", "${"), at):
            waiting.append(")" if text[at + 1] == "(" else "}")
            at += 1
        elif char in '"`' or (char == "'" and inner != '"'):
            waiting.append(char)
        elif char == "(" and inner == ")":
            waiting.append(")")
        at += 1
        if not waiting:
            return at
    return None


class _Lexer:
    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.at = text, file, 0

    def commands(self) -> Iterator[Command]:
        words: list[Word] = []
        bodies: list[str] = []
        while self.at < len(self.text):
            self._skip_spaces()
            if redirection := REDIRECTION.match(self.text, self.at):
                self.at = redirection.end()
                if words and words[-1].text.isdigit() and self.text[redirection.start() - 1].isdigit():
                    words.pop()  # 2> log
                self._skip_spaces()
                target = self._word()
                if redirection[0] in ("<<", "<<-") and target:
                    bodies.append(target.text)
            elif end := END.match(self.text, self.at):
                self.at = end.end()
                yield Command(words, end[0])
                words = []
                for mark in bodies if end[0] == "\n" else ():
                    yield from self._here_document(mark)
                bodies = [] if end[0] == "\n" else bodies
            elif word := self._word():
                words.append(word)
        yield Command(words, "\n")

    def piece(self) -> QuotedPart | None:
        """The next part of a word; None where the word ends."""
        text, start = self.text, self.at
        if match := PLAIN.match(text, start):
            self.at = match.end()
            return QuotedPart(match[0])
        if start >= len(text) or text.startswith("\\\n", start):
            return None
        if text[start] == "\\":
            self.at += 2
            return QuotedPart(text[start + 1 : start + 2], "'")
        if text[start] in "'\"`" or text.startswith(("$(", "${"), start):
            end = inner_end(text, start)
            if end is None:
                line = text.count("\n", 0, start) + 1
                raise UserError(
                    f"{self.file}: cannot be read as a shell script: no closing quotation or bracket for the "
                    f"{text[start : start + (2 if text[start] == '$' else 1)]} in or after line {line}"
                )
            self.at = end
            if text[start] in "'\"":
                return QuotedPart(text[start + 1 : end - 1].replace("\\\n", " "), text[start])
            return QuotedPart(text[start:end])
        if text[start] == "$":
            name = NAME.match(text, start)
            self.at = name.end() if name else start + 1
            return QuotedPart(text[start : self.at])
        return None

    def _word(self) -> Word | None:
        word = Word()
        while (piece := self.piece()) is not None:
            word.pieces.append(piece)
            if len(word.pieces) == 1 and OPENS_LIST.fullmatch(piece.text) and self.text.startswith("(", self.at):
                self.at += 1
                word.items = self._list()
                break
        return word if word.pieces else None

    def _list(self) -> list[Word]:
        items: list[Word] = []
        while self.at < len(self.text):
            self._skip_spaces(lines=True)
            if self.text.startswith(")", self.at):
                self.at += 1
                return items
            if word := self._word():
                items.append(word)
            else:
                self.at += 1
        raise UserError(f"{self.file}: cannot be read as a shell script: no closing bracket of a list")

    def _here_document(self, mark: str) -> Iterator[Command]:
        """The lines up to the mark: another script's, or any text."""
        last = re.compile(rf"^[^\S\n]*{re.escape(mark)}[^\S\n]*$", flags=re.MULTILINE).search(self.text, self.at)
        body = self.text[self.at : last.start() if last else len(self.text)]
        self.at = last.end() + 1 if last else len(self.text)
        try:
            yield from list(_Lexer(body, self.file).commands())
        except UserError:
            return  # text for people

    def _skip_spaces(self, *, lines: bool = False) -> None:
        """Skip spaces, and a comment, which begins with a # at the start of a word."""
        match = (SPACES_AND_LINES if lines else SPACES).match(self.text, self.at)
        self.at = match.end() if match else self.at
