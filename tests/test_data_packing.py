"""Concatenated packing: labels shifted by one, no token lost, and the text shown to users."""

import numpy as np
import pytest

from meshwright.data.describe import describe_sample
from meshwright.data.packing import NO_LABEL, ConcatenatedSamples, Piece, Sample, blank_sample
from meshwright.data.tokenizer import train_tokenizer


def stream(length):
    return np.arange(100, 100 + length, dtype=np.uint16)


@pytest.mark.parametrize("length", [9, 12, 13, 16, 17, 40])
def test_samples_follow_one_another(length):
    tokens = stream(length)
    samples = ConcatenatedSamples(tokens, 4)
    assert len(samples) == (length - 1) // 4
    inputs, labels = (np.concatenate(part) for part in zip(*(samples[i][:2] for i in range(len(samples))), strict=True))
    assert inputs.dtype == labels.dtype == np.int64
    np.testing.assert_array_equal(inputs, tokens[: len(inputs)])
    np.testing.assert_array_equal(labels, tokens[1 : len(labels) + 1])
    assert length - 1 - len(labels) < 4, "less than one sample is left out"


@pytest.mark.parametrize("length", [2, 4, 5, 6, 8, 9, 13])
def test_with_the_tail_every_token_is_a_label_once(length):
    tokens = stream(length)
    samples = ConcatenatedSamples(tokens, 4, keep_tail=True)
    read = [samples[i] for i in range(len(samples))]
    assert all(inputs.shape == labels.shape == (4,) for inputs, labels, *_ in read)
    labels = np.concatenate([sample.labels for sample in read])
    np.testing.assert_array_equal(labels[labels != NO_LABEL], tokens[1:])
    inputs = np.concatenate([sample.inputs for sample in read])
    np.testing.assert_array_equal(inputs[: length - 1], tokens[:-1])
    assert not inputs[length - 1 :].any()
    assert (labels[length - 1 :] == NO_LABEL).all()


def test_too_short_and_out_of_range():
    with pytest.raises(ValueError, match="the corpus has 4 tokens, but one sample needs 5"):
        ConcatenatedSamples(stream(4), 4)
    with pytest.raises(ValueError, match="one sample needs 2"):
        ConcatenatedSamples(stream(1), 4, keep_tail=True)
    samples = ConcatenatedSamples(stream(9), 4)
    for index in (-1, 2):
        with pytest.raises(IndexError):
            samples[index]


def test_samples_do_not_share_memory():
    tokens = stream(9)
    samples = ConcatenatedSamples(tokens, 4)
    samples[0][0][:] = 0
    assert samples[0][0].all()


class Fixed:
    """Given samples."""

    def __init__(self, *samples):
        self.samples, self.sequence_length = samples, len(samples[0][0])

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]

    def pieces(self, index):
        return [Piece(0, int(np.flatnonzero(self.samples[index].labels != NO_LABEL).max(initial=-1)) + 1)]


@pytest.fixture(scope="module")
def letters():
    return train_tokenizer(["."], 257)


def test_a_sample_as_people_see_it(letters):
    tokens = np.array([*letters.encode("ab\nc\x1b"), letters.eos_id, *letters.encode("d")])
    samples = ConcatenatedSamples(tokens, 4, keep_tail=True)
    assert describe_sample(samples, 0, letters) == [
        "sample 0 of 2: 4 tokens, 4 of them predicted, 0 document ends",
        ". a",
        "| b",
        "| c\\x1b",
    ]
    assert describe_sample(samples, 1, letters) == [
        "sample 1 of 2: 4 tokens, 2 of them predicted, 1 document end",
        ". \\x1b",
        "| <|endoftext|>d",
        "(2 positions of padding)",
    ]


def test_masked_text_is_marked(letters):
    inputs, labels = (
        np.array(letters.encode("question")),
        np.array([*letters.encode("uestion"), letters.eos_id]),
    )
    labels[2:4] = NO_LABEL
    apart = Sample(inputs, labels, np.array([0, 0, 0, 1, 1, 1, 1, 1]))
    assert describe_sample(Fixed(apart), 0, letters)[0].endswith("2 documents")
    assert describe_sample(Fixed(Sample(inputs, labels)), 0, letters)[1:] == [
        ". q",
        "| ue",
        ". st",
        "| ion<|endoftext|>",
    ]
    assert describe_sample(Fixed(blank_sample(3)), 0, letters)[1:] == ["(3 positions of padding)"]


def test_long_samples_are_cut_for_display(letters):
    text = "\n".join(f"line {i}" for i in range(50)) + "x" * 200
    samples = ConcatenatedSamples(np.array(letters.encode(text)), len(text) - 1)
    lines = describe_sample(samples, 0, letters, max_lines=9)
    assert [line for line in lines if "line 4" in line][-1].endswith(" ...")
    assert lines[1:4] == [". l", "| ine 0", "| line 1"]
    assert "(42 lines left out)" in lines
    assert len(lines) == 1 + 9 + 1
    assert max(map(len, lines)) < 110
