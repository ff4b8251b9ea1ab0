"""Flags of a shell script: those of its commands and of its lists of arguments, with its variables substituted.

Nothing is run. What only a shell could know is named: variables that the script does not set, flags in branches, and
flags that are given twice.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.imports.reading import Reading
from meshwright.imports.shell_values import Values, is_unset
from meshwright.imports.shell_words import Command, Word, read_commands
from meshwright.spec.errors import UserError

FLAG = re.compile(r"--[a-z][\w-]*(=.*)?", flags=re.DOTALL)
HOLDS_FLAG = re.compile(r"(?:^|\s)[\"']?--[a-z]")
LONG = re.compile(r"(?<!\S)--[a-z][\w-]*")
HIDES_FLAGS = re.compile(r"\$\{?\w*(?:ARGS|OPTS|OPTIONS|FLAGS)(?:\[[@*]\])?\}?")
"""A variable whose name says that it holds flags."""
ASSIGNED = re.compile(r"(\w+)(\+?)=(.*)", flags=re.DOTALL)
USED = re.compile(r"\$\{?[!#]?(\w+)")
DECLARES = ("export", "local", "declare", "readonly", "typeset")
KEYWORDS = ("then", "else", "do", "elif", "if", "while", "until", "!", "{", "}", "time", "exec", "eval", *DECLARES)
"""Words before a command."""
TESTS = ("[", "[[", "test", "shift")
DEEPEST = 8
"""Levels of quoted commands."""


@dataclass
class Flags:
    """The flags that a script passes to its program."""

    values: dict[str, Any] = field(default_factory=dict)
    """Flag -> its value; True if it has none."""
    replaced: list[tuple[str, Any]] = field(default_factory=list)
    """Flags that are given again with another value."""
    unset: list[str] = field(default_factory=list)
    """Words that the script does not set, and that may hold flags."""
    notes: list[str] = field(default_factory=list)
    """What was assumed."""


def read_flags(text: str, file: str, switches: Collection[str], lists: Collection[str]) -> Flags:
    """Every `--flag value` of a script or command line; `switches` never have a value, `lists` have any number.

    The flags of a variable are read where the script uses it, or at the end if it does not.
    Raises `UserError` if the text is not a script.
    """
    reader = _Reader(file, switches, lists)
    commands = list(read_commands(text, file))
    reader.used = {name for command in commands for word in command.words for name in _uses(word)}
    reader.run(commands)
    for name, fields in list(reader.values.words.items()):
        if name not in reader.values.put_in and any(HOLDS_FLAG.search(one) for one in fields):
            reader.arguments(fields)
    return reader.result()


def take_flags(
    reading: Reading, text: str, file: str, switches: Collection[str] = (), lists: Collection[str] = ()
) -> dict[str, Any]:
    """The flags and their values, as in `read_flags`; what cannot be known is listed."""
    flags = read_flags(text, file, switches, lists)
    for name, value in flags.replaced:
        reading.drop(f"{file}: {name}={value}", f"the script gives it again: {flags.values[name]}, which is taken")
    for word in dict.fromkeys(flags.unset):
        reading.drop(f"{file}: {' '.join(word.split())}", "the file does not set it; flags that it holds are missing")
    reading.notes += flags.notes
    return flags.values


def _uses(word: Word) -> Iterator[str]:
    """The variables that a word uses, but not to extend themselves."""
    assigned = ASSIGNED.match(word.text)
    for text in word.substituted:
        yield from (name for name in USED.findall(text) if not assigned or name != assigned[1])


class _Reader:
    def __init__(self, file: str, switches: Collection[str], lists: Collection[str]) -> None:
        self.file, self.switches, self.lists = file, switches, lists
        self.values = Values(file)
        self.used: set[str] = set()
        self._given: dict[str, list[str]] = {}
        self._flags = Flags()
        self._branches = 0
        self._in_branches: list[str] = []
        self._printed: list[str] = []
        self._depth = 0

    def run(self, commands: list[Command]) -> None:
        """Follow assignments, and read the flags of commands."""
        for command in commands:
            first, *names = [word.text for word in command.words] or [""]
            if first in ("for", "read"):  # only a shell knows the values that these set
                for name in names[:1] if first == "for" else names:
                    self.values.words.pop(name, None)
            if first == "for":
                continue
            words = self._after_keywords(command.words)
            while words and ASSIGNED.fullmatch(words[0].text):
                self._assign(words.pop(0))
            pattern = command.end == ")" and len(words) == 1 and words[0].text.startswith("-")  # of a case
            if words and words[0].text in ("echo", "printf"):
                self._printed += [flag for word in words for flag in LONG.findall(word.text)]
            elif words and words[0].text not in TESTS and not pattern:
                self.arguments([one for word in words for one in self.values.fields(word)])

    def arguments(self, fields: list[str]) -> None:
        """Read the flags of a list of arguments, and name the words that the script does not set."""
        name, read, unset = "", False, list[str]()
        for one in fields:
            if FLAG.fullmatch(one):
                name, equals, value = one[2:].partition("=")
                self._keep(name, [value] if equals else [])
                name, read = "" if equals else name, True
            elif any(space in one for space in " \t\n") and HOLDS_FLAG.search(one) and self._depth < DEEPEST:
                self._inner(one)
                name, read = "", True
            elif name and self._takes(name, one) and not HIDES_FLAGS.fullmatch(one):
                self._given[name].append(one)
            else:
                name = ""
                if is_unset(one):
                    unset.append(one)
        if read:
            self._flags.unset += unset

    def _inner(self, text: str) -> None:
        """Read a command in quotes."""
        try:
            commands = list(read_commands(text, self.file))
        except UserError:
            self._flags.notes.append(f"{self.file}: not a command, so not read: {' '.join(text.split())[:80]}")
            return
        self._depth += 1
        self.run(commands)
        self._depth -= 1

    def result(self) -> Flags:
        """What was found."""
        flags, branches = self._flags, list(dict.fromkeys(self._in_branches))
        flags.unset = [word for word in flags.unset if USED.sub(r"\1", word).strip("{}[]@*") not in self.values.words]
        for word in flags.unset:
            if HIDES_FLAGS.fullmatch(word):
                raise UserError(
                    f"{self.file}: {word} holds flags, but the file does not set it; write them in the file"
                )
        flags.values = {name: _value(given) for name, given in self._given.items()}
        flags.replaced = [(name, value) for name, value in flags.replaced if value != flags.values[name]]
        if branches:
            flags.notes.append(
                f"{self.file}: every branch of an if or a case is taken; they give {', '.join(branches)}"
            )
        if printed := list(dict.fromkeys(self._printed)):
            flags.notes.append(f"{self.file}: flags that it only prints are not read: {', '.join(printed)}")
        return flags

    def _after_keywords(self, words: list[Word]) -> list[Word]:
        """A command without the words before it; counts the branches that it opens and closes."""
        words = list(words)
        while words and (word := words[0].text) in (*KEYWORDS, "case", "fi", "esac"):
            self._branches += (word in ("if", "case")) - (word in ("fi", "esac"))
            words.pop(0)
            while word in DECLARES and words and words[0].text.startswith("-"):
                words.pop(0)
            if word == "case":
                return []
        return words

    def _assign(self, word: Word) -> None:
        match = ASSIGNED.fullmatch(word.text)
        assert match is not None
        name, more = match[1], bool(match[2])
        before = self.values.known(name)
        self.values.assign(name, word, more=more)
        now = self.values.known(name)
        if self._branches > 0 and name in self.used:
            old = LONG.findall(before or "")
            self._in_branches += [flag for flag in LONG.findall(now or "") if flag not in old]
            short = not any(HOLDS_FLAG.search(value) or " " in value for value in (before or "", now or ""))
            if before and now and not more and before != now and short:
                self._flags.notes.append(f"{self.file}: {name} is {before} or {now}, by a branch; {now} is taken")

    def _keep(self, name: str, value: list[str]) -> None:
        if name in self._given:
            self._flags.replaced.append((name, _value(self._given.pop(name))))
        self._given[name] = value
        if self._branches > 0:
            self._in_branches.append(f"--{name}")

    def _takes(self, name: str, word: str) -> bool:
        """Whether a word is a flag's value, or one of several."""
        if name in self.switches:
            return False
        return not self._given[name] or name in self.lists or not isinstance(_number(word), str)


def _value(given: list[str]) -> Any:
    text = " ".join(given)
    if text[:1] in "\"'" and text[-1:] == text[:1] and len(text) > 1:  # quoted in a list that the shell splits
        text = text[1:-1]
    return _number(text) if given else True


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
