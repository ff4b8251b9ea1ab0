"""Defaults that follow the data, all errors of records at once, and text that is skipped because it is not UTF-8."""

import json

import pytest

from conversations import chat_tokenizer
from meshwright.cli.main import main
from meshwright.data.beginning import MOST_ERRORS
from meshwright.data.defaults import PREFERRED, with_template
from meshwright.data.prepare import prepare_corpus
from meshwright.data.readers import told_apart
from meshwright.data.sources import find_files
from meshwright.data.tokenizer import TextTokenizer, numbers_tokenizer
from meshwright.spec.data import DataSpec
from meshwright.spec.recipe import load_recipe
from meshwright.trainer.resolve import resolve_run

LLAMA3 = [f"<|{name}|>" for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id")]
TALK = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
RECORDS = {
    "talks.jsonl": {"messages": TALK},
    "pairs.jsonl": {"prompt": "What?", "chosen": "That.", "rejected": "No."},
    "words.jsonl": {"prompt": "What?", "completion": "That."},
    "text.jsonl": {"text": "What? That."},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    without_template().save(tmp_path / "bare")
    for name, record in RECORDS.items():
        (tmp_path / name).write_text((json.dumps(record) + "\n") * 40)
    return tmp_path


def without_template():
    """A tokenizer with ChatML's tokens, but without a template, and without Llama 3's tokens."""
    files = dict(chat_tokenizer(None).files)
    whole = json.loads(files["tokenizer.json"])
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["content"] not in LLAMA3]
    config = {"eos_token": "<|im_end|>"}
    files |= {"tokenizer.json": json.dumps(whole).encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return TextTokenizer(files, where="bare")


def resolved(folder, data, **changes):
    model = {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 4, "vocab": 512}
    recipe = {"model": model, "training": {"steps": 2, "global_batch": 2}, **changes}
    recipe["data"] = {
        "tokenizer": "bare",
        "cache_dir": str(folder / "cache"),
        "sequence_length": 128,
        "held_out": 0,
        **data,
    }
    (folder / "run.yaml").write_text(json.dumps(recipe))
    return resolve_run(load_recipe(folder / "run.yaml"), base_dir=folder)


DEFAULTS = {
    "talks.jsonl": ("best_fit", True, "chatml"),
    "words.jsonl": ("best_fit", True, "auto"),
    "pairs.jsonl": ("best_fit", True, "auto"),
    "text.jsonl": ("concatenated", False, "auto"),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_follow_the_data(folder, name):
    preference = {"training": {"steps": 2, "global_batch": 2, "preference": {}}} if name == "pairs.jsonl" else {}
    one = resolved(folder, {"sources": name}, **preference)
    data = one.run.data
    assert (data.packing, data.separate_documents, data.chat.template) == DEFAULTS[name]
    assert ("data.packing" in one.reasons) == (data.packing == "best_fit")
    assert ("data.chat.template" in one.reasons) == (data.chat.template == "chatml")
    # what is recorded is the recipe as it was given
    assert one.given is None or one.given.data.packing == "concatenated"
    assert prepare_corpus(data, base_dir=folder).num_documents > 0


def test_what_the_recipe_sets_stays(folder):
    given = {"sources": "talks.jsonl", "packing": "padded", "separate_documents": False, "chat": {"template": "plain"}}
    data = resolved(folder, given).run.data
    assert (data.packing, data.separate_documents, data.chat.template) == ("padded", False, "plain")
    data = resolved(folder, {"sources": "talks.jsonl", "packing": "padded"}).run.data
    assert (data.packing, data.separate_documents) == ("padded", False)
    paired = {"steps": 2, "global_batch": 2, "preference": {}}
    data = resolved(folder, {"sources": "pairs.jsonl", "packing": "padded"}, training=paired).run.data
    assert (data.packing, data.separate_documents) == ("padded", True)


def test_a_tokenizer_without_any_template_s_tokens_gets_plain(folder):
    data = DataSpec(sources=("talks.jsonl",))
    suited, reason = with_template(data, told_apart(find_files(data, folder)), numbers_tokenizer(300))
    assert suited.chat.template == PREFERRED[-1] == "plain"
    assert reason.startswith("plain: the tokenizer has no chat template")


def test_an_error_in_a_record_is_reported_alone(folder, capsys):
    """It does not undo the packing that records get."""
    (folder / "pairs.jsonl").write_text(json.dumps({"chosen": TALK, "rejected": TALK}) + "\n")
    resolved(folder, {"sources": "pairs.jsonl"}, training={"steps": 2, "global_batch": 2, "preference": {}})
    assert main(["check", "run.yaml"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error == "error: pairs.jsonl:1: chosen and rejected have no prompt in common, or do not differ"


def test_check_reports_the_errors_of_records_together(folder, capsys):
    wrong = [
        {"messages": [{"role": "user", "content": "<|im_end|>"}, TALK[1]]},
        {"messages": [{"role": "user", "content": "long " * 400}, TALK[1]]},
        {"messages": [{"role": "user", "content": "<|im_end|>"}, TALK[1]]},
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [RECORDS["talks.jsonl"], *wrong]))
    resolved(folder, {"sources": "talks.jsonl", "packing": "concatenated"})
    assert main(["check", "run.yaml"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "data.packing=concatenated would cut conversations" in errors[0]
    assert errors[1].startswith("error: talks.jsonl:2: a message of role 'user' contains the special token")
    assert errors[1].endswith("(also 1 other record)")
    assert errors[2].startswith("error: talks.jsonl:3: its ")
    many = [{"messages": [{"role": "user", "content": "long " * (400 + i)}, TALK[1]]} for i in range(MOST_ERRORS + 2)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in many))
    assert main(["check", "run.yaml", "data.packing=padded"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == MOST_ERRORS + 1
    assert errors[-1] == "error: talks.jsonl: 2 more records with an error"


def test_a_named_template_without_its_tokens_is_refused_with_those_that_work(folder, capsys):
    resolved(folder, {"sources": "talks.jsonl", "packing": "concatenated"})
    assert main(["check", "run.yaml", "data.chat.template=llama3"]) == 1
    cut, lacking = capsys.readouterr().err.splitlines()
    assert "would cut" in cut
    assert "data.chat.template=llama3 needs the token <|start_header_id|>, which the tokenizer lacks" in lacking
    assert lacking.endswith("it has the tokens of chatml and plain and qwen")


def undecodable(folder, kind):
    """Sources with three pieces that are not UTF-8."""
    if kind == "text":
        for name in ("a", "c", "e"):
            (folder / f"{name}.txt").write_text(f"The words of {name}. " * 40)
        for name in ("b", "d", "f"):
            (folder / f"{name}.txt").write_bytes(b"caf\xe9")
        return "*.txt"
    lines = [json.dumps(RECORDS[f"{kind}.jsonl"]).replace("What", f"What {i}").encode() for i in range(6)]
    for place in (0, 3, 8):
        lines.insert(place, lines[-1].replace(b"That", b"Th\xe9t"))
    (folder / "all.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return "all.jsonl"


@pytest.mark.parametrize("kind", ["text", "talks"])
def test_what_is_not_utf8_is_skipped_and_counted_on_request(folder, kind, capsys):
    sources = undecodable(folder, kind)
    given = {"sources": sources, "held_out": 0, "sequence_length": 64}
    data = resolved(folder, {**given, "undecodable": "skip"}).run.data
    corpus = prepare_corpus(data, base_dir=folder)
    (stream,) = corpus.streams
    assert stream.train.counts == {"undecodable": 3}
    assert stream.train.num_documents == (3 if kind == "text" else 6)
    for words in (["check", "run.yaml"], ["data", "audit", "run.yaml"]):
        assert main(words) == 0
        assert "3 skipped: not UTF-8" in capsys.readouterr().out
    resolved(folder, given)
    assert main(["check", "run.yaml"]) == 1
    assert "data.undecodable=skip" in capsys.readouterr().err


def test_resolving_a_recipe_downloads_nothing(folder, monkeypatch):
    def download(source):
        raise AssertionError(f"{source.path} was asked for")

    monkeypatch.setattr("meshwright.data.sources._hub_files", download)
    (folder / "run.yaml").write_text("model: gpt2\ndata: {sources: [{path: hub:nobody/nothing}]}\n")
    run = load_recipe("run.yaml")
    assert resolve_run(run, base_dir=folder).run.data.packing == run.data.packing
