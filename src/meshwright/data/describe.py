"""Descriptions of samples: their text, with the trained part marked."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from meshwright.data.mixture import Mixture
from meshwright.data.packing import NO_LABEL, BestFitSamples, Sample, Samples
from meshwright.data.prepare import Corpus
from meshwright.data.token_file import TokenFile
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.text import counted
from meshwright.terminal import printable

WIDTH = 100
"""Characters shown of a line."""


def describe_mixture(corpus: Corpus, mixture: Mixture, num_samples: int) -> str:
    """The epochs in a run of `num_samples`, the shares of several streams, and the fill of best-fit samples."""
    counts, epochs = mixture.counts(num_samples), mixture.epochs(num_samples)
    tokens = [count * stream.num_tokens / len(stream) for count, stream in zip(counts, mixture.streams, strict=True)]
    parts = []
    for stream, packed, times, seen in zip(corpus.streams, mixture.streams, epochs, tokens, strict=True):
        share = f"{stream.name} {100 * seen / max(1.0, sum(tokens)):.1f} % in " if len(tokens) > 1 else ""
        fill = f" of samples {100 * packed.fill:.2f} % full" if isinstance(packed, BestFitSamples) else ""
        parts.append(f"{share}{times:.2f} epochs{fill}")
    return "; ".join(parts)


def describe_formats(corpus: Corpus) -> str:
    """The formats of each stream's records, with the numbers of records cut off or left out; empty for text."""
    parts = []
    for stream in corpus.streams:
        if stream.formats not in (("text",), ("tokens",)) or stream.train.counts:
            parts.append(f"{stream.name}: {', '.join([' and '.join(stream.formats), *describe_counts(stream.train)])}")
    return "; ".join(parts)


def describe_counts(file: TokenFile) -> list[str]:
    """How many records were cut off, left out or changed, for each reason."""
    return [describe_note(note, count) for note, count in file.counts.items()]


def describe_note(note: str, count: int) -> str:
    """How many records were treated as a note says."""
    return f"{count} {_NOTES[note]}"


_NOTES = {
    "truncated": "cut off at data.sequence_length",
    "overlong": "left out because of their length",
    "unlabelled": "left out because they have no trained tokens",
    "unweighted": "left out because their weight is 0",
    "spelled": "left out because they contain the text of a special token",
    "undecodable": "skipped: not UTF-8",
    "structs": "read without keys that are null in their struct, which the record may lack",
}


def describe_sample(samples: Samples, index: int, tokenizer: TextTokenizer, *, max_lines: int = 24) -> list[str]:
    """Lines for a terminal: a summary of sample `index`, then its decoded text, document by document if documents are
    separate.

    Text after `|` is predicted (in the loss), text after `.` is context. A long text is shortened to its first and last
    lines, `max_lines` in all.
    """
    sample = samples[index]
    num_predicted = int(np.count_nonzero(sample.labels != NO_LABEL))
    borders = _borders(sample, [piece.length for piece in samples.pieces(index)])
    lines = [
        f"sample {index} of {len(samples)}: {len(sample.inputs)} tokens, {num_predicted} of them predicted, "
        + _count(sample, len(borders) - 1, tokenizer)
    ]
    text = list(_by_document(sample, borders, tokenizer))
    if len(text) > max_lines:
        last = max_lines // 3
        left_out = len(text) - max_lines
        text = [*text[: max_lines - last], f"({left_out} lines left out)", *text[len(text) - last :]]
    return lines + text


def parts_of(samples: Samples, index: int, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Sample `index` as plain data: its documents, each with its tokens, its text in runs that are trained or not, and
    the spans of positions that are trained; the padding; whether attention separates documents."""
    sample = samples[index]
    lengths = [piece.length for piece in samples.pieces(index)]
    borders = set(_borders(sample, lengths))
    if sample.documents is None:
        borders |= {int(place) + 1 for place in np.flatnonzero(sample.inputs[: sum(lengths)] == tokenizer.eos_id)}
    trained = np.append(False, sample.labels != NO_LABEL)[:-1]
    parts = []
    for number, (start, end) in enumerate(pairwise(sorted(borders)), start=1):
        marks = trained[start:end]
        runs = list(pairwise([0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), end - start]))
        parts.append(
            {
                "document": number,
                "title": f"{_headline(sample, number)}, {counted(end - start, 'token')}",
                "tokens": end - start,
                "trained": int(marks.sum()),
                "spans": [(start + a, start + b) for a, b in runs if marks[a]],
                "text": [(bool(marks[a]), tokenizer.decode(sample.inputs[start + a : start + b])) for a, b in runs],
            }
        )
    return {
        "parts": parts,
        "padding": len(sample.inputs) - sum(lengths),
        "separate": sample.documents is not None,
    }


def length_histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """How many documents have 1, 2 to 3, 4 to 7, ... tokens."""
    classes = np.bincount(np.frexp(lengths[lengths > 0])[1] - 1)
    return [{"from": 1 << i, "to": (2 << i) - 1, "documents": int(count)} for i, count in enumerate(classes) if count]


def _borders(sample: Sample, lengths: Sequence[int]) -> list[int]:
    """The boundaries of the parts that are shown separately: pieces of `lengths` tokens, and separate documents."""
    borders = {0, *accumulate(lengths)}
    if sample.documents is not None:
        borders.update((np.flatnonzero(np.diff(sample.documents[: sum(lengths)])) + 1).tolist())
    return sorted(borders)


def _count(sample: Sample, parts: int, tokenizer: TextTokenizer) -> str:
    """How many pairs or documents a sample holds; for a piece of a stream, how many of them end in it."""
    if sample.references is not None:
        count, what = parts // 2, "pair"
    elif sample.documents is not None or parts > 1:
        count, what = parts, "document"
    else:
        count, what = int(np.count_nonzero(sample.labels == tokenizer.eos_id)), "document end"
    return f"{count} {what}{'' if count == 1 else 's'}"


def _by_document(sample: Sample, borders: Sequence[int], tokenizer: TextTokenizer) -> Iterator[str]:
    """The parts between `borders`, each under a headline if documents are separate."""
    used = borders[-1]
    for number, (start, end) in enumerate(pairwise(borders), start=1):
        if sample.documents is not None:
            yield f"- {_headline(sample, number)}: {end - start} tokens"
        yield from _marked_lines(sample.inputs[start:end], sample.labels[start:end], tokenizer)
    if used < len(sample.inputs):
        yield f"({len(sample.inputs) - used} positions of padding)"


def _headline(sample: Sample, number: int) -> str:
    """The title of the sample's document with that number, counted from 1."""
    if sample.references is None:
        return f"document {number}"
    return f"pair {(number + 1) // 2}, {'chosen' if number % 2 else 'rejected'}"


def _marked_lines(inputs_T: np.ndarray, labels_T: np.ndarray, tokenizer: TextTokenizer) -> Iterator[str]:
    """The tokens of a piece, and the one after it if it is predicted."""
    has_label_T = labels_T != NO_LABEL
    tokens = np.append(inputs_T, labels_T[-1:][has_label_T[-1:]])
    predicted = np.append(False, has_label_T)[: len(tokens)]
    borders = [0, *(np.flatnonzero(np.diff(predicted)) + 1), len(tokens)]
    for start, end in pairwise(borders):
        mark = "|" if predicted[start] else "."
        yield from (f"{mark} {_printable(line)}" for line in tokenizer.decode(tokens[start:end]).split("\n"))


def _printable(line: str) -> str:
    """At most WIDTH characters of a line, without control sequences."""
    return printable(line[:WIDTH]) + (" ..." if len(line) > WIDTH else "")
