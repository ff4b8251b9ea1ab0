"""Step `families`: the same step on the device and on the CPU."""

from collections.abc import Iterator
from typing import Any

import torch

from meshwright.accept.check import Check, Place, tried
from meshwright.accept.runs import beside, device_of, families_of, tiny_run
from meshwright.spec.precision import FP32, FP64
from meshwright.testing.equivalence import one_step

ALLOWED = {FP64.name: 1e-9, FP32.name: 1e-4}
"""Largest difference of a gradient, relative to the largest entry of all."""

WAYS: dict[str, dict[str, Any]] = {
    "recompute selective": {"recompute": "selective"},
    "recompute full": {"recompute": "full"},
    "accumulation": {"micro_batch": 3},
    "compiled": {"compile": True, "precision": "fp32"},
}
"""Ways to compute llama's step that must not change it."""


def checks(place: Place) -> Iterator[Check]:
    """Every family in both precisions; documents; the other ways."""
    for family in families_of(place):
        for precision in ALLOWED:
            yield tried(_compared, f"{family}, {precision}", place, family, precision=precision)
    for family in sorted({"llama", "mistral", "mixtral"} & set(families_of(place))):
        yield tried(_compared, f"{family}, separate documents", place, family, documents=True)
    for name, training in WAYS.items():
        if place.on_gpu or "compile" not in training:
            yield tried(_compared, f"llama, {name}", place, "llama", **training)


def _compared(name: str, place: Place, family: str, *, documents: bool = False, **training: Any) -> Check:
    run = tiny_run(family, **training)
    plain = {key: value for key, value in training.items() if key == "precision"}
    torch.compiler.reset()
    ours, expected = one_step(run, documents, device=device_of(place)), one_step(tiny_run(family, **plain), documents)
    return beside(name, ours, expected, ALLOWED[training.get("precision", FP64.name)])
