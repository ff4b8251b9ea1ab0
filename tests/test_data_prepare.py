"""The prepared corpus: the right tokens, built once, whole or not at all, and checked when read."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import prepare as prepare_module
from meshwright.data.encoders import Encoders
from meshwright.data.examples import TextEncoder
from meshwright.data.prepare import StartingModel, find_tokenizer, prepare_corpus
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
    """The corpus, and the work done for it: none if it was in the cache."""
    done = []
    corpus = prepare_corpus(
        spec(folder, **changes),
        base_dir=folder,
        progress=lambda what, n, total: done.append((what, n, total)),
    )
    return corpus, done


def train_of(corpus):
    (stream,) = corpus.streams
    return stream.train


def held_out_of(corpus):
    (held_out,) = corpus.held_out
    return held_out


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def folder_of(corpus):
    return train_of(corpus).path.parent


def documents(tokens, tokenizer):
    """The texts in a stream of tokens."""
    ends = np.flatnonzero(tokens == tokenizer.eos_id)
    assert ends[-1] == len(tokens) - 1, "an end-of-text token closes the stream"
    return [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]] if len(ends) else []


def texts_of(file, tokenizer):
    return [text.removesuffix("<|endoftext|>") for text in documents(file.tokens, tokenizer)]


def test_every_document_is_there_once_and_in_order(folder):
    corpus, _ = prepare(folder)
    train, held_out = (texts_of(file, corpus.tokenizer) for file in (train_of(corpus), held_out_of(corpus)))
    assert (len(train), len(held_out)) == (train_of(corpus).num_documents, held_out_of(corpus).num_documents)
    assert train == [text for text in TEXTS if text in train]
    assert held_out == [text for text in TEXTS if text in held_out]
    assert sorted(train + held_out) == sorted(TEXTS)
    assert 0 < len(held_out) < len(train)
    assert train_of(corpus).tokens.dtype == np.uint16


def test_the_tokenizer_is_trained_on_training_text_only(folder):
    corpus, _ = prepare(folder)
    train = texts_of(train_of(corpus), corpus.tokenizer)
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
    assert folder_of(second) == folder_of(first)
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    np.testing.assert_array_equal(train_of(second).tokens, train_of(first).tokens)
    assert {folder_of(first).name} < set(names(folder / "cache")), "the tokens and their tokenizer"
    assert len(names(folder / "cache")) == 2, "nothing is left over"
    stem = ("bin", "bin.crc", "idx", "idx.crc", "json")
    assert names(folder_of(first)) == [f"{side}.{ending}" for side in ("held_out", "train") for ending in stem]
    prepare(folder, sequence_length=7)
    assert len(names(folder / "cache")) == 2, "how tokens are cut into samples changes no token"


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
    assert folder_of(second) != folder_of(first)


def test_nothing_held_out(folder):
    corpus, _ = prepare(folder, held_out=0)
    assert not corpus.held_out
    assert texts_of(train_of(corpus), corpus.tokenizer) == TEXTS
    assert not (folder_of(corpus) / "held_out.bin").exists()


def test_given_tokenizers(folder):
    tokenizer = train_tokenizer(["something else"], 280)
    tokenizer.save(folder / "model")
    by_path, _ = prepare(folder, tokenizer="model")
    assert by_path.tokenizer.fingerprint == tokenizer.fingerprint
    assert not (folder_of(by_path) / "tokenizer").exists()
    of_model = prepare_corpus(spec(folder), base_dir=folder, model=StartingModel(folder / "model"))
    assert folder_of(of_model) == folder_of(by_path)
    trained, _ = prepare(folder)
    assert folder_of(trained) != folder_of(by_path)
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
    assert train_of(corpus).tokens.dtype == np.int32
    assert np.count_nonzero(train_of(corpus).tokens == 70000) == len(TEXTS)
    assert texts_of(train_of(corpus), corpus.tokenizer) == TEXTS


def test_one_long_document_in_small_chunks_is_the_same_stream(folder, monkeypatch):
    whole, _ = prepare(folder, held_out=0)
    (folder / "big.txt").write_bytes("".join(TEXTS).encode())
    whole.tokenizer.save(folder / "model")
    monkeypatch.setattr("meshwright.data.tokenizer.PIECE", 50)
    monkeypatch.setattr("meshwright.data.build.CHUNK", 120)
    corpus, _ = prepare(folder, sources="big.txt", tokenizer="model", held_out=0)
    assert train_of(corpus).num_documents == 1
    assert train_of(corpus).tokens.tolist() == [*whole.tokenizer.encode("".join(TEXTS)), whole.tokenizer.eos_id]


def files_of(cache):
    """Every file of the cache with its content."""
    return {path.relative_to(cache): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


def test_mistakes_leave_nothing(folder):
    (folder / "text" / "05.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"05\.txt: is not UTF-8"):
        prepare(folder)
    assert names(folder / "cache") == []


SCAFFOLDING = (".lengths", ".jsonl", ".lock-1")
"""Suffixes of files that may remain if the kill came after the corpus had its name; a dead owner's lock is taken over
when needed."""

KILLED = """
import os, signal, sys
from pathlib import Path
from meshwright.data import build, prepare, token_file, tokenizer
from meshwright.spec.data import DataSpec

