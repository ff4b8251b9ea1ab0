"""Places of special tokens in a conversation's text: those that its template wrote, and those spelled out in messages.

All functions take places in the text's order and need one pass over them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest


def inside(places: Sequence[tuple[int, int]], texts: Sequence[tuple[int, int]]) -> Iterator[bool]:
    """For each place, in order: whether it is inside one of the texts."""
    waiting, reach = deque(sorted(texts)), 0
    for start, end in places:
        while waiting and waiting[0][0] <= start:
            reach = max(reach, waiting.popleft()[1])
        yield end <= reach


def between(special: Sequence[tuple[int, int]], spelled: Sequence[bool], length: int) -> Iterator[tuple[int, int]]:
    """The parts with spelled tokens: from the template's token before them to the one after them."""
    start, wanted = 0, False
    for (begin, end), inside in zip([*special, (length, length)], [*spelled, False], strict=True):
        if not inside and wanted:
            yield start, begin
        start, wanted = (start, True) if inside else (end, False)


def replaced(text: str, places: Sequence[tuple[int, int]], others: Iterable[str]) -> str:
    """The text with other text at these places, in order."""
    borders = [0, *(border for place in places for border in place), len(text)]
    kept = (text[start:end] for start, end in zip(borders[::2], borders[1::2], strict=True))
    return "".join(chain.from_iterable(zip_longest(kept, others, fillvalue="")))
