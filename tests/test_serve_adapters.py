"""Adapters loaded and unloaded while the server runs, peft folders served, and the arena's votes."""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from meshwright.checkpoint.peft import Base, write_adapter
from meshwright.cli.main import main
from meshwright.judge.ratings import read_verdicts
from meshwright.models.generate import Sampling
from meshwright.serve.engine import InferenceEngine, Request
from meshwright.serve.served import Capacity, loader_of, open_adapter
from meshwright.serve.trained import TrainedModel
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import LoraSpec
from meshwright.trainer.weights import fingerprint_of
from served import adapted, hf_directory, model_of, tokenizer_of
from test_serve import PROMPTS, QUESTION, TOKENIZER, Running, running, trained

LORA = LoraSpec(method="lora", rank=4, alpha=8.0)


def answer(model: Any, max_tokens: int = 12) -> str:
    """The greedy answer of a model alone."""
    prompt, ends = PROMPTS.conversation(QUESTION), PROMPTS.answer_ends
    request = Request(prompt=prompt, max_tokens=max_tokens, sampling=Sampling(temperature=0), ends=ends)
    return InferenceEngine(model, decode=TOKENIZER.decode_text).run([request])[0].text


def asked(server: Running, name: str, max_tokens: int = 12) -> str | None:
    """The same answer from the server."""
    settings: dict[str, Any] = {"messages": QUESTION, "max_tokens": max_tokens, "temperature": 0}
    return server.client.chat.completions.create(model=name, **settings).choices[0].message.content


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=30)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    """A model from a Hugging Face directory, in fp32, with two adapters next to it: `one` and `two`."""
    folder = tmp_path_factory.mktemp("adapters")
    model = model_of("llama", dtype=torch.float32, max_positions=256)
    source = hf_directory(folder / "base", model, tokenizer_of())
    for seed, name in enumerate(("one", "two")):
        other = adapted(model, seed=seed + 2)
        kept = {name: tensor for name, tensor in other.named_parameters() if tensor.requires_grad}
        (folder / "loras").mkdir(exist_ok=True)
        fingerprint = fingerprint_of(source)
        write_adapter(folder / "loras" / name, kept, model.spec, LORA, Base(None, fingerprint))
    found = trained(model)
    return TrainedModel(**{**vars(found), "source": source})


def test_a_peft_folder_is_served_and_shares_the_base(base: TrainedModel) -> None:
    loras = base.source.parent / "loras"
    found = open_adapter(base, loras / "one")
    expected = adapted(base.model, seed=2)
    assert answer(found.model) == answer(expected) != answer(base.model)
    shared, mine = dict(base.model.named_parameters()), dict(found.model.named_parameters())
    assert all(mine[name].data_ptr() == shared[name].data_ptr() for name in shared)
    other = TrainedModel(**{**vars(base), "source": hf_other(base.source.parent)})
    with pytest.raises(UserError, match="was trained on another base"):
        open_adapter(other, loras / "one")
    with pytest.raises(UserError, match="has adapters itself"):
        open_adapter(found, loras / "two")


def hf_other(folder: Path) -> Path:
    if not (folder / "other").exists():
        hf_directory(folder / "other", model_of("llama", dtype=torch.float32, seed=9), tokenizer_of())
    return folder / "other"


