"""Writes docs/traffic.md, the bytes that every layout communicates in a step: run it after changing a formula."""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwright.families import resolve_model
from meshwright.predict.stages import balanced_stages, layer_costs
from meshwright.predict.traffic import predict_traffic
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
    {"dp_shard": 8, "quantized_weights": "int8", "quantized_gradients": "int4"},
    {"dp_replicate": 2, "dp_shard": 4},
    {"tp": 8},
    {"dp_shard": 4, "tp": 2},
    {"cp": 8, "zero": 3, "cp_method": "ring"},
    {"cp": 8, "zero": 3, "cp_method": "all_gather"},
    {"cp": 8, "zero": 3, "cp_method": "ulysses"},
    {"dp_shard": 2, "cp": 2, "tp": 2},
    {"pp": 8},
    {"pp": 4, "dp_shard": 2, "zero": 1},
    {"pp": 2, "dp_shard": 2, "tp": 2, "zero": 1},
)
EXPERTS = "mixtral-8x7b"
EXPERT_LAYOUTS = (
    {"dp_shard": 8},
    {"dp_shard": 8, "ep": 8},
    {"dp_shard": 8, "ep": 2},
    {"dp_shard": 4, "tp": 2, "ep": 8},
    {"pp": 2, "dp_shard": 4, "ep": 4, "zero": 1},
)

BEGIN = f"""\
# Traffic of every layout

GB (10**9 bytes) that pass through each kind of collective on one rank of 8, in one optimizer step of {MODEL}:
{SEQUENCES} sequences of {LENGTH} tokens, {MICRO_BATCH} at a time, bf16, gradients reduced in fp32, no recomputation. An
all-gather counts its output, a reduce-scatter its input, an all-reduce the reduced tensor, a message or an all-to-all
the sent bytes. In a ring of n ranks, each rank sends (n - 1) / n of the bytes of an all-gather or reduce-scatter, and
twice as much for an all-reduce.

The figures come from the formulas in `src/meshwright/predict/traffic.py`. `tests/test_traffic.py` runs the layouts of
the equivalence tests, counts every collective by kind, axis and bytes, and compares the formulas with the count, to
the byte.

For pipelines, the figures are for the first rank, which has the embedding and neither loss nor head.
"""

EXPERTS_BEGIN = f"""
## Experts

The same for {EXPERTS}. All-to-alls over `ep` send rows to experts and back; the number of rows depends on the routing,
and the figure is the mean. Expert weights are gathered, and their gradients reduced, over a separate group of ranks.
"""


def resolved(layout: LayoutSpec, name: str) -> ResolvedRun:
    """The run of a row."""
    fields = ModelFields(name=name)
    model = resolve_model(fields, base_dir=Path())
    per_rank = SEQUENCES // layout.data_parallel
    return ResolvedRun(
        run=Run(model=fields, data=DataSpec(sequence_length=LENGTH), training=TrainingSpec(), layout=layout),
        model=model,
        stage_layers=balanced_stages(layer_costs(model, LENGTH), layout.pp) if layout.pp > 1 else (),
        global_batch=SEQUENCES,
        micro_batch=MICRO_BATCH,
        accumulation=per_rank // MICRO_BATCH,
        reasons={},
    )


def page() -> str:
    """The whole page."""
    return "\n".join([BEGIN, *_table(LAYOUTS, MODEL), EXPERTS_BEGIN, *_table(EXPERT_LAYOUTS, EXPERTS)]) + "\n"


def _table(layouts: Iterable[dict[str, Any]], name: str) -> Iterator[str]:
    rows = [predict_traffic(resolved(LayoutSpec.model_validate(layout), name)) for layout in layouts]
    for row in rows:
        del row["all-reduce", "world"], row["receive", "cp"], row["receive", "pp"]
    columns = sorted({key for row in rows for key in row}, key=lambda key: (key[1], key[0]))
    yield "| layout | " + " | ".join(f"{kind}, `{axis}`" for kind, axis in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for layout, row in zip(layouts, rows, strict=True):
        degrees = ", ".join(f"{axis}: {degree}" for axis, degree in layout.items())
        cells = [f"{row[column] / 1e9:,.1f}" if row[column] else "" for column in columns]
        yield f"| `{{{degrees}}}` | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
