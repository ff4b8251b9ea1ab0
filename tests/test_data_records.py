"""Records of fine-tuning data: every format gives the same tokens, mistakes are named, trained tokens are proved."""

import csv
import importlib
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from conversations import TALKS, chat_tokenizer, lines
from meshwright.cli.main import main
from meshwright.data.audit_records import trained_text_problems
from meshwright.data.encoders import Encoders
from meshwright.data.examples import record_encoder
from meshwright.data.mixture import held_out_samples, training_samples
from meshwright.data.packing import NO_LABEL, build_samples
from meshwright.data.prepare import prepare_corpus
from meshwright.data.readers import read_documents, told_apart
from meshwright.data.records import record_content
from meshwright.data.sources import find_files
from meshwright.serve.trained import _samples_of
from meshwright.spec.data import ChatSpec, DataSpec

TOKENIZER = chat_tokenizer()
PAIRS = [(talk[1]["content"], talk[2]["content"]) for talk in TALKS]


def turn(role, content):
    return {"role": role, "content": content}


def record_text(fields, format, where):
    return record_content(fields, format, where).text


def write_parquet(path, rows):
    importlib.import_module("pyarrow.parquet").write_table(
        importlib.import_module("pyarrow").Table.from_pylist(rows), path
    )


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


MESSAGES = [{"messages": [turn("user", asked), turn("assistant", answer)]} for asked, answer in PAIRS]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]} for asked, answer in PAIRS
]
ALPACA = [{"instruction": asked, "input": "", "output": answer} for asked, answer in PAIRS]
COMPLETIONS = [{"prompt": [turn("user", asked)], "completion": [turn("assistant", answer)]} for asked, answer in PAIRS]
WRITERS = {
    "messages.jsonl": lambda path: path.write_text(lines(*MESSAGES)),
    "messages.parquet": lambda path: write_parquet(path, MESSAGES),
    "sharegpt.json": lambda path: path.write_text(json.dumps(SHAREGPT)),
    "alpaca.csv": lambda path: write_csv(path, ALPACA),
    "prompt_completion.jsonl": lambda path: path.write_text(lines(*COMPLETIONS)),
}


def recipe(folder, path, **fields):
    """Data with a chat tokenizer, about four conversations per sample."""
    if not (folder / "tokenizer").exists():
        TOKENIZER.save(folder / "tokenizer")
    fields = {"packing": "best_fit", "separate_documents": True, "sequence_length": 256} | fields
    sources = path if isinstance(path, list | dict) else {"path": path}
    return DataSpec.model_validate(
        {"sources": sources, "tokenizer": "tokenizer", "cache_dir": str(folder / "cache"), **fields}
    )


@pytest.mark.parametrize("name", WRITERS)
def test_formats_are_told_by_their_columns_and_mean_the_same(name, tmp_path):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    WRITERS[name](tmp_path / name)
    (file,) = told_apart(find_files(recipe(tmp_path, name), tmp_path))
    assert file.format == name.split(".")[0]
    encoder = record_encoder(TOKENIZER, ChatSpec(), base_dir=tmp_path, max_labels=256)
    found = encoder.encode([document.text for document in read_documents([file])])
    wanted = encoder.encode([json.dumps({"messages": record["messages"], "given": 0}) for record in MESSAGES])
    assert [one.documents[0].tolist() for one in found] == [one.documents[0].tolist() for one in wanted]


def test_a_prompt_is_only_read_and_tools_are_kept():
    prompt = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    fields = {"prompt": prompt, "completion": [turn("assistant", "d")], "tools": [{"name": "clock"}]}
    record = json.loads(record_text(fields, "prompt_completion", "here"))
    clock = {"type": "function", "function": {"name": "clock"}}
    assert record == {"messages": [*prompt, turn("assistant", "d")], "given": 3, "tools": [clock]}
    sides = ([*prompt, turn("assistant", "d")], [*prompt, turn("assistant", "e")])
    record = json.loads(record_text(dict(zip(("chosen", "rejected"), sides, strict=True)), "preference", "here"))
    assert record["chosen"] == {"messages": sides[0], "given": 3}
    assert record["rejected"] == {"messages": sides[1], "given": 3}


