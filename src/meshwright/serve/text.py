"""Incremental decoding of tokens to text: whole characters only, up to a stop string."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""The decoding of bytes that are not yet a complete character."""
PATIENCE = 16
"""Most tokens to wait for a complete character; no character has more."""


class TextWriter:
    """Decodes the tokens of one answer incrementally. The results of `add` and `finish`, joined, are the answer."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        """`stops`: the text ends before the first stop string in it."""
        self._decode, self._stops = decode, tuple(filter(None, stops))
        self._tokens: list[int] = []
        self._before = 0
        """Tokens from here to `_shown` are decoded again with the new ones, because spaces between words depend on the
        preceding tokens."""
        self._shown = 0
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found."""

    def add(self, token: int) -> str:
        """The new characters that are final."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._before :])
        if text.endswith(UNFINISHED) and len(self._tokens) - self._shown < PATIENCE:
            return ""
        return self._release(text)

    def finish(self) -> str:
        """The remaining text; call it at the end of the answer."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decode(self._tokens[self._before :])) if self._shown < len(self._tokens) else ""
        rest, self._held = self._held, ""
        return text if self.stopped is not None else text + rest

    def _release(self, text: str) -> str:
        known = self._decode(self._tokens[self._before : self._shown]) if self._shown > self._before else ""
        self._before, self._shown = self._shown, len(self._tokens)
        held = self._held + text[len(known) :]
        stops = [(held.find(stop), stop) for stop in self._stops if stop in held]
        if stops:
            place, self.stopped = min(stops, key=lambda pair: (pair[0], -len(pair[1])))
            self._held = ""
            return held[:place]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
