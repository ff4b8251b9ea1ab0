"""Embeddings and tokens over HTTP: transformers' hidden states, and the engine's own tokens."""

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from meshwright.data.tokenizer import TextTokenizer
from meshwright.models import Decoder
from meshwright.serve import engine as engine_file
from meshwright.serve import incoming
from meshwright.serve.prefixes import Prefixes
from meshwright.serve.readers import WholeReader
from meshwright.serve.served import Capacity, serve_as
from meshwright.spec.batch import Batch
from served import VOCAB, hf_directory, model_of
from test_serve import PROMPTS, QUESTION, SECONDS, TOKENIZER, Running, running, serving, trained

TEXTS = ["def add_7(x):", "return", "x" * 90, "def add_7(x): return x + 7, def add_8(x)"]


@pytest.fixture(scope="module")
def base() -> Decoder:
    return model_of("llama", max_positions=256)


@pytest.fixture(scope="module")
def server(base: Decoder) -> Iterator[Running]:
    with running({"base": base, "gpt": model_of("gpt2", max_positions=256)}) as found:
        yield found


def expected(model: Decoder, ids: list[int]) -> list[float]:
    """In one pass, with nothing else in the batch."""
    with torch.no_grad():
        hidden_1TD = model(Batch(torch.tensor([ids])))
    return (hidden_1TD[0, -1] / hidden_1TD[0, -1].norm()).tolist()


