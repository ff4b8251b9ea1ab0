"""Writes docs/rehearsal.md, the planner beside the rehearsal: `python docs/make_rehearsal_md.py [--measure]`.

With `--measure` it rehearses every cell (minutes) and writes docs/rehearsal.json; it always writes the page from that
and from what the planner says now.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.plan.blueprint import blueprint
from meshwright.plan.engine import engine_job
from meshwright.plan.machine import Machine
from meshwright.plan.memory import stage_memory
from meshwright.plan.traffic import predict_traffic
from meshwright.rehearse.world import rehearse, typical_ranks
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run

DOCS = Path(__file__).parent
PAGE, DATA = DOCS / "rehearsal.md", DOCS / "rehearsal.json"
MACHINE = Machine(kind="cuda", name="H100", devices=8, memory_bytes=80 * 2**30)

MODELS: dict[str, dict[str, Any]] = {
    "1B": {"name": "llama-3.2-1b", "num_layers": 4},
    "8B": {"name": "llama-3-8b", "num_layers": 4},
    "gpt2": {"name": "gpt2-medium", "num_layers": 6},
}
"""Published widths with fewer layers, which repeat themselves."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"dp_replicate": 8},
    "ZeRO-1": {"dp_shard": 8, "zero": 1},
    "ZeRO-2": {"dp_shard": 8, "zero": 2},
    "ZeRO-3": {"dp_shard": 8},
    "hybrid": {"dp_replicate": 4, "dp_shard": 8},
    "TP": {"tp": 4, "dp_replicate": 2},
    "TP over key heads": {"tp": 16, "dp_shard": 2},
    "TP + ZeRO-3": {"tp": 4, "dp_shard": 4},
    "CP": {"cp": 4, "dp_shard": 2},
    "CP + TP": {"cp": 2, "tp": 2, "dp_shard": 2},
    "PP": {"pp": 2, "dp_replicate": 2},
    "PP + ZeRO-1 + TP": {"pp": 2, "dp_shard": 2, "zero": 1, "tp": 2},
    "PP interleaved": {"pp": 2, "schedule": "interleaved-1f1b", "dp_shard": 2, "zero": 1},
}
POLICIES = ("none", "selective", "full")


def cells() -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """(model, layout, name of the layout, recomputation): policies take turns, all on one layout."""
    for turn, model in enumerate(MODELS):
        for place, (name, layout) in enumerate(LAYOUTS.items()):
            if model == "gpt2" and layout.get("tp", 1) > 4:
                continue
            yield model, layout, name, POLICIES[(turn + place) % 3]
    for policy in POLICIES:
        yield "1B", LAYOUTS["ZeRO-3"], "ZeRO-3", policy


def resolved_cell(model: str, layout: dict[str, Any], policy: str) -> ResolvedRun:
    """A cell as a run: 2048 tokens a sequence (1024 of GPT-2), four microbatches of one sequence, bf16."""
    data_parallel = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    training = {"global_batch": 4 * data_parallel, "micro_batch": 1, "precision": "bf16", "recompute": policy}
    length = 1024 if model == "gpt2" else 2048
    run = {"model": MODELS[model], "layout": layout, "training": training, "data": {"sequence_length": length}}
    return resolve_run(Run.model_validate(run), base_dir=DOCS, machine=MACHINE)


def planned_bytes(resolved: ResolvedRun, rank: int) -> float:
    """Bytes that the planner gives a rank at its peak, without what an allocator and libraries add."""
    layout = resolved.run.layout
    job = engine_job(resolved.run, blueprint(resolved.model), global_batch=resolved.global_batch, micro_batch=1)
    return stage_memory(job, rank // (layout.world_size // layout.pp)).allocated


def sent_bytes(traffic: list[dict[str, Any]]) -> int:
    """Bytes of all collectives together."""
    return sum(entry["bytes"] for entry in traffic)


def planned_traffic(resolved: ResolvedRun) -> int | None:
    """The same by the planner's formulas; None where they do not cover the layout."""
    try:
        return sum(predict_traffic(resolved).values())
    except ValueError:
        return None


def measure() -> list[dict[str, Any]]:
    """Rehearse every cell: of every rank its peak, and what the first sends."""
    rows = []
    for model, layout, name, policy in cells():
        resolved = resolved_cell(model, layout, policy)
        reports = rehearse(resolved, typical_ranks(resolved.run.layout), on_gpu=True)
        rows.append(
            {
                "model": model,
                "layout": layout,
                "name": name,
                "recompute": policy,
                "ranks": {str(report["rank"]): report["peak"] for report in reports},
                "kinds": {str(report["rank"]): report["peak_by_kind"] for report in reports},
                "traffic": reports[0]["traffic"],
            }
        )
        planned = [planned_bytes(resolved, report["rank"]) / report["peak"] - 1 for report in reports]
        print(model, name, policy, " ".join(f"{off:+.1%}" for off in planned), flush=True)
    return rows


BEGIN = """\
# The planner beside the rehearsal

`meshwright rehearse` runs the program that trains and counts every tensor's storage and every collective's bytes;
`meshwright plan` computes both from the parameter table. Bytes that live at the peak, without what an allocator and
libraries add, of the rank that is furthest off; and what the first rank sends in a step. Published widths with fewer
layers, which repeat themselves; bf16, one sequence of 2048 tokens (GPT-2: 1024) a microbatch, four microbatches.

| model | strategy | layout | recompute | rehearsed, MB | planned, MB | off | rehearsed sent, MB | planned |
|---|---|---|---|---|---|---|---|---|
"""


def page(rows: list[dict[str, Any]]) -> str:
    """The table, and its summary."""
    lines, worst = [], 0.0
    for row in rows:
        resolved = resolved_cell(row["model"], row["layout"], row["recompute"])
        planned = {rank: planned_bytes(resolved, int(rank)) for rank in row["ranks"]}
        rank = max(planned, key=lambda rank: abs(planned[rank] / row["ranks"][rank] - 1))
        off = planned[rank] / row["ranks"][rank] - 1
        worst = max(worst, abs(off))
        sent, formula = sent_bytes(row["traffic"]), planned_traffic(resolved)
        agrees = "" if formula is None else "to the byte" if formula == sent else f"{formula / 1e6:,.1f}"
        cells = (
            row["model"],
            row["name"],
            "`" + json.dumps(row["layout"]).replace('"', "") + "`",
            row["recompute"],
            f"{row['ranks'][rank] / 1e6:,.0f}",
            f"{planned[rank] / 1e6:,.0f}",
            f"{off:+.1%}",
            f"{sent / 1e6:,.1f}",
            agrees,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return BEGIN + "\n".join(lines) + f"\n\nFurthest off: {worst:.1%}.\n"


if __name__ == "__main__":
    if "--measure" in sys.argv:
        DATA.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")
