"""Damage of prepared tokens and of token files: reported before training on it, and repaired by preparing again."""

import os
import struct

import numpy as np
import pytest

from meshwright.data.checksums import BLOCK
from meshwright.data.packing import build_samples
from meshwright.data.prepare import prepare_corpus
from meshwright.data.token_file import write_index
from meshwright.data.tokenizer import train_tokenizer
from meshwright.spec.data import DataSpec
from meshwright.spec.errors import UserError

TEXTS = [f"document {number} says {number * 7} and {number * 13}. " * 20 for number in range(900)]
TOKENIZER = train_tokenizer(TEXTS[:50], 300)


@pytest.fixture
def folder(tmp_path):
    """Text, its tokenizer, and a cache."""
    TOKENIZER.save(tmp_path / "tokenizer")
    for number, text in enumerate(TEXTS[:300]):
        (tmp_path / f"{number}.txt").write_text(text)
    return tmp_path


def recipe(folder, source="*.txt", **fields):
    return DataSpec.model_validate(
        {"sources": source, "tokenizer": "tokenizer", "cache_dir": str(folder / "cache"), "sequence_length": 64}
        | {"held_out": 0}
        | fields
    )


def prepare(folder, source="*.txt", mend=None, **fields):
    (stream,) = prepare_corpus(recipe(folder, source, **fields), base_dir=folder, mend=mend).streams
    return stream.train


def read_all(folder, train):
    samples = build_samples(train, recipe(folder))
    return np.concatenate([samples[number].inputs for number in range(len(samples))])


def zero(content, place):
    content[place : place + 8] = bytes(8)


def flip(content, place):
    content[place] ^= 4


@pytest.mark.every(5)
@pytest.mark.parametrize("damage", [zero, flip])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("name", ["train.bin", "train.idx"])
def test_damage_is_named_and_mended_by_preparing_again(name, share, damage, folder):
    train = prepare(folder)
    wanted = read_all(folder, train)
    path = train.path.with_name(name)
    content = bytearray(path.read_bytes())
    assert len(content) > BLOCK or name.endswith("idx")
    header = 34 if name.endswith("idx") else 0
    damage(content, header + int(share * (len(content) - header - 8)))
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged: .*; delete .* to build it again$"):
        read_all(folder, prepare(folder))
    told = []
    assert np.array_equal(read_all(folder, prepare(folder, mend=told.append)), wanted)
    assert len(told) == 1
    assert f"{name} is damaged" in told[0]
    assert np.array_equal(read_all(folder, prepare(folder, mend=told.append)), wanted)
    assert len(told) == 1


@pytest.mark.parametrize("content", [b"", b"{\xfb}", b"5", b"[" * 100_000])
def test_damage_of_what_is_said_about_tokens_is_named(content, folder):
    path = prepare(folder).path.with_suffix(".json")
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train.bin cannot be read .*; delete .* to build it again$"):
        prepare(folder)


def test_only_what_is_read_is_compared(folder):
    train = prepare(folder)
    content = bytearray(train.path.read_bytes())
    flip(content, len(content) - 1)
    train.path.write_bytes(content)
    samples = build_samples(prepare(folder), recipe(folder))
    assert samples[0].inputs.any()
    with pytest.raises(ValueError, match=rf"train\.bin is damaged: bytes {(len(content) - 1) // BLOCK * BLOCK} to"):
        samples[len(samples) - 1]


def test_a_trained_tokenizer_that_was_changed_is_told(folder):
    train = prepare(folder, tokenizer="auto", tokenizer_vocab=300)
    (path,) = folder.glob("cache/*/tokenizer/tokenizer.json")
    assert train.num_documents
    path.write_text(path.read_text().replace('"merges": [', '"merges": [ ', 1))
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged: .*; delete .* to train it again"):
        prepare(folder, tokenizer="auto", tokenizer_vocab=300)


@pytest.fixture
def given(folder):
    """A raw file of tokens."""
    ids = [number for text in TEXTS for number in (*TOKENIZER.encode(text), TOKENIZER.eos_id)]
    np.array(ids, "<u2").tofile(folder / "raw.bin")
    return folder


RAW = {"path": "raw.bin", "tokens": "uint16"}


def test_a_file_of_tokens_that_changed_under_the_same_size_and_time_is_told(given):
    wanted = read_all(given, prepare(given, RAW))
    path = given / "raw.bin"
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[2 * BLOCK] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match=r"raw\.bin is damaged: bytes \d+ .*; if it should have changed, del"):
        read_all(given, prepare(given, RAW))
    told = []
    again = read_all(given, prepare(given, RAW, mend=told.append))
    assert told == ["raw.bin has changed since it was first read"]
    assert (again != wanted).sum() == 1


def test_wide_numbers_read_as_narrow_ones_are_told(given):
    np.fromfile(given / "raw.bin", "<u2").astype("<i4").tofile(given / "wide.bin")
    with pytest.raises(ValueError, match=r"wide\.bin: its 16-bit values look like halves of 32-bit ones"):
        prepare(given, {"path": "wide.bin", "tokens": "uint16"})
    assert prepare(given, {"path": "wide.bin", "tokens": "uint32"}).num_documents == len(TEXTS)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("documents", (0, 2, 1, 3), "documents out of order"),
        ("lengths", (3, 5, 4), "with gaps"),
    ],
)
def test_an_index_that_is_out_of_order_is_told(where, value, message, given):
    np.full(12, 5, "<u2").tofile(given / "mega.bin")
    path = given / "mega.idx"
    write_index(path, np.array([4, 4, 4]), np.dtype("<u2"))
    content = bytearray(path.read_bytes())
    place, code = (34 + 3 * 12, "<4q") if where == "documents" else (34, "<3i")
    content[place : place + struct.calcsize(code)] = struct.pack(code, *value)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(given, "mega.idx")
