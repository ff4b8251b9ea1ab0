"""Token files: byte for byte as Megatron's builder writes them, and all of the builder's files can be read."""

import importlib.util
import json
import struct
import subprocess
import sys

import numpy as np
import pytest

from meshwright.data import token_file
from meshwright.data.token_file import (
    Mark,
    TokenWriter,
    file_in_memory,
    open_indexed,
    open_token_file,
    scan_tokens,
    write_index,
)

DOCUMENTS = [[5, 6, 7], [], [9] * 20, [3, 2]]
EOS = 1


class Tokenizer:
    """The part of a tokenizer that a writer needs."""

    eos_id, fingerprint = EOS, "x"

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size


def write(path, vocab):
    with TokenWriter(path, Tokenizer(vocab)) as writer:
        for ids in DOCUMENTS:
            writer.write(ids)
            writer.end_document()
        writer.finish()


@pytest.mark.parametrize(("vocab", "letter", "code"), [(65499, "H", 8), (65500, "i", 4), (100_000, "i", 4)])
def test_bytes_are_as_the_format_is_described(vocab, letter, code, tmp_path):
    """Megatron-LM's megatron/core/datasets/indexed_dataset.py, written out."""
    write(tmp_path / "x.bin", vocab)
    documents = [[*ids, EOS] for ids in DOCUMENTS]
    tokens, lengths, size = np.concatenate(documents).tolist(), [*map(len, documents)], struct.calcsize(letter)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack(f"<{len(tokens)}{letter}", *tokens)
    places = [size * sum(lengths[:i]) for i in range(len(lengths))]
    assert (tmp_path / "x.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, 4, 5)
        + struct.pack("<4i", *lengths)
        + struct.pack("<4q", *places)
        + struct.pack("<5q", 0, 1, 2, 3, 4)
    )
    file = open_indexed(tmp_path / "x.bin")
    assert file.tokens.tolist() == tokens
    assert file.starts().tolist() == [0, *np.cumsum(lengths)]
    assert [file.document_at(i) for i in (0, 3, 4, 5, 25, 26, 28)] == [0, 0, 1, 2, 2, 3, 3]


def test_documents_of_several_sequences(tmp_path):
    """From preprocessing that splits sentences; multimodal files also have modes, one byte per sequence."""
    tokens = np.arange(7, dtype="<i4")
    tokens.tofile(tmp_path / "x.bin")
    lengths, places, firsts = [2, 3, 1, 1], [0, 8, 20, 24], [0, 2, 2, 4]
    content = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ4i4q4q", 1, 4, 4, 4, *lengths, *places, *firsts)
    for modes in (b"", bytes(4)):
        (tmp_path / "x.idx").write_bytes(content + modes)
        file = open_indexed(tmp_path / "x.bin")
        assert (file.num_documents, file.starts().tolist()) == (3, [0, 5, 5, 7])
        assert [file.document_at(i) for i in range(7)] == [0, 0, 0, 0, 0, 2, 2]
        part = file.part(1, 3)
        assert (part.tokens.tolist(), part.starts().tolist(), part.begin) == ([5, 6], [0, 0, 2], 1)


def test_a_json_of_somebody_elses_beside_tokens_does_not_matter(tmp_path):
    """Preprocessing tools leave such files; ours, which names the tokenizer, still counts."""
    write(tmp_path / "x.bin", 100)
    about = json.loads((tmp_path / "x.json").read_bytes())
    for foreign in (b"[]", b"{", b'{"tokenizer": "gpt2", "args": {}}', b'"text"', b"\xff"):
        (tmp_path / "x.json").write_bytes(foreign)
        assert open_token_file(tmp_path / "x.bin", Tokenizer(100)).num_documents == 4
    (tmp_path / "x.json").write_text(json.dumps(about | {"tokenizer": "another"}))
    with pytest.raises(ValueError, match="was made by another tokenizer"):
        open_token_file(tmp_path / "x.bin", Tokenizer(100))