@pytest.mark.parametrize("model", ["base", "gpt"])
def test_texts_are_embedded_as_in_one_pass(server: Running, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in several chunks, several at once, while another answer is being written."""
    monkeypatch.setattr(engine_file, "CHUNK", 16)
    stream = server.client.chat.completions.create(model=model, messages=QUESTION, max_tokens=200, stream=True)  # type: ignore[arg-type]
    next(iter(stream))
    ids = [TOKENIZER.encode_prompt(text) for text in TEXTS]
    found = server.client.embeddings.create(model=model, input=TEXTS * 5)
    assert [one.index for one in found.data] == list(range(20)), "more than one batch"
    for number, one in enumerate(found.data):
        assert one.embedding == pytest.approx(expected(server.models[model].engine.model, ids[number % 4]), abs=1e-6)
    assert found.usage.prompt_tokens == found.usage.total_tokens == 5 * sum(map(len, ids))
    assert [choice.finish_reason for part in stream for choice in part.choices][-1] in ("stop", "length")


def test_every_form_of_input_and_output(server: Running, base: Decoder) -> None:
    ids = TOKENIZER.encode_prompt(TEXTS[0])
    wanted = expected(base, ids)
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        for form in ("float", "base64"):
            body = {"model": "base", "input": given, "encoding_format": form, "user": "me"}
            answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=SECONDS).json()
            (one,) = answer["data"]
            vector = one["embedding"]
            if form == "base64":
                vector = np.frombuffer(base64.b64decode(vector), "<f4")
            assert list(vector) == pytest.approx(wanted, abs=1e-6)
            assert (answer["object"], one["object"], answer["model"]) == ("list", "embedding", "base")
    (single,) = server.client.embeddings.create(model="base", input=[[9]]).data
    assert single.embedding == pytest.approx(expected(base, [9]), abs=1e-6)


def test_compiled_steps_and_stored_prefixes_change_nothing(base: Decoder) -> None:
    """A step of single tokens has no hidden states; a prefix that is known need not be read."""
    model = model_of("llama", max_positions=256)
    model.next_step = lambda *_: pytest.fail("the hidden states are missing")
    with serving([serve_as(trained(model), "base", Capacity(max_batch=4, prefixes=Prefixes(2**24)))]) as server:
        for ids in ([9], TOKENIZER.encode_prompt(TEXTS[3]), TOKENIZER.encode_prompt(TEXTS[3])):
            (one,) = server.client.embeddings.create(model="base", input=[ids]).data
            assert one.embedding == pytest.approx(expected(base, ids), abs=1e-6)


def test_models_without_a_cache_are_embedded(base: Decoder) -> None:
    model = model_of("llama", max_positions=256)
    served = serve_as(trained(model), "base", Capacity(max_batch=4))
    served.engine._reader = WholeReader(model)
    with serving([served]) as server:
        for one, text in zip(server.client.embeddings.create(model="base", input=TEXTS).data, TEXTS, strict=True):
            assert one.embedding == pytest.approx(expected(base, TOKENIZER.encode_prompt(text)), abs=1e-6)


@pytest.mark.slow
def test_embeddings_are_transformers_hidden_states(tmp_path: Path) -> None:
    from transformers import AutoModel

    model = model_of("qwen3", dtype=torch.float32, max_positions=128)
    directory = hf_directory(tmp_path / "model", model, TOKENIZER)
    theirs = AutoModel.from_pretrained(directory, dtype=torch.float64)
    ids = TOKENIZER.encode_prompt(TEXTS[3])
    with torch.no_grad():
        state_D = theirs(torch.tensor([ids])).last_hidden_state[0, -1]
    with running({"model": model.double()}) as server:
        (one,) = server.client.embeddings.create(model="model", input=TEXTS[3]).data
    assert one.embedding == pytest.approx((state_D / state_D.norm()).tolist(), abs=1e-5)


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "empty": ("/v1/embeddings", {"model": "base", "input": []}, "input: the list or a prompt in it is empty"),
    "an empty one": ("/v1/embeddings", {"model": "base", "input": [[]]}, "input: the list or a prompt"),
    "too long": ("/v1/embeddings", {"model": "base", "input": "x" * 5000}, "the model supports 256"),
    "just too long": ("/v1/embeddings", {"model": "base", "input": [5] * 256}, "the model supports 256"),
    "no token": ("/v1/embeddings", {"model": "base", "input": [VOCAB]}, "token ids must be from 0 to 299"),
    "dimensions": ("/v1/embeddings", {"model": "base", "input": "x", "dimensions": 8}, "dimensions: this server does"),
    "a form": ("/v1/embeddings", {"model": "base", "input": "x", "encoding_format": "int8"}, "encoding_format: "),
    "nothing to encode": ("/tokenize", {}, "give prompt or messages"),
    "both": ("/tokenize", {"prompt": "x", "messages": QUESTION}, "give prompt or messages"),
    "unknown": ("/tokenize", {"prompt": "x", "colour": 1}, "colour: unknown field"),
    "no token either": ("/detokenize", {"tokens": [5, -1]}, "token ids must be from 0 to 299"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_told_what_is_wrong(server: Running, name: str) -> None:
    path, body, message = BAD[name]
    answer = httpx.post(server.url + path, json=body, timeout=SECONDS)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


def post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + path, json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_tokens_are_those_of_prompts(server: Running) -> None:
    text = "def add_7(x): é <|im_end|>"
    told = post(server, "/tokenize", model="gpt", prompt=text)
    ids = TOKENIZER.encode_prompt(text)
    assert told == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    assert post(server, "/tokenize", prompt=text, return_token_strs=True)["token_strs"][:2] == ["def", "Ġadd"]
    assert post(server, "/detokenize", tokens=ids) == {"prompt": text}
    assert post(server, "/tokenize", prompt="")["tokens"] == []
    assert post(server, "/detokenize", model="gpt", tokens=[]) == {"prompt": ""}
    tools = [{"type": "function", "function": {"name": "add"}}]
    for more, arguments in (({}, {}), ({"tools": tools}, {"tools": tools})):
        told = post(server, "/tokenize", messages=QUESTION, **more)
        assert told["tokens"] == PROMPTS.conversation(QUESTION, **arguments)
    unprompted = post(server, "/tokenize", messages=QUESTION, add_generation_prompt=False)["tokens"]
    assert unprompted == PROMPTS.conversation(QUESTION)[: len(unprompted)] != PROMPTS.conversation(QUESTION)


def test_tokens_around_a_text_can_be_left_out() -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    inner = Tokenizer.from_str(TOKENIZER.files["tokenizer.json"].decode())
    start = TOKENIZER.token_id("<|im_start|>")
    inner.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    files = {**TOKENIZER.files, "tokenizer.json": inner.to_str().encode()}
    with running({"base": model_of("llama", max_positions=64)}) as server:
        server.models["base"].prompts._tokenizer = TextTokenizer(files, where="test")
        whole = post(server, "/tokenize", prompt="def")["tokens"]
        assert post(server, "/tokenize", prompt="def", add_special_tokens=False)["tokens"] == whole[1:]
    assert whole[0] == start


def test_a_text_longer_than_the_context_is_counted_while_others_are_answered(server: Running) -> None:
    done = threading.Event()
    found = list[dict[str, Any]]()

    def count() -> None:
        found.append(post(server, "/tokenize", prompt="def add_7(x):\n" * 100_000, return_token_strs=False))
        done.set()

    thread = threading.Thread(target=count)
    thread.start()
    answered = 0
    while not done.is_set() and thread.is_alive():
        assert httpx.get(f"{server.url}/health", timeout=SECONDS).json() == {"status": "ok"}
        answered += 1
    thread.join()
    assert found[0]["count"] == 100_000 * len(TOKENIZER.encode_prompt("def add_7(x):\n"))
    assert answered > 2


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_encoding_ends_with_its_client(base: Decoder, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running({"base": base}) as server:
        begun, ended = threading.Event(), threading.Event()

        def endless(self: Any, text: str, *more: Any, **options: Any) -> Any:
            begun.set()
            progress = more[-1]
            try:
                while True:
                    progress(1)
                    time.sleep(0.005)
            finally:
                ended.set()

        monkeypatch.setattr(TextTokenizer, "encode_prompt", endless)
        monkeypatch.setattr(TextTokenizer, "encode_conversation", endless)
        body = {"model": "base", **({"prompt": "x"} if path == "/tokenize" else {"messages": QUESTION})}
        raw = http.client.HTTPConnection("127.0.0.1", server.port)
        raw.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        assert begun.wait(SECONDS)
        assert not ended.is_set()
        raw.sock.close()
        assert ended.wait(SECONDS)
        ended.clear()
        monkeypatch.setattr(incoming, "ENCODING_SECONDS", 0.2)
        late = httpx.post(server.url + path, json=body, timeout=SECONDS)
        assert (late.status_code, "was not encoded within 0 s" in late.text) == (503, True)
        assert ended.wait(SECONDS)


def test_over_several_processes_there_are_no_embeddings(base: Decoder) -> None:
    with running({"base": base}) as server:
        server.models["base"].engine.model.make_reader = WholeReader
        try:
            with pytest.raises(openai.BadRequestError, match=r"serve without layout\.tp"):
                server.client.embeddings.create(model="base", input="x")
        finally:
            server.models["base"].engine.model.make_reader = None
