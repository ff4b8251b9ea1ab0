"""Trains one small model in every precision, and with what its optimizer keeps in bf16, and draws the losses:
`python docs/plot_precision.py [--measure precision | bf16]`.

With `--measure` it trains (minutes, on the CPU) and writes docs/precision.json or docs/bf16.json; it always writes the
pictures docs/precision.svg and docs/bf16.svg and prints the tables of docs/precision.md from those.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.families import resolve_model
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import loss_curve

DOCS = Path(__file__).parent
GLOBAL_BATCH, LAST = 8, 30

RECIPE = """
model: {family: llama, hidden: 128, num_layers: 4, num_heads: 4, num_kv_heads: 4, ffn: 256, vocab: 256}
data: {sequence_length: 32}
training:
  lr_schedule: {name: cosine, warmup: 20}
device: cpu
"""


class Study(NamedTuple):
    """Ways of training that are compared with the first, `bf16`."""

    name: str
    steps: int
    optimizer: dict[str, Any]
    ways: dict[str, dict[str, Any]]
    apart: list[float]
    """Marks of the lower panel."""


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "fp8 tensorwise": {"precision": "fp8"},
    "fp8 rowwise": {"precision": "fp8", "low_precision": {"recipe": "rowwise"}},
    "fp8 rowwise_with_gw_hp": {"precision": "fp8", "low_precision": {"recipe": "rowwise_with_gw_hp"}},
    "fp8 blockwise": {"precision": "fp8", "low_precision": {"recipe": "blockwise"}},
    "fp8 delayed": {"precision": "fp8", "low_precision": {"recipe": "delayed", "amax_history": 16}},
    "mxfp8": {"precision": "mxfp8"},
    "nvfp4": {"precision": "nvfp4"},
    "nvfp4, ends in bf16": {"precision": "nvfp4", "low_precision": {"keep": ["layers.0", "layers.-1"]}},
}
PURE: dict[str, Any] = {"precision": "bf16", "master_dtype": "bf16"}
KEPT: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "moments in bf16": {"precision": "bf16", "optimizer": {"state_dtype": "bf16"}},
    "moments in 8 bits": {"precision": "bf16", "optimizer": {"name": "adamw_8bit"}},
    "weights in bf16, nearest": {**PURE, "optimizer": {"rounding": "nearest"}},
    "weights in bf16, stochastic": {**PURE, "optimizer": {"rounding": "stochastic"}},
    "weights in bf16, kahan": {**PURE, "optimizer": {"rounding": "kahan"}},
    "weights and moments, stochastic": {**PURE, "optimizer": {"rounding": "stochastic", "state_dtype": "bf16"}},
    "weights and moments, kahan": {**PURE, "optimizer": {"rounding": "kahan", "state_dtype": "bf16"}},
}
STUDIES = (
    Study("precision", 120, {"lr": 2e-3}, PRECISIONS, [-0.3, -0.2, -0.1, 0, 0.1]),
    Study("bf16", 300, {"lr": 5e-5}, KEPT, [-0.1, -0.05, 0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8]),
)
COLOURS = ("#000000", "#777777", "#0072b2", "#56b4e9", "#009e73", "#8a9a00", "#e69f00", "#cc79a7", "#d55e00", "#7a3db8")

WIDTH, HEIGHT, LEFT, TOP, GAP, WINDOW = 720, 240, 60, 24, 60, 20


def measure(study: Study) -> dict[str, list[float]]:
    """Losses in every way, from the same weights on the same tokens."""
    losses = {}
    for name, settings in study.ways.items():
        settings = {**settings, "optimizer": study.optimizer | settings.get("optimizer", {}), "steps": study.steps}
        run = parse_spec(RECIPE, Run, [f"training.{key}={json.dumps(value)}" for key, value in settings.items()])
        model = resolve_model(run.model, base_dir=DOCS)
        sizes: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "micro_batch": GLOBAL_BATCH, "accumulation": 1}
        losses[name] = loss_curve(ResolvedRun(run=run, model=model, reasons={}, **sizes), study.steps)
        print(f"{name:<32}{losses[name][-1]:.4f}", flush=True)
    return losses


def smooth(values: list[float]) -> list[float]:
    """Means over the last `WINDOW` steps, as many as there are."""
    parts = [values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw(study: Study, losses: dict[str, list[float]]) -> str:
    """Two panels: the losses, and their distance from bf16's."""
    beside = {
        name: smooth([a - b for a, b in zip(curve, losses["bf16"], strict=True)]) for name, curve in losses.items()
    }
    panels = [
        ("loss, nats per token", losses, [1, 2, 3, 4, 5, 6]),
        (f"loss minus bf16's, mean of {WINDOW} steps", beside, study.apart),
    ]
    total = TOP + len(panels) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 220} {total}" font-family="sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (title, curves, ticks) in enumerate(panels):
        parts += _panel(study, title, curves, ticks, TOP + number * (HEIGHT + GAP))
    for number, (name, colour) in enumerate(zip(losses, COLOURS, strict=False)):
        y = TOP + 14 + 20 * number
        parts.append(f'<path d="M{WIDTH + 20} {y}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH + 52}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(study: Study, title: str, curves: dict[str, list[float]], ticks: list[float], top: int) -> list[str]:
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)

    def place(step: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT) * step / study.steps
        return f"{x:.1f},{top + HEIGHT * (high - value) / (high - low):.1f}"

    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>']
    for tick in (tick for tick in ticks if low <= tick <= high):
        x, y = place(0, tick).split(",")
        parts.append(f'<path d="M{x} {y}H{WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" dy="4">{tick:g}</text>')
    for step in range(0, study.steps + 1, study.steps // 6):
        x, y = place(step, low).split(",")
        parts.append(f'<text x="{x}" y="{y}" text-anchor="middle" dy="18">{step}</text>')
    for colour, curve in zip(COLOURS, curves.values(), strict=False):
        points = " ".join(place(step, value) for step, value in enumerate(curve, start=1))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    return parts


def table(losses: dict[str, list[float]]) -> list[str]:
    """The mean loss of the last steps and its distance from bf16's, as Markdown."""
    means = {name: math.fsum(curve[-LAST:]) / LAST for name, curve in losses.items()}
    rows = (f"| {name} | {mean:.3f} | {mean - means['bf16']:+.4f} |" for name, mean in means.items())
    return [f"| precision | loss, mean of the last {LAST} steps | minus bf16's |", "|---|---|---|", *rows]


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--measure", nargs="+", default=[], choices=[study.name for study in STUDIES], help="anew first")
    arguments = words.parse_args()
    torch.set_num_threads(1)
    for study in STUDIES:
        data = DOCS / f"{study.name}.json"
        if study.name in arguments.measure:
            data.write_text(json.dumps(measure(study)) + "\n")
        measured = json.loads(data.read_text())
        (DOCS / f"{study.name}.svg").write_text(draw(study, measured))
        print("\n".join(table(measured)))
