"""A model split over tensor-parallel processes answers as one process does."""

import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from launched import Program, ranks_of, run_program
from meshwright.finetune import apply_finetune
from meshwright.models import build_model, packed
from meshwright.models.generate import Sampling
from meshwright.parallel import build_meshes
from meshwright.serve.engine import Answer, InferenceEngine, Request
from meshwright.serve.examine import examinee_of
from meshwright.serve.grammar import Grammars
from meshwright.serve.ranks import Ranks
from meshwright.serve.readers import CachedReader
from meshwright.serve.trained import evaluate_texts, open_trained, split_over
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.tasks.examinee import Writing
from meshwright.testing.ranks import RankPool
from served import CHATML, VOCAB, hf_directory, model_of, tokenizer_of
from tiny import tiny_run

GRAMMARS = Grammars(tokenizer_of(CHATML), VOCAB + 1)
TEXT = "def add_1(x):\n    return x + 1\n" * 20


def requests() -> list[Request]:
    """Several lengths, greedy and sampled, in two waves: some end early, so that others move into their rows."""
    kinds = [(5, 0.0, 9), (1, 0.9, 3), (17, 0.0, 6), (4, 1.1, 9), (2, 0.0, 1), (33, 0.7, 8)]
    return [
        Request(
            prompt=list(range(3, 3 + length)),
            max_tokens=tokens,
            sampling=Sampling(temperature=temperature, seed=4, repetition_penalty=1.1),
            ends=[0] if length in (1, 5) else (),
            logprobs=2,
            scores_prompt=length == 17,
            bias={5: 2.0} if length == 4 else {},
            grammar=GRAMMARS.compile("regex", "[a-f]+", [0]) if length in (1, 5) else None,
        )
        for length, temperature, tokens in kinds
    ]


def told(answers: list[Answer]) -> list[Any]:
    return [
        (answer.ids, [round(logprob, 9) for token in answer.prompt + answer.tokens for _, logprob in token.top])
        for answer in answers
    ]


def no_other(error: BaseException) -> NoReturn:
    raise error


def found_on_ranks(folder: Path, text: Path) -> dict[str, Any]:
    """This rank's results for a directory's model, split over both."""
    mesh = build_meshes(LayoutSpec(tp=2), "cpu").axis("tp")
    assert mesh is not None
    ranks = Ranks(mesh, no_other)
    opened = open_trained(folder, device="cpu", dtype="fp64", weights=mesh)
    ranks.alike(opened.model)
    found = everything_of(opened, text)
    split = open_trained(folder, device="cpu", dtype="fp32", weights=mesh).model
    threshold, packed.SMALL = packed.SMALL, 0
    packed.pack(split)
    packed.SMALL = threshold
    found["packed"] = logits_read(CachedReader(split, 2)), "run: packed" in repr(split.layers["0"])
    local = opened.model.layers["0"].attention.wo.weight
    found["kept"] = local.to_local().numel() / local.numel()
    if ranks.leads:
        ranks.lead(opened.model)
        found["led"] = told(InferenceEngine(opened.model, max_batch=4).run(requests()))
        engine = InferenceEngine(opened.model)
        engine.submit(requests()[0])
        engine.step()
        engine.reset()  # as after an error
        found["again"] = told(engine.run(requests()[2:3]))
        ranks.dismiss()
    else:
        ranks.follow(opened.model)
    return found


@torch.inference_mode()
def logits_read(reader: CachedReader) -> torch.Tensor:
    """After two prompts, and two steps of three tokens, which two ranks pad."""
    reader.read([(0, [5, 6, 7]), (1, [9]), (2, [4, 3])], 3)
    return torch.cat([reader.read([(row, [row + step]) for row in range(3)], 3) for step in (10, 20)])


