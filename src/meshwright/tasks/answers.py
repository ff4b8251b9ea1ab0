"""Extraction of answers from a model's text, and comparison with the correct ones. No torch here."""

import re
import string
from collections.abc import Callable

_BEHIND_HASHES = re.compile(r"####\s*(-?[0-9.,]+)")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_SAID = re.compile(r"(?:final answer is|the answer is):?\s*(.+?)(?:\.\s|\.?$)", re.IGNORECASE | re.MULTILINE)
_UNITS = re.compile(r"\\(?:text|mbox)\{[^{}]*\}\s*$")
_PLAIN_FRACTION = re.compile(r"^(-?\d+)/(-?\d+)$")

Extract = Callable[[str], str | None]
"""Takes a model's text, returns the answer in it; None if there is none."""


def number_behind_hashes(text: str) -> str | None:
    """The number after `####`, at the end of GSM8K's solutions."""
    found = _BEHIND_HASHES.search(text)
    return found and plain_number(found[1])


def last_number(text: str) -> str | None:
    """The last number of the text."""
    found = _NUMBER.findall(text)
    return plain_number(found[-1]) if found else None


def plain_number(text: str) -> str:
    """A number without currency, thousands separators and final dot: `$1,234.` is `1234`."""
    return text.strip().replace("$", "").replace(",", "").rstrip(".")


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\boxed 5`, or the text after "the answer is"; normalized."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        said = _SAID.findall(text)
        return plain_math(said[-1]) if said else None
    rest = text[text.index("box", start) :].removeprefix("boxed").removeprefix("box")
    if not rest.startswith("{"):
        return plain_math(rest.split("$")[0]) if rest.startswith(" ") else None
    depth = 0
    for place, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return plain_math(rest[1:place])
    return None


def plain_math(text: str) -> str:
    r"""An expression in a normal form, after Hendrycks et al. (2021): without spaces, units, `\left` and `\right`, with
    `\frac{a}{b}` for its short forms and for `a/b`."""
    for old, new in (("\n", ""), ("\\!", ""), ("\\,", ""), ("\\;", ""), ("tfrac", "frac"), ("dfrac", "frac")):
        text = text.replace(old, new)
    for old in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$", "\\%", "%"):
        text = text.replace(old, "")
    text = _UNITS.sub("", text.strip().rstrip(".")).replace(" ", "")
    text = re.sub(r"(?<![\d])\.(\d)", r"0.\1", text)
    name, _, value = text.partition("=")
    text = value if value and len(name) <= 2 else text
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\w)\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac(\{[^{}]*\})(\w)", r"\\frac\1{\2}", text)
    return _PLAIN_FRACTION.sub(r"\\frac{\1}{\2}", text)


def plain_text(text: str) -> str:
    """Text without case, punctuation and repeated spaces."""
    return " ".join("".join(letter for letter in text.casefold() if letter not in string.punctuation).split())
