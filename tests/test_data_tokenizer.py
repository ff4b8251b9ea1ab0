"""Tokenizers: trained, read from files, with their end-of-text token; cutting long texts does not change tokens."""

import json
import random

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from meshwright.data import tokenizer as tokenizer_module
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from meshwright.data.tokenizer_files import END_OF_TEXT
from meshwright.spec.errors import UserError

TEXTS = [
    "def main():\n    return 42\n" * 20,
    "The quick brown fox, it's said, jumps over 12345 lazy dogs.\r\nTwice.\r\n" * 20,
    "Żółć ÄÖÜß 中文分词 は 日本語\nemoji 👩‍👩‍👧 🇪🇺\n" * 20,
]
ODD = [
    "",
    " ",
    "\n\n\n",
    "\t\x00\x01\x7f",
    "\r\n mixed \r line ends \n",
    "e\u0301 is not \u00e9",
    "\u202eright to left\u202c \u200bzero width",
    "\ufeffbyte order mark",
    "👩‍👩‍👧‍👦 𝕌𝕟𝕚𝕔𝕠𝕕𝕖 \U0010ffff",
    f"text that spells {END_OF_TEXT} inside",
    "a" * 5000,
    " " * 5000,
]


@pytest.fixture(scope="module")
def trained() -> TextTokenizer:
    return train_tokenizer(TEXTS, 350)


def write_tokenizer(directory, tokens, **configs):
    """A folder with a word-level tokenizer.json of these tokens and the given .json files."""
    vocab = {token: i for i, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(vocab, unk_token=tokens[0])).save(str(directory / "tokenizer.json"))
    for name, content in configs.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("text", ODD)
def test_every_text_survives(trained, text):
    assert trained.decode(trained.encode(text)) == text
    assert trained.encode_batch([text, "x"])[0] == trained.encode(text)


def test_text_cannot_end_its_document(trained):
    assert trained.eos_id not in trained.encode(f"a{END_OF_TEXT}b")
    assert trained.decode([trained.eos_id]) == END_OF_TEXT


def test_training_is_deterministic_and_bounded(trained):
    again = train_tokenizer(iter(TEXTS), 350)
    assert again.fingerprint == trained.fingerprint
    assert trained.vocab_size == 350
    assert max(i for text in TEXTS + ODD for i in trained.encode(text)) < trained.vocab_size
    assert train_tokenizer(["ab"], 400).vocab_size == 258, "256 bytes, end-of-text, and the one possible merge"


def test_save_and_load(trained, tmp_path):
    trained.save(tmp_path / "kept")
    for path in (tmp_path / "kept", tmp_path / "kept" / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert (loaded.fingerprint, loaded.eos_id, loaded.vocab_size) == (trained.fingerprint, 0, 350)
        assert loaded.encode(TEXTS[2]) == trained.encode(TEXTS[2])


def test_hugging_face_reads_what_is_saved(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == trained.eos_id
    for text in TEXTS + ODD[:9]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == trained.encode(text)


@pytest.mark.parametrize(
    ("tokens", "configs", "expected"),
    [
        (["<unk>", "</s>", "a"], {}, "</s>"),
        (["<unk>", "<|end_of_text|>"], {}, "<|end_of_text|>"),
        (["<unk>", "</s>", END_OF_TEXT], {}, END_OF_TEXT),
        (["<unk>", "</s>", "<end>"], {"tokenizer_config": {"eos_token": "<end>"}}, "<end>"),
        (["<unk>", "</s>", "<end>"], {"tokenizer_config": {"eos_token": {"content": "<end>"}}}, "<end>"),
        (["<unk>", "</s>", "<end>"], {"tokenizer_config": {"eos_token": None}}, "</s>"),
        (["<unk>", "</s>", "<end>"], {"special_tokens_map": {"eos_token": "<end>"}}, "<end>"),
        (["<unk>", "</s>", "<end>"], {"generation_config": {"eos_token_id": 2}}, "<end>"),
        (["<unk>", "</s>", "<end>"], {"generation_config": {"eos_token_id": [2, 1]}}, "<end>"),
    ],
)
def test_end_of_text_of_other_peoples_tokenizers(tmp_path, tokens, configs, expected):
    assert load_tokenizer(write_tokenizer(tmp_path, tokens, **configs)).eos_id == tokens.index(expected)


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({}, "no end-of-text token"),
        ({"tokenizer_config": {"eos_token": "<end>"}}, "tokenizer_config.json has eos_token '<end>'"),
        ({"generation_config": {"eos_token_id": 7}}, "generation_config.json has eos_token_id 7"),
        ({"generation_config": {"eos_token_id": []}}, "no end-of-text token"),
        ({"tokenizer_config": ["x"]}, "tokenizer_config.json is not a JSON object"),
    ],
)
def test_no_end_of_text(tmp_path, configs, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write_tokenizer(tmp_path, ["<unk>", "a"], **configs))


