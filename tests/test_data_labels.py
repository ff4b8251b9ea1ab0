"""Fields of records that say what carries loss, in other systems' words: used, or refused by name, with their line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from conversations import TALKS, chat_tokenizer, lines
from meshwright.cli.main import main
from meshwright.data.audit_records import trained_text_problems
from meshwright.data.examples import record_encoder
from meshwright.data.labels import FLAGS
from meshwright.data.prepare import prepare_corpus
from meshwright.data.records import record_content
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.data import ChatSpec, DataSpec
from test_data_records import write_csv, write_parquet

TOKENIZER = chat_tokenizer()
IDS = [5, 6, 7, 8, 9, 10]


def turn(role, content, **fields):
    return {"role": role, "content": content, **fields}


def encoder_of(tokenizer, **chat):
    return record_encoder(tokenizer, ChatSpec.model_validate(chat), base_dir=Path(), max_labels=512)


def record_of(fields, format: Any = "messages"):
    return json.loads(record_content(fields, format, "a.jsonl:3").text)


def data_of(folder, records, **fields):
    if not (folder / "tokenizer").exists():
        TOKENIZER.save(folder / "tokenizer")
    if records:
        (folder / "a.jsonl").write_text(lines(*records))
    fields = {"packing": "best_fit", "separate_documents": True, "sequence_length": 256, "held_out": 0} | fields
    given = {"sources": "a.jsonl", "tokenizer": "tokenizer", "cache_dir": str(folder / "cache"), **fields}
    return DataSpec.model_validate(given)


def stream_of(folder, data):
    (stream,) = prepare_corpus(data, base_dir=folder).streams
    return stream


# Tokens with labels or masks.


@pytest.mark.parametrize(
    "masks",
    [
        {"completion_mask": [0, 0, 1, 1, 1, 1]},
        {"completion_mask": [False, False, True, True, True, True]},
        {"assistant_masks": [0, 1, 1, 0, 1, 0]},
        {"completion_mask": [0, 0, 1, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 1, 0]},
        {"loss_mask": [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]},
        {"completion_mask": [0, 0, 1, 1, 1, 1], "labels": [-100, -100, 7, 8, 9, 10]},
        {"loss_mask": [1] * 6, "completion_mask": None},
    ],
)
def test_a_token_carries_loss_where_every_mask_is_one(masks):
    """As trl builds labels, and as Megatron-Bridge shifts its mask: a value belongs to the token at its place."""
    given = [mask for name, mask in masks.items() if name != "labels" and mask is not None]
    wanted = [token if all(bits) else -100 for token, *bits in zip(IDS, *given, strict=True)]
    assert record_of({"input_ids": IDS, **masks}, "tokenized") == {"input_ids": IDS, "labels": wanted}


def test_padding_at_the_ends_is_cut_off():
    padded = {"input_ids": [0, 0, 5, 6, 7, 0], "attention_mask": [0, 0, 1, 1, 1, 0]}
    assert record_of(padded, "tokenized") == {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    labels = {"labels": [-100, -100, -100, 6, 7, -100]}
    assert record_of(padded | labels, "tokenized") == {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    mask = {"completion_mask": [0, 0, 0, 1, 1, 1]}
    assert record_of(padded | mask, "tokenized") == {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}


def test_columns_that_describe_one_document_say_nothing_new():
    columns = {"attention_mask": [1] * 6, "position_ids": [*range(6)], "token_type_ids": [0] * 6, "seq_lengths": [6]}
    assert record_of({"input_ids": IDS, **columns}, "tokenized") == {"input_ids": IDS, "labels": IDS}


REFUSED_TOKENS = {
    "short": ({"completion_mask": [1, 0]}, "'completion_mask' has 2 values for 6 tokens"),
    "weights": ({"loss_mask": [0.5] * 6}, "'loss_mask' must be a list of 0 and 1"),
    "text": ({"assistant_masks": "111111"}, "'assistant_masks' must be a list of 0 and 1"),
    "contradiction": (
        {"labels": IDS, "completion_mask": [0, 1, 1, 1, 1, 1]},
        "labels and completion_mask contradict each other; remove one",
    ),
    "other labels": ({"labels": [1, 2, 3, 4, 5, 6]}, "every label must be its own token or -100"),
    "holes": ({"attention_mask": [1, 0, 1, 1, 1, 1]}, "'attention_mask' must be 1 for every token, and may be 0 for"),
    "trained padding": (
        {"labels": IDS, "attention_mask": [0, 1, 1, 1, 1, 1]},
        "padding (attention_mask 0) has labels; set them to -100",
    ),
    "packed by positions": ({"position_ids": [0, 1, 2, 0, 1, 2]}, "column 'position_ids' describes several documents"),
    "packed by lengths": ({"seq_lengths": [2, 4]}, "column 'seq_lengths' describes several documents"),
    "kinds": ({"token_type_ids": [0, 0, 1, 1, 1, 1]}, "column 'token_type_ids' describes several documents"),
    "documents": ({"documents": [{"text": "x"}]}, "column 'documents' is for a chat template, which this format does"),
    "images": (
        {"images": ["x.png"]},
        "column 'images': images are not supported; to ignore the column, set columns={im",
    ),
}


@pytest.mark.parametrize("name", REFUSED_TOKENS)
def test_columns_beside_tokens_are_refused_by_name(name, tmp_path):
    columns, message = REFUSED_TOKENS[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is compared below)
        stream_of(tmp_path, data_of(tmp_path, [{"input_ids": IDS}, {"input_ids": IDS, **columns}]))
    assert str(caught.value).startswith(f"a.jsonl:2: {message}")


def test_the_audit_proves_the_labels_of_tokens(tmp_path):
    records = [
        {"input_ids": [*range(number, number + 9)], "labels": [-100] * 4 + [*range(number + 4, number + 9)]}
        for number in range(5, 45, 4)
    ]
    for chat in ({}, {"train_on": "all"}, {"overlong": "truncate"}):
        length = 6 if "overlong" in chat else 256
        data = data_of(tmp_path, records, chat=chat, sequence_length=length)
        stream = stream_of(tmp_path, data)
        assert list(trained_text_problems(stream, TOKENIZER, data)) == []
        trained = np.asarray(stream.train.trained)
        for wrong in (np.roll(trained, 1), 1 - trained, np.ones_like(trained), np.zeros_like(trained)):
            broken = replace(stream, train=replace(stream.train, trained=wrong))
            assert len(list(trained_text_problems(broken, TOKENIZER, data))) == len(records)


# Flags of messages.


def trained_texts(messages, **chat):
    """The contents of the messages that carry loss, and of those that carry none."""
    (found,) = encoder_of(TOKENIZER, **chat).encode([json.dumps(record_of({"messages": messages}))])
    assert not found.error, found.error
    ids = np.concatenate([np.zeros(0, np.int32), *found.documents])
    shown = TOKENIZER.decode(ids[ids >= 0]), TOKENIZER.decode(~ids[ids < 0])
    return [[message["content"] for message in messages if message["content"] in text] for text in shown]


SAID = [turn("user", "one"), turn("assistant", "two"), turn("user", "three"), turn("assistant", "four")]


@pytest.mark.parametrize(
    ("number", "flag", "train_on", "trained"),
    [
        (1, {}, "assistant", ["two", "four"]),
        (1, {"weight": 0}, "assistant", ["four"]),
        (1, {"train": False}, "assistant", ["four"]),
        (1, {"training": False}, "assistant", ["four"]),
        (1, {"loss": False}, "assistant", ["four"]),
        (1, {"loss_scale": 0.0}, "assistant", ["four"]),
        (1, {"loss_weight": 0}, "assistant", ["four"]),
        (1, {"masked": True}, "assistant", ["four"]),
        (1, {"masked": False, "weight": 1, "loss_weight": 1.0}, "assistant", ["two", "four"]),
        (0, {"train": True}, "assistant", ["one", "two", "four"]),  # axolotl trains it whatever its role
        (0, {"training": True}, "assistant", ["one", "two", "four"]),
        (0, {"loss": True, "weight": 1, "masked": False}, "assistant", ["two", "four"]),  # the others only answers
        (1, {}, "last", ["four"]),
        (1, {"loss": True}, "last", ["two", "four"]),  # ms-swift: it takes priority over the strategy
        (1, {"train": True}, "last", ["two", "four"]),
        (1, {"weight": 1}, "last", ["four"]),
        (3, {"loss": False}, "last", []),
        (1, {}, "all", ["one", "two", "three", "four"]),
        (1, {"weight": 0}, "all", ["one", "three", "four"]),
        (2, {"train": False}, "all", ["one", "two", "four"]),
    ],
)
def test_a_flag_of_a_message_decides_about_its_loss(number, flag, train_on, trained):
    messages = [dict(message) for message in SAID]
    messages[number] |= flag
    assert not set(FLAGS[1:]) & set(record_of({"messages": messages})["messages"][number])
    context = [message["content"] for message in SAID if trained and message["content"] not in trained]
    assert trained_texts(messages, train_on=train_on, unlabelled="drop") == [trained, context]


def test_a_prompt_carries_no_loss_whatever_its_messages_say():
    prompt = [turn("user", "one"), turn("assistant", "two", train=True), turn("user", "three")]
    record = record_of({"prompt": prompt, "completion": [turn("assistant", "four")]}, "prompt_completion")
    (ids,) = encoder_of(TOKENIZER).encode([json.dumps(record)])[0].documents
    assert TOKENIZER.decode(ids[ids >= 0]) == "four<|im_end|>"


REFUSED_FLAGS = {
    "half": ({"loss": 0.5}, "'loss' is 0.5, but must be 0 (no loss) or 1; remove or rename it"),
    "scaled": ({"loss_scale": 2.0}, "'loss_scale' is 2.0, but must be 0 (no loss) or 1"),
    "weighted": ({"loss_weight": 0.3}, "'loss_weight' is 0.3, but must be 0 (no loss) or 1"),
    "contradiction": ({"weight": 1, "train": False}, "weight and train contradict each other; remove one"),
    "detail": (
        {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
        "'train_detail' trains a part of a message, which is not supported; set train on whole messages, or remove it",
    ),
    "axolotl's own": ({"training_detail": [{"train": True}]}, "'training_detail' trains a part of a message"),
    "part": (
        {"content": [{"type": "text", "text": "a", "train": False}, {"type": "text", "text": "b"}]},
        "'train' of a part of its content is not supported; set it on the message",
    ),
    "image part": (
        {"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]},
        "a part of its content is not text but image_url",
    ),
    "captioned": (
        {"content": [{"type": "image", "text": "a", "image": "x.png"}]},
        "a part of its content is not text but image",
    ),
    "part with an image": (
        {"content": [{"type": "text", "text": "a", "image": "x.png"}]},
        "column 'image': images are not supported",
    ),
    "images": ({"images": ["x.png"]}, "column 'images': images are not supported"),
    "audio": ({"audio": {"id": "x"}}, "column 'audio': audio is not supported"),
}


@pytest.mark.parametrize("name", REFUSED_FLAGS)
def test_fields_of_a_message_are_refused_by_name(name, tmp_path):
    fields, message = REFUSED_FLAGS[name]
    talk = [turn("user", "?"), turn("assistant", "b") | fields]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        stream_of(tmp_path, data_of(tmp_path, [{"messages": SAID}, {"messages": talk}]))
    assert str(caught.value).startswith(f"a.jsonl:2: message 2: {message}")


def test_the_audit_knows_the_flags(tmp_path):
    talks: list[list[dict[str, Any]]] = [[dict(message) for message in talk] for talk in TALKS]
    for number, talk in enumerate(talks):
        talk[2]["train"] = bool(number % 2)
        talk[1]["train"] = number % 3 == 0
    for chat in ({}, {"train_on": "last"}, {"train_on": "all"}):
        data = data_of(tmp_path, [{"messages": talk} for talk in talks], chat=chat)
        stream = stream_of(tmp_path, data)
        assert list(trained_text_problems(stream, TOKENIZER, data)) == []
        broken = replace(stream, train=replace(stream.train, trained=1 - np.asarray(stream.train.trained)))
        assert len(list(trained_text_problems(broken, TOKENIZER, data))) > 30


# Columns beside the text.


WRITERS = {
    ".jsonl": lambda path, rows: path.write_text(lines(*rows)),
    ".json": lambda path, rows: path.write_text(json.dumps(rows)),
    ".csv": write_csv,
    ".parquet": write_parquet,
}


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("column", ["image", "audios", "video", "kto_tag"])
def test_a_column_beside_text_is_refused_unless_it_is_ignored(ending, column, tmp_path):
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    text = [{"text": f"Look, number {number}!", column: "x.png"} for number in range(30)]
    alpaca = [{"instruction": "a", "output": f"b{number}", column: "x.png"} for number in range(30)]
    for rows in (text, alpaca) if column != "kto_tag" else (alpaca,):
        WRITERS[ending](tmp_path / f"a{ending}", rows)
        for given, refused in (({}, True), ({"columns": {column: None}}, False)):
            data = data_of(tmp_path, [], sources=[{"path": f"a{ending}", **given}])
            if not refused:
                assert stream_of(tmp_path, data).train.num_documents == 30
                continue
            with pytest.raises(
                ValueError, match=rf"^a{ending}.* column '{column}': \w+.* not supported; .*to ignore th"
            ):
                stream_of(tmp_path, data)


def test_a_mask_without_tokens_is_refused():
    with pytest.raises(
        ValueError, match=r"^a.jsonl:3: column 'completion_mask' belongs to input_ids, not to format mes"
    ):
        record_of({"messages": SAID, "completion_mask": [1]})


QUESTIONS = [turn("system", "s"), turn("user", "one"), turn("assistant", "two"), turn("user", "three")]


@pytest.mark.parametrize(
    ("rejected", "answer"),
    [
        ({"rejected_response": "five"}, [turn("assistant", "five")]),
        ({"rejected_response": [turn("assistant", "five")]}, [turn("assistant", "five")]),
        ({"rejected_messages": [*QUESTIONS, turn("assistant", "five")]}, [turn("assistant", "five")]),
    ],
)
def test_a_rejected_response_makes_a_preference(rejected, answer, tmp_path):
    """ms-swift: it replaces everything after the last message of the user."""
    chosen = [*QUESTIONS, turn("assistant", "four"), turn("tool", "x"), turn("assistant", "so four")]
    wanted = record_of({"chosen": chosen, "rejected": [*QUESTIONS, *answer]}, "preference")
    assert record_of({"messages": chosen, **rejected}, "preference") == wanted
    assert wanted["rejected"]["given"] == 4
    data = data_of(tmp_path, [{"messages": [turn("user", "q"), turn("assistant", "a")], **rejected}] * 2)
    if "rejected_response" in rejected:
        stream = stream_of(tmp_path, data)
        assert (stream.formats, stream.train.num_documents) == (("preference",), 4)


def test_a_rejected_response_is_not_left_out_of_other_formats():
    with pytest.raises(
        ValueError, match=r"^a.jsonl:3: column 'rejected_response' belongs to preferences, not to format"
    ):
        record_of({"messages": SAID, "rejected_response": "x"})
    with pytest.raises(
        ValueError, match=r"'rejected_response' must be a text or messages, after a question of the user"
    ):
        record_of({"messages": SAID, "rejected_response": 5}, "preference")


# Variables of the chat template.

WITH_VARIABLES = """\
{%- for d in documents or [] -%}
{{- '<|im_start|>document\\n' + d.title + ': ' + d.text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and enable_thinking is defined and not enable_thinking -%}{{- '<none>' -}}{%- endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<none>' -}}{%- endif -%}{%- endif -%}
"""
DOCUMENTS = [{"title": "t", "text": "Some facts."}]


def encoded(fields, template=WITH_VARIABLES, format: Any = "messages", arguments=None):
    """(text, trained text) of each document."""
    encoder = encoder_of(TOKENIZER.with_chat_template(template), template_arguments=arguments or {})
    (found,) = encoder.encode([json.dumps(record_of(fields, format))])
    if found.error:
        raise ValueError(found.error)
    return [
        (TOKENIZER.decode(np.where(ids < 0, ~ids, ids)), TOKENIZER.decode(ids[ids >= 0])) for ids in found.documents
    ]


def test_a_record_sets_variables_of_the_template():
    talk = [turn("user", "q"), turn("assistant", "a")]
    plain = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{}a<|im_end|>\n"
    assert encoded({"messages": talk}) == [(plain.format(""), "a<|im_end|>")]
    for given in ({"enable_thinking": False}, json.dumps({"enable_thinking": False})):
        found = encoded({"messages": talk, "chat_template_kwargs": given})
        assert found == [(plain.format("<none>"), "a<|im_end|>")]
    off = {"enable_thinking": False}
    assert encoded({"messages": talk}, arguments=off)[0][0] == plain.format("<none>")
    on = {"messages": talk, "chat_template_kwargs": {"enable_thinking": True}}
    assert encoded(on, arguments=off)[0][0] == plain.format("")
    document = "<|im_start|>document\nt: Some facts.<|im_end|>\n"
    for fields in ({"documents": DOCUMENTS}, {"chat_template_kwargs": {"documents": DOCUMENTS}}):
        assert encoded({"messages": talk, **fields}) == [(document + plain.format(""), "a<|im_end|>")]
    pair = {"prompt": talk[:1], "chosen": talk[1:], "rejected": [turn("assistant", "b")], "documents": DOCUMENTS}
    sides = encoded(pair, format="preference")
    assert sides == [
        (document + plain.format(""), "a<|im_end|>"),
        (document + plain.format("")[:-12] + "b<|im_end|>\n", "b<|im_end|>"),
    ]


def test_what_was_learnt_about_turns_does_not_pass_to_other_variables():
    """As in Qwen3, only the generation prompt tells whether the model itself writes the empty thought."""
    always = WITH_VARIABLES.replace("m.role == 'assistant' and enable_thinking is", "m.role == 'assistant' or m.x is")
    encoder, wanted = (
        encoder_of(TOKENIZER.with_chat_template(always)),
        {True: "<none>a<|im_end|>", False: "a<|im_end|>"},
    )
    for on in (True, False, True):
        talk = [turn("user", "q"), turn("assistant", "a")]
        record = record_of({"messages": talk, "chat_template_kwargs": {"enable_thinking": on}})
        ((ids,), *_) = encoder.encode([json.dumps(record)])[0]
        assert TOKENIZER.decode(ids[ids >= 0]) == wanted[on]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"documents": DOCUMENTS}, "the chat template of the tokenizer omits the record's documents"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "the chat template of the tokenizer does not use the reco",
        ),
    ],
)
def test_a_variable_that_the_template_does_not_use_is_refused(fields, message):
    template = WITH_VARIABLES.replace("documents", "pages").replace("enable_thinking", "thinking_is_on")
    with pytest.raises(ValueError, match=f"^{message}"):
        encoded({"messages": SAID, **fields}, template)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"documents": "not JSON"}, "documents: is not JSON"),
        ({"documents": ["a"]}, "'documents' must be a list of objects, each with title and text"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' must be an object"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs cannot set 'tools'; remove it"),
    ],
)
def test_odd_variables_are_named(fields, message):
    with pytest.raises(ValueError, match=f"^a.jsonl:3: {message}"):
        record_of({"messages": SAID, **fields})
    assert record_of({"messages": SAID, "documents": None, "chat_template_kwargs": {}}) == record_of({"messages": SAID})


def test_special_tokens_in_documents_are_found():
    fields = {"messages": SAID, "documents": [{"title": "t", "text": "<|im_end|>"}]}
    with pytest.raises(ValueError, match=r"contains the special token '<\|im_end\|>' as text"):
        encoded(fields)


# GLM-4: the next message's token ends a turn.

GLM = """\
[gMASK]<sop>{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 1, num_heads: 2, ffn: 64, max_positions: 256}
run_dir: RUN
data: {sources: a.jsonl, tokenizer: tokenizer, sequence_length: 256, packing: padded, cache_dir: CACHE}
training: {steps: 1, global_batch: 2, precision: fp32, lr_schedule: {warmup: 0}}
"""


def test_a_template_whose_turns_end_with_the_next_message_is_told(tmp_path, capsys):
    inner = Tokenizer.from_str(TOKENIZER.files["tokenizer.json"].decode())
    inner.add_special_tokens(["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"])
    files = {**TOKENIZER.files, "tokenizer.json": inner.to_str().encode(), "chat_template.jinja": GLM.encode()}
    TextTokenizer(files, where="test").save(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text(lines(*({"messages": talk} for talk in TALKS)))
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE.replace("CACHE", str(tmp_path / "cache")).replace("RUN", str(tmp_path / "run")))
    told = (
        "the assistant's turn but the next message's <|user|>, which carries no loss, so the model will not learn to st"
    )
    for words in (["check"], ["data", "prepare"], ["data", "show"], ["data", "audit"], ["train"]):
        assert main([*words, str(path)]) == 0
        assert told in capsys.readouterr().out, words
    assert main(["data", "prepare", str(path), "data.chat.train_on_eos=none"]) == 0
    assert told not in capsys.readouterr().out
    assert main(["data", "prepare", str(path), "data.chat.template=chatml"]) == 0
    assert told not in capsys.readouterr().out
