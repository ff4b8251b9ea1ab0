"""Writes docs/equivalence.md from the layouts that tests compare with one process: run it after adding one."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from meshwright.families import resolve_model
from meshwright.spec.layout import AXES, LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.testing.layouts import (
    CONTEXT_PARALLEL,
    EXPERT_PARALLEL,
    LAYOUTS,
    PIPELINE_SHARDED,
    REFUSED,
    refusal,
)

PAGE = Path(__file__).with_name("equivalence.md")

PROVEN = LAYOUTS | CONTEXT_PARALLEL | PIPELINE_SHARDED | EXPERT_PARALLEL
SPLITS = {"pp": "PP", "cp": "CP", "tp": "TP", "ep": "EP"}
TESTS_MODEL = ModelFields(
    family="llama", hidden=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn=40, vocab=50, max_positions=16
)

BEGIN = """\
# What is proven equal to one process

Each layout below runs as real processes over gloo and is compared with one process on the same weights and the same
batch: the loss, the gradient norm, **every parameter's gradient** and **every weight after one optimizer step**, in
float64, up to the rounding of another order of summation (192 tokens x 2e-16). The batch has sequences with different
numbers of trained tokens; neither the vocabulary nor the rows of most matrices divide by all degrees. Families, tied
and untied embeddings, recomputation (none, selective, full) and accumulation vary over the layouts; data-parallel
layouts are tested with all combinations of them, on llama.

Tests also check that every rank stores **exactly the bytes** of weights, gradients and optimizer state that the
parameter table predicts, and that one layout resumes from another's checkpoints (`tests/test_equivalence.py`,
`tests/test_tensor_parallel.py`, `tests/test_resume.py`).

- Layouts with `ep` train a model with eight experts (`tests/test_expert_parallel.py`).
- `every-method` covers ring, all_gather and ulysses (`tests/test_context.py`), `every-schedule` the schedules that
  matter for sharding (`tests/test_pipeline.py`).
- [`pipedream-2bw`](schedules.md#steps-that-overlap-pipedream-2bw) is missing: it is compared with its own definition.
  It is compared with one process whose gradients are one step late.

## Data parallelism combined with other axes

Rows are data-parallel strategies, columns ways to split the model; a number is the largest number of processes in a
test of the pair. Pairs with an empty cell are allowed but not tested.
"""

REFUSED_BEGIN = """
## Refused layouts

Illegal layouts are refused before any process starts; the error names the nearest legal one. These examples are for the
tests' model, with 4 query heads, 2 key and value heads and a vocabulary of 50, on sequences of 16 tokens.

| layout | why |
|---|---|"""


def page() -> str:
    """The text of docs/equivalence.md."""
    return "\n".join([BEGIN, *_matrix(), "", *_list(), REFUSED_BEGIN, *_refused()]) + "\n"


def state(layout: LayoutSpec) -> str:
    """What data-parallel ranks keep."""
    name = f"ZeRO-{layout.zero_stage}" if layout.zero_stage else ("DDP" if layout.dp_replicate > 1 else "one replica")
    hybrid = "hybrid " if layout.zero_stage and layout.dp_replicate > 1 else ""
    return hybrid + name + (" + offload" if layout.tiers.words else "")


def split(layout: LayoutSpec) -> str:
    """How the model is split."""
    return " x ".join(word for axis, word in SPLITS.items() if getattr(layout, axis) > 1) or "whole model"


def _matrix() -> Iterator[str]:
    most: dict[tuple[str, str], int] = {}
    for layout in PROVEN.values():
        place = state(layout), split(layout)
        most[place] = max(most.get(place, 0), layout.world_size)
    rows = list(dict.fromkeys(row for row, _ in most))
    columns = sorted(dict.fromkeys(column for _, column in most), key=lambda name: name.count(" x "))
    yield f"| | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {row} | {' | '.join(str(most.get((row, column), '')) for column in columns)} |"


def _list() -> Iterator[str]:
    yield "## Every layout\n"
    yield "| name | layout | processes |"
    yield "|---|---|---|"
    for name, layout in PROVEN.items():
        yield f"| {name} | `{_fields(layout.model_dump(exclude_defaults=True))}` | {layout.world_size} |"


def _refused() -> Iterator[str]:
    model = resolve_model(TESTS_MODEL, base_dir=Path())
    for layout in REFUSED:
        yield f"| `{_fields(layout)}` | {refusal(layout, model, 16)} |"


def _fields(layout: dict[str, object]) -> str:
    known = [field for field in (*AXES, "ep") if field in layout]
    order = [*known, *(field for field in layout if field not in known)]
    return "{" + ", ".join(f"{field}: {layout[field]}" for field in order) + "}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
