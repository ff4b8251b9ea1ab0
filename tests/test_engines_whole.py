"""Programs of other engines for a whole run: stopped and started again they compute what an uninterrupted one does, and
what they save is the model that they have trained."""

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from meshwright.data.tokenizer import load_tokenizer
from meshwright.engines.handover import hand_over
from meshwright.engines.layouts import layout_called
from meshwright.engines.registry import ENGINES
from meshwright.launch.launcher import rank_environments
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, tied_embeddings: true}
data: {sources: "*.txt", tokenizer_vocab: 300, sequence_length: 32}
training: {steps: 4, global_batch: 8, micro_batch: 2, precision: fp32, lr_schedule: {warmup: 3}}
checkpoint: {every: 2}
device: cpu
"""
UNTIED = "model.tied_embeddings=false"
LORA = ["finetune={method: lora, rank: 4, alpha: 8}", "model.weights=random"]
EXACT: dict[str, tuple[str, str, list[str]]] = {
    "bare ddp": ("bare", "ddp", []),
    "bare zero1": ("bare", "zero1", []),
    "bare zero3": ("bare", "zero3", []),
    "transformers tp2": ("transformers", "tp2", []),
    "hf_trainer": ("hf_trainer", "single", []),
    "accelerate ddp": ("accelerate", "ddp", []),
    "fabric tp2": ("fabric", "tp2", []),
    "lightning zero3": ("lightning", "zero3", []),
    "deepspeed zero3": ("deepspeed", "zero3", []),
    "deepspeed tp2": ("deepspeed", "tp2", [UNTIED]),
    "deepspeed pp2": ("deepspeed", "pp2", [UNTIED]),
    "megatron tp2": ("megatron", "tp2", []),
    "megatron pp2": ("megatron", "pp2", []),
    "litgpt": ("litgpt", "single", []),
    "peft": ("peft", "single", LORA),
    "trl": ("trl", "ddp", []),
}
"""Programs whose second half is bit by bit that of an uninterrupted run."""
SAME = ("step", "loss", "gnorm", "lr", "tokens")


def resolved(folder: Path, layout: str, overrides: list[str]) -> ResolvedRun:
    (folder / "a.txt").write_text("".join(f"{n} cats sat on {n * n} mats\n" for n in range(400)))
    run = parse_spec(RECIPE, Run, [*overrides, f"data.cache_dir={folder / 'cache'}"]).model_copy(
        update={"layout": layout_called(layout)}
    )
    return resolve_run(run, base_dir=folder)


def started(program: Path, ranks: int, *options: str | Path) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", program, *map(str, options)]
    with (program.parent / "log.txt").open("ab") as log:
        return [
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            for environment in rank_environments(ranks)
        ]


def ran(program: Path, ranks: int, *options: str | Path) -> None:
    ended = [process.wait(timeout=600) for process in started(program, ranks, *options)]
    assert not any(ended), (program.parent / "log.txt").read_text()[-3000:]


def steps_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: line[key] for key in SAME} for line in lines if "step" in line]


def as_after_step_2(output: Path) -> None:
    """What is left where a run was killed between its checkpoints of steps 2 and 4."""
    for path in (output / "checkpoints").iterdir():
        if path.name.endswith(("-4", "=4.ckpt")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if (latest := output / "checkpoints/latest").exists():
        latest.write_text("step-2")
    shutil.rmtree(output / "model")
    (output / "metrics.jsonl").unlink(missing_ok=True)


@pytest.mark.filterwarnings("ignore")
def loss_of(directory: Path, tokens_BT: torch.Tensor) -> float:
    model, problems = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(problems.values())
    return model(tokens_BT, labels=tokens_BT).loss.item()


def saved(folder: Path) -> dict[str, np.ndarray]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


@pytest.mark.slow
def test_a_killed_program_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Killed at step 3, it computes step 3 again and step 4, as without a kill; started once more, it only writes its
    model again."""
    there = tmp_path / "there"
    hand_over(resolved(tmp_path, "single", []), ENGINES["bare"], there)
    assert (there / "left-out.md").read_text().endswith("Nothing.\n")
    program, killed = there / "run_bare_standalone.py", tmp_path / "killed"
    (process,) = started(program, 1, "--output", killed)
    while process.poll() is None and len((killed / "metrics.jsonl").read_text().splitlines() if killed.exists() and
                                         (killed / "metrics.jsonl").exists() else []) < 3:  # fmt: skip
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (killed / "model").exists()
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "los')  # a line that the kill has cut
    ran(program, 1, "--output", killed)
    ran(program, 1, "--output", killed)
    ran(program, 1)
    whole = steps_of(there / "metrics.jsonl")
    assert [line["step"] for line in whole] == [1, 2, 3, 4]
    assert steps_of(killed / "metrics.jsonl") == whole, "every step has one line"
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["latest", "step-2", "step-4"]
    first, second = saved(killed / "model"), saved(there / "model")
    assert first.keys() == second.keys() == saved(there / "start").keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert load_tokenizer(there / "model").vocab_size == load_tokenizer(there / "start").vocab_size
    tokens_BT = torch.arange(64).reshape(2, 32)
    assert loss_of(there / "model", tokens_BT) != loss_of(there / "start", tokens_BT)


@pytest.mark.engines
@pytest.mark.parametrize("name", EXACT)
def test_a_program_of_each_engine_resumes_exactly_and_saves_what_it_trained(tmp_path: Path, name: str) -> None:
    """measure.py, which runs the same program, wrote the trained weights from the engine's own tensors."""
    word, layout, overrides = EXACT[name]
    engine, run = ENGINES[word], resolved(tmp_path, layout, overrides)
    if not all(importlib.util.find_spec(module) for module in engine.packages):
        pytest.skip(f"{word} is not installed")
    there, ranks = tmp_path / "there", run.run.layout.world_size
    translation = hand_over(run, engine, there)
    assert not (there / "measure.py").exists()
    dump = [] if engine.cannot_dump(run) else ["--dump", there]
    ran(translation.write_measured(there), ranks, "--journal", there / "journal.jsonl", *dump)
    whole, trained = steps_of(there / "journal.jsonl"), saved(there / "model")
    as_after_step_2(there)
    ran(there / translation.program, ranks)
    assert steps_of(there / "metrics.jsonl") == whole[2:]
    assert [line["step"] for line in whole] == [1, 2, 3, 4]
    again = saved(there / "model")
    assert trained.keys() == again.keys()
    assert all(np.array_equal(trained[key], again[key]) for key in trained)
    if dump:
        with np.load(there / "weights-4.npz") as last:
            assert all(np.array_equal(last[key], trained[key]) for key in last.files)
    if word != "peft":
        assert trained.keys() == saved(there / "start").keys()
        loss_of(there / "model", torch.arange(32)[None])
    assert load_tokenizer(there / "model").vocab_size == load_tokenizer(there / "start").vocab_size


@pytest.mark.engines
def test_what_the_trainer_cannot_resume_is_said(tmp_path: Path) -> None:
    """transformers' Trainer refuses checkpoints of a model that transformers has sharded."""
    if not importlib.util.find_spec("accelerate"):
        pytest.skip("accelerate is not installed")
    there = tmp_path / "there"
    translation = hand_over(resolved(tmp_path, "zero3", []), ENGINES["hf_trainer"], there)
    assert "the Trainer cannot resume" in (there / "left-out.md").read_text()
    ran(there / translation.program, 2)
    assert not (there / "checkpoints").exists() or not list((there / "checkpoints").iterdir())
    loss_of(there / "model", torch.arange(32)[None])
