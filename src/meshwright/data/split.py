"""The held-out split: selects the text for evaluation."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from meshwright.data.readers import Document
from meshwright.spec.errors import UserError

HASHES = 1 << 64
"""Number of values of a text's hash."""


def text_hash(text: str) -> int:
    """A uniform number below HASHES that depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which documents of a corpus are held out.

    A document's side depends on a hash of its text. So it keeps its side when others are added, files are renamed or
    the seed changes. Exact copies of a document are always on the same side: no held-out text is ever trained on under
    another name.
    """

    below: int
    """Documents whose hash is below this are held out."""
    single_cut: int | None = None
    """For a corpus of one document: the cut; everything after it is held out."""

    @property
    def holds_out(self) -> bool:
        """Whether anything is held out."""
        return self.below > 0 or self.single_cut is not None

    def parts(self, text: str, value: int) -> Iterator[tuple[bool, str]]:
        """(held out?, text) of a document with this `text_hash`: the whole, or for an only document its two parts."""
        if self.single_cut is None:
            yield value < self.below, text
        else:
            yield False, text[: self.single_cut]
            yield True, text[self.single_cut :]


@dataclass(kw_only=True)
class Census:
    """Counts of the part of a corpus that has been read."""

    num_documents: int = 0
    num_characters: int = 0
    smallest: int = HASHES
    """Smallest hash of a document."""
    largest: int = -1
    """Largest hash of a document."""

    notes: dict[str, int] = field(default_factory=dict)
    """Records that were cut off, left out, or read without some keys, by reason."""

    def add(self, num_characters: int, value: int, *notes: str) -> None:
        """Count a document."""
        self.note(*notes)
        self.num_documents += 1
        self.num_characters += num_characters
        self.smallest, self.largest = min(self.smallest, value), max(self.largest, value)

    def note(self, *notes: str) -> None:
        """Count records by their notes; empty ones are none."""
        for note in filter(None, notes):
            self.notes[note] = self.notes.get(note, 0) + 1

    def suits(self, split: Split) -> bool:
        """Whether both sides of a split by hashes have documents."""
        return self.num_documents > 0 and (not split.below or self.smallest < split.below <= self.largest)


def likely_split(held_out: float) -> Split:
    """The split of a corpus that has not been read yet. It is right if there are enough documents to fall on both
    sides; a `Census` checks that."""
    return Split(below=int(held_out * HASHES))


def plan_split(documents: Iterable[Document], held_out: float, *, where: str) -> tuple[Split, Census]:
    """Read all documents once and choose a split that holds out the share `held_out` of them.

    A share above 0 holds out at least the document with the smallest hash. Of an only document it is the last part,
    from the start of a line. Raises UserError if there is no text, naming `where`, or if one side of the split would be
    empty.
    """
    census, text = Census(), ""
    for document in documents:
        text = document.text
        census.add(len(text), text_hash(text))
    if not census.num_documents:
        raise UserError(f"{where}: every document is empty")
    if held_out and census.num_documents == 1:
        return Split(below=0, single_cut=_cut(text, held_out)), census
    below = max(likely_split(held_out).below, census.smallest + 1) if held_out else 0
    if census.largest < below:
        raise UserError(
            f"no document is left to train on: all {census.num_documents} are held out by data.held_out={held_out}; "
            "lower it, or set it to 0 to train on all"
        )
    return Split(below=below), census


def _cut(text: str, held_out: float) -> int:
    target = int(len(text) * (1 - held_out))
    cut = text.rfind("\n", 0, target) + 1 or target
    if not 0 < cut < len(text):
        raise UserError(f"the only document has {len(text)} characters, too few to hold out data.held_out={held_out}")
    return cut
