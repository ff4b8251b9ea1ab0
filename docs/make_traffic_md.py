"""Writes docs/traffic.md, what every layout exchanges in a step: run it after changing a formula (a test notices)."""

from pathlib import Path

from meshwright.families import resolve_model
from meshwright.plan.traffic import predict_traffic
from meshwright.spec.data import DataSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import TrainingSpec

PAGE = Path(__file__).with_name("traffic.md")
MODEL, LENGTH, SEQUENCES, MICRO_BATCH = "llama-3-8b", 8192, 64, 1

LAYOUTS = (
    {"dp_replicate": 8},
    {"dp_shard": 8, "zero": 1},
    {"dp_shard": 8, "zero": 2},
    {"dp_shard": 8},
    {"dp_replicate": 2, "dp_shard": 4},
    {"tp": 8},
    {"dp_shard": 4, "tp": 2},
    {"cp": 8, "zero": 3, "cp_method": "ring"},
    {"cp": 8, "zero": 3, "cp_method": "all_gather"},
    {"cp": 8, "zero": 3, "cp_method": "ulysses"},
    {"dp_shard": 2, "cp": 2, "tp": 2},
)

BEGIN = f"""\
# What every layout exchanges in a step

GB (10**9 bytes) that pass through each kind of collective on one rank of 8, in one optimizer step of {MODEL}:
{SEQUENCES} sequences of {LENGTH} tokens, {MICRO_BATCH} at a time, bf16, gradients reduced in fp32, no recomputation.
A gather counts what it makes, a scatter what it is given, an all-reduce what is reduced, a message what goes out; in a
ring of n ranks (n - 1) / n of a gather or scatter is on a rank's wire, and twice that of an all-reduce.

The figures come from the formulas in `src/meshwright/plan/traffic.py`. `tests/test_traffic.py` runs the layouts of the
equivalence tests, counts every collective by kind, axis and bytes, and holds the formulas to the count, to the byte.
"""


def resolved(layout: LayoutSpec) -> ResolvedRun:
    """The run of a row."""
    fields = ModelFields(name=MODEL)
    per_rank = SEQUENCES // layout.data_parallel
    return ResolvedRun(
        run=Run(model=fields, data=DataSpec(sequence_length=LENGTH), training=TrainingSpec(), layout=layout),
        model=resolve_model(fields, base_dir=Path()),
        global_batch=SEQUENCES,
        micro_batch=MICRO_BATCH,
        accumulation=per_rank // MICRO_BATCH,
        reasons={},
    )


def page() -> str:
    """The whole page."""
    rows = [predict_traffic(resolved(LayoutSpec.model_validate(layout))) for layout in LAYOUTS]
    for row in rows:
        del row["all-reduce", "world"], row["receive", "cp"]
    columns = sorted({key for row in rows for key in row}, key=lambda key: (key[1], key[0]))
    lines = [
        "| layout | " + " | ".join(f"{kind}, `{axis}`" for kind, axis in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for layout, row in zip(LAYOUTS, rows, strict=True):
        name = ", ".join(f"{axis}: {degree}" for axis, degree in layout.items())
        cells = [f"{row[column] / 1e9:,.1f}" if row[column] else "" for column in columns]
        lines.append(f"| `{{{name}}}` | " + " | ".join(cells) + " |")
    return BEGIN + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