def test_a_system_message_and_an_input_are_kept():
    system, talk = turn("system", "Be brief."), [turn("user", "Add.\n\n2, 2"), turn("assistant", "4")]
    alpaca = {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be brief."}
    sharegpt = {"conversations": talk, "system": "Be brief."}
    for format, fields in (("alpaca", alpaca), ("sharegpt", sharegpt)):
        assert json.loads(record_text(fields, format, "here"))["messages"] == [system, *talk]


BAD = {
    "unknown column": ({"mesages": []}, "a.jsonl: unknown column 'mesages'; did you mean 'messages'?"),
    "two formats": ({"messages": [], "text": "x"}, "a.jsonl: its columns match messages and text; set"),
    "no list": ({"messages": "Hi"}, "a.jsonl:2: a conversation must be a list of messages"),
    "role": ({"messages": [turn("asistant", "x")]}, "a.jsonl:2: message 1: role 'asistant' is not one of system, "),
    "content": ({"messages": [turn("user", 3)]}, "a.jsonl:2: message 1: its content is not text but int"),
    "null": (
        {"prompt": "x", "completion": None},
        "a.jsonl:2: has no 'completion', which format prompt_completion needs",
    ),
    "labels": ({"input_ids": [1, 2], "labels": [2, -100]}, "a.jsonl:2: every label must be its own token or -100"),
    "no prompt": (
        {"chosen": [turn("assistant", "x")], "rejected": [turn("assistant", "y")]},
        "a.jsonl:2: has no 'prompt', and chosen and rejected do not begin with one",
    ),
    "all masked": ({"messages": [turn("user", "x")]}, "a.jsonl:2: it has no trained tokens; fix it, or set data.c"),
    "overlong": (
        {"prompt": "x " * 300, "completion": "y"},
        "a.jsonl:2: its ",
    ),
    "spelling": (
        {"messages": [turn("user", "<|im_end|>")]},
        "a.jsonl:2: a message of role 'user' contains the special",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_told_with_their_line(name, tmp_path):
    record, message = BAD[name]
    (tmp_path / "a.jsonl").write_text("\n" + lines(record))
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared below)
        prepare_corpus(recipe(tmp_path, "a.jsonl", held_out=0), base_dir=tmp_path)
    assert str(caught.value).startswith(message)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder of conversations, the recipe and its corpus."""
    folder = tmp_path_factory.mktemp("records")
    too_long = {"messages": [turn("user", "x " * 400), turn("assistant", "y")]}
    (folder / "talks.jsonl").write_text(lines(*({"messages": talk} for talk in TALKS), too_long))
    data = recipe(folder, "talks.jsonl", held_out=0.1, chat={"overlong": "drop"})
    return folder, data, prepare_corpus(data, base_dir=folder)


def test_labels_of_packed_samples_are_answers(prepared):
    _, data, corpus = prepared
    (stream,) = corpus.streams
    assert (stream.name, stream.formats, stream.train.counts) == ("conversations", ("messages",), {"overlong": 1})
    samples = training_samples(corpus, data).streams[0]
    predicted = [
        np.concatenate([sample.labels[sample.labels != NO_LABEL]])
        for sample in map(samples.__getitem__, range(len(samples)))
    ]
    text = "".join(TOKENIZER.decode(tokens) for tokens in predicted)
    held_out = {TOKENIZER.decode(part) for part in [stream.held_out.tokens]}.pop()
    for talk in TALKS:
        answers = [f"{message['content']}<|im_end|>" for message in talk if message["role"] == "assistant"]
        inside = talk[2]["content"] not in held_out
        assert all(text.count(answer) == inside for answer in answers)
    assert "What is" not in text
    assert len(text) == sum(
        len(m["content"]) + 10 for talk in TALKS if talk[2]["content"] not in held_out for m in talk[2::2]
    )
    padded = build_samples(stream.train, data.model_copy(update={"packing": "padded"}))
    assert len(padded) == stream.train.num_documents > len(samples)
    assert sum((padded[i].labels != NO_LABEL).sum() for i in range(len(padded))) == sum(map(len, predicted))
    assert held_out_samples(corpus, data).num_tokens == len(stream.held_out.tokens) - stream.held_out.num_documents


def test_processes_make_the_same_files(prepared, tmp_path):
    folder, data, corpus = prepared
    again = data.model_copy(update={"cache_dir": str(tmp_path / "cache")})
    (stream,) = prepare_corpus(again, base_dir=folder, processes=1).streams
    assert np.array_equal(stream.train.tokens, corpus.streams[0].train.tokens)
    assert np.array_equal(stream.train.trained, corpus.streams[0].train.trained)
    assert stream.train.counts == {"overlong": 1}


def test_what_processes_say_is_what_they_were_asked(tmp_path):
    encoder = record_encoder(TOKENIZER, ChatSpec(overlong="drop"), base_dir=tmp_path, max_labels=60)
    texts = [json.dumps({"messages": talk[:n], "given": 0}) for talk in TALKS[:3] for n in (2, 3, 5)]
    texts.append(json.dumps({"prompt": "a", "completion": "b"}))
    with Encoders(encoder, 1) as encoders:
        ((_, found),) = encoders.map([("", texts)])
    for one, wanted in zip(found, encoder.encode(texts), strict=True):
        assert (one.note, one.error) == (wanted.note, wanted.error)
        assert [ids.tolist() for ids in one.documents] == [ids.tolist() for ids in wanted.documents]


def test_another_template_or_policy_is_another_corpus(prepared):
    folder, data, corpus = prepared
    others = [{"train_on": "last", "overlong": "drop"}, {"template": "plain", "overlong": "drop"}]
    for chat in others:
        (stream,) = prepare_corpus(data.model_copy(update={"chat": ChatSpec(**chat)}), base_dir=folder).streams
        assert stream.train.path != corpus.streams[0].train.path
        text = TOKENIZER.decode(stream.train.tokens[stream.train.trained == 1])
        assert text.startswith("That is" if chat.get("train_on") else "It is")
        assert ("<|im_start|>" in TOKENIZER.decode(stream.train.tokens)) == ("template" not in chat)


def test_a_damaged_mask_is_noticed(prepared, tmp_path):
    folder, data, corpus = prepared
    shutil.copytree(corpus.streams[0].train.path.parent.parent, tmp_path / "cache")
    (mask,) = (tmp_path / "cache").glob(f"{corpus.streams[0].train.path.parent.name}/train.mask")
    mask.write_bytes(mask.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"train\.mask is damaged: it has \d+ bytes instead of \d+; delete "):
        prepare_corpus(data.model_copy(update={"cache_dir": str(tmp_path / "cache")}), base_dir=folder)


def shifted(trained):
    return np.roll(trained, 1)


def all_of_it(trained):
    return np.ones_like(trained)


def questions(trained):
    return 1 - trained


def one_more(trained):
    more = trained.copy()
    more[np.flatnonzero(np.diff(trained) == 1)[5]] = 1
    return more


@pytest.mark.parametrize("fault", [shifted, all_of_it, questions, one_more])
def test_the_audit_finds_what_no_assistant_wrote(fault, prepared):
    _, data, corpus = prepared
    (stream,) = corpus.streams
    assert list(trained_text_problems(stream, corpus.tokenizer, data)) == []
    broken = replace(stream, train=replace(stream.train, trained=fault(np.asarray(stream.train.trained))))
    problems = list(trained_text_problems(broken, corpus.tokenizer, data))
    assert any("which is not an assistant's text in the records" in problem for problem in problems)


def test_a_model_without_a_recipe_is_measured_on_what_its_template_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talks.jsonl").write_text(lines(*({"messages": talk} for talk in TALKS[:6])))
    (stream,) = prepare_corpus(recipe(tmp_path, "talks.jsonl", held_out=0), base_dir=tmp_path).streams
    trained = SimpleNamespace(
        run=None, tokenizer_dir=tmp_path / "tokenizer", spec=SimpleNamespace(foreign=None, vocab=512)
    )
    (samples,) = _samples_of(trained, ["talks.jsonl"], 256).values()
    assert (
        sum(int((sample.labels != NO_LABEL).sum()) for sample in map(samples.__getitem__, range(len(samples))))
        == stream.train.trained.sum()
        > 0
    )


RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 1, num_heads: 2, ffn: 64, max_positions: 256}
data:
  sources: talks.jsonl
  tokenizer: tokenizer
  sequence_length: 256
  packing: best_fit
  separate_documents: true
  cache_dir: CACHE
training: {steps: 4, global_batch: 4, precision: fp32, lr_schedule: {warmup: 0}}
"""


def test_the_verbs_show_and_prove_it(tmp_path, capsys):
    TOKENIZER.save(tmp_path / "tokenizer")
    (tmp_path / "talks.jsonl").write_text(lines(*({"messages": talk} for talk in TALKS)))
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE.replace("CACHE", str(tmp_path / "cache")))
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "talks.jsonl: messages" in out
    assert "| It is " in out
    assert ". <|im_start|>user\n" in out
    assert main(["data", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "conversations: messages" in out
    shown = [line.strip() for line in out.splitlines()]
    assert any(line.startswith("| Ask on, é!<|im_end|>") for line in shown)
    assert not any(line.startswith("| What is") for line in shown)
    assert main(["data", "audit", str(path)]) == 0
    assert "ok    answers    in records" in capsys.readouterr().out
    assert main(["check", str(path), "data.packing=concatenated"]) == 1
    assert "data.packing=concatenated would cut conversations at arbitrary positions; set" in capsys.readouterr().err


CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "é", "n": 2}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
AS_TEXT = json.dumps(CALL["function"]["arguments"])
CALLS = {
    "OpenAI's, arguments as text": (
        "messages",
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock", "arguments": AS_TEXT}}]},
        turn("tool", "9"),
    ),
    "OpenAI's older": (
        "messages",
        {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": AS_TEXT}},
        turn("function", "9"),
    ),
    "sharegpt's": (
        "conversations",
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "9"},
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tools", [[CLOCK], json.dumps([CLOCK]), json.dumps([CLOCK["function"]])])
def test_calls_of_tools_mean_the_same_in_every_form(name, tools):
    column, call, answer = CALLS[name]
    talk = [{"from": "human", "value": "?"}, call, answer, {"from": "gpt", "value": "nine"}]
    format = {"messages": "messages", "conversations": "sharegpt"}[column]
    for key in ("tools", "functions"):
        record = json.loads(record_text({column: talk, key: tools}, format, "here"))
        wanted = [turn("user", "?"), turn("assistant", "") | {"tool_calls": [CALL]}, turn("tool", "9")]
        assert record == {"messages": [*wanted, turn("assistant", "nine")], "given": 0, "tools": [CLOCK]}


def test_a_preference_keeps_its_tools_on_both_sides():
    sides = {"prompt": "?", "chosen": [turn("assistant", "a")], "rejected": [turn("assistant", "b")], "tools": [CLOCK]}
    record = json.loads(record_text(sides, "preference", "here"))
    assert record["chosen"]["tools"] == record["rejected"]["tools"] == [CLOCK]


ODD_CALLS = {
    "call": ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "a call of a tool has no name"),
    "arguments": ({"from": "function_call", "value": "not JSON"}, "a call: is not JSON"),
    "list": (
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
        "of 'f' are not an object but list",
    ),
}


@pytest.mark.parametrize("name", ODD_CALLS)
def test_odd_calls_are_told(name):
    message, reason = ODD_CALLS[name]
    with pytest.raises(ValueError, match=rf"^here: message 1: .*{reason}"):
        record_text({"messages": [message]}, "messages", "here")


REFUSED = {
    "label": (COMPLETIONS[0] | {"label": True}, "prompt_completion", "a.jsonl:1: column 'label': KTO labels"),
    "images": (MESSAGES[0] | {"images": ["x.png"]}, "messages", "a.jsonl:1: column 'images': images are not"),
    "weight": (MESSAGES[0] | {"weight": 0.5}, "messages", "a.jsonl:1: 'weight' is 0.5, but must be 0 (no loss) or 1"),
    "history": (MESSAGES[0] | {"history": [["a", "b"]]}, "messages", "a.jsonl:1: column 'history' belongs to"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_columns_that_mean_something_are_not_ignored(name, tmp_path):
    record, format, message = REFUSED[name]
    (tmp_path / "a.jsonl").write_text(lines(record))
    source = {"path": "a.jsonl", "format": format}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared below)
        prepare_corpus(recipe(tmp_path, [source], held_out=0), base_dir=tmp_path)
    assert str(caught.value).startswith(message)
    (stream,) = prepare_corpus(
        recipe(tmp_path, [source | {"columns": {name: None}}], held_out=0), base_dir=tmp_path
    ).streams
    assert stream.train.num_documents == 1


def test_columns_may_have_other_names_and_weights_leave_records_out(tmp_path):
    rows = [
        {"question": asked, "answer": answer, "weight": str(number % 2), "history": [["Before?", "Before."]]}
        for number, (asked, answer) in enumerate(PAIRS[:6])
    ]
    (tmp_path / "a.jsonl").write_text(lines(*rows))
    source = {"path": "a.jsonl", "columns": {"instruction": "question", "output": "answer"}}
    (stream,) = prepare_corpus(recipe(tmp_path, [source], held_out=0), base_dir=tmp_path).streams
    assert (stream.formats, stream.train.num_documents, stream.train.counts) == (("alpaca",), 3, {"unweighted": 3})
    assert TOKENIZER.decode(stream.train.tokens[stream.train.trained == 1]).startswith("Before.<|im_end|>It is 2")


def test_a_message_of_weight_nothing_is_only_read():
    talk = [dict(message) for message in TALKS[3]]
    talk[2]["train"] = False
    record = json.loads(record_text({"messages": talk}, "messages", "here"))
    assert [message.get("weight") for message in record["messages"]] == [None, None, 0, None, None]
    assert "train" not in record["messages"][2]


def test_the_audit_reads_calls_of_tools(tmp_path):
    talk = [
        turn("user", "?"),
        turn("assistant", "") | {"tool_calls": [CALL]},
        turn("tool", "9"),
        turn("assistant", "nine"),
    ]
    (tmp_path / "a.jsonl").write_text(lines({"messages": talk, "tools": [CLOCK]}, *MESSAGES[:3]))
    data = recipe(tmp_path, "a.jsonl", held_out=0, sequence_length=1024, chat={"template": "chatml"})
    (stream,) = prepare_corpus(data, base_dir=tmp_path).streams
    assert list(trained_text_problems(stream, TOKENIZER, data)) == []
    broken = replace(stream, train=replace(stream.train, trained=questions(np.asarray(stream.train.trained))))
    assert len(list(trained_text_problems(broken, TOKENIZER, data))) == 4
