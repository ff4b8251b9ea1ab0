"""Formats of text: in any container, the documents are the same; one clear sentence for each kind of damage."""

import csv
import gzip
import importlib
import importlib.util
import io
import json
import tracemalloc

import numpy as np
import pytest

from meshwright.data import prepare as prepare_module
from meshwright.data.prepare import prepare_corpus
from meshwright.data.readers import read_all, read_documents
from meshwright.data.sources import find_files
from meshwright.data.tokenizer import train_tokenizer
from meshwright.spec.data import DataSpec

pyarrow = pytest.importorskip("pyarrow")
parquet = importlib.import_module("pyarrow.parquet")

TEXTS = [f'row {i},\n"quoted" é{"x" * (i % 50)}' for i in range(700)]
TEXTS[3] = ""  # left out
WANTED = [text for text in TEXTS if text]


def jsonl():
    return "".join(json.dumps({"body": text, "n": 1}) + "\n" for text in TEXTS).encode()


def csv_rows():
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerows([("n", "body"), *((1, text) for text in TEXTS)])
    return written.getvalue().encode()


def table():
    return pyarrow.table({"n": range(len(TEXTS)), "body": TEXTS})


def write_arrow(path, new):
    with new(str(path), table().schema) as writer:
        writer.write_table(table(), max_chunksize=100)


def zst(content):
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(jsonl()),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl()[:1000]) + gzip.compress(jsonl()[1000:])),
    "a.jsonl.zst": lambda path: path.write_bytes(zst(jsonl()[:1000]) + zst(jsonl()[1000:])),
    "a.csv": lambda path: path.write_bytes(csv_rows()),
    "a.csv.gz": lambda path: path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + csv_rows())),
    "a.parquet": lambda path: parquet.write_table(table(), path, row_group_size=150),
    "stream.arrow": lambda path: write_arrow(path, pyarrow.ipc.new_stream),
    "file.arrow": lambda path: write_arrow(path, pyarrow.ipc.new_file),
}


def source(folder, **fields):
    return find_files(DataSpec.model_validate({"sources": {"text_key": "body", **fields}}), folder)


@pytest.mark.parametrize("name", WRITERS)
def test_the_documents_are_the_same(name, tmp_path):
    WRITERS[name](tmp_path / name)
    files = source(tmp_path, path=name)
    documents = list(read_documents(files))
    assert [document.text for document in documents] == WANTED
    assert len({document.id for document in documents}) == len(documents)
    assert all(document.id.startswith(name) for document in documents)
    for skip in (0, 1, 149, 150, 151, 450, 699, 700):
        rest = [document for document in documents if document.record > skip]
        found = list(read_all(files, skip=skip))
        assert [(d.text, d.id, d.record) for d in found] == [(d.text, d.id, d.record) for d in rest], skip
    size = (tmp_path / name).stat().st_size
    told = sum(document.num_bytes for document in documents)
    assert told <= size or name.endswith("arrow"), "progress never passes the end"


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_compressed_text(compression, tmp_path):
    pack = gzip.compress if compression == ".gz" else zst
    (tmp_path / f"a.txt{compression}").write_bytes(pack("é one\n".encode()))
    (document,) = read_documents(source(tmp_path, path="*.txt.*"))
    assert document.text == "é one\n"


