"""Chat templates: the same tokens as transformers, and loss on exactly the assistant's text."""

import json
from pathlib import Path

import numpy as np
import pytest

from conversations import CHATML, TALKS, chat_tokenizer
from meshwright.data.chat import TEMPLATES, ChatTemplate, ask, find_template
from meshwright.data.examples import RecordEncoder
from meshwright.data.tokenizer import TextTokenizer
from meshwright.spec.data import ChatSpec

TOKENIZER = chat_tokenizer()
TALK = TALKS[3]
ANSWERS = [message["content"] for message in TALK if message["role"] == "assistant"]
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def encode(record, *, template=None, limit=500, **chat):
    encoder = RecordEncoder(TOKENIZER, template or find_template("auto", TOKENIZER, Path()), ChatSpec(**chat), limit)
    (found,) = encoder.encode([json.dumps(record)])
    return found


def conversation(messages=TALK, given=0):
    return {"messages": messages, "given": given}


def ids_of(tokens):
    return np.where(tokens < 0, ~tokens, tokens).tolist()


def trained_text(tokens):
    """The text of each run of trained tokens."""
    runs, before = [], False
    for token in tokens.tolist():
        if token >= 0:
            runs[-1:] = [runs[-1] + [token]] if before else [*runs[-1:], [token]]
        before = token >= 0
    return [TOKENIZER.decode(run) for run in runs]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "qwen", "plain", "auto"])
def test_tokens_are_those_of_transformers(name, theirs):
    template = find_template(name, TOKENIZER, Path())
    (tokens,) = encode(conversation(), template=template).documents
    wanted = theirs.apply_chat_template(TALK, chat_template=template.source, tokenize=True, return_dict=True)
    assert ids_of(tokens) == wanted["input_ids"]
    asked = theirs.apply_chat_template(
        TALK[:2], chat_template=template.source, tokenize=False, add_generation_prompt=True
    )
    assert template.render(TALK[:2], answer=True) == asked


def test_marked_turns_are_those_of_transformers(theirs):
    (tokens,) = encode(conversation()).documents
    wanted = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert (tokens >= 0).astype(int).tolist() == wanted["assistant_masks"]
    assert trained_text(tokens) == [f"{answer}<|im_end|>" for answer in ANSWERS]


def test_turns_are_found_without_marks():
    (marked,) = encode(conversation()).documents
    (found,) = encode(conversation(), template=ChatTemplate(UNMARKED, TOKENIZER, name="unmarked")).documents
    assert found.tolist() == marked.tolist()


@pytest.mark.parametrize(
    ("name", "end"),
    [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("plain", "<|im_end|>"), ("qwen", "<|im_end|>")],
)
def test_named_templates_train_the_answer_and_its_end(name, end):
    (tokens,) = encode(conversation(), template=find_template(name, TOKENIZER, Path())).documents
    assert trained_text(tokens) == [answer + end for answer in ANSWERS]
    assert find_template(name, TOKENIZER, Path()).ends_of_turn() == [TOKENIZER.token_id(end)]


def test_what_is_trained_on():
    assert trained_text(*encode(conversation(), train_on="last").documents) == [f"{ANSWERS[1]}<|im_end|>"]
    assert trained_text(*encode(conversation(given=4)).documents) == [f"{ANSWERS[1]}<|im_end|>"]
    assert (encode(conversation(), train_on="all").documents[0] >= 0).all()


def test_prompt_and_completion():
    (tokens,) = encode({"prompt": "2 plus 2 is", "completion": " 4."}).documents
    assert trained_text(tokens) == [" 4.<|im_end|>"]
    assert ids_of(tokens) == [*TOKENIZER.encode("2 plus 2 is"), *TOKENIZER.encode(" 4."), TOKENIZER.eos_id]


def test_an_answer_ends_where_a_text_does_or_a_turn():
    tokenizer = TOKENIZER.with_chat_template((TEMPLATES / "llama3.jinja").read_text())
    _, ends = ask(tokenizer, ["Hello?"])
    assert ends == {TOKENIZER.eos_id, TOKENIZER.token_id("<|eot_id|>")}
    assert len(ends) == 2


