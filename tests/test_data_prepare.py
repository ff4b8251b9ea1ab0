"""The prepared corpus: the right tokens, built once, whole or not at all, and checked when read."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import prepare as prepare_module
from meshwright.data.prepare import find_tokenizer, prepare_corpus
from meshwright.data.tokenizer import TextTokenizer, train_tokenizer
from meshwright.spec.data import DataSpec

TEXTS = [f"Document {i}.\n" + f"It says {i * i} and é{i} 中.\n" * (i % 7 + 1) for i in range(40)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{i:02}.txt").write_bytes(text.encode())
    return tmp_path


def spec(folder, **changes):
    fields = {
        "sources": "text/*.txt",
        "tokenizer_vocab": 300,
        "held_out": 0.2,
        "cache_dir": str(folder / "cache"),
    }
    return DataSpec.model_validate(fields | changes)


def prepare(folder, **changes):
    """The corpus, and what was done for it: nothing when it was found in the cache."""
    done = []
    corpus = prepare_corpus(
        spec(folder, **changes),
        base_dir=folder,
        progress=lambda what, n, total: done.append((what, n, total)),
    )
    return corpus, done


def documents(tokens, tokenizer):
    """The texts in a stream of tokens."""
    ends = np.flatnonzero(tokens == tokenizer.eos_id)
    assert ends[-1] == len(tokens) - 1, "an end-of-text token closes the stream"
    return [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]] if len(ends) else []


def texts_of(file, tokenizer):
    return [text.removesuffix("<|endoftext|>") for text in documents(file.tokens, tokenizer)]


def test_every_document_is_there_once_and_in_order(folder):
    corpus, _ = prepare(folder)
    train, held_out = (texts_of(file, corpus.tokenizer) for file in (corpus.train, corpus.held_out))
    assert (len(train), len(held_out)) == (corpus.train.num_documents, corpus.held_out.num_documents)
    assert train == [text for text in TEXTS if text in train]
    assert held_out == [text for text in TEXTS if text in held_out]
    assert sorted(train + held_out) == sorted(TEXTS)
    assert 0 < len(held_out) < len(train)
    assert corpus.train.tokens.dtype == np.uint16


def test_the_tokenizer_is_trained_on_training_text_only(folder):
    corpus, _ = prepare(folder)
    train = texts_of(corpus.train, corpus.tokenizer)
    assert corpus.tokenizer.fingerprint == train_tokenizer(train, 300).fingerprint
    assert corpus.tokenizer.fingerprint != train_tokenizer(TEXTS, 300).fingerprint


def test_a_long_corpus_trains_the_tokenizer_on_evenly_spaced_blocks(monkeypatch):
    monkeypatch.setattr(prepare_module, "TRAINING_CHARACTERS", 400)
    monkeypatch.setattr(prepare_module, "BLOCK", 10)
    texts = [f"{i:04}" * 50 for i in range(20)]
    blocks = list(prepare_module._sample(texts, 4000))
    assert blocks == [f"{i:04}" * 2 + f"{i:04}"[:2] for i in range(20) for _ in range(2)]
    assert list(prepare_module._sample(texts[:2], 400)) == texts[:2]


def test_the_second_time_it_is_found(folder):
    first, done = prepare(folder)
    size = sum(len(text.encode()) for text in TEXTS)
    assert [event for event in done if event[1] == size] == [
        (what, size, size) for what in ("reading", "training the tokenizer", "tokenizing")
    ]
    second, done = prepare(folder)
    assert not done
    assert second.directory == first.directory
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    np.testing.assert_array_equal(second.train.tokens, first.train.tokens)
    assert [path.name for path in (folder / "cache").iterdir()] == [first.directory.name], "nothing is left over"
    prepare(folder, sequence_length=7)
    assert len(list((folder / "cache").iterdir())) == 1, "how tokens are cut into samples changes no token"


@pytest.mark.parametrize("change", ["vocab", "share", "key", "time", "size", "added", "removed", "renamed"])
def test_whatever_changes_tokens_makes_another_corpus(folder, change):
    first, _ = prepare(folder)
    file = folder / "text" / "05.txt"
    changes = {}
    if change == "vocab":
        changes["tokenizer_vocab"] = 280
    elif change == "share":
        changes["held_out"] = 0.5
    elif change == "key":
        changes["sources"] = ["text/*.txt", {"path": "more.jsonl", "text_key": "a"}]
        (folder / "more.jsonl").write_text('{"a": "x", "b": "y"}')
        first, _ = prepare(folder, **changes)
        changes["sources"][1]["text_key"] = "b"
    elif change == "time":
        os.utime(file, ns=(0, 1))
    elif change == "size":
        file.write_bytes(file.read_bytes() + b".")
        os.utime(file, ns=(0, 0))
    elif change == "added":
        (folder / "text" / "99.txt").write_text("new")
    elif change == "removed":
        file.unlink()
    elif change == "renamed":
        file.rename(file.with_name("zz.txt"))
    second, done = prepare(folder, **changes)
    assert done
    assert second.directory != first.directory


def test_nothing_held_out(folder):
    corpus, _ = prepare(folder, held_out=0)
    assert corpus.held_out is None
    assert texts_of(corpus.train, corpus.tokenizer) == TEXTS
    assert not (corpus.directory / "held_out.bin").exists()


def test_given_tokenizers(folder):
    tokenizer = train_tokenizer(["something else"], 280)
    tokenizer.save(folder / "model")
    by_path, _ = prepare(folder, tokenizer="model")
    assert by_path.tokenizer.fingerprint == tokenizer.fingerprint
    assert not (by_path.directory / "tokenizer").exists()
    of_model = prepare_corpus(spec(folder), base_dir=folder, model_dir=folder / "model")
    assert of_model.directory == by_path.directory
    trained, _ = prepare(folder)
    assert trained.directory != by_path.directory
    assert find_tokenizer(spec(folder), base_dir=folder) is None
    with pytest.raises(ValueError, match="no such file"):
        prepare(folder, tokenizer="none/tokenizer.json")


def test_large_vocabularies_take_four_bytes(folder):
    tokenizer = train_tokenizer(TEXTS, 300)
    content = json.loads(tokenizer._files["tokenizer.json"])
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 70000, "content": "Document", "special": False})
    content["model"]["vocab"]["Document"] = 70000
    large = TextTokenizer({"tokenizer.json": json.dumps(content).encode()}, where="test")
    large.save(folder / "model")
    corpus, _ = prepare(folder, tokenizer="model", held_out=0)
    assert corpus.train.tokens.dtype == np.uint32
    assert np.count_nonzero(corpus.train.tokens == 70000) == len(TEXTS)
    assert texts_of(corpus.train, corpus.tokenizer) == TEXTS


def test_one_long_document_in_small_chunks_is_the_same_stream(folder, monkeypatch):
    whole, _ = prepare(folder, held_out=0)
    (folder / "big.txt").write_bytes("".join(TEXTS).encode())
    whole.tokenizer.save(folder / "model")
    monkeypatch.setattr("meshwright.data.tokenizer.PIECE", 50)
    monkeypatch.setattr("meshwright.data.prepare.CHUNK", 120)
    corpus, _ = prepare(folder, sources="big.txt", tokenizer="model", held_out=0)
    assert corpus.train.num_documents == 1
    assert corpus.train.tokens.tolist() == [*whole.tokenizer.encode("".join(TEXTS)), whole.tokenizer.eos_id]


def test_a_failure_leaves_nothing(folder, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TextTokenizer, "encode_batch", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(folder)
    assert list((folder / "cache").iterdir()) == []


def test_a_kill_leaves_no_half_corpus(folder):
    script = f"""
