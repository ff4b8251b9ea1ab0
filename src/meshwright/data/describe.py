"""The one place that shows a sample to people: its text, and what of it is in the loss."""

import numpy as np

from meshwright.data.packing import NO_LABEL, Samples
from meshwright.data.tokenizer import TextTokenizer

WIDTH = 100
"""Characters shown of a line."""


def describe_sample(
    samples: Samples, index: int, tokenizer: TextTokenizer, *, max_lines: int = 24
) -> list[str]:
    """Lines for a terminal: what sample `index` holds, then its decoded text.

    Text behind `|` is predicted (in the loss), text behind `.` is only read. Of a long text, the first and
    the last lines, `max_lines` together.
    """
    inputs_T, labels_T = samples[index]
    num_predicted = int(np.count_nonzero(labels_T != NO_LABEL))
    num_ends = int(np.count_nonzero(labels_T == tokenizer.eos_id))
    lines = [
        f"sample {index} of {len(samples)}: {len(inputs_T)} tokens, {num_predicted} of them predicted, "
        f"{num_ends} document {'end' if num_ends == 1 else 'ends'}"
    ]
    text = _marked_lines(inputs_T, labels_T, tokenizer)
    if len(text) > max_lines:
        last = max_lines // 3
        left_out = len(text) - max_lines
        text = [*text[: max_lines - last], f"({left_out} lines left out)", *text[len(text) - last :]]
    return lines + text


def _marked_lines(inputs_T: np.ndarray, labels_T: np.ndarray, tokenizer: TextTokenizer) -> list[str]:
    # The label of a position is the input of the next, so the text is the inputs and the last label.
    tokens = np.append(inputs_T, labels_T[-1])
    predicted = np.append(False, labels_T != NO_LABEL)
    # What follows the last label takes part in nothing.
    used = int(np.flatnonzero(predicted).max(initial=-1)) + 1
    borders = np.flatnonzero(np.diff(predicted[:used])) + 1
    lines = []
    for run, marks in zip(np.split(tokens[:used], borders), np.split(predicted[:used], borders), strict=True):
        mark = "|" if marks.any() else "."
        lines += [f"{mark} {_printable(line)}" for line in tokenizer.decode(run).split("\n")]
    if used < len(tokens):
        lines.append(f"({len(tokens) - used} positions of padding)")
    return lines


def _printable(line: str) -> str:
    """At most WIDTH characters of a line, control characters (which would act on the terminal) escaped."""
    shown = "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in line[:WIDTH])
    return shown + (" ..." if len(line) > WIDTH else "")
