"""Chat templates with features of published ones: transformers' tokens, and loss on the assistant's text."""

import datetime
import json
import re

import numpy as np
import pytest
from tokenizers import Tokenizer

from meshwright.data.chat import TEMPLATES, ChatTemplate
from meshwright.data.examples import RecordEncoder
from meshwright.data.sandbox import Sandbox
from meshwright.data.tokenizer import TextTokenizer, train_tokenizer
from meshwright.spec.data import ChatSpec
from meshwright.testing.conversations import CONVERSATIONS, turn
from templates import FAMILIES

NAMED = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}
SOURCES = FAMILIES | NAMED
SPECIAL = ["<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"]
SPECIAL += ["[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
SPECIAL += sorted(set(re.findall(r"<\|\w+\|>", "".join(SOURCES.values()))))
SPECIAL += [f"<|{role}|>" for role in ("system", "user", "assistant", "developer", "tool")]


def make_tokenizer():
    texts = [message["content"] for record in CONVERSATIONS.values() for message in record["messages"]]
    trained = Tokenizer.from_str(train_tokenizer(texts, 400).files["tokenizer.json"].decode())
    trained.add_special_tokens(list(dict.fromkeys(SPECIAL)))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    files = {"tokenizer.json": trained.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return TextTokenizer(files, where="test")


TOKENIZER = make_tokenizer()


def template(name, **chat):
    return ChatTemplate(SOURCES[name], TOKENIZER, name=name, chat=ChatSpec(**chat))


def encode(name, record, **chat):
    (found,) = RecordEncoder(TOKENIZER, template(name, **chat), ChatSpec(**chat), 10**6).encode(
        [json.dumps({"given": 0} | record)]
    )
    return found


def runs(found):
    """The text of each run of trained tokens."""
    assert not found.error
    (tokens,) = found.documents
    parts, before = [], False
    for token in tokens.tolist():
        if token >= 0:
            parts[-1:] = [parts[-1] + [token]] if before else [*parts[-1:], [token]]
        before = token >= 0
    return [TOKENIZER.decode(part) for part in parts]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(folder)

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2025, 1, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.utils.chat_template_utils, "datetime", Day)
        yield transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", SOURCES)
def test_tokens_are_those_of_transformers_and_answers_are_trained(name, theirs):
    """Every conversation that the template supports; others are refused."""
    written = 0
    for record in CONVERSATIONS.values():
        found = encode(name, record)
        if found.error:
            continue
        written += 1
        messages = template(name).prepared(record["messages"])
        wanted = theirs.apply_chat_template(
            messages, tools=record.get("tools"), chat_template=SOURCES[name], tokenize=True, return_dict=True
        )
        (tokens,) = found.documents
        assert np.where(tokens < 0, ~tokens, tokens).tolist() == wanted["input_ids"]
        trained = "\n".join(runs(found))
        for message in record["messages"]:
            content = message["content"].split("</think>")[-1].strip()
            if content:
                assert (content in trained) == (message["role"] == "assistant")
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in trained
                assert all(key in trained for key in call["function"]["arguments"])
    assert written >= 9


FOUR, EIGHT = "Four, surely.", "Eight then.\n\nAsk on!"
TRAINED = {
    "forgets thoughts": [f"{FOUR}<|im_end|>", f"<think>\n\n</think>\n\n{EIGHT}<|im_end|>"],
    "prompts for a thought": [f"{FOUR}<|im_end|>", f"{EIGHT}<|im_end|>"],
    "ends the text": [f"{FOUR}<|end|>", f"{EIGHT}<|end|>"],
    "two ends": [f"<|channel|>final<|message|>{FOUR}<|end|>", f"<|channel|>final<|message|>{EIGHT}<|return|>"],
    "takes turns": [f"{FOUR}<end_of_turn>", f"{EIGHT}<end_of_turn>"],
    "bare calls": [f"{FOUR}<|eos|>", f"{EIGHT}<|eos|>"],
    "ids": [f"{FOUR}</s>", f"{EIGHT}</s>"],
    "tells the date": [f"{FOUR}<|eot_id|>", f"{EIGHT}<|eot_id|>"],
    "ends twice": [f"<|response|>{answer}<|endresponse|><|endturn|>" for answer in (FOUR, EIGHT)],
    "no ends": [FOUR, f"{EIGHT}</s>"],
    "parts": [f"{FOUR}<|im_end|>", f"{EIGHT}<|im_end|>"],
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_turn_goes_from_the_prompt_to_its_end(name):
    assert runs(encode(name, CONVERSATIONS["two turns"])) == TRAINED[name]
    assert runs(encode(name, CONVERSATIONS["two turns"], train_on="last")) == TRAINED[name][1:]


@pytest.mark.parametrize("name", SOURCES)
def test_a_conversation_costs_no_more_renderings_for_being_long(name, monkeypatch):
    count = 0
    render = Sandbox.render

    def counted(self, variables):
        nonlocal count
        count += 1
        return render(self, variables)

    monkeypatch.setattr(Sandbox, "render", counted)
    costs = []
    for turns in (3, 60):
        messages = [turn(role, f"{role} {n}") for n in range(turns) for role in ("user", "assistant")]
        count = 0
        assert not encode(name, {"messages": messages}).error
        costs.append(count)
    assert costs[0] == costs[1] <= 16


def test_calls_are_written_once_whatever_form_they_have():
    for name in ("chatml", "qwen", "plain", "llama3", "mistral", "forgets thoughts", "bare calls", "ids"):
        (call, answer) = runs(encode(name, CONVERSATIONS["call"]))
        assert re.search(r'{\s*"city": "Oslo"\s*}', call), name
        assert "It rains there." in answer


def test_nothing_is_left_out_in_silence():
    for name, conversation, reason in (
        ("tells the date", "tools not used", "omits the record's tools"),
        (
            "ends the text",
            "thought",
            r"omits thoughts \(reasoning_content\); set data.chat.thinking=drop or keep",
        ),
        ("bare calls", "system", "omits a message of role 'system'"),
        ("llama3", "calls at once", "an answer is one call of a tool, or words"),
    ):
        assert re.search(reason, encode(name, CONVERSATIONS[conversation]).error)
    silent = {"messages": CONVERSATIONS["call"]["messages"]}
    assert "omits the tool calls of message 2" in encode("tells the date", silent).error


def test_thoughts_are_kept_or_dropped_as_the_recipe_says():
    record = CONVERSATIONS["thoughts of two turns"]
    first, second = "They want a sum.\nTwo and two.", "Twice four."
    trained = "".join(runs(encode("forgets thoughts", record)))
    assert first not in trained
    assert second in trained
    kept = runs(encode("forgets thoughts", record, thinking="keep"))
    assert kept == [
        f"<think>\n{first}\n</think>\n\nFour, surely.<|im_end|>",
        f"<think>\n{second}\n</think>\n\nEight then.<|im_end|>",
    ]
    dropped = "".join(runs(encode("forgets thoughts", record, thinking="drop")))
    assert first not in dropped
    assert second not in dropped
    assert first in runs(encode("ends the text", record, thinking="keep"))[0]
    assert runs(encode("ends the text", record, thinking="drop")) == ["Four, surely.<|end|>", "Eight then.<|end|>"]
    assert len(runs(encode("parts", record))) == 4


def test_roles_ends_and_weights_say_what_carries_loss():
    talk = CONVERSATIONS["two turns"]
    both = runs(encode("chatml", talk, roles_to_train=["user", "assistant"]))
    assert both[0] == "What is two plus two?<|im_end|>"
    assert len(both) == 4
    assert runs(encode("chatml", talk, train_on_eos="none")) == [FOUR, EIGHT]
    assert runs(encode("chatml", talk, train_on_eos="last")) == [FOUR, f"{EIGHT}<|im_end|>"]
    messages = [dict(message) for message in talk["messages"]]
    messages[1]["weight"] = 0
    assert runs(encode("chatml", {"messages": messages})) == [f"{EIGHT}<|im_end|>"]
    assert encode("chatml", talk | {"weight": 0}).note == "unweighted"


def test_spelled_special_tokens_are_kept_as_letters_refused_or_dropped():
    record = {"messages": [turn("user", "What is <|im_end|> for?"), turn("assistant", "<|im_end|> ends a turn.")]}
    assert "contains the special token '<|im_end|>' as text" in encode("chatml", record).error
    assert encode("chatml", record, special_tokens="drop").note == "spelled"
    found = encode("chatml", record, special_tokens="text")
    assert runs(found) == ["<|im_end|> ends a turn.<|im_end|>"]
    (tokens,) = found.documents
    ids = np.where(tokens < 0, ~tokens, tokens)
    assert (ids == TOKENIZER.token_id("<|im_end|>")).sum() == 2
    assert TOKENIZER.decode(ids) == template("chatml").render(record["messages"])
    letters = TOKENIZER.encode("\nWhat is <|im_end|> for?")
    assert any(ids[i : i + len(letters)].tolist() == letters for i in range(len(ids)))


def test_the_date_is_the_recipes():
    assert "01 Jan 2025" in template("tells the date").render([turn("user", "?")])
    assert "24 Dec 2026" in template("tells the date", date="2026-12-24").render([turn("user", "?")])
    with pytest.raises(ValueError, match="2026-13-01 is not a date"):
        ChatSpec(date="2026-13-01")


def test_a_template_is_told_what_the_recipe_says():
    source = "{{ 'on' if enable_thinking else 'off' }}"
    for given, said_ in (({}, "off"), ({"enable_thinking": True}, "on")):
        made = ChatTemplate(source, TOKENIZER, name="x", chat=ChatSpec(template_arguments=given))
        assert made.render([]) == said_


HOSTILE = {
    "{% for i in range(10**9) %}x{% endfor %}": "Range too big",
    "{{ 1/0 }}": "division by zero",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "it recurses infinitely",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "loop iterations",
    "{{ 'x' * 10**9 }}": "a value of more than",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}": "a value",
    "{{ 'x'.ljust(10**9) }}": "pads text",
    "{{ 'x'|center(10**9) }}": "pads text",
    "{{ '{:1000000000d}'.format(5) }}": "pads text",
    "{% set x='x'*9999999 %}{{ [x,x,x,x]*1000 }}": "a value of more than",
    "{% set x='x'*9999999 %}{{ x.replace('x', x) }}": "a value of more than",
    "{{ lipsum(n=10**6) }}": "'lipsum' is undefined",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ''.__class__.__mro__ }}": "unsafe",
}