import os, signal
from pathlib import Path
from meshwright.data.prepare import prepare_corpus
from meshwright.spec.data import DataSpec
data = DataSpec.model_validate_json({spec(folder).model_dump_json()!r})
def progress(what, done, total):
    if what == "tokenizing" and done == total:
        os.kill(os.getpid(), signal.SIGKILL)
prepare_corpus(data, base_dir=Path({str(folder)!r}), progress=progress)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    left = list((folder / "cache").iterdir())
    assert [path.name[0] for path in left] == ["."], "what was begun lies under a hidden name that nobody reads"
    corpus, done = prepare(folder)
    assert done
    assert sorted(texts_of(corpus.train, corpus.tokenizer) + texts_of(corpus.held_out, corpus.tokenizer)) == sorted(
        TEXTS
    )


def test_a_race_is_won_by_the_first(folder):
    both_are_building = threading.Barrier(2, timeout=20)
    found = []

    def build():
        corpus = prepare_corpus(spec(folder), base_dir=folder, progress=progress)
        found.append(corpus)

    def progress(what, done, total):
        if what == "tokenizing" and done == total:
            both_are_building.wait()

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert [path.name for path in (folder / "cache").iterdir()] == [found[0].directory.name]
    for corpus in found:
        assert len(texts_of(corpus.train, corpus.tokenizer)) == corpus.train.num_documents


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("train.bin", truncate, r"train\.bin is damaged: it has \d+ bytes instead of \d+; delete"),
        ("held_out.bin", truncate, r"held_out\.bin is damaged"),
        ("train.bin", Path.unlink, r"train\.bin cannot be read .*; delete"),
        ("train.json", Path.unlink, r"train\.bin cannot be read .*; delete"),
        ("train.json", truncate, r"train\.bin cannot be read .*; delete"),
        (
            "train.json",
            lambda path: edit(path, tokenizer="other"),
            r"train\.bin was made by another tokenizer",
        ),
        ("train.json", lambda path: edit(path, dtype="uint7"), r"train\.bin cannot be read .*; delete"),
    ],
)
def test_damage_is_noticed(folder, name, damage, message):
    corpus, _ = prepare(folder)
    damage(corpus.directory / name)
    with pytest.raises(ValueError, match=message):
        prepare(folder)


def test_a_cache_that_cannot_be_written(folder):
    (folder / "cache").write_text("a file")
    with pytest.raises(ValueError, match=r"data\.cache_dir=.* cannot be written"):
        prepare(folder)


def test_an_empty_corpus(folder):
    (folder / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="hold no text"):
        prepare(folder, sources="empty.txt")
    assert not (folder / "cache").exists()


def test_no_torch():
    script = "import sys, meshwright.data; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