@pytest.mark.slow
def test_adapters_come_and_go_while_the_server_runs(base: TrainedModel) -> None:
    loras = base.source.parent / "loras"
    load = loader_of(base, loras, Capacity(max_batch=4))
    expected = {name: answer(adapted(base.model, seed=seed + 2)) for seed, name in enumerate(("one", "two"))}
    with running({"base": base.model}, load=load) as server:
        before = asked(server, "base")
        for name in ("one", "two"):
            told = post(server, "/v1/load_lora_adapter", lora_name=name, lora_path=str(loras / name))
            assert (told.status_code, told.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        assert {model.id for model in server.client.models.list()} == {"base", "one", "two"}
        assert {name: asked(server, name) for name in ("one", "two")} == expected
        assert len({before, *expected.values()}) == 3
        again = post(server, "/v1/load_lora_adapter", lora_name="one", lora_path="one")
        assert (again.status_code, "model 'one' already exists" in again.text) == (400, True)
        assert post(server, "/v1/unload_lora_adapter", lora_name="one").status_code == 200
        with pytest.raises(openai.NotFoundError, match="model 'one' does not exist"):
            asked(server, "one")
        assert post(server, "/v1/unload_lora_adapter", lora_name="base").status_code == 404
        assert post(server, "/v1/load_lora_adapter", lora_name="one", lora_path="two").status_code == 200
        assert asked(server, "one") == expected["two"]
        assert asked(server, "base") == before
        assert server.settles("meshwright_requests_running", 0)


@pytest.mark.slow
def test_answers_that_are_being_written_outlive_their_adapter(base: TrainedModel) -> None:
    loras = base.source.parent / "loras"
    load = loader_of(base, loras, Capacity(max_batch=4))
    with running({"base": base.model}, load=load) as server:
        assert post(server, "/v1/load_lora_adapter", lora_name="one", lora_path="one").status_code == 200
        texts: list[str] = []
        with server.client.chat.completions.create(
            model="one", messages=QUESTION, max_tokens=60, temperature=0, stream=True
        ) as stream:
            events = iter(stream)
            next(events)
            assert post(server, "/v1/unload_lora_adapter", lora_name="one").status_code == 200
            texts += [event.choices[0].delta.content or "" for event in events]
        assert "".join(texts) == answer(adapted(base.model, seed=2), 60)
        assert asked(server, "base")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "x", "lora_path": "../base"}, 400, "is not a folder in"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "is not a folder in"),
        ({"lora_name": "x", "lora_path": "none"}, 400, "is not a folder in"),
        ({"lora_name": "x", "lora_path": "one\0"}, 400, "is not a folder in"),
        ({"lora_name": "x", "lora_path": "x" * 5000}, 400, "is not a folder in"),
        ({"lora_name": "a b", "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "empty"}, 400, "empty"),
    ],
)
def test_a_server_loads_only_adapters_of_its_folder(base: TrainedModel, body: dict, status: int, message: str) -> None:
    loras = base.source.parent / "loras"
    (loras / "empty").mkdir(exist_ok=True)
    load = loader_of(base, loras, Capacity(max_batch=4))
    with running({"base": base.model}, load=load) as server:
        told = post(server, "/v1/load_lora_adapter", **body)
        assert told.status_code == status
        assert message in told.json()["error"]["message"]
        assert asked(server, "base", 2) is not None


def test_without_a_folder_no_client_loads_anything(base: TrainedModel) -> None:
    with running({"base": base.model}, api_key="secret") as server:
        path, body = "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"}
        assert post(server, path, **body).status_code == 401
        told = httpx.post(f"{server.url}{path}", json=body, headers={"authorization": "Bearer secret"})
        assert (told.status_code, "serve with --adapters-from" in told.text) == (403, True)


VOTE = {
    "model_a": "base",
    "model_b": "tuned",
    "winner": "model_b",
    "conversation_a": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "one\nline"}],
    "conversation_b": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "two"}],
}


def test_votes_are_written_and_counted(base: TrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    votes = tmp_path / "votes.jsonl"
    with running({"base": base.model, "tuned": adapted(base.model)}, votes=votes) as server:
        page = httpx.get(f"{server.url}/arena")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"https?://|src=|@import|url\(", page.text)
        threads = [threading.Thread(target=post, args=(server, "/arena/votes"), kwargs=VOTE) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for bad in ({"winner": "tuned"}, {"model_b": "base"}, {"conversation_a": []}, {"extra": 1}):
            assert post(server, "/arena/votes", **{**VOTE, **bad}).status_code == 400
    lines = [json.loads(line) for line in votes.read_text().splitlines()]
    assert len(lines) == 8
    assert all(line["time"] <= time.time() and line["conversation_a"] == VOTE["conversation_a"] for line in lines)
    assert len({line["question_id"] for line in lines}) == 1
    assert {verdict.score for verdict in read_verdicts([votes])} == {0.0}
    assert main(["judge", "--votes", str(votes)]) == 0
    assert "base against tuned: 0 wins, 0 ties, 8 losses" in capsys.readouterr().out


def test_without_a_file_there_is_no_arena(base: TrainedModel) -> None:
    with running({"base": base.model}) as server:
        assert httpx.get(f"{server.url}/arena").status_code == 404
        assert post(server, "/arena/votes", **VOTE).status_code == 404


def test_misuse_of_serve_is_told(base: TrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for words, message in {
        ("--votes", "v.jsonl"): "an arena needs two models",
        ("--adapters-from", str(tmp_path / "none")): "is not a folder",
        ("--beside", "x=a", "--beside", "x=b"): "a name is given twice",
        ("--name", "x", "--beside", f"x={base.source}"): "name x is given twice",
    }.items():
        assert main(["serve", str(base.source), "--port", "0", "--device", "cpu", *words]) == 2
        assert message in capsys.readouterr().err
