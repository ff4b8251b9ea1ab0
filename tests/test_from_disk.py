"""Weights on disk: the same answers bit for bit, in a quarter of the weights' memory."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.models.from_disk import blocks_from_disk
from meshwright.models.generate import Sampling
from meshwright.serve.engine import InferenceEngine, Request
from meshwright.serve.from_disk import about_disk
from meshwright.serve.served import Capacity, open_served
from meshwright.serve.trained import evaluate_texts, open_trained
from meshwright.spec.errors import UserError
from meshwright.spec.run import Run
from meshwright.trainer.run import train
from served import CHATML, hf_directory, model_of, tokenizer_of


def answers_of(model: Any) -> list[Any]:
    requests = [
        Request(prompt=list(range(3, 3 + length)), max_tokens=9, sampling=Sampling(temperature=t, seed=4), logprobs=2)
        for length, t in ((5, 0.0), (1, 0.9), (17, 0.0))
    ]
    return [answer.tokens for answer in InferenceEngine(model).run(requests)]


@pytest.mark.every(1)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek_v3", "gemma3", "gpt_oss", "qwen3_next"])
def test_answers_and_losses_are_those_of_weights_in_memory(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    folder = hf_directory(tmp_path / "hf", model_of(family, num_layers=3, dtype=torch.float32), tokenizer)
    text = tmp_path / "text.txt"
    text.write_text("def add_1(x):\n    return x + 1\n" * 20)
    kept, read = (open_trained(folder, device="cpu", weights=where) for where in ("memory", "disk"))
    assert answers_of(read.model) == answers_of(kept.model)
    losses = [evaluate_texts(one, sources=[str(text)], sequence_length=32).loss for one in (kept, read)]
    assert losses[0] == losses[1]
    blocks = blocks_from_disk(read.model)
    assert blocks is not None
    assert blocks_from_disk(kept.model) is None
    held = sum(parameter.numel() for block in read.model.layers.values() for parameter in block.parameters())
    assert held <= max(sum(p.numel() for p in block.parameters()) for block in kept.model.layers.values())
    assert "read from disk" in about_disk(read.model)
    with pytest.raises(UserError, match="share their base's weights in memory"):
        open_served(read, "base", {"sql": folder}, Capacity(max_batch=2))


def test_a_checkpoint_is_read_layer_by_layer(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(f"def add_{n}(x):\n    return x + {n}\n" for n in range(200)))
    model = {"family": "llama", "hidden": 32, "num_layers": 3, "num_heads": 2, "max_positions": 64, "init_std": 0.3}
    data = {"sources": [str(tmp_path / "text.txt")], "sequence_length": 32, "tokenizer_vocab": 280}
    training = {"steps": 1, "global_batch": 4, "precision": "fp32", "lr_schedule": {"warmup": 0}}
    train(
        Run.model_validate(
            {
                "model": model | {"weights": "random"},
                "data": data | {"cache_dir": str(tmp_path / "cache")},
                "training": training | {"optimizer": {"name": "adamw", "lr": 0.05}},
                "run_dir": str(tmp_path / "run"),
                "device": "cpu",
            }
        )
    )
    kept, read = (open_trained(tmp_path / "run", device="cpu", weights=where) for where in ("memory", "disk"))
    assert blocks_from_disk(read.model) is not None
    assert answers_of(read.model) == answers_of(kept.model)


def test_a_shortened_file_ends_the_answer_with_one_sentence(tmp_path: Path) -> None:
    folder = hf_directory(tmp_path / "hf", model_of("llama", num_layers=3, dtype=torch.float32), tokenizer_of(CHATML))
    read = open_trained(folder, device="cpu", weights="disk")
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(UserError, match="has become shorter since it was opened"):
        answers_of(read.model)


PROGRAM = """
import resource, sys, torch
from pathlib import Path
from meshwright.launch.memory import field_of
from meshwright.models.generate import Sampling
from meshwright.serve import trained as module
from meshwright.serve.trained import Settings
from meshwright.spec.errors import UserError
torch.set_num_threads(1)
import torch.distributed.checkpoint
held = field_of(Path("/proc/self/status"), "VmData:") * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + int(sys.argv[2]),) * 2)
for where in ("memory", "auto"):
    try:
        opened = module.open_trained(Path(sys.argv[1]), device="cpu", weights=where)
        print(where, module.continue_texts(opened, ["def "], Settings(max_tokens=3, sampling=Sampling(temperature=0))))
    except UserError as error:
        print(where, "refused:", error)
"""


@pytest.mark.exhaustive
def test_a_process_limited_to_a_quarter_of_the_weights(tmp_path: Path) -> None:
    sizes = {"hidden": 512, "num_layers": 24, "num_heads": 8, "num_kv_heads": 8, "ffn": 2048}
    model = model_of("llama", **sizes, dtype=torch.float32)
    folder = hf_directory(tmp_path / "hf", model, tokenizer_of(CHATML))
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    del model
    words = [sys.executable, "-c", PROGRAM, str(folder), str(weights // 4)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
    kept, read = printed.splitlines()
    assert kept.startswith(f"memory refused: the weights of {folder} do not fit in memory")
    assert read.startswith("auto ['")
