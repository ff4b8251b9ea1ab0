"""Trains one small model under ten layouts and draws their losses: `python docs/plot_loss_curves.py [--measure]`.

With `--measure` it trains (minutes) and writes docs/loss-curves.json; it always writes docs/loss-curves.svg from that.
"""

import argparse
import json
import math
from pathlib import Path

from meshwright.families import resolve_model
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import loss_curve
from meshwright.testing.ranks import RankPool

DOCS = Path(__file__).parent
DATA, PLOT = DOCS / "loss-curves.json", DOCS / "loss-curves.svg"
STEPS, GLOBAL_BATCH, MICRO_BATCH = 100, 8, 2

RECIPE = """
model: {family: llama, hidden: 32, num_layers: 4, num_heads: 4, num_kv_heads: 4, ffn: 64, vocab: 256}
data: {sequence_length: 32}
training:
  precision: fp32
  optimizer: {lr: 2e-3}
  lr_schedule: {name: constant, warmup: 20}
device: cpu
"""

LAYOUTS = {
    "one process": {},
    "DDP": {"dp_replicate": 4},
    "ZeRO-1": {"dp_shard": 4, "zero": 1},
    "ZeRO-2": {"dp_shard": 2, "zero": 2},
    "ZeRO-3": {"dp_shard": 4},
    "hybrid": {"dp_replicate": 2, "dp_shard": 2},
    "tensor": {"tp": 4},
    "context": {"cp": 4, "cp_method": "ring"},
    "pipeline": {"pp": 4},
    "dp x cp x tp": {"dp_shard": 2, "cp": 2, "tp": 2},
}
COLOURS = ("#000000", "#0072b2", "#56b4e9", "#009e73", "#8a9a00", "#e69f00", "#d55e00", "#cc79a7", "#7a3db8", "#777777")

WIDTH, HEIGHT, LEFT, TOP, GAP = 760, 260, 60, 24, 60


def measure() -> dict[str, list[float]]:
    """Losses under every layout."""
    losses, ranks = {}, RankPool()
    for name, degrees in LAYOUTS.items():
        layout = LayoutSpec.model_validate(degrees)
        run = parse_spec(RECIPE, Run, [f"layout={json.dumps(degrees)}"])
        resolved = ResolvedRun(
            run=run,
            model=resolve_model(run.model, base_dir=DOCS),
            global_batch=GLOBAL_BATCH,
            micro_batch=MICRO_BATCH,
            accumulation=GLOBAL_BATCH // MICRO_BATCH // layout.data_parallel,
            stage_layers=(1, 1, 1, 1) if layout.pp == 4 else (),
            reasons={},
        )
        losses[name] = ranks.run(layout.world_size, loss_curve, resolved, STEPS, timeout=550)[0]
        print(name, losses[name][-1], flush=True)
    ranks.close()
    return losses


def draw(losses: dict[str, list[float]]) -> str:
    """Two panels: the losses, and how far each is from one process's."""
    alone = losses["one process"]
    panels = [
        ("loss, nats per token", losses, lambda loss: loss, [1, 2, 3, 4, 5, 6, 7]),
        (
            "relative distance from one process",
            {
                name: [abs(a - b) / b for a, b in zip(curve, alone, strict=True)]
                for name, curve in losses.items()
                if name != "one process"
            },
            lambda distance: math.log10(max(distance, 1e-9)),
            [1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4],
        ),
    ]
    total = TOP + len(panels) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 190} {total}" font-family="sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="white"/>'
    ]
    colours = dict(zip(losses, COLOURS, strict=True))
    for number, (title, curves, scale, ticks) in enumerate(panels):
        parts += _panel(title, curves, scale, ticks, colours, TOP + number * (HEIGHT + GAP))
    for number, (name, colour) in enumerate(colours.items()):
        y = TOP + 14 + 20 * number
        parts.append(
            f'<line x1="{WIDTH + 20}" x2="{WIDTH + 44}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{WIDTH + 52}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(title, curves, scale, ticks, colours, top) -> list[str]:
    """One panel; `scale` maps a value to what its height is proportional to."""
    values = [scale(value) for curve in curves.values() for value in curve]
    low, high = math.floor(min(values)), math.ceil(max(values))

    def place(step: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT) * step / STEPS
        return f"{x:.1f},{top + HEIGHT * (high - value) / (high - low):.1f}"

    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>']
    for tick in ticks:
        if low <= scale(tick) <= high:
            x, y = place(0, scale(tick)).split(",")
            parts.append(f'<line x1="{x}" x2="{WIDTH}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" dy="4">{tick:g}</text>')
    for step in range(0, STEPS + 1, 20):
        x, y = place(step, low).split(",")
        parts.append(f'<text x="{x}" y="{y}" text-anchor="middle" dy="18">{step}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(place(step, scale(value)) for step, value in enumerate(curve, start=1))
        # Curves on one another: the first is widest, so that it shows behind the others.
        width = 1.2 + 0.6 * (len(curves) - number) if scale(1.0) == 1.0 else 1.4
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="{width:.1f}" '
            'stroke-linejoin="round"/>'
        )
    return parts


def page_facts(losses: dict[str, list[float]]) -> tuple[float, str]:
    """The largest relative distance from one process, and whose."""
    alone = losses["one process"]
    distance = {n: max(abs(a - b) / b for a, b in zip(c, alone, strict=True)) for n, c in losses.items()}
    worst = max(distance, key=lambda name: distance[name])
    return distance[worst], worst


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--measure", action="store_true", help="train anew first")
    arguments = words.parse_args()
    assert all(LayoutSpec.model_validate(layout) for layout in LAYOUTS.values())
    if arguments.measure:
        DATA.write_text(json.dumps(measure()) + "\n")
    measured = json.loads(DATA.read_text())
    PLOT.write_text(draw(measured))
    print("largest relative distance: {:.1e}, {}".format(*page_facts(measured)))