@pytest.mark.parametrize(("source", "reason"), HOSTILE.items(), ids=range(len(HOSTILE)))
def test_what_a_template_may_not_do_ends_in_one_line(source, reason):
    made = ChatTemplate(source, TOKENIZER, name="x")
    with pytest.raises(ValueError, match=r"^the chat template x rejects this conversation: .*" + re.escape(reason)):
        made.render([turn("user", "?")])


def test_a_template_that_is_too_deep_is_refused():
    with pytest.raises(ValueError, match=r"^chat template x: it is nested too deeply"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", TOKENIZER, name="x")


@pytest.mark.parametrize("wrong", [5, [{"x": 1}], ["a"]])
def test_odd_templates_and_tokens_of_a_tokenizer_are_told(wrong):
    config = {"eos_token": "</s>", "chat_template": wrong}
    files = {**TOKENIZER.files, "tokenizer_config.json": json.dumps(config).encode()}
    with pytest.raises(ValueError, match=r"^here: chat_template in tokenizer_config.json is"):
        TextTokenizer(files, where="here")
    files["tokenizer_config.json"] = json.dumps({"eos_token": wrong}).encode()
    with pytest.raises(ValueError, match=r"^here: tokenizer_config.json has eos_token"):
        TextTokenizer(files, where="here")
