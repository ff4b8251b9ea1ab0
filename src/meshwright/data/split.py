"""The one place that decides which text is held out for evaluation."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.data.sources import Document

HASHES = 1 << 64
"""Number of values of a text's hash."""


def text_hash(text: str) -> int:
    """A uniform number below HASHES that depends on nothing but the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which documents of a corpus are held out.

    A document's side follows from a hash of its text. So it keeps its side when others are added, when
    files are renamed and when the seed changes, and exact copies of a document are always together: no
    held-out text is ever trained on under another name.
    """

    num_documents: int
    """Documents in the corpus."""
    num_characters: int
    """Characters in the corpus."""
    below: int
    """Documents whose hash is below this are held out."""
    single_cut: int | None = None
    """Corpus of one document: where it is cut; what follows is held out."""

    @property
    def holds_out(self) -> bool:
        """Whether anything is held out."""
        return self.below > 0 or self.single_cut is not None

    def parts(self, document: Document) -> Iterator[tuple[bool, str]]:
        """(held out?, text) of a document: itself, or the two parts of an only document."""
        if self.single_cut is None:
            yield text_hash(document.text) < self.below, document.text
        else:
            yield False, document.text[: self.single_cut]
            yield True, document.text[self.single_cut :]


def plan_split(documents: Iterable[Document], held_out: float) -> Split:
    """Read all documents once and choose a split that holds out the share `held_out` of them.

    A share above 0 holds out at least the document with the smallest hash. Of an only document it is the
    last part, from the start of a line. Raises ValueError when there is no text, or one side of the split
    would be empty.
    """
    num_documents, num_characters, smallest, largest, text = 0, 0, HASHES, -1, ""
    for document in documents:
        text = document.text
        value = text_hash(text)
        smallest, largest = min(smallest, value), max(largest, value)
        num_documents, num_characters = num_documents + 1, num_characters + len(text)
    if not num_documents:
        raise ValueError("data.sources hold no text: every document is empty")
    below, cut = 0, None
    if held_out and num_documents == 1:
        cut = _cut(text, held_out)
    elif held_out:
        below = max(int(held_out * HASHES), smallest + 1)
    if largest < below:
        raise ValueError(
            f"no document is left to train on: all {num_documents} fall into the share "
            f"data.held_out={held_out}; lower it, or set it to 0 to train on everything"
        )
    return Split(num_documents=num_documents, num_characters=num_characters, below=below, single_cut=cut)


def _cut(text: str, held_out: float) -> int:
    target = int(len(text) * (1 - held_out))
    cut = text.rfind("\n", 0, target) + 1 or target
    if not 0 < cut < len(text):
        raise ValueError(f"the only document has {len(text)} characters, too few to hold out data.held_out={held_out}")
    return cut