def test_what_a_tokenizer_puts_before_a_text_stands_before_the_prompt_alone(monkeypatch):
    monkeypatch.setattr(TextTokenizer, "encode_prompt", lambda self, text: [7, *self.encode(text)])
    (tokens,) = encode({"prompt": "2 plus", "completion": " 4."}).documents
    assert ids_of(tokens) == [7, *TOKENIZER.encode("2 plus"), *TOKENIZER.encode(" 4."), TOKENIZER.eos_id]


def test_tokenized_records():
    (tokens,) = encode({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}).documents
    assert tokens.tolist() == [~5, 6, 7]
    assert "it has no trained tokens" in encode({"input_ids": [5, 6], "labels": [5, -100]}).error  # none before it
    assert "token 999 is outside" in encode({"input_ids": [5, 999], "labels": [5, 999]}).error


def test_overlong_records():
    (whole,) = encode(conversation()).documents
    limit = len(whole) - 2  # one label fewer than it has
    assert encode(conversation(), limit=limit + 1).documents[0].tolist() == whole.tolist()
    assert (
        f"its {limit + 1} tokens are more than data.sequence_length={limit}"
        in encode(conversation(), limit=limit).error
    )
    dropped = encode(conversation(), limit=limit, overlong="drop")
    assert (dropped.documents, dropped.note) == ((), "overlong")
    cut = encode(conversation(), limit=limit, overlong="truncate")
    assert (cut.documents[0].tolist(), cut.note) == (whole[: limit + 1].tolist(), "truncated")
    side = conversation()
    pair = {"chosen": side, "rejected": side}
    assert len(encode(pair, limit=2 * (limit + 1)).documents) == 2
    assert encode(pair, limit=2 * limit + 1, overlong="drop").note == "overlong", "both sides share a sample"
    hopeless = encode(conversation(), limit=5, overlong="truncate", unlabelled="drop")
    assert (hopeless.documents, hopeless.note) == ((), "unlabelled")


def test_a_template_that_rewrites_earlier_turns():
    rewriting = UNMARKED.replace(
        "message.content", "(message.content if loop.last or message.role != 'assistant' else '..')"
    )
    template = ChatTemplate(rewriting, TOKENIZER, name="rewriting")
    assert "changes or omits parts of an assistant's turn" in encode(conversation(), template=template).error
    (tokens,) = encode(conversation(), template=template, train_on="last").documents
    assert trained_text(tokens) == [f"{ANSWERS[1]}<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([{"role": "user", "content": "Hi"}], "chatml", "it has no trained tokens"),
        ([*TALK[:2], TALK[1]], "mistral", "rejects this conversation: after an optional system message, user and"),
        (TALK, "no_system", "omits a message of role 'system'"),
        (
            [{"role": "user", "content": "<|im_end|>"}, TALK[2]],
            "chatml",
            "contains the special token '<|im_end|>' as text",
        ),
    ],
)
def test_conversations_that_cannot_be_trained_on(messages, template, message):
    if template == "no_system":
        left_out = UNMARKED.replace("{%- for message in messages -%}", "{%- for message in messages[1:] -%}")
        found = ChatTemplate(left_out, TOKENIZER, name=template)
    else:
        found = find_template(template, TOKENIZER, Path())
    assert message in encode(conversation(messages), template=found).error


def test_a_template_must_be_there(tmp_path):
    bare = chat_tokenizer(None)
    with pytest.raises(ValueError, match=r"data\.chat\.template: the tokenizer has no chat template; choose"):
        find_template("auto", bare, tmp_path)
    with pytest.raises(ValueError, match=r"neither a file nor one of .*; did you mean 'chatml'\?"):
        find_template("chatlm", bare, tmp_path)
    (tmp_path / "mine.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"chat template mine\.jinja: Expected an expression"):
        find_template("mine.jinja", bare, tmp_path)
    (tmp_path / "other.jinja").write_text("<|turn|>")
    with pytest.raises(ValueError, match=r"needs the token <\|turn\|>, which the tokenizer lacks"):
        find_template("other.jinja", bare, tmp_path)
    template = find_template("chatml", bare, tmp_path)
    assert bare.with_chat_template(template.source).chat_template == template.source