data, folder = DataSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2])
build.CHUNK, build.COMMIT_SECONDS, build.SMALL = 300, 0, 0
tokenizer.TextTokenizer.pieces = lambda self, text: [text[i : i + 40] for i in range(0, len(text), 40)]
# A kill, unlike a power cut, takes nothing from the disk's cache, and waiting for disks is slow.
real, moments = {"fsync": lambda handle: None, "rename": Path.rename, "mkdir": Path.mkdir, "unlink": Path.unlink}, 0

def may_be_killed(name):
    def before(*arguments, **options):
        global moments
        moments += 1
        if moments == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*arguments, **options)
    return before

os.fsync, Path.rename = may_be_killed("fsync"), may_be_killed("rename")
Path.mkdir, Path.unlink = may_be_killed("mkdir"), may_be_killed("unlink")
for last in range(1, 1000, 3):
    cache = f"{folder}/killed-{last}"
    for attempt in range(2):
        child = os.fork()
        if not child:
            first = []
            progress = lambda what, done, total: first or first.append(done) or attempt and print(last, done)
            here = data.model_copy(update={"cache_dir": cache})
            prepare.prepare_corpus(here, base_dir=folder, progress=progress, processes=0)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        last, moment = (0, last) if attempt == 0 else (last, moment)
        if attempt == 0 and status == 0:
            sys.exit()
        assert os.WIFSIGNALED(status) if attempt == 0 else status == 0
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_continues(folder):
    """SIGKILL before every third operation that writes to disk: the files equal those of an undisturbed run, and
    committed work is not repeated."""
    train_tokenizer(TEXTS, 300).save(folder / "model")
    data = spec(folder, tokenizer="model")
    script = [sys.executable, "-c", KILLED, data.model_dump_json(), str(folder)]
    result = subprocess.run(script, check=True, capture_output=True, text=True, timeout=120)
    caches = sorted(folder.glob("killed-*"), key=lambda path: int(path.name.split("-")[1]))
    assert len(caches) > 15
    expected = files_of(caches[-1])
    assert len(expected) == 10
    for cache in caches:
        found = {path: content for path, content in files_of(cache).items() if path.suffix not in SCAFFOLDING}
        assert found == expected, cache.name
    begins = [int(line.split()[1]) for line in result.stdout.splitlines()]
    assert len(set(begins)) > 5, "each continues where the one before it had come"


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_processes(folder, monkeypatch):
    train_tokenizer(TEXTS, 300).save(folder / "model")
    data = spec(folder, tokenizer="model")
    prepare_corpus(data, base_dir=folder, processes=0)
    expected = files_of(folder / "cache")
    monkeypatch.setattr("meshwright.data.build.CHUNK", 300)
    other = data.model_copy(update={"cache_dir": str(folder / "other")})
    prepare_corpus(other, base_dir=folder, processes=2)
    assert files_of(folder / "other") == expected


def test_an_encoder_that_dies_is_told(folder):
    with Encoders(TextEncoder(train_tokenizer(TEXTS, 300)), 1) as encoders:
        encoders._processes[0].kill()
        with pytest.raises(RuntimeError, match="an encoding process ended with status -9"):
            list(encoders.map([(0, ["a"])]))


def test_of_two_one_builds_and_the_other_waits(folder):
    train_tokenizer(TEXTS, 300).save(folder / "model")
    begun, found, events = threading.Event(), [], []

    def build():
        found.append(prepare_corpus(spec(folder, tokenizer="model"), base_dir=folder, progress=progress))

    def progress(what, done, total):
        begun.set()
        events.append(threading.current_thread())

    threads = [threading.Thread(target=build) for _ in range(2)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert set(events) == {threads[0]}
    assert names(folder / "cache") == [folder_of(found[0]).name]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            "train.bin",
            truncate,
            r"train\.bin is damaged: it has \d+ bytes, but its index requires \d+; delete",
        ),
        ("held_out.bin", truncate, r"held_out\.bin is damaged"),
        ("train.bin", Path.unlink, r"train\.bin cannot be read .*; delete"),
        ("train.json", Path.unlink, r"train\.bin cannot be read .*; delete"),
        ("train.json", truncate, r"train\.bin cannot be read .*; delete"),
        (
            "train.json",
            lambda path: edit(path, tokenizer="other"),
            r"train\.bin was made by another tokenizer",
        ),
        ("train.idx", Path.unlink, r"train\.bin cannot be read .*; delete"),
        ("train.idx", truncate, r"train\.idx is damaged: it has \d+ bytes instead of \d+; delete"),
        (
            "train.idx",
            lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
            r"train\.idx is not a token index",
        ),
    ],
)
def test_damage_is_noticed(folder, name, damage, message):
    corpus, _ = prepare(folder)
    damage(folder_of(corpus) / name)
    with pytest.raises(ValueError, match=message):
        prepare(folder)


def test_a_cache_that_cannot_be_written(folder):
    (folder / "cache").write_text("a file")
    with pytest.raises(ValueError, match=r"data\.cache_dir=.* cannot be written"):
        prepare(folder)


def test_an_empty_corpus(folder):
    (folder / "empty.jsonl").write_text('{"text": ""}')
    with pytest.raises(ValueError, match=r"empty\.jsonl: every document is empty"):
        prepare(folder, sources="empty.jsonl")
    assert names(folder / "cache") == []


def test_no_torch():
    script = "import sys, meshwright.data; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
