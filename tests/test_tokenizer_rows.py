"""A tokenizer with more tokens than the model has rows: verbs work until such a token occurs, and then name it."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from conversations import lines
from meshwright.cli.main import main
from meshwright.data.examples import build_encoder
from meshwright.data.prepare import StartingModel, prepare_corpus
from meshwright.data.tokenizer import TextTokenizer
from meshwright.serve.conversation import PromptEncoder
from meshwright.spec.data import DataSpec
from served import CHATML, VOCAB, hf_directory, model_of, tokenizer_of

TALK = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
NO_ROW = "token 299 ('<tool>') has no row in the model, which has 299 rows for the tokenizer's 300 tokens; add rows to"
RECIPE = """\
model: {name: NAME}
run_dir: RUN
data: {sources: FILE, sequence_length: 64, packing: padded, held_out: 0, cache_dir: cache}
training: {steps: 1, global_batch: 1, precision: fp32}
"""


def with_tool(tokenizer: TextTokenizer) -> TextTokenizer:
    """One token more, which any text may contain."""
    inner = Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    inner.add_tokens([AddedToken("<tool>", special=False)])
    return TextTokenizer({**tokenizer.files, "tokenizer.json": inner.to_str().encode()}, where="test")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`few` lacks the row of `<tool>`, `fewer` also those of the chat template's tokens; `enough` has all."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), with_tool(tokenizer_of(CHATML))
    for name, rows in (("few", VOCAB - 1), ("fewer", VOCAB - 3), ("enough", VOCAB)):
        hf_directory(folder / name, model_of("llama", vocab=rows), tokenizer)
    return folder


@pytest.fixture
def here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with texts, records and questions, of which those named `bad` have the token."""
    monkeypatch.chdir(tmp_path)
    for name, word in (("good", "tools"), ("bad", "<tool>")):
        texts = [{"text": f"def add_{number}(x): return {word if number == 2 else 'x'}"} for number in range(30)]
        Path(f"{name}.jsonl").write_text(lines(*texts))
        talk = {"messages": [{"role": "user", "content": f"a {word}"}, TALK["messages"][1]]}
        Path(f"{name}-talks.jsonl").write_text(lines(TALK, talk))
        Path(f"{name}-questions.jsonl").write_text(lines({"question": f"a {word}?", "answer": "b"}))
    for name in ("few", "fewer", "enough"):
        Path(name).symlink_to(models / name)
    return tmp_path


def recipe(model: str, file: str) -> str:
    path = Path(f"{model}-{file}.yaml")
    path.write_text(RECIPE.replace("NAME", model).replace("RUN", f"runs/{path.stem}").replace("FILE", f"{file}.jsonl"))
    return str(path)


