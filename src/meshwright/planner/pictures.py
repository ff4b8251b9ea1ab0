"""Drawings of a planned layout: its step over time, its ranks on the machines, and their traffic."""

from collections.abc import Iterator
from html import escape

from meshwright.pages.drawing import Scale, box, colour, lanes, legend, stacked_bars
from meshwright.pages.shell import section
from meshwright.planner.figures import gigabytes, seconds
from meshwright.planner.links import AxisTraffic, link_traffic
from meshwright.planner.query import Planned
from meshwright.planner.timeline import MOST_RANKS, StepTimeline, step_timeline
from meshwright.predict.candidate import Candidate
from meshwright.predict.explain import WORTH_A_WORD
from meshwright.predict.recipe import planned_run
from meshwright.spec.errors import UserError

KINDS = {
    "forward": (0, 0.04),
    "backward": (1, 0.04),
    "weights": (2, 0.04),
    "recompute": (3, 0.18),
    "communication": (5, 0.3),
    "update": (6, 0.18),
}
"""Kind of a span -> its colour, and the part of its lane that it leaves free above and below."""
NAMES = {"weights": "gradients of weights", "recompute": "recomputation"}
PEERS = {"tp": 1, "cp": 2, "dp_shard": 0, "dp_replicate": 3, "pp": 6}
"""Axis -> the colour of the ranks that the one pointed at talks to along it; `plan.js` has the same."""
MOST_MACHINES = 32
"""Machines that are drawn."""


def timeline(chosen: Candidate) -> str:
    """The step over real seconds."""
    timeline = step_timeline(chosen)
    stages = chosen.job.layout.pp
    title = "The step over time" if stages == 1 else "The pipeline over time"
    if timeline is None:
        reason = (
            f"{stages} stages are too many to draw" if stages > MOST_RANKS else "a schedule of one's own is not drawn"
        )
        return section(title, f"<p>{reason[:1].upper()}{reason[1:]}.</p>")
    used = {span.kind for spans in timeline.ranks for span in spans}
    names = {NAMES.get(kind, kind): colour(number) for kind, (number, _) in KINDS.items() if kind in used}
    x = Scale(0.0, timeline.seconds, lambda value: seconds(value) if value else "0")
    lane = [f"stage {rank}" for rank in range(stages)] if stages > 1 else ["a rank"]
    each = 1.5 if stages <= 16 else 0.95
    if stages == 1:
        each = 2.6
    drawing = lanes(x, lane, _boxes(timeline, x), each=each, title="seconds of a step")
    return section(title, legend(names), drawing, about=escape(_about(timeline, chosen)))


def _about(timeline: StepTimeline, chosen: Candidate) -> str:
    """What is drawn."""
    words = f"All {timeline.of} microbatches" if timeline.of > 1 else "One microbatch"
    if timeline.microbatches < timeline.of:
        words = f"The first {timeline.microbatches} of {timeline.of} microbatches, then the end of the step"
    what = "every pipeline rank" if chosen.job.layout.pp > 1 else "a rank"
    planned, differs = chosen.time.total, ""
    if timeline.microbatches == timeline.of and abs(timeline.seconds / planned - 1) > WORTH_A_WORD:
        ends = seconds(timeline.seconds)
        differs = f" Pass by pass it ends after {ends}; the plan's formula says {seconds(planned)}."
    return (
        f"{words} on {what}, as predicted. Communication that computation hides takes no time of its own. Low boxes "
        f"are recomputation and communication that nothing hides. Point at a box.{differs}"
    )


def _boxes(timeline: StepTimeline, x: Scale) -> Iterator[str]:
    height = 1 / len(timeline.ranks)
    for rank, spans in enumerate(timeline.ranks):
        for span in spans:
            if span.end <= span.start:
                continue
            number, free = KINDS[span.kind]
            rows = (height * (rank + free), height * (rank + 1 - free))
            tip = f"{span.about}\n{seconds(span.end - span.start)}, from {seconds(span.start)} to {seconds(span.end)}"
            yield box(x, (span.start, span.end), colour(number), rows=rows, tip=tip)


def machines(planned: Planned) -> str:
    """The ranks on their machines, and the bytes on each kind of link."""
    chosen = planned.plan.chosen
    if chosen is None:
        return ""
    cluster, layout = chosen.cluster, chosen.job.layout
    count = -(-cluster.devices // cluster.per_node)
    shown = min(count, MOST_MACHINES)
    degrees = " ".join(
        f'data-{axis.replace("_", "-")}="{getattr(layout, axis)}"' for axis in ("dp_replicate", "dp_shard", "cp", "tp")
    )
    cells = "".join(_machine(chosen, number) for number in range(shown))
    more = f"<p>The first {shown} of {count:,} machines.</p>" if shown < count else ""
    words = (
        f"{count:,} machine{'s' if count > 1 else ''} of {min(cluster.per_node, cluster.devices)}. "
        + ("Colour: pipeline stage. " if layout.pp > 1 else "")
        + "Numbers are ranks. Point at one to see whom it talks to."
    )
    groups = legend({axis: colour(number) for axis, number in PEERS.items() if getattr(layout, axis) > 1})
    return section(
        "Ranks and traffic",
        f'<div class="peers">{groups}</div><div class="machines" {degrees} data-pp="{layout.pp}">{cells}</div>{more}',
        f"<h3>Bytes that a device sends in a step</h3>{_traffic(planned)}",
        about=words,
    )


def _machine(chosen: Candidate, number: int) -> str:
    layout, cluster = chosen.job.layout, chosen.cluster
    inner = layout.cp * layout.tp
    first = number * cluster.per_node
    ranks = range(first, min(cluster.devices, first + cluster.per_node))

    def cell(rank: int) -> str:
        stage = rank // (layout.data_parallel * inner)
        return f'<span data-rank="{rank}" style="--of:{colour(stage)}">{rank}</span>'

    cells = "".join(map(cell, ranks))
    columns = f"--columns:{min(8, len(ranks))}"
    return f'<div class="machine"><b>{number}</b><div class="ranks" style="{columns}">{cells}</div></div>'


def _traffic(planned: Planned) -> str:
    chosen = planned.plan.chosen
    assert chosen is not None
    cluster = chosen.cluster
    if chosen.job.layout.alone:
        return "<p>None: one device trains alone.</p>"
    try:
        traffic = link_traffic(planned_run(planned.recipe, planned.plan), planned.plan.case.spec, chosen)
    except UserError as error:
        return f"<p>{escape(str(error))}</p>"
    traffic = sorted((one for one in traffic if one.link + one.network > 0), key=lambda one: -(one.link + one.network))
    rows = [(_title(one), {"inside a machine": one.link, "over the network": one.network}) for one in traffic]
    link, network = (sum(getattr(one, kind) for one in traffic) for kind in ("link", "network"))
    total = f"{seconds(link / cluster.link_gb_s / 1e9)} at {cluster.link_gb_s:g} GB/s inside a machine"
    if network:
        total += f", {seconds(network / cluster.network_gb_s / 1e9)} at {cluster.network_gb_s:g} GB/s over the network"
    words = (
        f"<p>At the links' own rates all of this takes {total}; the plan counts {seconds(chosen.time.exposed)} for "
        "communication that computation does not hide.</p>"
    )
    return stacked_bars(rows, gigabytes) + words


def _title(one: AxisTraffic) -> str:
    group = one.group
    where = "in one machine" if group.domains == 1 else f"{group.local} in a machine"
    return f"{one.title}: {group.ranks:,} ranks, {where}"
