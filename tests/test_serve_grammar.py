"""Answers that must follow a grammar: requested with OpenAI's client, checked by pydantic and by an oracle."""

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
import torch

from meshwright.data.tokenizer import numbers_tokenizer
from meshwright.models.generate import Sampling
from meshwright.serve.engine import InferenceEngine, Request
from meshwright.serve.grammar import LARGEST, Grammars
from meshwright.spec.errors import UserError
from served import VOCAB, adapted, model_of
from test_serve import PROMPTS, QUESTION, TOKENIZER, Running, running

pytest.importorskip("llguidance")


class Pet(pydantic.BaseModel):
    """Small enough for a model that draws tokens nearly at random."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=30)
    toys: list[Literal["ball", "mouse"]] = pydantic.Field(max_length=1)


SCHEMA = json.dumps(Pet.model_json_schema())
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema(), "strict": True}}
LENGTH = 200


@pytest.fixture(scope="module")
def base() -> Any:
    return model_of("llama", max_positions=256, dtype=torch.float32)


@pytest.fixture(scope="module")
def server(base: Any) -> Iterator[Running]:
    with running({"base": base, "tuned": adapted(base)}, max_queue=64) as found:
        yield found


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB)


def request_of(grammars: Grammars, **more: Any) -> Request:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 1}
    settings |= {name: more.pop(name) for name in list(more) if name in ("temperature", "seed", "top_k", "top_p")}
    settings |= {name: more.pop(name) for name in list(more) if name in ("min_p", "repetition_penalty")}
    grammar = grammars.compile("schema", more.pop("schema", SCHEMA), PROMPTS.answer_ends)
    return Request(
        prompt=more.pop("prompt", PROMPTS.conversation(QUESTION)),
        max_tokens=more.pop("max_tokens", LENGTH),
        sampling=Sampling(**settings),
        ends=PROMPTS.answer_ends,
        grammar=more.pop("grammar", grammar),
        **more,
    )


@pytest.mark.slow
def test_every_drawn_answer_is_valid(server: Running) -> None:
    """With both models, in batches with free answers, which are the same as alone."""
    free: dict[str, Any] = {"model": "base", "messages": QUESTION, "max_tokens": 40, "seed": 9}
    expected = server.client.chat.completions.create(**free).choices[0].message.content

    def ask(number: int) -> list[str | None]:
        if number % 3 == 2:
            return [server.client.chat.completions.create(**free).choices[0].message.content]
        answer = server.client.chat.completions.create(
            model=("base", "tuned")[number % 2],
            messages=QUESTION,
            max_tokens=LENGTH,
            n=3,
            seed=number,
            temperature=(0.7, 1.0, 3.0)[number % 3],
            response_format=FORMAT,  # type: ignore[arg-type]
        )
        assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
        return [choice.message.content for choice in answer.choices]

    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(ask, range(9)))
    assert [text for texts in found[2::3] for text in texts] == [expected] * 3
    pets = [
        Pet.model_validate_json(text or "") for number, texts in enumerate(found) if number % 3 < 2 for text in texts
    ]
    assert len(pets) == 18
    assert len({pet.model_dump_json() for pet in pets}) > 12


@pytest.mark.slow
def test_openais_client_parses_streams_and_greedy_answers(server: Running) -> None:
    settings: dict[str, Any] = {"model": "base", "messages": QUESTION, "max_tokens": LENGTH, "temperature": 0}
    parsed = server.client.chat.completions.parse(**settings, response_format=Pet).choices[0].message
    assert isinstance(parsed.parsed, Pet)
    with server.client.chat.completions.stream(**settings, response_format=Pet) as stream:
        final = stream.get_final_completion().choices[0].message
    assert (final.content, final.parsed) == (parsed.content, parsed.parsed)
    drawn = server.client.chat.completions.create(
        **{**settings, "temperature": 1, "max_tokens": 30}, response_format={"type": "json_object"}, seed=4
    ).choices[0]
    assert (drawn.message.content or "").startswith("{")
    if drawn.finish_reason == "stop":
        assert isinstance(json.loads(drawn.message.content or ""), dict)
    cut = server.client.chat.completions.create(**{**settings, "max_tokens": 3}, response_format=FORMAT)  # type: ignore[arg-type]
    assert cut.choices[0].finish_reason == "length"


def test_other_forms_are_kept_too(server: Running) -> None:
    def ask(form: dict[str, Any]) -> list[str]:
        extra = {"structured_outputs": form}
        answer = server.client.completions.create(
            model="base", prompt="def", n=8, seed=1, max_tokens=30, extra_body=extra
        )
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        return [choice.text for choice in answer.choices]

    assert set(ask({"choice": ["yes", 'say "no"\n']})) == {"yes", 'say "no"\n'}
    found = ask({"regex": "a[bc]{2,3}"})
    assert all(text[0] == "a" and set(text[1:]) <= {"b", "c"} and 3 <= len(text) <= 4 for text in found)
    assert {type(json.loads(text)) for text in ask({"json": {"enum": [7, None]}})} <= {int, type(None)}


def test_tokens_are_the_likeliest_that_the_grammar_allows(base: Any, grammars: Grammars) -> None:
    """Greedily, step by step, compared with a full sort of the logits; log-probabilities are those before the mask."""
    answer = InferenceEngine(base, decode=TOKENIZER.decode_text).run(
        [request_of(grammars, temperature=0, logprobs=VOCAB)]
    )[0]
    matcher = grammars.compile("schema", SCHEMA, PROMPTS.answer_ends).begin()
    special = {TOKENIZER.token_id(token) for token in TOKENIZER.special_tokens}
    forbidden = 0
    for token in answer.tokens:
        allowed = matcher.allowed()
        assert not any(allowed[number] for number in special)
        best = next(other for other, _ in token.top if allowed[other])
        assert token.id == best
        assert token.logprob == dict(token.top)[token.id]
        assert sum(pow(2.718281828459045, value) for _, value in token.top) == pytest.approx(1, abs=1e-6)
        forbidden += token.top[0][0] != token.id
        matcher.accept(token.id)
    assert answer.finish == "stop"
    assert matcher.complete
    assert {number for number, one in enumerate(matcher.allowed()) if one} == PROMPTS.answer_ends
    assert forbidden > 5


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 1, "bias": {0: 100.0, VOCAB - 1: 100.0}},
        {"top_p": 1e-9, "min_p": 1.0, "temperature": 1e-300},
        {"repetition_penalty": 1.5, "row": 3, "logprobs": 2},
    ],
    ids=lambda more: next(iter(more)),
)
def test_the_grammar_holds_under_every_setting(base: Any, grammars: Grammars, more: dict[str, Any]) -> None:
    answer = InferenceEngine(base, decode=TOKENIZER.decode_text).run([request_of(grammars, **more)])[0]
    Pet.model_validate_json(answer.text)


def test_an_end_is_allowed_only_where_the_grammar_may_end(grammars: Grammars) -> None:
    ends = sorted(PROMPTS.answer_ends)
    matcher = grammars.compile("regex", "ab?", ends).begin()
    seen = [matcher.allowed()[ends].tolist()]
    for letter in "ab":
        matcher.accept(TOKENIZER.encode(letter)[0])
        seen.append(matcher.allowed()[ends].tolist())
    assert seen == [[False] * 2, [True] * 2, [True] * 2]
    assert matcher.complete


def test_a_grammar_that_grows_too_complex_ends_its_own_answer_only(base: Any, grammars: Grammars) -> None:
    request, heard = request_of(grammars), list[Any]()
    engine = InferenceEngine(base, decode=TOKENIZER.decode_text)
    planted = engine.submit(request, lambda answer, tokens, text: heard.append((len(tokens), text, answer.finish)))
    other = engine.submit(request)
    rows = engine._waiting
    row = rows[0]
    accept = row.matcher.accept  # type: ignore[union-attr]

    def fails(token: int) -> None:
        accept(TOKENIZER.token_id("<|im_start|>") if len(planted.tokens) == 4 else token)  # type: ignore[arg-type]

    row.matcher.accept = fails  # type: ignore[union-attr, method-assign]
    while other.finish is None:
        engine.step()
    assert planted.finish == "error"
    assert planted.problem
    assert [tokens for tokens, _, _ in heard] == [1, 1, 1, 1, 0]
    Pet.model_validate_json(other.text)


REFUSED = {
    "no such type": ({"type": "pet"}, "Invalid type: pet"),
    "unsupported word": ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "other address": ({"$ref": "http://localhost:1/x"}, "not present in a registry"),
    "unknown reference": ({"$ref": "#/$defs/x"}, "does not exist"),
    "endless reference": ({"$ref": "#"}, "response_format: "),
    "nothing fits": ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable schema"),
    "too large": ({"enum": ["x" * LARGEST]}, f"more than this server's limit of {LARGEST}"),
    "too wide": ({"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(1500)}}, "items"),
    "too many cases": (
        {"allOf": [{"anyOf": [{"type": "string", "maxLength": i + j} for i in range(9)]} for j in range(8)]},
        "too large",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schemas_that_cannot_be_kept_are_refused_with_the_reason(server: Running, name: str) -> None:
    schema, reason = REFUSED[name]
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(model="base", messages=QUESTION, response_format=form)
    assert reason in caught.value.message
    assert caught.value.param == "response_format"
    assert "<state>" not in caught.value.message


def test_bad_forms_are_told_what_is_wrong(server: Running) -> None:
    nested = '{"type":"array","items":' * 150 + "{}" + "}" * 150
    for change, message in (
        ('"response_format": {"type": "xml"}', "response_format.type: this server does not support"),
        ('"response_format": {"type": "json_schema"}', "json_schema is missing"),
        ('"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}', "json_schema.schema: "),
        (
            f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {nested}}}}}',
            "recursion limit exceeded",
        ),
        ('"structured_outputs": {}', "give exactly one of json, regex and choice"),
        ('"structured_outputs": {"regex": "a", "choice": ["b"]}', "give exactly one of json, regex and choice"),
        ('"structured_outputs": {"regex": "("}', "structured_outputs: unclosed group"),
        ('"structured_outputs": {"choice": []}', "structured_outputs.choice: "),
        ('"structured_outputs": {"grammar": "x"}', "structured_outputs.grammar: unknown field"),
    ):
        body = f'{{"model": "base", "messages": {json.dumps(QUESTION)}, {change}}}'
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers, timeout=30)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


def test_others_are_answered_while_a_schema_is_compiled(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, go_on = threading.Event(), threading.Event()

    def slowly(*_: Any) -> Any:
        compiling.set()
        go_on.wait(30)
        raise UserError("planted")

    monkeypatch.setattr(Grammars, "compile", slowly)
    settings: dict[str, Any] = {"model": "base", "messages": QUESTION, "max_tokens": 3}
    client, form = server.client, {"type": "json_object"}
    with ThreadPoolExecutor(8) as pool:  # more than the threads that encode prompts
        asked = [
            pool.submit(client.chat.completions.create, **settings, response_format=form)  # type: ignore[arg-type]
            for _ in range(8)
        ]
        compiling.wait(30)
        assert client.chat.completions.create(**settings).choices
        assert not any(one.done() for one in asked)
        go_on.set()
        assert all("planted" in str(one.exception()) for one in asked)


def test_without_the_package_the_request_is_told_what_to_install(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"llguidance on the server: pip install 'meshwright\[serve\]'"):
        server.client.chat.completions.create(
            model="base", messages=QUESTION, extra_body={"structured_outputs": {"regex": "never compiled"}}
        )


def test_tokenizers_that_cannot_be_read_are_told() -> None:
    with pytest.raises(UserError, match="llguidance cannot read the model's tokenizer"):
        Grammars(numbers_tokenizer(50), 50).compile("schema", "{}", [49])


def test_a_grammar_is_compiled_once_and_every_answer_has_its_own_place(grammars: Grammars) -> None:
    first = grammars.compile("schema", SCHEMA, PROMPTS.answer_ends)
    assert grammars.compile("schema", SCHEMA, PROMPTS.answer_ends) is first
    assert grammars.compile("schema", SCHEMA, PROMPTS.text_ends) is not first
    one, other = first.begin(), first.begin()
    one.accept(TOKENIZER.encode("{")[0])
    assert one.allowed().tolist() != other.allowed().tolist()