DAMAGE = {
    "a.jsonl.gz": (gzip.compress(jsonl())[:-100], "a.jsonl.gz is damaged"),
    "b.jsonl.gz": (b"no gzip", "b.jsonl.gz is damaged near byte"),
    "a.jsonl.zst": (b"no zstd at all", "a.jsonl.zst is damaged"),
    "a.csv": (b'n,body\n1,"open', "a.csv:2: not CSV: "),
    "b.csv": (b"n,body\n1,two\n1,two,three\n", "b.csv:3: 3 fields, but the header has 2"),
    "c.csv": (b"n,body\n1,\xff\n", "c.csv: is not UTF-8 shortly after line "),
    "d.csv": (b"n,text\n1,x\n", "d.csv: no column 'body' (its columns are n, text); set the source's text_key"),
    "a.parquet": (b"PAR1 nothing PAR1", "a.parquet cannot be read: "),
    "a.arrow": (b"nothing at all, in arrow", "a.arrow cannot be read: "),
    "a.txt.gz": (gzip.compress(b"ok \xff"), "a.txt.gz: is not UTF-8 at byte 3"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name, tmp_path):
    content, message = DAMAGE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared below)
        list(read_documents(source(tmp_path, path=name)))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("values", "message"), [(["a", None], "row 2: 'body' is empty (null)"), ([1], "row 1: 'body' is not a s")]
)
def test_columns_that_are_no_text(values, message, tmp_path):
    parquet.write_table(pyarrow.table({"body": values}), tmp_path / "a.parquet")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        list(read_documents(source(tmp_path, path="a.parquet")))
    assert str(caught.value).startswith(f"a.parquet: {message}")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst", "hub:owner/name"])
def test_a_missing_extra_is_one_line(name, tmp_path, monkeypatch):
    (tmp_path / name.replace("/", "_")).write_bytes(b"x")

    def missing(library):
        raise ImportError(f"No module named {library!r}")

    monkeypatch.setattr("meshwright.data.sources.importlib.import_module", missing)
    extra = "hub" if name.startswith("hub") else "arrow"
    with pytest.raises(ValueError, match=rf"needs \w+: pip install 'meshwright\[{extra}\]'$"):
        list(read_documents(source(tmp_path, path=name)))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
@pytest.mark.filterwarnings("ignore")
def test_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"body": TEXTS})
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": rows.select([0, 5]), "test": rows}).save_to_disk(tmp_path / "splits")
    assert [document.text for document in read_documents(source(tmp_path, path="one"))] == WANTED
    found = read_documents(source(tmp_path, path="splits"))
    assert [document.text for document in found] == [TEXTS[0], TEXTS[5]]
    with pytest.raises(ValueError, match=r"has no split 'dev' \(it has train, test\)"):
        source(tmp_path, path="splits", split="dev")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "rows.jsonl").write_bytes(jsonl())
    hub = f"hub:{tmp_path / 'hub'}"
    assert [document.text for document in read_documents(source(tmp_path, path=hub))] == WANTED
    with pytest.raises(ValueError, match="split dev, cannot be loaded"):
        source(tmp_path, path=hub, split="dev")


def corpus_of(folder, **fields):
    fields = {"tokenizer": "tokenizer", "cache_dir": str(folder / "cache"), "held_out": 0, **fields}
    return prepare_corpus(DataSpec.model_validate(fields), base_dir=folder)


