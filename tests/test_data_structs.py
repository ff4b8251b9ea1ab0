"""Records in Arrow, Parquet and `datasets`: the same tokens as from JSON Lines, without the keys that structs add."""

import copy
import importlib
import importlib.util
import json

import pytest

from conversations import chat_tokenizer, lines
from meshwright.cli.main import main
from meshwright.data.prepare import prepare_corpus
from meshwright.data.readers import read_documents, told_apart
from meshwright.data.sources import find_files
from meshwright.data.structs import readers_of
from meshwright.spec.data import DataSpec
from meshwright.spec.recipe import load_recipe
from meshwright.testing.conversations import called, turn

pyarrow = pytest.importorskip("pyarrow")
parquet = importlib.import_module("pyarrow.parquet")


def tool(name, properties, required=()):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": f"{name}s", "parameters": parameters}}


NUMBER, TEXT = {"type": "integer"}, {"type": "string", "description": "a name"}
ADD = tool("add", {"a": NUMBER, "b": NUMBER}, ["a", "b"])
PLACE = {"type": "object", "properties": {"city": TEXT, "zip": NUMBER}}
FIND = tool("find", {"where": PLACE, "steps": {"type": "array", "items": PLACE}}, ["where"])
ROWS = [
    {"messages": [turn("user", "2 + 3?"), called(("add", {"a": 2, "b": 3})), turn("tool", "5")], "tools": [ADD]},
    {
        "messages": [
            turn("user", "Where?", origin={"site": "x"}),
            called(("find", {"where": {"city": "Oslo"}, "steps": [{"city": "Rome"}, {"zip": 7}, {}]})),
            turn("tool", "there", origin={"page": 3}),
        ],
        "tools": [FIND, ADD],
    },
]
"""Rows whose tools, calls and messages have different keys, at every depth."""


def as_table(rows):
    return pyarrow.Table.from_pylist(rows)


def with_text(rows):
    """The rows with tools and arguments as JSON text."""
    rows = copy.deepcopy(rows)
    for row in rows:
        row["tools"] = json.dumps(row["tools"])
        for message in row["messages"]:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return rows


def write_arrow(path, rows, new):
    table = as_table(rows)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


def save_dataset(path, rows, *, splits=False, **options):
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    found = datasets.Dataset.from_list(rows, **options)
    (datasets.DatasetDict({"test": found.select([0]), "train": found}) if splits else found).save_to_disk(path)


STRUCTS = {
    "a.parquet": lambda path, rows: parquet.write_table(as_table(rows), path),
    "file.arrow": lambda path, rows: write_arrow(path, rows, pyarrow.ipc.new_file),
    "stream.arrow": lambda path, rows: write_arrow(path, rows, pyarrow.ipc.new_stream),
    "dataset": save_dataset,
    "splits": lambda path, rows: save_dataset(path, rows, splits=True),
}
EXACT = {
    "a.jsonl": lambda path, rows: path.write_text(lines(*rows)),
    "text.parquet": lambda path, rows: parquet.write_table(as_table(with_text(rows)), path),
    "dataset of text": lambda path, rows: save_dataset(path, with_text(rows)),
    "dataset of JSON": lambda path, rows: save_dataset(path, rows, on_mixed_types="use_json"),
}


def documents_of(folder, name):
    files = find_files(DataSpec.model_validate({"sources": {"path": name}}), folder)
    return read_documents(told_apart(files))


def read(folder, name, rows):
    if "dataset" in name or name == "splits":
        pytest.importorskip("datasets")
    (STRUCTS | EXACT)[name](folder / name, rows)
    return [(json.loads(document.text), document.note) for document in documents_of(folder, name)]


@pytest.mark.filterwarnings("ignore")  # of datasets
@pytest.mark.parametrize("name", [*STRUCTS, "text.parquet", "dataset of text", "dataset of JSON"])
def test_records_have_the_keys_of_their_json_and_no_others(name, tmp_path):
    wanted = read(tmp_path, "a.jsonl", ROWS)
    found = read(tmp_path, name, ROWS)
    assert [record for record, _ in found] == [record for record, _ in wanted]
    assert found[0][0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3}
    # Arguments and tools as text leave `origin`, whose keys differ between the second row's messages.
    notes = ["structs"] * 2 if name in STRUCTS else ["", "structs"] if "text" in name else ["", ""]
    assert [note for _, note in found] == notes


NULLABLE = {"type": ["string", "null"]}
EITHER = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "required", "kept"),
    [
        (NULLABLE, True, True),
        (EITHER, True, True),
        ({"type": "string", "nullable": True}, True, True),
        ({"enum": ["x", None]}, True, True),
        (NULLABLE, False, False),
        (TEXT, True, False),
        ({}, True, False),
        ("damaged", True, False),
        ({"anyOf": 3, "oneOf": None, "enum": "x", "type": None}, True, False),
    ],
)
def test_a_null_that_the_tool_requires_is_kept(schema, required, kept, tmp_path):
    """An argument that the schema requires, and that may be null, cannot be absent; any other null is an absent key."""
    asks = tool("ask", {"unit": schema, "n": NUMBER}, ["unit"] * required)
    rows = [
        {"messages": [turn("user", "?"), called(("ask", {"unit": unit, "n": 1}))], "tools": json.dumps([asks])}
        for unit in (None, "m")
    ]
    (first, note), (second, _) = read(tmp_path, "a.parquet", rows)
    arguments = [record["messages"][1]["tool_calls"][0]["function"]["arguments"] for record in (first, second)]
    assert [list(found.items()) for found in arguments] == [
        [("unit", None), ("n", 1)] if kept else [("n", 1)],
        [("unit", "m"), ("n", 1)],
    ]
    assert note == ("" if kept else "structs")


