"""The charts of a page: which figures of the runs share one, its title, section, unit and lines."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Data = dict[str, Any]

SECTIONS = ("Loss", "Training", "More")


def chart(section: str, title: str, unit: str, *lines: tuple[str, str, str], **more: Any) -> Data:
    """A chart. `lines`: kind of record, column, and name of each. `unit`: number, share, bytes, seconds or rate."""
    named = [{"table": table, "column": column, "name": name} for table, column, name in lines]
    return {"section": section, "title": title, "unit": unit, "lines": named, **more}


KNOWN = (
    chart(
        "Loss",
        "Loss",
        "number",
        ("step", "loss", "training"),
        ("evaluation", "loss", "held out"),
        smooth=True,
        wide=True,
    ),
    chart("Loss", "Held-out loss", "number", ("evaluation", "loss", "held out"), ("ema", "loss", "averaged weights")),
    chart("Training", "Learning rate", "number", ("step", "lr", "")),
    chart("Training", "Gradient norm", "number", ("step", "gnorm", ""), smooth=True, log=True),
    chart("Training", "Load of the busiest expert", "number", ("step", "expert_load", ""), smooth=True),
    chart("Training", "Gradient noise scale, sequences", "number", ("noise_scale", "sequences", "")),
    chart("Training", "Tokens per second", "rate", ("step", "tokens_per_s", ""), planned="tokens_per_s"),
    chart("Training", "Model FLOPs utilisation", "share", ("step", "mfu", "")),
    chart(
        "Training",
        "Step time",
        "seconds",
        ("step", "step_time", "step"),
        ("step", "data_time", "data"),
        planned="step_time",
    ),
    chart("Training", "Peak memory of a rank", "bytes", ("step", "mem", ""), planned="memory"),
)
HIDDEN = {
    "step": {"tokens_per_s_per_rank", "trained_per_s_per_rank"},
    "evaluation": {"perplexity"},
    "ema": {"perplexity"},
    "noise_scale": {"terms", "gradient_square", "trace"},
}
"""Columns that follow from others."""
AXES = ("step", "tokens", "time", "flops")


def charts_of(runs: Sequence[Data]) -> list[Data]:
    """The charts for which a run has figures, in order."""
    present: dict[str, dict[str, None]] = {}
    for run in runs:
        for kind, columns in run["tables"].items():
            present.setdefault(kind, {}).update(dict.fromkeys(columns))
    known = list(_present(KNOWN, present))
    used = {(line["table"], line["column"]) for one in known for line in one["lines"]}
    sources = [name for name in present.get("evaluation", {}) if name.startswith("loss/")]
    if len(sources) > 1:
        lines = [("evaluation", name, name.removeprefix("loss/")) for name in sources]
        known.insert(_end_of(known, "Loss"), chart("Loss", "Held-out loss by source", "number", *lines))
    rest = [
        (kind, name)
        for kind, columns in present.items()
        for name in columns
        if (kind, name) not in used and name not in (*AXES, *sources, *HIDDEN.get(kind, ()))
        if not name.endswith("_stderr") and not (kind == "ema" and name.startswith("loss/"))
    ]
    charts = known + [_other(kind, name) for kind, name in rest]
    charts.sort(key=lambda one: SECTIONS.index(one["section"]))
    return [one | {"id": f"chart-{number}"} for number, one in enumerate(charts)]


def _present(charts: Iterable[Data], present: dict[str, dict[str, None]]) -> Iterator[Data]:
    """The charts, with the lines that exist."""
    for one in charts:
        lines = [line for line in one["lines"] if line["column"] in present.get(line["table"], {})]
        if lines:
            yield one | {"lines": lines}


def _end_of(charts: Sequence[Data], section: str) -> int:
    return sum(one["section"] == section for one in charts)


def _other(kind: str, name: str) -> Data:
    section = {"evaluation": "Loss", "tasks": "Loss"}.get(kind, "More")
    title = name if kind in ("evaluation", "tasks", "step") else f"{kind}: {name}"
    return chart(section, title, "number", (kind, name, ""))
