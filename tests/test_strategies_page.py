"""The tables of docs/strategies.md, measured: what a rank of each strategy stores and sends."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from meshwright.parallel.traffic import Traffic
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.ranks import RankPool
from tiny import GLOBAL_BATCH, SEQUENCE_LENGTH, STRATEGIES, tiny_run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "strategies.md"

ROWS = {
    "single": ("single process", None),
    "ddp": ("DDP", "DDP"),
    "zero-1": ("ZeRO-1", "ZeRO-1"),
    "zero-2": ("ZeRO-2", "ZeRO-2"),
    "zero-3": ("ZeRO-3", "ZeRO-3"),
    "hybrid-1": ("hybrid", "hybrid ZeRO-1"),
    "hybrid-2": ("hybrid", "hybrid ZeRO-2"),
    "hybrid-3": ("hybrid", "hybrid ZeRO-3"),
    "offload": ("CPU offload", "ZeRO-3"),
}
"""Name of the strategy in `tiny.py` -> its rows in the tables of stored and sent bytes."""

ON_FOUR = {"zero-2": LayoutSpec(dp_shard=4, zero=2)}
"""Instead of three ranks, which pad more."""

MICROBATCHES = 3


def num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of these tensors on this rank, without single numbers (AdamW's step)."""
    held = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    return sum(tensor.nbytes for tensor in held if tensor.dim())


def kept_and_sent(run: ResolvedRun) -> tuple[int, int, dict[str, int], int]:
    """(bytes between steps, bytes of reduced gradients, bytes sent in a step by kind, parameters of the model)."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        trainer.train_step(1, loader.microbatches(0))
        stored = list(trainer.parameters.values())
        moments = [state for tensor in stored for state in trainer.optimizers.state_of(tensor).values()]
        copies = trainer.store.copies.values()
        kept = num_bytes([*stored, *moments, *copies])
        with Traffic() as traffic:
            trainer.train_step.gradients(loader.microbatches(1))
    sent = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0)
    sent |= {kind: count.bytes for (kind, _), count in traffic.counts.items()}
    reduced = num_bytes(tensor.grad for tensor in stored)
    return kept, reduced, sent, sum(row.numel for row in trainer.table)


def table(first_two_headings: str) -> dict[str, list[str]]:
    """The rows of a table of the page, by their first cell."""
    text = PAGE.read_text().split(f"| {first_two_headings} |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {first: rest for first, *rest in rows}


def value(formula: str, **letters: float) -> float:
    """`2 M P` or `12 P / N` with numbers for the letters."""
    product, _, divisor = formula.partition(" / ")
    result = 1.0
    for factor in product.split():
        result *= letters[factor] if factor in letters else float(factor)
    return result / letters[divisor] if divisor else result


@pytest.mark.every(4)
@pytest.mark.parametrize("strategy", ROWS)
def test_a_rank_keeps_and_sends_what_the_page_says(ranks: RankPool, strategy: str) -> None:
    """Within 2 %: shards are padded if the ranks do not divide a tensor."""
    layout = ON_FOUR.get(strategy, STRATEGIES[strategy])
    accumulation = MICROBATCHES if 12 // layout.data_parallel % MICROBATCHES == 0 else 2
    run = tiny_run(layout, precision="bf16", accumulation=accumulation)
    kept, reduced, sent, parameters = ranks.run(layout.world_size, kept_and_sent, run)[0]
    letters = {"P": parameters, "N": layout.dp_shard, "M": accumulation}

    keeps_row, sends_row = ROWS[strategy]
    between_steps, _ = table("strategy | between steps")[keeps_row]
    assert kept == pytest.approx(value(between_steps, **letters), rel=0.02)
    assert reduced == pytest.approx(value("4 P / N", **letters), rel=0.02)

    sends = table("strategy | all-gather weights")[sends_row] if sends_row else ["0", "0", "0"]
    widths = {"all-gather": 2, "reduce-scatter": 4, "all-reduce": 4}  # bf16 weights, fp32 gradients
    for formula, (collective, width) in zip(sends, widths.items(), strict=True):
        expected = value(formula, **letters)
        few = 20  # losses and token counts
        assert sent[collective] / width == pytest.approx(expected, rel=0.02, abs=few), collective


def sent_over_tp(run: ResolvedRun) -> dict[str, int]:
    """Bytes that pass through each kind of collective of the tensor-parallel group in a step. Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader, Traffic(trainer.meshes) as traffic:
        trainer.train_step.gradients(loader.microbatches(0))
    return {kind: count.bytes for (kind, axis), count in traffic.counts.items() if axis == "tp"}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_tensor_parallel_group_sends_what_the_page_says(ranks: RankPool, recompute: str) -> None:
    """Exactly. All-reduces: three numbers per token for the loss, and the norms' gradients."""
    run = tiny_run(LayoutSpec(dp_replicate=2, tp=2), recompute=recompute, precision="fp32")
    letters = {"L": run.model.num_layers, "B": GLOBAL_BATCH // 2, "T": SEQUENCE_LENGTH, "D": run.model.hidden}
    rows = table("pass | all-gather")
    passes = ["forward", "backward", *([f"again under `recompute: {recompute}`"] if recompute != "none" else [])]
    expected = [
        sum(value(term, **letters) for name in passes for term in rows[name][column].split(" + ")) for column in (0, 1)
    ]
    norms = (2 * letters["L"] + 1) * letters["D"]
    sent = ranks.run(4, sent_over_tp, run)[0]
    assert {kind: total / 4 for kind, total in sent.items()} == {
        "all-gather": expected[0],
        "reduce-scatter": expected[1],
        "all-reduce": 3 * letters["B"] * letters["T"] + norms,
    }