VERBS = {
    "check": lambda model, file: ["check", recipe(model, file)],
    "check talks": lambda model, file: ["check", recipe(model, f"{file}-talks")],
    "prepare": lambda model, file: ["data", "prepare", recipe(model, file)],
    "prepare with processes": lambda model, file: ["data", "prepare", recipe(model, file), "--processes", "1"],
    "show talks": lambda model, file: ["data", "show", recipe(model, f"{file}-talks")],
    "generate": lambda model, file: ["generate", model, "--prompt", "<tool>" * (file == "bad"), "--max-tokens", "2"],
    "generate --chat": lambda model, file: [
        *("generate", model, "--chat", "--prompt", "<tool>" if file == "bad" else "x", "--max-tokens", "2")
    ],
    "eval": lambda model, file: ["eval", model, "--source", f"{file}.jsonl"],
    "eval talks": lambda model, file: ["eval", model, "--source", f"{file}-talks.jsonl"],
    "eval tasks": lambda model, file: ["eval", model, "--tasks", f"{file}-questions.jsonl"],
}
PLACES = {"bad.jsonl": "bad.jsonl:3: ", "bad-talks.jsonl": "bad-talks.jsonl:2: "}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_works_until_a_token_without_a_row_occurs(
    verb: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(VERBS[verb]("few", "good")) == 0
    assert main(VERBS[verb]("enough", "bad")) == 0
    capsys.readouterr()
    assert main(VERBS[verb]("few", "bad")) == (1 if verb.startswith("check") else 2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert NO_ROW in error
    read = [place for file, place in PLACES.items() if verb != "check" and file in " ".join(VERBS[verb]("few", "bad"))]
    assert not read or error.removeprefix("error: ").startswith(read[0])


@pytest.mark.parametrize("verb", ["generate --chat", "check talks", "eval talks"])
def test_a_template_whose_tokens_have_no_rows_is_named(
    verb: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(VERBS[verb]("fewer", "good")) > 0
    assert "token 298 ('<|im_end|>') has no row in the model, which has 297 rows for" in capsys.readouterr().err


def test_training_starts_only_without_such_tokens(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe("few", "bad")]) == 2
    assert f"bad.jsonl:3: {NO_ROW}" in capsys.readouterr().err
    assert main(["train", recipe("few", "good")]) == 0
    assert main(["generate", "runs/few-good", "--prompt", "<tool>"]) == 2
    assert NO_ROW in capsys.readouterr().err
    assert main(["check", recipe("few", "bad"), "model={name: few, vocab: 300}"]) == 1
    assert "remove model.vocab or use weights: random\n" in (errors := capsys.readouterr().err)
    assert errors.count("error: ") == 1
    # With random weights, the recipe chooses the rows, and the advice works.
    assert main(["train", recipe("few", "bad"), "model.weights=random"]) == 2
    assert "the tokenizer has 300 tokens but the model only 299 rows; set model.vocab=300" in capsys.readouterr().err
    assert main(["train", recipe("few", "bad"), "model.weights=random", "model.vocab=300"]) == 0


def test_tokens_that_were_cached_for_another_model_are_not_taken(here: Path) -> None:
    data = DataSpec.model_validate({"sources": "bad.jsonl", "tokenizer": "enough", "held_out": 0, "cache_dir": "cache"})
    (stream,) = prepare_corpus(data, base_dir=here, model=StartingModel(rows=300)).streams
    given = data.model_copy(update={"sources": DataSpec.model_validate({"sources": str(stream.train.path)}).sources})
    for again in (data, given):
        with pytest.raises(ValueError, match=r"token 299 \('<tool>'\) has no row in the model"):
            prepare_corpus(again, base_dir=here, model=StartingModel(rows=299))


def test_a_tokenizer_whose_end_of_text_has_no_row_is_refused() -> None:
    tokenizer = tokenizer_of(CHATML)
    with pytest.raises(
        ValueError, match=r"token 0 \('<\|endoftext\|>'\) has no row in the model, which has 0 rows for"
    ):
        tokenizer.for_rows(0)
    assert tokenizer.for_rows(299) is tokenizer
    assert tokenizer.for_rows(None) is tokenizer


def test_every_way_of_encoding_looks_for_rows() -> None:
    tokenizer = with_tool(tokenizer_of(CHATML)).for_rows(VOCAB - 1)
    spelled = "<|im_end|> <tool>"
    record = json.dumps({"prompt": "", "completion": "<tool>"})
    encoder = build_encoder({"files": tokenizer.files, "rows": tokenizer.rows})
    assert "no row" in encoder.encode(["x", "<tool>"])[1].error
    assert encoder.encode(["x", "<tool>"])[0].error == ""
    settings = {"files": tokenizer.files, "rows": tokenizer.rows, "template": None, "chat": {}, "labels": 64}
    assert "no row" in build_encoder(settings).encode([record])[0].error
    tokens = json.dumps({"input_ids": [1, 299], "labels": [1, 299]})
    assert "no row" in build_encoder(settings).encode([tokens])[0].error
    ways = [
        lambda: tokenizer.encode("<tool>"),
        lambda: tokenizer.encode_batch(["<tool>"]),
        lambda: tokenizer.encode_marked(["<tool>"]),
        lambda: tokenizer.encode_prompt("<tool>"),
        lambda: tokenizer.encode_conversation(spelled, [(0, len(spelled))]),
        lambda: tokenizer.with_chat_template(CHATML).encode("<tool>"),
        lambda: PromptEncoder(tokenizer).text("<tool>"),
        lambda: PromptEncoder(tokenizer).conversation([{"role": "user", "content": spelled}]),
    ]
    for way in ways:
        with pytest.raises(ValueError, match="has no row in the model"):
            way()


def test_exports_say_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "few", "--hf", "out"]) == 0
    assert "warning: the model has no row for tokens 299 ('<tool>') to 299 of its tokenizer" in capsys.readouterr().out
    assert json.loads(Path("out/receipt.json").read_text())["notes"][0].startswith("warning: the model has no row for")
    assert main(["export", "few", "--gguf", "out.gguf"]) == 2
    assert "GGUF: the tokenizer has 300 tokens, but the embedding 299 rows; add rows" in capsys.readouterr().err
    assert main(["export", "enough", "--hf", "whole"]) == 0
    assert "no row" not in capsys.readouterr().out