def everything_of(opened: Any, text: Path) -> dict[str, Any]:
    examinee = examinee_of(opened)
    return {
        "answers": told(InferenceEngine(opened.model, max_batch=4).run(requests())),
        "loss": evaluate_texts(opened, sources=[str(text)], sequence_length=32),
        "chosen": [one.logprob for one in examinee.logprobs([([5, 6, 7], [8]), ([9, 4], [3, 2, 1])])],
        "written": examinee.write([[5, 6, 7], [9]], Writing(max_tokens=5)),
    }


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mixtral", "deepseek_v3", "gemma3", "olmo3", "smollm3", "gpt_oss", "qwen3_5"]
)
def test_two_ranks_answer_as_one_process(family: str, ranks: RankPool, tmp_path: Path) -> None:
    model = model_of(family, vocab=301, init_std=0.2)
    folder = hf_directory(tmp_path / "hf", model, tokenizer_of(CHATML))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    expected = everything_of(open_trained(folder, device="cpu", dtype="fp64"), text)
    alone = expected["loss"]
    logits = logits_read(CachedReader(open_trained(folder, device="cpu", dtype="fp32").model))
    for rank, found in enumerate(ranks.run(2, found_on_ranks, folder, text)):
        assert found["answers"] == expected["answers"]
        assert found["loss"].tokens == alone.tokens
        assert found["loss"].loss == pytest.approx(alone.loss, abs=1e-11)
        assert found["chosen"] == pytest.approx(expected["chosen"], abs=1e-9)
        assert found["written"] == expected["written"]
        assert found["kept"] == 0.5
        parts, is_packed = found["packed"]
        assert (parts - logits).norm() <= 20 * torch.finfo(torch.float32).eps * logits.norm()
        assert is_packed == (family in ("llama", "gpt2", "smollm3"))
        if rank == 0:
            assert found["led"] == expected["answers"]
            assert found["again"] == expected["answers"][2:3]


def refused_on_ranks(folder: Path) -> str:
    mesh = build_meshes(LayoutSpec(tp=2), "cpu").axis("tp")
    assert mesh is not None
    with pytest.raises(UserError) as refused:
        open_trained(folder, device="cpu", weights=mesh)
    return str(refused.value)


def test_a_model_that_two_ranks_cannot_split_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    model = model_of("llama", num_heads=3, num_kv_heads=3, hidden=24, dtype=torch.float32)
    folder = hf_directory(tmp_path / "hf", model, tokenizer_of(CHATML))
    for message in ranks.run(2, refused_on_ranks, folder):
        assert message.startswith("layout.tp=2: 3 query heads cannot be split evenly over 2 ranks")


def test_quantized_blocks_that_ranks_would_cut_are_refused() -> None:
    run = tiny_run(LayoutSpec(), finetune={"method": "qlora", "rank": 4})
    model = build_model(run.model)
    assert run.run.finetune is not None
    apply_finetune(model, run.run.finetune, torch.bfloat16)
    two: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(
        UserError, match=r"layout.tp=2 with finetune.base=nf4: .*; leave layout.tp out, or use the merged"
    ):
        split_over(model, two)


def succeeds(*words: str) -> str:
    """The output of `meshwright WORDS...`."""
    status, out, errors = run_program(*words)
    assert status == 0, errors
    return out


@pytest.mark.slow
def test_a_server_over_two_processes_answers_and_ends_with_a_sentence_when_one_dies(tmp_path: Path) -> None:
    folder = hf_directory(tmp_path / "hf", model_of("llama", dtype=torch.float32), tokenizer_of(CHATML))
    prompt = ["--prompt", "def add", "--max-tokens", "8", "--temperature", "0", "--json"]
    (tmp_path / "text.txt").write_text(TEXT)
    measure = ["--source", str(tmp_path / "text.txt"), "--sequence-length", "32"]
    printed = [
        [succeeds("generate", str(folder), *more, *prompt), succeeds("eval", str(folder), *more, *measure)]
        for more in ([], ["layout.tp=2"])
    ]
    assert printed[0] == printed[1]
    expected = json.loads(printed[0][0])["texts"][0]["continuation"]
    with Program("serve", str(folder), "layout.tp=2", "--port", "0") as server:
        place = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+/v1", line)))

        def opened(path: str, body: Any = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{place}{path}", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        def ask() -> str:
            body = {"model": "hf", "prompt": "def add", "max_tokens": 8, "temperature": 0}
            return opened("/completions", body)["choices"][0]["text"]

        for _ in range(100):  # the address is printed before connections are accepted
            with contextlib.suppress(urllib.error.URLError):
                opened("/models")
                break
            time.sleep(0.1)
        assert [ask(), ask()] == [expected, expected]
        os.kill(ranks_of(server.pid)[1], signal.SIGKILL)
        _, errors = server.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if line.strip()]
    assert lines == ["error: rank 1 was killed by SIGKILL"]
    assert server.returncode == 128 + signal.SIGKILL


def test_other_settings_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from meshwright.cli.main import main

    assert main(["generate", str(tmp_path), "layout.pp=2", "--prompt", "x"]) == 2
    assert "split only by tensor parallelism, as in layout.tp=2" in capsys.readouterr().err
