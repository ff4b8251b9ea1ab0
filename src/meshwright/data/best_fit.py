"""Best-fit-decreasing bin packing of documents, by counting lengths instead of placing one document at a time.

Longest first, each document goes into the fullest bin with room (Johnson, 1973; for sequences Krell et al., "Efficient
Sequence Packing without Cross-contamination", 2021). Documents of one length are placed together: the fullest bins with
room all have the same room r, and each takes r // length documents before the next bin. The cost is sorting plus one
array operation for each pair of length and room that occurs: about as many as the capacity, for any number of
documents.
"""

from dataclasses import dataclass

import numpy as np

WINDOW = 1 << 24
"""Documents packed together. More documents are packed in windows, each with its own bins: this bounds memory (about
100 bytes per document) and leaves a few bins per window less full."""


@dataclass(frozen=True)
class Bins:
    """The content of each bin: pieces of a stream. Labels are the next tokens."""

    starts: np.ndarray
    """First token of each piece, bin after bin: int64."""
    lengths: np.ndarray
    """Labels of each piece: int32."""
    firsts: np.ndarray
    """First piece of each bin, and the number of pieces: int64 (num_bins + 1,)."""


def best_fit(starts: np.ndarray, capacity: int, *, alone: bool = False) -> Bins:
    """Pack documents into bins of `capacity` labels.

    `starts`, int64 (num_documents + 1,), are the documents' first tokens and the number of tokens. A document of n
    tokens has n - 1 labels. A document of more than `capacity` labels is cut into pieces that fill a bin, and a
    remainder. `alone`: every document, or remainder, gets its own bin.
    """
    windows = [
        _pack(starts[first : first + WINDOW + 1], capacity, alone) for first in range(0, len(starts) - 1, WINDOW)
    ]
    offsets = np.cumsum([0, *(len(window.lengths) for window in windows)])
    firsts = [window.firsts[:-1] + offset for window, offset in zip(windows, offsets[:-1], strict=True)]
    return Bins(
        starts=np.concatenate([np.zeros(0, np.int64), *(window.starts for window in windows)]),
        lengths=np.concatenate([np.zeros(0, np.int32), *(window.lengths for window in windows)]),
        firsts=np.append(np.concatenate([np.zeros(0, np.int64), *firsts]), offsets[-1]),
    )


def assign_bins(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """(bin of each item, number of bins) for items of 1 to `capacity`."""
    bins = np.empty(len(lengths), np.int64)
    order = np.argsort((capacity - lengths).astype(np.uint16 if capacity < 1 << 16 else np.int64), kind="stable")
    rooms: dict[int, list[np.ndarray]] = {}
    """Bins by their remaining room."""
    open_rooms = 0  # bit r is set if rooms[r] has bins
    num_bins = placed = 0
    for length, count in reversed(list(enumerate(np.bincount(lengths)))):
        items = order[placed : placed + count]
        placed += int(count)
        while len(items):
            fitting = open_rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                free = rooms[room].pop()
                if not rooms[room]:
                    open_rooms &= ~(1 << room)
            else:
                room = capacity
                free = np.arange(num_bins, num_bins - (-len(items) // (capacity // length)))
                num_bins += len(free)
            each = room // length
            used, unused = np.split(free, [-(-len(items) // each)])
            bins[items[: len(used) * each]] = np.repeat(used, each)[: len(items)]
            last = min(each, len(items) - each * (len(used) - 1))  # documents in the last bin used
            items = items[len(used) * each :]
            for left, some in ((room, unused), (room - each * length, used[:-1]), (room - last * length, used[-1:])):
                if left and len(some):
                    rooms.setdefault(left, []).append(some)
                    open_rooms |= 1 << left
    return bins, num_bins


def _pack(starts: np.ndarray, capacity: int, alone: bool) -> Bins:
    labels = np.maximum(np.diff(starts) - 1, 0)
    whole, rests = labels // capacity, labels % capacity
    # Pieces that fill a bin, then the remainders of documents; a short document is one remainder.
    cut = np.flatnonzero(whole)
    numbers = np.arange(whole.sum()) - np.repeat(np.cumsum(whole[cut]) - whole[cut], whole[cut])
    full_starts = np.repeat(starts[cut], whole[cut]) + capacity * numbers
    has_rest = np.flatnonzero(rests)
    bins, num_bins = (np.arange(len(has_rest)), len(has_rest)) if alone else assign_bins(rests[has_rest], capacity)
    # Within a bin the longest comes first.
    order = np.lexsort((-rests[has_rest], bins))
    rest_starts = (starts[:-1] + whole * capacity)[has_rest][order]
    counts = np.append(np.ones(len(full_starts), np.int64), np.bincount(bins, minlength=num_bins))
    return Bins(
        starts=np.append(full_starts, rest_starts).astype(np.int64),
        lengths=np.append(np.full(len(full_starts), capacity), rests[has_rest][order]).astype(np.int32),
        firsts=np.append(0, np.cumsum(counts)),
    )
