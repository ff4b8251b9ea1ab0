"""Writes docs/rehearsal.md, the planner compared with the rehearsal: `python docs/make_rehearsal_md.py [--measure]`.

With `--measure` it rehearses every cell (minutes) and writes docs/rehearsal.json; it always writes the page from that
and from what the planner says now.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.machine import Machine
from meshwright.predict.blueprint import blueprint
from meshwright.predict.engine import engine_job
from meshwright.predict.memory import stage_memory
from meshwright.predict.traffic import predict_traffic
from meshwright.rehearse.world import rehearse, typical_ranks
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run

DOCS = Path(__file__).parent
PAGE, DATA = DOCS / "rehearsal.md", DOCS / "rehearsal.json"
MACHINE = Machine(kind="gpu", name="H100", devices=8, memory_bytes=80 * 2**30)

LENGTH: dict[str, Any] = {"sequence": 2048, "micro_batch": 1, "microbatches": 4}
MODELS: dict[str, dict[str, Any]] = {
    "1B": {"model": {"name": "llama-3.2-1b", "num_layers": 4}},
    "8B": {"model": {"name": "llama-3-8b", "num_layers": 4}},
    "GPT-2": {"model": {"name": "gpt2-medium", "num_layers": 6}, "sequence": 1024},
    "8B, long": {"model": {"name": "llama-3-8b", "num_layers": 4}, "sequence": 8192, "micro_batch": 4},
    "GPT-2, wide": {"model": {"name": "gpt2-medium", "num_layers": 6}, "sequence": 1024, "micro_batch": 64},
    "1B, once": {"model": {"name": "llama-3.2-1b", "num_layers": 4}, "microbatches": 1},
    "Qwen3": {"model": {"name": "qwen3-0.6b"}, "sequence": 4096, "microbatches": 8},
    "MoE": {"model": {"name": "qwen3-30b-a3b", "num_layers": 3}, "sequence": 4096},
    "Qwen3.5": {
        "model": {"name": "qwen3.5-0.8b", "num_layers": 4, "vocab": 32768},
        "sequence": 1024,
        "microbatches": 2,
    },
    "8B, LoRA": {"model": {"name": "llama-3-8b", "num_layers": 4}, "finetune": {"method": "lora", "rank": 16}},
    "1B, LoRA": {"model": {"name": "llama-3.2-1b"}, "finetune": {"method": "lora", "rank": 32}},
    "1B, LoRA, dropout": {"model": {"name": "llama-3.2-1b"}, "finetune": {"method": "lora", "dropout": 0.1}},
    "8B, QLoRA": {"model": {"name": "llama-3-8b"}, "sequence": 1024, "finetune": {"method": "qlora", "rank": 16}},
    "8B, QLoRA, long": {"model": {"name": "llama-3-8b"}, "sequence": 8192, "finetune": {"method": "qlora"}},
    **{
        f"1B, {recipe}": {"model": {"name": "llama-3.2-1b", "num_layers": 4}, "training": {"precision": recipe}}
        for recipe in ("mxfp8", "nvfp4")
    },
    **{
        f"1B, fp8 {recipe}": {
            "model": {"name": "llama-3.2-1b", "num_layers": 4},
            "training": {"precision": "fp8", "low_precision": {"recipe": recipe}},
        }
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "delayed")
    },
    "MoE, mxfp8": {
        "model": {"name": "qwen3-30b-a3b", "num_layers": 1},
        "microbatches": 1,
        "training": {"precision": "mxfp8"},
    },
    "MoE, fp8": {
        "model": {"name": "qwen3-30b-a3b", "num_layers": 1},
        "microbatches": 1,
        "training": {"precision": "fp8"},
    },
}
"""Published widths with fewer layers, which repeat themselves, and what differs from `LENGTH`."""

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
    "one device": {},
    "PP of 4": {"pp": 4, "dp_shard": 2, "zero": 1},
    "PP zero bubble": {"pp": 2, "schedule": "zbv", "dp_shard": 2, "zero": 1},
    "offload": {"dp_shard": 8, "offload": "cpu"},
    "EP": {"dp_shard": 8, "ep": 8},
    "EP + TP": {"dp_shard": 4, "tp": 2, "ep": 8, "zero": 1},
}
FEW_BYTES = 64
"""Of the sums that every step makes of counts of tokens, of the loss and for the gradient's norm, at most."""
POLICIES: dict[str, Any] = {
    "none": "none",
    "selective": "selective",
    "full": "full",
    "full:2/4": {"full": 2},
    "full:1,selective:2/4": {"full": 1, "selective": 2},
    "selective:4/6": {"selective": 4},
    "full:3/4": {"full": [2, 1]},
    "full:4/6": {"full": 1},
    "full:1,selective:1/3": {"full": 1, "selective": 1},
    "selective:2/4": {"selective": 2},
    "full:30,selective:2/32": {"full": 30, "selective": 2},
}
"""Recomputation by how it is shown: layers of all there are."""
WORDS = tuple(POLICIES)[:3]
FIRST = 13
"""Layouts that the first three models are all rehearsed in."""
MORE = {
    "8B, long": (
        ("ZeRO-3", 2),
        ("ZeRO-3", 1),
        ("TP + ZeRO-3", 0),
        ("TP + ZeRO-3", 2),
        ("CP", 2),
        ("PP", 2),
        ("ZeRO-1", 2),
    ),
    "GPT-2, wide": (("DDP", 0), ("ZeRO-3", 2), ("TP", 1)),
    "1B, once": (("DDP", 0), ("ZeRO-1", 1), ("ZeRO-2", 2), ("ZeRO-3", 0), ("one device", 0)),
    "Qwen3": (("one device", 1), ("ZeRO-2", 0), ("TP", 2), ("PP of 4", 0), ("PP zero bubble", 0)),
    "MoE": (("ZeRO-3", 0), ("EP", 0), ("EP", 2), ("EP + TP", 1)),
    "Qwen3.5": (("one device", 0), ("TP", 0), ("one device", 2), ("ZeRO-3", 1), ("TP", 1)),
    "8B, LoRA": (("DDP", 0), ("ZeRO-3", 2), ("TP", 0)),
    "1B, LoRA": (("one device", 0), ("one device", 1), ("ZeRO-2", 1), ("ZeRO-3", 0)),
    "1B, LoRA, dropout": (("one device", 0), ("one device", 1)),
    "8B, QLoRA": (("one device", 1), ("DDP", 2), ("ZeRO-3", 0)),
    "8B, QLoRA, long": (("one device", 2),),
    "1B, mxfp8": (("one device", 0), ("ZeRO-3", 1), ("TP", 0), ("CP", 2)),
    "1B, nvfp4": (("one device", 0), ("ZeRO-2", 2), ("TP", 1), ("PP", 0)),
    "1B, fp8 tensorwise": (("one device", 0), ("ZeRO-3", 1), ("TP", 0), ("PP zero bubble", 0)),
    "1B, fp8 rowwise": (("one device", 0), ("ZeRO-1", 1), ("TP", 2)),
    "1B, fp8 rowwise_with_gw_hp": (("one device", 0),),
    "1B, fp8 blockwise": (("one device", 0), ("ZeRO-3", 0), ("TP", 1)),
    "1B, fp8 delayed": (("one device", 0), ("ZeRO-3", 0), ("TP", 1)),
    "MoE, mxfp8": (("EP", 0),),
    "MoE, fp8": (("EP", 0), ("EP + TP", 1)),
}
SOME_LAYERS = (
    ("8B, long", "ZeRO-3", "full:2/4"),
    ("8B, long", "TP + ZeRO-3", "full:1,selective:2/4"),
    ("8B, long", "PP", "full:3/4"),
    ("8B", "CP + TP", "full:2/4"),
    ("GPT-2", "ZeRO-1", "selective:4/6"),
    ("GPT-2", "PP interleaved", "full:4/6"),
    ("MoE", "EP", "full:1,selective:1/3"),
    ("8B, LoRA", "one device", "selective:2/4"),
    ("8B, QLoRA", "one device", "full:30,selective:2/32"),
)
"""Cells in which layers recompute differently."""