def test_missing_and_broken_tokenizers(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_tokenizer(tmp_path / "none" / "tokenizer.json")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    write_tokenizer(tmp_path, ["<unk>", "</s>"])
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: is not JSON"):
        load_tokenizer(tmp_path)


def test_a_file_of_another_name_stands_alone(tmp_path):
    write_tokenizer(tmp_path, ["<unk>", "</s>", "<end>"], tokenizer_config={"eos_token": "<end>"})
    (tmp_path / "tokenizer.json").rename(tmp_path / "mine.json")
    assert load_tokenizer(tmp_path / "mine.json").eos_id == 1


def test_ids_with_holes_fit_the_embedding(tmp_path):
    Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 900}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size == 901


def byte_level(trained, **changes):
    inner = Tokenizer.from_str(trained._files["tokenizer.json"].decode())
    for name, value in changes.items():
        setattr(inner, name, value)
    return inner, lambda: TextTokenizer({"tokenizer.json": inner.to_str().encode()}, where="test")


def test_truncation_and_padding_in_the_file_are_ignored(trained):
    inner, build = byte_level(trained)
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    text = TEXTS[0]
    assert build().encode_batch(["x", text]) == [trained.encode("x"), trained.encode(text)]


def test_prompts_begin_as_the_template_says(trained):
    inner, build = byte_level(trained)
    inner.add_special_tokens(["<bos>"])
    bos = inner.token_to_id("<bos>")
    inner.post_processor = processors.TemplateProcessing(
        single=f"<bos> $A {END_OF_TEXT}", special_tokens=[("<bos>", bos), (END_OF_TEXT, 0)]
    )
    tokenizer = build()
    assert tokenizer.encode_prompt("main") == [bos, *trained.encode("main")]
    assert tokenizer.encode("main") == trained.encode("main"), "documents get no extra tokens"
    assert trained.encode_prompt("main") == trained.encode("main")


def long_text() -> str:
    draw = random.Random(0)
    words = " ".join(TEXTS + ODD[:9]).split(" ")
    gaps = [" ", " ", "\n", "\r\n", "  ", "\n\n", ""]
    return "".join(draw.choice(words) + draw.choice(gaps) for _ in range(2000))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"normalizer": normalizers.NFC()},
    ],
    ids=["gpt2", "prefix space", "nfc"],
)
def test_cutting_a_long_text_does_not_show(trained, monkeypatch, changes):
    tokenizer = byte_level(trained, **changes)[1]()
    monkeypatch.setattr(tokenizer_module, "PIECE", 100)
    monkeypatch.setattr(tokenizer_module, "WINDOW", 40)
    text = long_text()
    pieces = tokenizer.pieces(text)
    assert "".join(pieces) == text
    assert len(pieces) > 50
    assert max(map(len, pieces)) < 500
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_a_tokenizer_that_marks_every_start_gets_its_text_whole(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "PIECE", 100)
    text = long_text()
    vocab = {token: i for i, token in enumerate(["</s>", "▁", *sorted(set(text) - {"▁"})])}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama2 = TextTokenizer({"tokenizer.json": inner.to_str().encode()}, where="test")
    assert llama2.encode("a b") == [vocab[c] for c in "▁a▁b"]
    assert llama2.pieces(text) == [text]


def test_text_without_a_place_to_cut_stays_whole(trained, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "PIECE", 100)
    assert trained.pieces("x" * 1000) == ["x" * 1000]
    assert trained.pieces("") == [""]


def test_a_long_word_is_learnt_piece_by_piece() -> None:
    """Learning it whole is quadratic in its length: 40 s for 262,144 characters."""
    word = "x" * (1 << 14)
    tokenizer = train_tokenizer([word, " " * len(word)], 300)
    assert 256 < max(len(tokenizer.decode([token])) for token in range(tokenizer.vocab_size)) <= 1000
    assert tokenizer.decode(tokenizer.encode(word)) == word


def test_a_regular_expression_that_never_ends_is_told() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, END_OF_TEXT: 2}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("^(a|a)*$"), "isolated")  # pyright: ignore
    ours = TextTokenizer({"tokenizer.json": tokenizer.to_str().encode()}, where="here")
    for encode in (ours.encode, lambda text: ours.encode_batch([text]), lambda text: ours.encode_marked([text])):
        with pytest.raises(UserError, match=r"tokenizer.json cannot be used: .*retry-limit"):
            encode("a" * 40 + "b")
    assert ours.encode("ab") == [0, 1]