def test_indexes_are_written_in_blocks(tmp_path, monkeypatch):
    write_index(tmp_path / "whole.idx", np.arange(1, 50), np.dtype("<u2"))
    monkeypatch.setattr("meshwright.data.token_file.BLOCK", 7)
    write_index(tmp_path / "blocks.idx", np.arange(1, 50), np.dtype("<u2"))
    assert (tmp_path / "blocks.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


def test_a_writer_continues_from_a_mark(tmp_path):
    write(tmp_path / "whole.bin", 100)
    with TokenWriter(tmp_path / "x.bin", Tokenizer(100)) as writer:
        writer.write(DOCUMENTS[0])
        writer.end_document()
        mark = writer.sync()
        writer.write([7, 7, 7])
        writer.end_document()
    assert mark == Mark(tokens=4, documents=1, begun=0)
    with TokenWriter(tmp_path / "x.bin", Tokenizer(100), mark=mark) as writer:
        for ids in DOCUMENTS[1:]:
            writer.write(ids)
            writer.end_document()
        writer.finish()
    for ending in (".bin", ".idx", ".json"):
        assert (tmp_path / f"x{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()


def test_a_fingerprint_tells_documents_apart_wherever_they_lie(tmp_path):
    write(tmp_path / "x.bin", 100)
    ended = [[*ids, EOS] for ids in DOCUMENTS]
    first, *others = ended
    whole = file_in_memory(ended)
    assert whole.fingerprint == open_indexed(tmp_path / "x.bin").fingerprint == whole.part(0, 4).fingerprint
    different = {
        "added": [*ended, [4, EOS]],
        "removed": others,
        "moved": [*others, first],
        "cut otherwise": [[*first, *others[0]], *others[1:]],
        "changed": [[5, 6, 8, EOS], *others],
        "only read": [[5, 6, ~7, EOS], *others],
    }
    prints = {whole.fingerprint, *(file_in_memory(ids, masked=True).fingerprint for ids in different.values())}
    assert len(prints) == 1 + len(different)


def test_a_fingerprint_of_a_large_file_reads_evenly_spaced_samples(monkeypatch):
    monkeypatch.setattr(token_file, "SAMPLES", 10)
    monkeypatch.setattr(token_file, "SAMPLE", 2)
    ids = list(range(10, 110))
    prints = {file_in_memory([[*ids[:place], 7, *ids[place + 1 :]]]).fingerprint for place in range(100)}
    assert len(prints) == 21, "the 20 that it looks at, and all others alike"


def test_scanning(monkeypatch):
    monkeypatch.setattr("meshwright.data.token_file.BLOCK", 3)
    tokens = np.array([4, 5, 1, 1, 9, 2, 1, 8], np.uint16)
    largest, lengths = scan_tokens(tokens, eos_id=1)
    assert (largest, lengths.tolist()) == (9, [3, 1, 3, 1])
    assert scan_tokens(np.array([3, -1], np.int32), eos_id=1)[0] > 1 << 40, "a negative token is in no vocabulary"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "is not a token index"),
        (lambda content: content[:20], "is not a token index"),
        (lambda content: content[:-1], "is damaged: it has"),
        (lambda content: content[:9] + b"\x02" + content[10:], "version 2"),
        (lambda content: content[:17] + b"\x06" + content[18:], "dtype 6 is not supported"),
        (lambda content: content[:-8] + bytes(8), "do not begin with sequence 0 and end with 4"),
    ],
)
def test_damaged_indexes(change, message, tmp_path):
    write(tmp_path / "x.bin", 100)
    (tmp_path / "x.idx").write_bytes(change((tmp_path / "x.idx").read_bytes()))
    with pytest.raises(ValueError, match=message):
        open_indexed(tmp_path / "x.bin")


MEGATRON = """
import sys
import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
prefix, vocab, documents = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
builder = IndexedDatasetBuilder(prefix + "/theirs.bin", dtype=DType.optimal_dtype(vocab))
for ids in documents:
    builder.add_document(np.array(ids), [len(ids)])
builder.finalize(prefix + "/theirs.idx")
ours = IndexedDataset(prefix + "/ours")
assert [ours[i].tolist() for i in range(len(ours))] == documents
"""


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("vocab", [1000, 100_000])
def test_megatron_writes_and_reads_the_same(vocab, tmp_path):
    """Its own builder and reader, if installed (pip install megatron-core)."""
    write(tmp_path / "ours.bin", vocab)
    documents = [[*ids, EOS] for ids in DOCUMENTS]
    subprocess.run([sys.executable, "-c", MEGATRON, str(tmp_path), str(vocab), repr(documents)], check=True)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()