def cells() -> Iterator[tuple[str, str, str]]:
    """(model, layout, recomputation): the first models in the first layouts, policies taking turns; and `MORE`."""
    for turn, model in enumerate(list(MODELS)[:3]):
        for place, layout in enumerate(list(LAYOUTS)[:FIRST]):
            if model != "GPT-2" or layout != "TP over key heads":
                yield model, layout, WORDS[(turn + place) % 3]
    for model, places in MORE.items():
        for layout, policy in places:
            yield model, layout, WORDS[policy]
    yield from SOME_LAYERS


def resolved_cell(model: str, layout: str, policy: str) -> ResolvedRun:
    """A cell as a run in bf16, or in the model's low precision beside it."""
    size, degrees = LENGTH | MODELS[model], LAYOUTS[layout]
    data_parallel = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    micro = size["micro_batch"]
    batches = {"global_batch": size["microbatches"] * micro * data_parallel, "micro_batch": micro}
    run = {
        "model": size["model"],
        "layout": degrees,
        "training": {"precision": "bf16", "recompute": POLICIES[policy]} | batches | size.get("training", {}),
        "data": {"sequence_length": size["sequence"]},
        "finetune": size.get("finetune"),
    }
    return resolve_run(Run.model_validate(run), base_dir=DOCS, machine=MACHINE)