def test_a_required_null_is_kept_inside_objects_and_lists(tmp_path):
    place = {"type": "object", "properties": {"zip": NULLABLE, "city": NULLABLE}, "required": ["zip"]}
    asks = tool("ask", {"to": place, "via": {"type": "array", "items": place}})
    arguments = {"to": {"zip": None}, "via": [{"zip": None, "city": "Rome"}, {"zip": "1"}]}
    rows = [{"messages": [turn("user", "?"), called(("ask", arguments))], "tools": [asks]}]
    (first, _), _ = read(tmp_path, "a.parquet", [*rows, {**ROWS[0], "tools": [asks, ADD]}])
    assert first["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.filterwarnings("ignore")  # of datasets
@pytest.mark.parametrize("name", EXACT)
def test_text_keeps_every_null(name, tmp_path):
    rows = [{"messages": [turn("user", "?"), called(("add", {"a": None, "b": 3}))], "tools": [ADD]}, ROWS[1]]
    record, note = read(tmp_path, name, rows)[0]
    assert record["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": None, "b": 3}
    assert note == ""


def test_maps_keep_every_null_and_name_a_repeated_key(tmp_path):
    calls = pyarrow.struct([("name", pyarrow.string()), ("arguments", pyarrow.map_(pyarrow.string(), pyarrow.int64()))])
    message = pyarrow.struct([("role", pyarrow.string()), ("content", "string"), ("tool_calls", pyarrow.list_(calls))])
    schema = pyarrow.schema([("messages", pyarrow.list_(message))])

    def written(*arguments):
        talk = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": given}]} for given in arguments]
        parquet.write_table(pyarrow.Table.from_pylist([{"messages": talk}], schema), tmp_path / "a.parquet")
        (document,) = documents_of(tmp_path, "a.parquet")
        return [
            call["function"]["arguments"] for m in json.loads(document.text)["messages"] for call in m["tool_calls"]
        ]

    assert written([("a", 1), ("b", None)], []) == [{"a": 1, "b": None}, {}]
    with pytest.raises(ValueError, match=r"^a.parquet: row 1: column 'messages': an object has the key 'a' twice; rem"):
        written([("a", 1), ("a", 2)])


def test_json_is_recognised_by_a_pyarrow_that_does_not_know_its_type():
    plain = pyarrow.field("x", pyarrow.string(), metadata={"ARROW:extension:name": "arrow.json"})
    assert readers_of([plain], "a")["x"]('{"a": null}') == {"a": None}


def test_a_struct_with_two_fields_of_one_name_is_named(tmp_path):
    twice = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("content", pyarrow.string())])
    table = pyarrow.table({"messages": pyarrow.array([[("user", "a", "b")]], pyarrow.list_(twice))})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match=r"^a.arrow: column 'messages': an object has the key 'content' twice; remove"):
        list(documents_of(tmp_path, "a.arrow"))


RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4, ffn: 64, vocab: 512, max_positions: 4096}
data:
  sources: {path: PATH}
  tokenizer: tokenizer
  sequence_length: 4096
  packing: best_fit
  separate_documents: true
  held_out: 0
  cache_dir: CACHE
  chat: {template: chatml}
training: {steps: 2, global_batch: 1, precision: fp32, lr_schedule: {warmup: 0}}
"""


def test_the_verbs_tell_that_keys_are_left_out(tmp_path, capsys):
    chat_tokenizer().save(tmp_path / "tokenizer")
    STRUCTS["a.parquet"](tmp_path / "a.parquet", ROWS)
    EXACT["a.jsonl"](tmp_path / "a.jsonl", ROWS)
    said_of, tokens = {}, {}
    for name in ("a.parquet", "a.jsonl"):
        path = tmp_path / "run.yaml"
        path.write_text(RECIPE.replace("PATH", name).replace("CACHE", str(tmp_path / "cache")))
        for action in (["check"], ["data", "prepare"], ["data", "show"], ["data", "audit"]):
            assert main([*action, str(path)]) == 0, capsys.readouterr()
            said_of[name, action[-1]] = capsys.readouterr().out
        data = load_recipe(path).data
        (stream,) = prepare_corpus(data, base_dir=tmp_path).streams
        tokens[name] = stream.train.tokens.tolist()
    told = "2 read without keys that are null in their struct, which the record may lack"
    assert {key for key, out in said_of.items() if told in out} == {
        ("a.parquet", action) for action in ("check", "prepare", "show", "audit")
    }
    assert tokens["a.parquet"] == tokens["a.jsonl"]