@pytest.fixture
def tokens(tmp_path):
    """A folder with a tokenizer, a prepared corpus, and its tokens as raw files."""
    train_tokenizer(TEXTS, 300).save(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_bytes(jsonl())
    corpus = corpus_of(tmp_path, sources={"path": "a.jsonl", "text_key": "body"})
    found = np.array(corpus.streams[0].train.tokens)
    found.astype(np.uint16).tofile(tmp_path / "two.bin")
    found.astype(np.uint32).tofile(tmp_path / "four.bin")
    return tmp_path, corpus


@pytest.mark.parametrize("name", ["prepared", "uint16", "uint32"])
def test_files_of_tokens(tokens, name):
    """Prepared tokens can be a source elsewhere, and raw files give the same documents."""
    folder, corpus = tokens
    prepared = corpus.streams[0].train
    file = {"uint16": "two.bin", "uint32": "four.bin"}.get(name, str(prepared.path.with_suffix(".idx")))
    given = {"path": file} if name == "prepared" else {"path": file, "tokens": name}
    again = corpus_of(folder, sources=given)
    np.testing.assert_array_equal(again.streams[0].train.tokens, prepared.tokens)
    np.testing.assert_array_equal(again.streams[0].train.starts(), prepared.starts())
    parted = corpus_of(folder, sources=given, held_out=0.25)
    train, held_out = parted.streams[0].train, parted.held_out[0]
    assert held_out.num_documents == round(0.25 * len(WANTED))
    np.testing.assert_array_equal(np.append(train.tokens, held_out.tokens), prepared.tokens)
    assert held_out.start(0) == 0
    assert held_out.start(1) == prepared.start(train.num_documents + 1) - prepared.start(train.num_documents)


def test_tokens_are_gone_through_once(tokens, monkeypatch):
    folder, _ = tokens
    corpus_of(folder, sources={"path": "two.bin", "tokens": "uint16"})
    monkeypatch.setattr(prepare_module, "scan_tokens", None)
    corpus_of(folder, sources={"path": "two.bin", "tokens": "uint16"})


def test_tokens_that_are_none(tokens):
    folder, corpus = tokens
    raw = {"path": "two.bin", "tokens": "uint32"}
    with pytest.raises(ValueError, match=r"two\.bin: token \d+ is outside the tokenizer's vocabulary of 300"):
        corpus_of(folder, sources=raw)
    train_tokenizer(["other"], 270).save(folder / "other")
    with pytest.raises(ValueError, match="was made by another tokenizer"):
        corpus_of(folder, sources=str(corpus.streams[0].train.path), tokenizer="other")
    with pytest.raises(ValueError, match=r"set data\.tokenizer to the tokenizer that made them"):
        corpus_of(folder, sources=raw, tokenizer="auto")
    np.array([5, 6, 7], np.uint16).tofile(folder / "one.bin")
    with pytest.raises(ValueError, match="has only one document"):
        corpus_of(folder, sources={"path": "one.bin", "tokens": "uint16"}, held_out=0.1)


def read(folder, name, **source):
    return list(read_documents(find_files(DataSpec(sources=[{"path": name, **source}]), folder)))


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_lines_and_files_have_a_longest_length(ending, tmp_path, monkeypatch):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zst}[ending]
    (tmp_path / f"a.jsonl{ending}").write_bytes(pack(b'{"text": "short"}\n{"text": "' + b"x" * 2000 + b'"}\n'))
    (tmp_path / f"b.txt{ending}").write_bytes(pack(b"x" * 2000))
    assert len(read(tmp_path, f"a.jsonl{ending}")) == 2
    monkeypatch.setattr("meshwright.data.readers.LONGEST", 1000)
    with pytest.raises(ValueError, match=rf"^a\.jsonl{ending}:2: the line is longer than 1000 bytes; split it"):
        read(tmp_path, f"a.jsonl{ending}")
    with pytest.raises(ValueError, match=rf"^b\.txt{ending}: a single block is larger than 1000 bytes; split"):
        read(tmp_path, f"b.txt{ending}")


@pytest.mark.slow
def test_an_archive_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 400_000))
    monkeypatch.setattr("meshwright.data.readers.LONGEST", 1 << 16)
    with pytest.raises(ValueError, match=r"^a\.jsonl\.gz:\d+: unpacks to more than 250 times its size"):
        read(tmp_path, "a.jsonl.gz")


def test_json_that_is_nested_too_deep_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ValueError, match=r"^a\.jsonl:1: its JSON is nested too deeply"):
        read(tmp_path, "a.jsonl")


def test_a_column_given_twice_is_told(tmp_path):
    (tmp_path / "a.csv").write_text("text,n,text\na,1,b\n")
    with pytest.raises(ValueError, match=r"^a\.csv: two columns are named 'text'; rename or remove one"):
        read(tmp_path, "a.csv")


def test_a_short_text_takes_no_more_memory_than_a_few_megabytes(tmp_path):
    (tmp_path / "a.txt").write_text("fish\n" * 100)
    files = find_files(DataSpec(sources=[{"path": "a.txt"}]), tmp_path)
    tracemalloc.start()
    try:
        (document,) = read_documents(files)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert document.text == "fish\n" * 100
    assert peak < 8e6
