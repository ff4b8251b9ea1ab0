"""A plan as one offline HTML page of inline SVG, made from the plan's data."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from textwrap import wrap
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.schedule import build_schedule, nearest_microbatches
from meshwright.spec.timeline import StageCosts, simulate

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999", "#dddddd", "#ee8866")
WIDTH, LINE, BAR = 440, 14, 14
"""Sizes of a drawing, a line of text in it, and a bar; narrow enough for text to be readable on a phone."""
CHARACTERS = 56
"""Width of a line of text, in the widest of usual fonts."""
LEGEND = 4
"""Names in a row of a legend."""
IN_FP8 = "With training.precision=fp8"
IN_BF16 = "The low precision is emulated on this device, in fp32; with training.precision=bf16"
MOST_RANKS, MOST_STAGES = 64, 16
"""Limits of a rank map and a timeline."""

HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>Plan</title>
<style>body{font:15px system-ui,sans-serif;margin:1em auto;max-width:40em;padding:0 .7em;color:#222}
svg{width:100%;height:auto}text{font-size:12px;fill:#222}h2{font-size:1.1em;margin:1.6em 0 .3em}p{margin:.3em 0}</style>
</head><body>"""


def plan_page(facts: dict[str, Any]) -> str:
    """The page of `plan --html` from the facts of `plan --json`. Raises `UserError` if nothing fits."""
    chosen = facts["chosen"]
    if chosen is None:
        raise UserError("no layout that this version supports fits, so there is no page")
    shown = [chosen] + [found for found in facts["candidates"] if found["text"] != chosen["text"]]
    cluster = facts["cluster"]
    memory = [(f["text"], {kind: size / 1e9 for kind, size in f["memory"].items()}) for f in shown]
    parts = [
        f"<h1>{escape(cluster['name'])}</h1><p>Chosen: <b>{escape(chosen['strategy'])}</b>, {escape(chosen['text'])}. "
        f"{chosen['step_time']['value']:.3g} s a step, {chosen['mfu']:.0%} MFU; "
        f"binding: {escape(facts['binding'])}.{_in(facts['fp8'], IN_FP8)}{_in(facts['emulated'], IN_BF16)}</p>",
        "<h2>Memory per device, GB; the line marks its capacity</h2>",
        _bars(memory, chosen["memory_available"] / 1e9),
        "<h2>Seconds per step by cause</h2>",
        _bars([(f["text"], {k: v for k, v in f["step_parts"].items() if k != "recompute"}) for f in shown], None),
        "<h2>Frontier: memory against tokens per second and device</h2>",
        _frontier(shown),
        "<h2>The pipeline, first microbatches</h2>",
        _timeline(chosen["layout"]),
        "<h2>Ranks, one row per node; colour: pipeline stage; number: data-parallel group</h2>",
        _rank_map(chosen["layout"], cluster),
    ]
    return HEAD + "\n".join(parts) + "</body></html>\n"


def _in(other: dict[str, float] | None, words: str) -> str:
    """A sentence on the same layout in another precision; empty if it is not worth one."""
    return f" {words}: {other['step_time']:.3g} s a step, {other['saved']:.0%} less." if other else ""


