"""A plan as one offline HTML page, made from the plan's data."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from meshwright.pages.drawing import SIDE, Scale, box, colour, dot, legend, plot, stacked_bars
from meshwright.pages.shell import header, page, section
from meshwright.spec.errors import UserError
from meshwright.spec.schedule import build_schedule, nearest_microbatches
from meshwright.spec.timeline import StageCosts, simulate

IN_FP8 = "With training.precision=fp8"
IN_BF16 = "The low precision is emulated on this device, in fp32; with training.precision=bf16"
MAP = "A row is a node; colour: pipeline stage; number: data-parallel group."
KINDS = {"F": 0, "B": 1, "I": 1, "W": 2}
"""Colours of the actions of a pipeline."""
MOST_RANKS, MOST_STAGES = 64, 16
"""Limits of a rank map and a timeline."""


def plan_page(facts: dict[str, Any]) -> str:
    """The page of `plan --html` from the facts of `plan --json`. Raises `UserError` if nothing fits."""
    chosen = facts["chosen"]
    if chosen is None:
        raise UserError("no layout that this version supports fits, so there is no page")
    shown = [chosen] + [found for found in facts["candidates"] if found["text"] != chosen["text"]]
    cluster = facts["cluster"]
    about = (
        f"Chosen: <b>{escape(chosen['strategy'])}</b>, {escape(chosen['text'])}. "
        f"{chosen['step_time']['value']:.3g} s a step, {chosen['mfu']:.0%} MFU; "
        f"binding: {escape(facts['binding'])}.{_in(facts['fp8'], IN_FP8)}{_in(facts['emulated'], IN_BF16)}"
    )
    memory = [(found["text"], found["memory"]) for found in shown]
    seconds = [(f["text"], {k: v for k, v in f["step_parts"].items() if k != "recompute"}) for f in shown]
    bars = stacked_bars(memory, _gigabytes, limit=chosen["memory_available"])
    body = [
        header(cluster["name"], about),
        section("Memory per device", bars, about="The red mark is the device's capacity."),
        section("Time per step by cause", stacked_bars(seconds, lambda value: f"{value:.3g} s")),
        section("Memory against speed", _frontier(shown), about="Tokens per second and device; point at a layout."),
        section("The pipeline, first microbatches", _timeline(chosen["layout"])),
        section("Ranks", _rank_map(chosen["layout"], cluster), about=MAP),
    ]
    return page(f"{cluster['name']} - plan", body)


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def _in(other: dict[str, float] | None, words: str) -> str:
    """A sentence on the same layout in another precision; empty if it is not worth one."""
    return f" {words}: {other['step_time']:.3g} s a step, {other['saved']:.0%} less." if other else ""


def _frontier(shown: Sequence[dict[str, Any]]) -> str:
    points = [(found["memory_total"]["value"], found["tokens_per_second_per_device"]) for found in shown]
    x = Scale.around((size for size, _ in points), _gigabytes, room=0.08)
    y = Scale.around((speed for _, speed in points), lambda speed: f"{speed:,.0f}", room=0.08)
    tips = (
        f"{found['text']}\n{_gigabytes(size)}, {speed:,.0f}" for found, (size, speed) in zip(shown, points, strict=True)
    )
    dots = [
        dot(x, y, point, 0 if place else 1, tip) for place, (point, tip) in enumerate(zip(points, tips, strict=True))
    ]
    names = legend({"chosen": colour(1), "others": colour(0)})
    return names + plot(x, y, (), dots="".join(reversed(dots)))


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
    x, height = Scale(0.0, timeline.duration), 1 / len(timeline.ranks)

    def boxes() -> Iterator[str]:
        for rank, spans in enumerate(timeline.ranks):
            for span in spans:
                rows = (height * (rank + 0.06), height * (rank + 0.94))
                fill = colour(KINDS.get(span.action.kind, 2))
                yield box(x, (span.start, span.end), fill, rows=rows, tip=f"stage {rank}: {span.action}")

    names = {"forward": colour(0), "backward": colour(1)}
    if any(span.action.kind not in ("F", "B") for spans in timeline.ranks for span in spans):
        names["weight gradients"] = colour(2)
    view = f'viewBox="0 0 {SIDE:.0f} {SIDE:.0f}" preserveAspectRatio="none"'
    svg = (
        f'<svg {view} role="img" style="width:100%;height:{1.2 * len(timeline.ranks):.1f}rem">{"".join(boxes())}</svg>'
    )
    return legend(names) + svg


def _rank_map(layout: dict[str, Any], cluster: dict[str, Any]) -> str:
    per_node, inner = cluster["per_node"], layout.get("cp", 1) * layout.get("tp", 1)
    dp = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    devices = min(cluster["devices"], MOST_RANKS)

    def cells() -> Iterator[str]:
        for rank in range(devices):
            stage, group = rank // (dp * inner), rank // inner % dp
            tip = f"rank {rank}: stage {stage}, data {group}, tp x cp {rank % inner}"
            yield f'<span style="--of:{colour(stage)}" data-tip="{tip}">{group}</span>'

    more = f"<p>The first {devices} of {cluster['devices']} ranks.</p>" if devices < cluster["devices"] else ""
    columns = f"--columns:{min(per_node, devices)}"
    return f'<div class="ranks" style="{columns}">{"".join(cells())}</div>{more}'
