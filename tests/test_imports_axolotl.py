"""Configurations of axolotl and nanoGPT: every key is imported with its meaning, or named with the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError

BASE = {"base_model": "gpt2", "micro_batch_size": 2, "learning_rate": 1e-4, "max_steps": 100}


class Imported:
    """A recipe from one file, and its report."""

    def __init__(self, folder: Path, name: str, content: str, ranks: int | None = 8) -> None:
        (folder / name).write_text(content)
        self.text, self.reading = import_files([folder / name], ranks=ranks)
        self.recipe = yaml.safe_load(self.text)

    def why(self, key: str) -> str:
        """The report's reasons for the keys without a counterpart whose origin contains `key`."""
        return "; ".join(why for origin, why in self.reading.without if key in origin)

    def tells(self, key: str) -> bool:
        """Whether the recipe or its report names the key."""
        return key in self.text


def axolotl(folder: Path, ranks: int | None = 8, **keys: Any) -> Imported:
    return Imported(folder, "a.yml", yaml.safe_dump({**BASE, **keys}), ranks)


def sources(folder: Path, *entries: dict[str, Any], **keys: Any) -> tuple[list[dict[str, Any]], Imported]:
    found = axolotl(folder, datasets=list(entries), **keys)
    return found.recipe["data"]["sources"], found


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"path": "tatsu-lab/alpaca"}, [{"path": "hub:tatsu-lab/alpaca"}]),
        ({"path": "teknium/OpenHermes-2.5"}, [{"path": "hub:teknium/OpenHermes-2.5"}]),
        ({"path": "data/mine.jsonl", "ds_type": "json", "split": "train"}, [{"path": "data/mine.jsonl"}]),
        ({"path": "json", "data_files": "mine.jsonl"}, [{"path": "mine.jsonl"}]),
        ({"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, [{"path": "a.jsonl"}, {"path": "b.jsonl"}]),
        ({"path": "./saved", "split": "dev"}, [{"path": "./saved", "split": "dev"}]),
        ({"path": "./folder", "data_files": "part.parquet", "ds_type": "parquet"}, [{"path": "part.parquet"}]),
        (
            {"path": "own/er", "name": ["a", "b"], "split": "train[:5]"},
            [{"path": "hub:own/er", "split": "train[:5]", "subset": name} for name in ("a", "b")],
        ),
    ],
)
def test_a_data_sets_place_is_the_sources(tmp_path: Path, entry: dict[str, Any], expected: list[Any]) -> None:
    found, told = sources(tmp_path, entry)
    assert found == expected
    assert not told.why("datasets")


def test_files_of_a_data_set_on_the_hub_are_not_files_here(tmp_path: Path) -> None:
    found, told = sources(tmp_path, {"path": "own/er", "data_files": ["a.jsonl", "b.jsonl"], "ds_type": "json"})
    assert found == [{"path": "hub:own/er"}]
    assert "read whole" in told.why("datasets.0.data_files=['a.jsonl', 'b.jsonl']")
    found, told = sources(tmp_path, {"path": "s3://bucket/x.jsonl"})
    assert "download" in told.why("datasets.0.path=s3://bucket/x.jsonl")


def test_what_a_local_file_does_not_have_is_named(tmp_path: Path) -> None:
    found, told = sources(tmp_path, {"path": "d.csv", "ds_type": "json", "split": "train[:9]", "name": "part"})
    assert found == [{"path": "d.csv"}]
    assert "the ending of d.csv tells what is in it: csv" in told.why("ds_type=json")
    assert "read whole" in told.why("split=train[:9]")
    assert "read whole" in told.why("name=part")


KEYS: dict[str, Any] = {
    "shards": 4, "shards_idx": 1, "preprocess_shards": 2, "conversation": "vicuna", "chat_template": "gemma",
    "chat_template_jinja": "{{ x }}", "input_format": "f", "input_transform": "t", "field": "f",
    "field_human": "h", "field_model": "m", "field_messages": "dialog", "field_tools": "uses",
    "field_thinking": "why", "template_thinking_key": "because", "message_field_role": "who",
    "message_field_content": "what", "message_property_mappings": {"role": "speaker"},
    "message_field_training": "learn", "message_field_training_detail": "spans",
    "split_thinking": True, "logprobs_field": "l", "temperature": 0.5,
    "roles_to_train": ["gpt"], "train_on_eos": "all", "train_on_eot": "last", "roles": {"user": ["customer"]},
    "drop_system_message": True, "trust_remote_code": True, "revision": "abc", "text_column": "t", "skip": 3,
    "field_chosen": "yes", "field_rejected": "no", "step_separator": "|", "max_completion_length": 9,
    "train_on_last_step_only": True, "weight": "2", "split": "dev", "name": "sub", "ds_type": "json",
}  # fmt: skip
"""Keys of a data set in axolotl's schemas, and one of none."""


