"""Questions in the training data are found: planted ones, each with its location, and no others."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.data.overlap import find_overlap
from meshwright.data.prepare import Corpus, prepare_corpus
from meshwright.spec.data import DataSpec
from meshwright.spec.errors import UserError

WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "light", "seven", "green", "under", "table"]


def sentence(seed: int, length: int = 30) -> str:
    """Random words, so that two sentences share no long run."""
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(length))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    rows = [json.dumps({"text": sentence(seed, 60)}) for seed in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    data = DataSpec.model_validate(
        {
            "sources": [{"path": "text.jsonl", "name": "text"}],
            "tokenizer_vocab": 300,
            "sequence_length": 32,
            "held_out": 0,
            "cache_dir": str(tmp_path / "cache"),
        }
    )
    return prepare_corpus(data, base_dir=tmp_path)


def test_planted_questions_are_found_with_their_place(tmp_path, corpus):
    document = 7
    (file,) = (stream.train for stream in corpus.streams)
    starts = file.starts()
    text = corpus.tokenizer.decode(np.asarray(file.tokens[starts[document] : starts[document + 1] - 1]).tolist())
    words = text.split()
    whole, half = " ".join(words[5:25]), " ".join(words[5:15]) + " but " + sentence(999, 10)
    rows = [{"question": sentence(500)}, {"question": whole, "choices": ["no"]}, {"turns": [sentence(501), half]}, {}]
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = find_overlap(corpus, [path], 16)
    assert (found.rows, found.short) == (4, 1)
    assert [one.line for one in found.shared] == [2, 3]
    first, second = found.shared
    assert first.found / first.windows > 0.8 > 2 * second.found / second.windows > 0
    assert first.place == f"text, document {document + 1}"
    assert first.example.strip() in text
    tokens, planted = list(file.tokens), corpus.tokenizer.encode(first.example)
    assert any(tokens[i : i + 16] == planted for i in range(len(tokens))), "token for token"


def test_a_run_over_the_border_of_two_chunks_is_found(tmp_path, corpus, monkeypatch):
    path = tmp_path / "eval.txt"
    (file,) = (stream.train for stream in corpus.streams)
    start = int(file.starts()[3])
    path.write_text(corpus.tokenizer.decode(np.asarray(file.tokens[start : start + 20]).tolist()))
    everywhere = find_overlap(corpus, [path], 13)[0].shared[0].found
    assert everywhere > 0
    for chunk in (start + 5, start + 10, 64):
        monkeypatch.setattr("meshwright.data.overlap.CHUNK", chunk)
        assert find_overlap(corpus, [path], 13)[0].shared[0].found == everywhere


def test_the_audit_fails_on_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{sentence(seed, 60)}\n" for seed in range(30)))
    Path("seen.jsonl").write_text(json.dumps({"question": sentence(3, 60)}) + "\n")
    Path("new.jsonl").write_text(json.dumps({"question": sentence(800, 60)}) + "\n")
    Path("run.yaml").write_text(
        "model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2}\n"
        "data: {sources: text.txt, tokenizer_vocab: 300, sequence_length: 32}\n"
        "training: {steps: 1, global_batch: 1}\ndevice: cpu\n"
    )
    assert main(["data", "audit", "run.yaml", "--against", "new.jsonl"]) == 0
    assert "ok    overlap    new.jsonl: 0 of 1 rows" in capsys.readouterr().out
    assert main(["data", "audit", "run.yaml", "--against", "seen.jsonl", "new.jsonl"]) == 1
    out = capsys.readouterr().out
    assert "FAULT overlap    seen.jsonl: 1 of 1 rows share 13 tokens in a row" in out
    assert "line 1, 100 % of it" in out or "% of it: " in out
    assert main(["data", "audit", "run.yaml", "--against", "seen.jsonl", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert told["overlap"][0]["shared"][0]["line"] == 1
    Path("bad.jsonl").write_text("{")
    assert main(["data", "audit", "run.yaml", "--against", "bad.jsonl"]) == 2
    assert "bad.jsonl:1: is not JSON" in capsys.readouterr().err


def test_a_missing_file_is_told(tmp_path, corpus):
    with pytest.raises(UserError, match=r"none\.txt: cannot be read"):
        find_overlap(corpus, [tmp_path / "none.txt"])
