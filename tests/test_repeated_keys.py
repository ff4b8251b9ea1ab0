"""A key that an object has twice: Python's `json` takes the last value silently; here it is one clear sentence."""

import json

import pytest

from conversations import chat_tokenizer
from meshwright.checkpoint.peft_config import lora_of
from meshwright.data.overlap import _texts_of
from meshwright.data.readers import read_documents, told_apart
from meshwright.data.sources import find_files
from meshwright.data.tokenizer import load_tokenizer
from meshwright.families.resolve import read_hf_directory
from meshwright.judge.questions import read_questions
from meshwright.spec.data import DataSpec
from meshwright.storage.jsonl import parse_json, read_objects
from meshwright.storage.opening import read_data, read_text

TWICE = "an object has the key 'a' twice; remove or rename one"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": 2, "a": 1}', f"x: {TWICE}"),
        ('[{}, {"b": [{"a": {}, "\\u0061": 3}]}]\n', f"x: {TWICE}"),
        (
            '{"t": "}\\"}",\n "b": {\n"a": 1, "a": {}\n}\n}',
            f"x:4: {TWICE.replace('an object', 'the object that ends here')}",
        ),
        ('[{"a": 1, "b": {"a": 2}}, {"a": 3}]', ""),
    ],
)
def test_the_parser_refuses_a_repeated_key(text, message):
    if not message:
        assert parse_json(text, "x") == json.loads(text)
        return
    with pytest.raises(ValueError, match="twice") as caught:
        parse_json(text, "x")
    assert str(caught.value) == message


def records(name):
    return lambda folder: list(read_documents(told_apart(find_files(DataSpec(sources=name), folder))))


ARGUMENTS = json.dumps('{"a": 1, "a": 2}')
CALL = f'{{"role": "assistant", "content": "", "tool_calls": [{{"name": "f", "arguments": {ARGUMENTS}}}]}}'
TOOLS = json.dumps('[{"name": "f", "a": 1, "a": 2}]')
ANSWER = '{"role": "assistant", "content": ""}'
READERS = {
    "r.jsonl": ('{"text": "x"}\n{"text": "x", "meta": {"a": 1, "a": 2}}', records("r.jsonl"), "r.jsonl:2: "),
    "m.jsonl": ('{"messages": [{"role": "user", "content": "?", "a": 1, "a": 1}]}', records("m.jsonl"), "m.jsonl:1: "),
    "c.jsonl": (f'{{"messages": [{CALL}]}}', records("c.jsonl"), "c.jsonl:1: message 1: the arguments of 'f': "),
    "t.jsonl": (
        f'{{"messages": [{ANSWER}], "tools": [{{"name": "f", "parameters": {{"a": 1, "a": 2}}}}]}}',
        records("t.jsonl"),
        "t.jsonl:1: ",
    ),
    "text.jsonl": (
        f'{{"messages": [{ANSWER}], "tools": {TOOLS}}}',
        records("text.jsonl"),
        "text.jsonl:1: tools: ",
    ),
    "r.json": ('[{"text": "x"},\n{"text": "y",\n"a": 1, "a": 2}]', records("r.json"), "r.json:3: "),
    "o.jsonl": ('\n{"a": 1, "a": 2}', lambda folder: list(read_objects(folder / "o.jsonl")), "o.jsonl:2: "),
    "q.jsonl": (
        '{"question": "?", "a": 1, "a": 2}',
        lambda folder: read_questions(folder / "q.jsonl"),
        "q.jsonl:1: ",
    ),
    "against.jsonl": (
        '{"question": "?", "a": 1, "a": 2}',
        lambda folder: list(_texts_of(folder / "against.jsonl")),
        "against.jsonl:1: ",
    ),
    "config.json": ('{\n"a": 1,\n"a": 2}', read_hf_directory, "config.json:3: "),
    "tokenizer_config.json": ('{"a": 1, "a": 2}', load_tokenizer, "tokenizer_config.json: "),
    "adapter_config.json": ('{"a": 1, "a": 2}', lora_of, "adapter_config.json is not an adapter's configuration: "),
    "trainer.json": (
        '{"a": 1, "a": 2}',
        lambda folder: read_data(folder / "trainer.json", read_text(folder / "trainer.json")),
        "trainer.json: cannot be read: ",
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_of_json_refuses_a_repeated_key(name, tmp_path):
    content, reads, place = READERS[name]
    if name == "tokenizer_config.json":
        chat_tokenizer().save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="twice") as caught:
        reads(tmp_path)
    assert place in str(caught.value)
    assert str(caught.value).endswith("has the key 'a' twice; remove or rename one")