def _bars(rows: Sequence[tuple[str, dict[str, float]]], limit: float | None) -> str:
    """Stacked bars, each below its label, with a legend, and a line at `limit`."""
    scale = (WIDTH - 45) / max([sum(parts.values()) for _, parts in rows] + ([limit] if limit else []))
    names, shapes = list(rows[0][1]), []
    for place, name in enumerate(names):
        x, y = place % LEGEND * WIDTH / LEGEND, LINE * (place // LEGEND)
        shapes += [
            f'<rect x="{x:.0f}" y="{y + 3}" width="9" height="9" fill="{COLOURS[place % len(COLOURS)]}"/>',
            f'<text x="{x + 12:.0f}" y="{y + 12}">{escape(name)}</text>',
        ]
    y = LINE * -(-len(names) // LEGEND) + 4
    for label, parts in rows:
        for line in wrap(label, CHARACTERS):
            y += LINE
            shapes.append(f'<text x="0" y="{y}">{escape(line)}</text>')
        x = 0.0
        for place, name in enumerate(names):
            wide = parts[name] * scale
            title = f"<title>{escape(name)} {parts[name]:.3g}</title>"
            shapes.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{wide:.1f}" height="{BAR}" '
                f'fill="{COLOURS[place % len(COLOURS)]}">{title}</rect>'
            )
            x += wide
        shapes.append(f'<text x="{x + 4:.1f}" y="{y + 15}">{sum(parts.values()):.3g}</text>')
        if limit is not None:
            at = f"{limit * scale:.1f}"
            shapes.append(f'<line x1="{at}" x2="{at}" y1="{y + 2}" y2="{y + BAR + 6}" stroke="#c00" stroke-width="2"/>')
        y += BAR + 10
    return _svg(y, shapes)


def _frontier(shown: Sequence[dict[str, Any]]) -> str:
    xs = [found["memory_total"]["value"] / 1e9 for found in shown]
    ys = [found["tokens_per_second_per_device"] for found in shown]
    left, right, low, high = 0.9 * min(xs), 1.05 * max(xs), 0.97 * min(ys), 1.02 * max(ys)

    def dots() -> Iterator[str]:
        for place, (found, x, y) in enumerate(zip(shown, xs, ys, strict=True)):
            across = 60 + (x - left) / (right - left) * (WIDTH - 90)
            down = 200 - (y - low) / (high - low) * 180
            title = f"<title>{escape(found['text'])}: {x:.1f} GB, {y:.0f}</title>"
            fill = COLOURS[0] if place else COLOURS[1]
            yield f'<circle cx="{across:.0f}" cy="{down:.0f}" r="6" fill="{fill}">{title}</circle>'
        yield f'<text x="0" y="20">{high:.0f}</text><text x="0" y="205">{low:.0f}</text>'
        yield f'<text x="60" y="222">{left:.0f} GB</text><text x="{WIDTH - 60}" y="222">{right:.0f} GB</text>'

    return _svg(230, dots())


def _timeline(layout: dict[str, Any]) -> str:
    ranks = layout.get("pp", 1)
    if ranks == 1:
        return "<p>One stage: there is no pipeline.</p>"
    if ranks > MOST_STAGES:
        return f"<p>{ranks} stages are too many to draw.</p>"
    name, chunks = layout.get("schedule", "1f1b"), layout.get("stages_per_rank", 1)
    count = nearest_microbatches(name, ranks, 2 * ranks, chunks)
    schedule = build_schedule(name, ranks=ranks, microbatches=count, stages_per_rank=chunks)
    timeline = simulate(schedule, StageCosts.equal(schedule.num_stages))
    scale = WIDTH / timeline.duration

    def boxes() -> Iterator[str]:
        for rank, spans in enumerate(timeline.ranks):
            for span in spans:
                fill = COLOURS[0] if span.action.kind == "F" else COLOURS[3]
                yield (
                    f'<rect x="{span.start * scale:.1f}" y="{rank * 16}" width="{(span.end - span.start) * scale:.1f}" '
                    f'height="14" fill="{fill}" stroke="#fff" stroke-width=".5"><title>{span.action}</title></rect>'
                )

    return _svg(16 * ranks, boxes())


def _rank_map(layout: dict[str, Any], cluster: dict[str, Any]) -> str:
    per_node, inner = cluster["per_node"], layout.get("cp", 1) * layout.get("tp", 1)
    dp = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    devices = min(cluster["devices"], MOST_RANKS)

    wide = min(40, WIDTH / per_node)

    def cells() -> Iterator[str]:
        for rank in range(devices):
            x, y = wide * (rank % per_node), 26 * (rank // per_node)
            stage, group = rank // (dp * inner), rank // inner % dp
            fill = COLOURS[stage % len(COLOURS)]
            title = f"<title>rank {rank}: stage {stage}, data {group}, tp x cp {rank % inner}</title>"
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{0.93 * wide:.1f}" height="23" fill="{fill}" opacity=".7">'
                f"{title}</rect>"
            )
            if wide >= 20:
                yield f'<text x="{x + wide / 4:.1f}" y="{y + 15}">{group}</text>'

    more = f"<p>The first {devices} of {cluster['devices']} ranks.</p>" if devices < cluster["devices"] else ""
    return _svg(26 * -(-devices // per_node), cells()) + more


def _svg(height: float, shapes: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(shapes)}</svg>'