def planned_bytes(resolved: ResolvedRun, rank: int) -> float:
    """Bytes that the planner gives a rank at its peak, without what an allocator and libraries add."""
    layout = resolved.run.layout
    job = engine_job(
        resolved.run, blueprint(resolved.model), global_batch=resolved.global_batch, micro_batch=resolved.micro_batch
    )
    return stage_memory(job, rank // (layout.world_size // layout.pp)).allocated


def sent_bytes(traffic: list[dict[str, Any]]) -> int:
    """Bytes of all collectives together."""
    return sum(entry["bytes"] for entry in traffic)


def is_exact(row: dict[str, Any], resolved: ResolvedRun) -> bool:
    """Whether the planner's traffic is what was sent but for counts, loss and norm, and every expert's load."""
    loads = 8 * resolved.model.num_experts * sum(map(resolved.model.is_moe, range(resolved.model.num_layers)))
    planned = planned_traffic(resolved)
    return planned is None or 0 <= sent_bytes(row["traffic"]) - planned - loads <= FEW_BYTES


def planned_traffic(resolved: ResolvedRun) -> int | None:
    """The same by the planner's formulas, counts and loss left out; None where they do not cover the run."""
    try:
        return sum(size for key, size in predict_traffic(resolved).items() if key != ("all-reduce", "world"))
    except ValueError:
        return None


def measure() -> None:
    """Rehearse every cell that the file lacks: of every stage's first rank its peak, and what the first rank sends."""
    rows = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else []
    known = {tuple(row["cell"]) for row in rows}
    for cell in cells():
        if cell in known:
            continue
        resolved = resolved_cell(*cell)
        reports = rehearse(resolved, typical_ranks(resolved.run.layout), on_gpu=True)
        peaks = {str(report["rank"]): report["peak"] for report in reports}
        rows.append({"cell": cell, "peaks": peaks, "traffic": reports[0]["traffic"]})
        print(*cell, " ".join(f"{planned_bytes(resolved, int(rank)) / peak - 1:+.1%}" for rank, peak in peaks.items()))
        DATA.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


BEGIN = """\
# The planner compared with the rehearsal

`meshwright rehearse` runs the training program as one rank of a large job and counts the bytes of every tensor and
every collective ([how](verbs.md#rehearse)); with `--deadlocks` it proves that no rank of the job waits for ever
([how](verbs.md#deadlocks)). `meshwright plan` computes both from the parameter table ([how](plan.md)).
This page compares two figures: tensor bytes at the peak, without the overhead of allocator and libraries, for the
pipeline stage that differs most; and the bytes that the first rank sends in a step. All cells are for GPUs, in bf16 or
in low precision beside bf16. A test compares the rehearsed peak with PyTorch's allocator in a real process (on a CPU,
with a GPU's operations): they agree within 2 %.

{cells} cells, {ranks} ranks. Memory differs by {worst:.1%} at worst and {median:.2%} in the median; the plan omits
tokens, masks, rotary tables, some messages in transit, and the working memory of quantization (which matters where the
peak is inside a block: pipeline stages without the loss, in low precision). Traffic agrees to the byte in {exact} of
{predicted} cells, except for the bytes after +, which are not compared: sums of 4 to 24 bytes for token counts, loss
and gradient norm, and 8 bytes for every expert's load. The planner leaves out the maxima that tensor-parallel ranks
exchange for scales in low precision, and delayed scales' maxima; such cells have no prediction.

| model | strategy | layout | recompute | rehearsed, MB | planned, MB | error | sent, MB | planned |
|---|---|---|---|---|---|---|---|---|
"""

MODELS_HEAD = """
| model | |
|---|---|
"""


def page() -> str:
    """The table, and its summary."""
    lines, errors, agreements = [], [], []
    for row in json.loads(DATA.read_text(encoding="utf-8")):
        model, layout, policy = row["cell"]
        resolved, peaks = resolved_cell(*row["cell"]), row["peaks"]
        off = {rank: planned_bytes(resolved, int(rank)) / peak - 1 for rank, peak in peaks.items()}
        rank = max(off, key=lambda rank: abs(off[rank]))
        errors += off.values()
        sent, formula = sent_bytes(row["traffic"]), planned_traffic(resolved)
        if formula is not None:
            agreements.append(is_exact(row, resolved))
        shown = "" if formula is None else f"{sent - formula:+d} B" if agreements[-1] else f"{formula / 1e6:,.1f}"
        cells = (
            model,
            layout,
            "`" + (", ".join(f"{axis}: {degree}" for axis, degree in LAYOUTS[layout].items()) or "{}") + "`",
            policy,
            f"{peaks[rank] / 1e6:,.0f}",
            f"{peaks[rank] * (1 + off[rank]) / 1e6:,.0f}",
            f"{off[rank]:+.2%}",
            f"{sent / 1e6:,.1f}",
            shown,
        )
        lines.append(f"| {' | '.join(cells)} |")
    begin = BEGIN.format(
        cells=len(lines),
        ranks=len(errors),
        worst=max(map(abs, errors)),
        median=statistics.median(map(abs, errors)),
        exact=sum(agreements),
        predicted=len(agreements),
    )
    models = [f"| {name} | {_described(size)} |" for name, size in MODELS.items()]
    return begin + "\n".join([*lines, MODELS_HEAD.rstrip("\n"), *models]) + "\n"


def _described(changes: dict[str, Any]) -> str:
    size = LENGTH | changes
    layers = f", {size['model']['num_layers']} layers" if "num_layers" in size["model"] else ""
    tuned = f", {size['finetune']['method']}" if "finetune" in size else ""
    return (
        f"{size['model']['name']}{layers}{tuned}; {size['microbatches']} microbatches of {size['micro_batch']} x "
        f"{size['sequence']} tokens"
    )


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--measure", action="store_true", help="measure anew first")
    if words.parse_args().measure:
        measure()
    PAGE.write_text(page(), encoding="utf-8")