@pytest.mark.parametrize("kind", ["chat_template", "alpaca", "completion", "elsewhere.load", None])
def test_every_key_of_a_data_set_is_imported_or_named(tmp_path: Path, kind: str | None) -> None:
    _, told = sources(tmp_path, {"path": "own/er", "type": kind, **KEYS})
    for key, value in KEYS.items():
        assert told.tells(f"datasets.0.{key}={value}"), key
    silent = [origin for origin in told.reading.already_so() if "datasets" in origin]
    assert [origin.split(": ")[1] for origin in silent] == ["datasets.0.ds_type=json"]  # which the Hub's tells


def test_a_key_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    for key, value in {"path": 3, "type": ["alpaca"], "data_files": 1, "roles": "x", "shards": "two"}.items():
        with pytest.raises(UserError, match=rf"a.yml: datasets.0.{key}=.* must be"):
            sources(tmp_path, {"path": "own/er", key: value})
    with pytest.raises(UserError, match=r"a\.yml: datasets\.1\.path is missing"):
        sources(tmp_path, {"path": "own/er"}, {"type": "alpaca"})


def test_conversations_keep_columns_and_what_is_trained(tmp_path: Path) -> None:
    entry = {
        "path": "own/er", "type": "chat_template", "field_messages": "dialog", "field_tools": "uses",
        "message_property_mappings": {"role": "from", "content": "value"}, "roles_to_train": ["gpt", "tool"],
        "roles": {"assistant": ["gpt", "model"]}, "train_on_eos": "last", "chat_template": "chatml",
    }  # fmt: skip
    found, told = sources(tmp_path, entry)
    assert found == [{"path": "hub:own/er", "format": "messages", "columns": {"messages": "dialog", "tools": "uses"}}]
    assert told.recipe["data"]["chat"] == {
        "roles_to_train": ["assistant", "tool"],
        "train_on_eos": "last",
        "template": "chatml",
    }
    assert not told.why("datasets")
    _, told = sources(tmp_path, entry, {"path": "an/other", "type": "chat_template"})
    assert "chat" not in told.recipe["data"]
    assert "other data sets differ" in told.why("datasets.0.train_on_eos=last")


def test_the_loss_is_on_prompts_where_axolotl_is_told_so(tmp_path: Path) -> None:
    assert axolotl(tmp_path, train_on_inputs=True).recipe["data"]["chat"] == {"train_on": "all"}
    assert "chat" not in axolotl(tmp_path, train_on_inputs=False).recipe["data"]


def test_texts_keep_their_column(tmp_path: Path) -> None:
    found, _ = sources(tmp_path, {"path": "own/er", "type": "completion", "field": "body"})
    assert found == [{"path": "hub:own/er", "format": "text", "text_key": "body"}]
    streamed = axolotl(tmp_path, pretraining_dataset=[{"path": "own/er", "name": "en", "text_column": "body"}])
    assert streamed.recipe["data"]["sources"] == [
        {"path": "hub:own/er", "subset": "en", "format": "text", "text_key": "body"}
    ]
    alone = axolotl(tmp_path, pretraining_dataset="own/er")
    assert alone.recipe["data"]["sources"] == [{"path": "hub:own/er", "format": "text"}]


def test_types_without_a_format_are_named(tmp_path: Path) -> None:
    for kind in ("input_output", "alpaca_w_system.load_open_orca", "jeopardy"):
        found, told = sources(tmp_path, {"path": "own/er", "type": kind})
        assert found == [{"path": "hub:own/er"}]
        assert "supported: alpaca, " in told.why(f"datasets.0.type={kind}")
    _, told = sources(tmp_path, {"path": "own/er", "type": "alpaca:chat"})
    assert any("type=alpaca:chat" in note and "Instruction" in note for note in told.reading.notes)


def test_a_prompt_of_the_users_own_keeps_columns_and_names_words(tmp_path: Path) -> None:
    kind = {
        "field_instruction": "question",
        "field_output": "answer",
        "format": "Q: {instruction}\nA:",
        "system_prompt": "S",
    }
    found, told = sources(tmp_path, {"path": "own/er", "type": kind})
    columns = {"instruction": "question", "output": "answer"}
    assert found == [{"path": "hub:own/er", "format": "alpaca", "columns": columns}]
    assert "data.chat.template" in told.why("a.yml: datasets.0.type.format=Q: {instruction}\nA:")
    assert "data.chat.template" in told.why("datasets.0.type.system_prompt=S")
    assert not told.why("type.field_")
    assert told.tells("datasets.0.type.field_instruction=question")
    plain = {
        "field_instruction": "question",
        "field_output": "answer",
        **dict.fromkeys(("format", "no_input_format"), "{instruction}"),
    }
    found, told = sources(tmp_path, {"path": "own/er", "type": plain})
    columns = {"prompt": "question", "completion": "answer"}
    assert found == [{"path": "hub:own/er", "format": "prompt_completion", "columns": columns}]
    assert not told.why("datasets")
