"""vLLM's part of a receipt, with a stand-in for vLLM's interface in a separate environment.

`benchmarks/receipts.py` uses the real vLLM.
"""

import json
import stat
import sys
from pathlib import Path

import pytest
import torch

from meshwright.cli.main import main
from meshwright.handover.receipt import CONVERSATIONS, TEXTS, conversations_of, next_logprobs, probe_prompts, texts_of
from meshwright.handover.vllm_receipt import CONTEXT
from meshwright.serve.trained import TrainedModel, open_trained
from served import CHATML, hf_directory, model_of, tokenizer_of

STAND_IN = """
import json
from pathlib import Path
from types import SimpleNamespace as Made

KNOWN = json.loads((Path(__file__).parent / "known.json").read_text())
SamplingParams = Made

class Tokenizer:
    def __call__(self, text, add_special_tokens=True):
        return Made(input_ids=KNOWN["texts"][text] if text in KNOWN["texts"] else json.loads(text))

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return json.dumps(KNOWN["conversations"][json.dumps(messages)])

class LLM:
    def __init__(self, model, dtype, **options):
        assert dtype == "float32" and (Path(model) / "config.json").is_file()
        if "refuses" in KNOWN:
            raise RuntimeError(KNOWN["refuses"])

    def get_tokenizer(self):
        return Tokenizer()

    def generate(self, prompts, sampling, use_tqdm):
        for prompt in prompts:
            row = KNOWN["logprobs"][json.dumps(prompt["prompt_token_ids"])]
            found = {token: Made(logprob=value) for token, value in enumerate(row)}
            yield Made(outputs=[Made(logprobs=[found])])
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    model = model_of("llama", dtype=torch.float32)
    folder = hf_directory(tmp_path_factory.mktemp("model") / "llama", model, tokenizer_of(CHATML))
    return open_trained(folder, device="cpu", dtype="fp32")


def environment(folder: Path, trained: TrainedModel, **changes: object) -> Path:
    """A Python whose vLLM returns the model's results, except for the `changes`."""
    prompts = probe_prompts(trained.spec, min(CONTEXT, trained.spec.max_positions))
    rows = [row.tolist() for row in next_logprobs(trained.model, prompts)]
    known = {
        "logprobs": {json.dumps(prompt): row for prompt, row in zip(prompts, rows, strict=True)},
        "texts": dict(zip(TEXTS, texts_of(trained.tokenizer), strict=True)),
        "conversations": {
            json.dumps(messages): ids
            for messages, ids in zip(CONVERSATIONS, conversations_of(trained.tokenizer), strict=True)
        },
    }
    folder.mkdir()
    (folder / "vllm.py").write_text(STAND_IN)
    (folder / "known.json").write_text(json.dumps(known | changes))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def export(trained: TrainedModel, into: Path, python: Path) -> int:
    return main(["export", str(trained.source), "--hf", str(into), "--dtype", "fp32", "--vllm", str(python)])


def test_vllms_reading_is_in_the_receipt(trained, tmp_path, capsys):
    assert export(trained, tmp_path / "hf", environment(tmp_path / "env", trained)) == 0
    reading = json.loads((tmp_path / "hf" / "receipt.json").read_text())["readings"][-1]
    assert (reading["program"], reading["compared"]) == ("vLLM", "logprobs")
    assert reading["largest_difference"] < 1e-5
    assert (reading["texts_equal"], reading["conversations_equal"]) == (len(TEXTS), len(CONVERSATIONS))
    said = capsys.readouterr().out
    assert "vLLM" in said
    served = (
        f"{tmp_path / 'env/python'} -m vllm.entrypoints.openai.api_server --model {tmp_path / 'hf'} --max-model-len "
    )
    assert served in said


def test_other_numbers_are_refused(trained, tmp_path, capsys):
    prompts = probe_prompts(trained.spec, CONTEXT)
    rows = [row.flip(0).tolist() for row in next_logprobs(trained.model, prompts)]
    wrong = {json.dumps(prompt): row for prompt, row in zip(prompts, rows, strict=True)}
    assert export(trained, tmp_path / "hf", environment(tmp_path / "env", trained, logprobs=wrong)) == 2
    assert "log-probabilities computed by vLLM differ from the model's" in capsys.readouterr().err
    short = {prompt: row[:-1] for prompt, row in wrong.items()}
    assert export(trained, tmp_path / "hf", environment(tmp_path / "short", trained, logprobs=short)) == 2
    assert "by inf" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_other_tokens_are_told_and_what_it_cannot_read_is_refused(trained, tmp_path, capsys):
    texts = dict(zip(TEXTS, [[1], *texts_of(trained.tokenizer)[1:]], strict=True))
    assert export(trained, tmp_path / "hf", environment(tmp_path / "env", trained, texts=texts)) == 0
    assert "warning: vLLM encodes text 0 differently" in capsys.readouterr().out
    receipt = json.loads((tmp_path / "hf" / "receipt.json").read_text())
    assert receipt["readings"][-1]["texts_equal"] is None
    assert export(trained, tmp_path / "no", environment(tmp_path / "small", trained, refuses="head_dim=8")) == 2
    assert "vLLM cannot read it (RuntimeError: head_dim=8)" in capsys.readouterr().err
    assert export(trained, tmp_path / "no", tmp_path / "nothing") == 2
    assert "does not exist; give the Python of an environment with vLLM" in capsys.readouterr().err


def test_without_vllm_the_receipt_says_so(trained, tmp_path, capsys):
    assert main(["export", str(trained.source), "--hf", str(tmp_path / "hf")]) == 0
    said = capsys.readouterr().out
    assert "vLLM                    not installed" in said
    assert f" vllm serve {tmp_path / 'hf'} --max-model-len " in said
    assert json.loads((tmp_path / "hf" / "receipt.json").read_text())["not_installed"] == ["vLLM"]
    assert main(["export", str(trained.source), "--gguf", str(tmp_path / "x"), "--vllm", "python"]) == 2
    assert "GGUF files are read back by llama.cpp" in capsys.readouterr().err
