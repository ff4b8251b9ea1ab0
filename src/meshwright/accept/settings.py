"""Step `settings`: what changes formats, kernels and places of tensors, three steps each beside the CPU's."""

from collections.abc import Iterator
from typing import Any

import torch

from meshwright.accept.check import Check, Place, tried, within
from meshwright.accept.runs import SMALL, device_of, run_of, train_here
from meshwright.devices import CPU
from meshwright.spec.precision import Precision
from meshwright.spec.training import TrainingSpec

STEPS = 3
WIDE, NARROW, QUANTIZED = 1e-4, 0.01, 0.08
"""Largest relative difference of a loss from the CPU's: in fp32, in bf16 or fp16, and with quantized products."""

EXPERTS = {**SMALL, "family": "mixtral", "num_experts": 4, "experts_per_token": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain bf16": {"precision": "bf16"},
    "fp16 with a loss scale": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "fp8 rowwise": {"precision": "fp8", "low_precision": {"recipe": "rowwise"}},
    "fp8 delayed": {"precision": "fp8", "low_precision": {"recipe": "delayed"}},
    "mxfp8": {"precision": "mxfp8"},
    "nvfp4": {"precision": "nvfp4"},
    "bf16 weights, stochastic rounding": {"precision": "bf16", "master_dtype": "bf16"},
    "adamw_8bit": {"precision": "bf16", "optimizer": {"name": "adamw_8bit"}},
    "muon": {"precision": "bf16", "optimizer": {"name": "muon"}},
    "documents": {"precision": "bf16", "data": {"packing": "best_fit", "separate_documents": True}},
    "experts": {"precision": "bf16", "model": EXPERTS},
    "experts in fp16": {"precision": "fp16", "model": EXPERTS},
    "experts in fp8": {"precision": "fp8", "model": EXPERTS},
    "lora with dropout": {"precision": "bf16", "finetune": {"method": "lora", "rank": 8, "dropout": 0.1}},
    "qlora": {"precision": "bf16", "finetune": {"method": "qlora", "rank": 8}},
    "optimizer in host memory": {"precision": "bf16", "layout": {"offload": {"optimizer": "host"}}},
    "optimizer on disk": {"precision": "bf16", "layout": {"offload": {"optimizer": "disk"}}},
    "activations in host memory": {"precision": "bf16", "layout": {"offload": {"activations": "host"}}},
    "compiled": {"precision": "bf16", "compile": True},
    "compiled fp8": {"precision": "fp8", "compile": True},
    "full recomputation, compiled": {"precision": "bf16", "compile": True, "recompute": "full"},
}
NOT_TRAINING = ("model", "data", "finetune", "layout")


def checks(place: Place) -> Iterator[Check]:
    """Every setting."""
    for name, setting in SETTINGS.items():
        if not place.on_gpu and setting.get("compile"):
            continue
        training = {key: value for key, value in setting.items() if key not in NOT_TRAINING}
        fields = {"model": SMALL, "run_dir": str(place.work / "settings"), **setting}
        fields = {key: value for key, value in fields.items() if key in NOT_TRAINING or key == "run_dir"}
        yield tried(_compared, name, place, training, fields)


def _compared(name: str, place: Place, training: dict[str, Any], fields: dict[str, Any]) -> Check:
    base = {"global_batch": 8, "micro_batch": 4, **training}
    model = fields.pop("model")
    torch.compiler.reset()
    ours = train_here(run_of(model, base, 128, device=place.device, **fields), device_of(place), STEPS)
    plain = {**base, "compile": False}
    fields["layout"] = {}
    expected = train_here(run_of(model, plain, 128, device="cpu", **fields), CPU, STEPS)
    apart = max(abs(a / b - 1) for a, b in zip(ours.losses, expected.losses, strict=True))
    check = within(
        name, apart, _allowed(TrainingSpec(precision=base["precision"]).dtypes), "largest relative difference of a loss"
    )
    check.figures.update(losses=ours.losses, seconds=ours.seconds)
    return check


def _allowed(dtypes: Precision) -> float:
    return QUANTIZED if dtypes.recipe else NARROW if dtypes.narrow else WIDE
