"""The page of a rehearsal: each rank's memory over a step and by kind, and what it sends."""

from collections.abc import Sequence
from html import escape
from typing import Any

from meshwright.pages.drawing import stacked_bars
from meshwright.pages.memory import FILLS, memory_picture, peak_tables, size
from meshwright.pages.shell import header, page, section, table, verdict

Report = dict[str, Any]


def rehearsal_page(reports: Sequence[Report], *, about: str, findings: Sequence[str], memory: int) -> str:
    """The page of `rehearse_rank`'s reports with timelines. `memory`: bytes of a device."""
    shortened = any(report["microbatches"]["rehearsed"] < report["microbatches"]["in_a_step"] for report in reports)
    order = "Allocations and releases in their order, without time: nothing is computed in a rehearsal."
    order += " Of equal microbatches in the middle of the step only some are rehearsed." if shortened else ""
    body = [
        header("Rehearsal", escape(about)),
        verdict(not findings, "Nothing would break.", [f"would break: {finding}" for finding in findings]),
        section(
            "At the peak, by rank",
            _bars(reports, "peak_by_kind", memory),
            about=f"The red mark is the device's memory, {size(memory)}.",
        ),
        *(section(f"Memory of {_name(report)} over a step", _timeline(report), about=order) for report in reports),
        section("Collectives by rank", _sent(reports), about="Bytes of whole tensors in one step."),
        section("Between steps, by rank", _bars(reports, "at_rest")),
        *map(_details, reports),
    ]
    return page("Rehearsal - meshwright", body, parts=("reports.css",))


def _timeline(report: Report) -> str:
    return memory_picture(report["timeline"]["points"], timed=False)


def _name(report: Report) -> str:
    place = ", ".join(f"{axis} {index}" for axis, index in report["place"].items())
    return f"rank {report['rank']}" + (f" ({place})" if place else "")


def _bars(reports: Sequence[Report], what: str, memory: float | None = None) -> str:
    rows = [(_name(report), {kind: float(report[what].get(kind, 0)) for kind in FILLS}) for report in reports]
    return stacked_bars(rows, size, limit=memory, fills=FILLS)


def _sent(reports: Sequence[Report]) -> str:
    """Bars of bytes by collective and axis, and their calls as a table."""
    rows = [
        (_name(report), {f"{one['kind']} over {one['axis']}": float(one["bytes"]) for one in report["traffic"]})
        for report in reports
    ]
    calls = [
        (_name(report), one["kind"], one["axis"], f"{one['calls']:,}", size(one["bytes"]))
        for report in reports
        for one in report["traffic"]
    ]
    if not calls:
        return "<p>No rank sends anything.</p>"
    return stacked_bars(rows, size) + table(("rank", "collective", "axis", "calls", "bytes"), calls)


def _details(report: Report) -> str:
    facts = [
        ("parameters", f"{report['parameters']:,}"),
        ("peak", f"{size(report['peak'])}, in the {report['peak_phase']}"),
        ("computes", f"{report['flops'] / 1e12:.3g} TFLOP a step"),
        ("checkpoint", f"{report['checkpoint']['pieces']} pieces, {size(report['checkpoint']['bytes'])}"),
    ]
    if report["host"]:
        facts.append(("in the host's memory", size(report["host"])))
    kinds, modules, largest = peak_tables(report["timeline"]["peak"])
    return section(
        f"What {_name(report)} holds",
        table((), facts),
        f"<h3>At the peak, by kind</h3>{kinds}",
        f"<details><summary>Activations by the module that made them</summary>{modules}</details>",
        f"<details><summary>The largest tensors</summary>{largest}</details>",
    )
