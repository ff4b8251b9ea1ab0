"""Trains one small model in every precision and draws its losses: `python docs/plot_precision.py [--measure]`.

With `--measure` it trains (minutes, on the CPU) and writes docs/precision.json; it always writes docs/precision.svg and
prints the table of docs/precision.md from that.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from meshwright.families import resolve_model
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.curves import loss_curve

DOCS = Path(__file__).parent
DATA, PLOT = DOCS / "precision.json", DOCS / "precision.svg"
STEPS, GLOBAL_BATCH, LAST = 120, 8, 30

RECIPE = """
model: {family: llama, hidden: 128, num_layers: 4, num_heads: 4, num_kv_heads: 4, ffn: 256, vocab: 256}
data: {sequence_length: 32}
training:
  optimizer: {lr: 2e-3}
  lr_schedule: {name: cosine, warmup: 20}
  steps: 120
device: cpu
"""

WAYS: dict[str, dict[str, Any]] = {
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
COLOURS = ("#000000", "#777777", "#0072b2", "#56b4e9", "#009e73", "#8a9a00", "#e69f00", "#cc79a7", "#d55e00", "#7a3db8")

WIDTH, HEIGHT, LEFT, TOP, GAP, WINDOW = 720, 240, 60, 24, 60, 20


def measure() -> dict[str, list[float]]:
    """Losses in every precision, from the same weights on the same tokens."""
    losses = {}
    for name, settings in WAYS.items():
        run = parse_spec(RECIPE, Run, [f"training.{key}={json.dumps(value)}" for key, value in settings.items()])
        model = resolve_model(run.model, base_dir=DOCS)
        sizes: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "micro_batch": GLOBAL_BATCH, "accumulation": 1}
        losses[name] = loss_curve(ResolvedRun(run=run, model=model, reasons={}, **sizes), STEPS)
        print(f"{name:<24}{losses[name][-1]:.4f}", flush=True)
    return losses


def smooth(values: list[float]) -> list[float]:
    """Means over the last `WINDOW` steps, as many as there are."""
    parts = [values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def draw(losses: dict[str, list[float]]) -> str:
    """Two panels: the losses, and their distance from bf16's."""
    beside = {
        name: smooth([a - b for a, b in zip(curve, losses["bf16"], strict=True)]) for name, curve in losses.items()
    }
    panels = [
        ("loss, nats per token", losses, [1, 2, 3, 4, 5, 6]),
        (f"loss less bf16's, mean of {WINDOW} steps", beside, [-0.3, -0.2, -0.1, 0, 0.1]),
    ]
    total = TOP + len(panels) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 220} {total}" font-family="sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (title, curves, ticks) in enumerate(panels):
        parts += _panel(title, curves, ticks, TOP + number * (HEIGHT + GAP))
    for number, (name, colour) in enumerate(zip(losses, COLOURS, strict=True)):
        y = TOP + 14 + 20 * number
        parts.append(f'<path d="M{WIDTH + 20} {y}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{WIDTH + 52}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(title: str, curves: dict[str, list[float]], ticks: list[float], top: int) -> list[str]:
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)

    def place(step: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT) * step / STEPS
        return f"{x:.1f},{top + HEIGHT * (high - value) / (high - low):.1f}"

    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>']
    for tick in (tick for tick in ticks if low <= tick <= high):
        x, y = place(0, tick).split(",")
        parts.append(f'<path d="M{x} {y}H{WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" dy="4">{tick:g}</text>')
    for step in range(0, STEPS + 1, 20):
        x, y = place(step, low).split(",")
        parts.append(f'<text x="{x}" y="{y}" text-anchor="middle" dy="18">{step}</text>')
    for colour, curve in zip(COLOURS, curves.values(), strict=True):
        points = " ".join(place(step, value) for step, value in enumerate(curve, start=1))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    return parts


def table(losses: dict[str, list[float]]) -> list[str]:
    """The mean loss of the last steps and its distance from bf16's, as Markdown."""
    means = {name: math.fsum(curve[-LAST:]) / LAST for name, curve in losses.items()}
    rows = (f"| {name} | {mean:.3f} | {mean - means['bf16']:+.4f} |" for name, mean in means.items())
    return [f"| precision | loss, mean of the last {LAST} steps | less bf16's |", "|---|---|---|", *rows]


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--measure" in sys.argv:
        DATA.write_text(json.dumps(measure()) + "\n")
    measured = json.loads(DATA.read_text())
    PLOT.write_text(draw(measured))
    print("\n".join(table(measured)))
