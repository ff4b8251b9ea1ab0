"""The runs that steps train: recipes as files, and small runs in this process."""

import json
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.accept.check import Check, Place, within
from meshwright.devices import CPU, accelerator, peak_reserved_bytes, release_unused, reset_peak, synchronize
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import Outcome, largest_difference, loader_for
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.setup import RankContext, Trainer, build_trainer

WORDS, LINES = 400, 4000
"""Sizes of the text that runs read; it is the same on every machine and under every Python."""

SMALL = {"family": "llama", "hidden": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "vocab": 320}
"""A model that trains in seconds on a CPU; its vocabulary has all bytes, and whole tiles."""

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"max_positions": 64},
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_experts": 8, "experts_per_token": 2, "balance_loss": 0.5},
    "qwen3_moe": {"num_experts": 8, "experts_per_token": 2, "expert_ffn": 32, "balance_loss": 0.5},
    "deepseek_v3": {
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_ffn": 32,
        "shared_experts": 2,
        "dense_layers": 1,
        "num_layers": 3,
        "balance_rate": 0.05,
        "router_groups": 4,
        "router_top_groups": 2,
        "q_rank": 32,
        "kv_rank": 32,
        "nope_head_dim": 16,
        "rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "qwen3_next": {
        "num_layers": 4,
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_ffn": 32,
        "shared_ffn": 32,
        "balance_loss": 0.5,
        "delta_heads": 8,
        "delta_key_heads": 4,
        "delta_key_dim": 16,
        "delta_value_dim": 16,
        "norm_eps": 0.05,
    },
}
"""Families -> what their tiny models have besides `tiny_model`'s fields."""

BATCH, LENGTH = 12, 64
"""Sequences of a tiny run's step, and their tokens."""


def device_of(place: Place) -> torch.device:
    """The first device of the place's type; this process computes on it."""
    return accelerator(0) if place.on_gpu else CPU


def tiny_model(family: str) -> dict[str, Any]:
    """The fields of a family's tiny model."""
    sizes = {"hidden": 64, "num_layers": 2, "num_heads": 4, "vocab": 128, "init_std": 0.2}
    sizes |= {} if family == "gpt2" else {"ffn": 96}
    sizes |= {} if family in ("gpt2", "deepseek_v3") else {"num_kv_heads": 2}
    return {"family": family, **sizes, **FAMILIES[family]}


def run_of(model: Mapping[str, Any], training: Mapping[str, Any], length: int = LENGTH, **fields: Any) -> ResolvedRun:
    """A run on random tokens at a constant rate; `fields` are the recipe's others."""
    data = {"sequence_length": length, **fields.pop("data", {})}
    training = {"lr_schedule": {"name": "constant", "warmup": 0}, **training}
    run = Run.model_validate({"model": dict(model), "data": data, "training": training, **fields})
    return resolve_run(run, base_dir=Path())


def families_of(place: Place) -> list[str]:
    """The families that a step tries: all, or in a rehearsal a dense one and one with experts."""
    return ["llama", "mixtral"] if not place.on_gpu else list(FAMILIES)


def tiny_run(family: str = "llama", *, batch: int = BATCH, layout: Any = None, **training: Any) -> ResolvedRun:
    """A family's tiny model in fp64, unless `training` has another precision."""
    optimizer = {"name": "adamw", "lr": 1e-2, "eps": 0.1}
    training = {"precision": "fp64", "global_batch": batch, "optimizer": optimizer, **training}
    return run_of(tiny_model(family), training, device="cpu", layout=layout or {})


def write_recipe(place: Place, name: str, fields: Mapping[str, Any]) -> Path:
    """A recipe on the place's text, in its work folder; the run's folder has the recipe's name."""
    shutil.rmtree(place.work / name, ignore_errors=True)  # of an earlier acceptance
    data = {"sources": str(text_of(place)), "tokenizer_vocab": 257, "cache_dir": str(place.work / "cache")}
    training = {"lr_schedule": {"name": "constant", "warmup": 0}, "evaluation": {"batches": 0}}
    file = place.work / f"{name}.yaml"
    recipe = {"device": place.device, "run_dir": str(place.work / name), **fields}
    recipe["data"] = data | fields.get("data", {})
    recipe["training"] = training | fields.get("training", {})
    file.write_text(json.dumps(recipe, indent=1))
    return file


def text_of(place: Place) -> Path:
    """The text that runs read."""
    file = place.work / "text.txt"
    if not file.exists():
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(WORDS)]
        lines = (" ".join(draw.choices(words, k=draw.randint(4, 14))) for _ in range(LINES))
        file.write_text("\n".join(lines) + "\n")
    return file


def losses_in(run_dir: Path) -> list[float]:
    """The losses of a run's steps."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record and "step" in record]


def beside(name: str, ours: Outcome | None, expected: Outcome | None, allowed: float) -> Check:
    """The loss and every gradient of a step beside another's, relative to the largest entry of all gradients."""
    assert ours is not None
    assert expected is not None
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    difference, where = largest_difference(ours.gradients, expected.gradients)
    loss = abs(ours.loss / expected.loss - 1)
    what = f"loss off by {loss:.1e}; largest relative difference, in the gradient of {where},"
    return within(name, max(loss, difference / largest), allowed, what)


@dataclass(frozen=True)
class Steps:
    """Some steps of a run in this process."""

    losses: list[float]
    seconds: float
    """Of a step, the median without the first."""
    reserved: int
    """Peak of the device's memory that torch had reserved; 0 on a CPU."""


def train_here(resolved: ResolvedRun, device: torch.device, steps: int) -> Steps:
    """Train some steps on random tokens, in this process alone."""
    release_unused()
    reset_peak(device)
    trainer = build_trainer(resolved, RankContext(device=device))
    losses, seconds = [], []
    for loss, took in steps_of(trainer, steps):
        losses.append(loss)
        seconds.append(took)
    reserved = peak_reserved_bytes(device) if device != CPU else 0
    return Steps(losses, statistics.median(seconds[1:] or seconds), reserved)


def steps_of(trainer: Trainer, steps: int) -> Iterator[tuple[float, float]]:
    """The loss and the seconds of each step."""
    with loader_for(trainer) as loader:
        for step in range(1, steps + 1):
            microbatches = loader.microbatches(step - 1)
            began = time.perf_counter()
            loss = trainer.train_step(step, microbatches).loss
            synchronize(trainer.device)
            yield loss, time.perf_counter() - began
