"""The one place that makes a small run of a large one which meets the same conditions; no torch here.

What a layout is about stays: degrees, numbers of stages and microbatches, ratios of heads, whether things divide. What
only costs time goes: width, depth, vocabulary, length.
"""

from collections.abc import Iterator
from math import gcd
from typing import Any

from meshwright.spec.fit import find_misfits
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import ResolvedRun

HEAD_DIM, HIDDEN, FFN, LENGTH, VOCAB = 8, 32, 48, 32, 96
"""Sizes that no layout enlarges."""


def shrink(resolved: ResolvedRun) -> ResolvedRun:
    """The run with a small model and batch, and random weights.

    Raises `ValueError` where no small model fits the layout, which the large one does.
    """
    run, layout = resolved.run, resolved.run.layout
    ranks = layout.pp * layout.tp * layout.cp
    accumulation = min(resolved.accumulation, max(2, 2 * layout.pp))
    micro_batch = min(resolved.micro_batch, 2)
    for model, length in _candidates(resolved):
        if not find_misfits(layout, model, length):
            break
    else:
        raise ValueError(f"no small model was found that fits {layout.strategy} over {ranks} ranks; use --no-shrink")
    run = run.model_copy(
        update={
            "data": run.data.model_copy(update={"sequence_length": length}),
            "model": run.model.model_copy(update={"weights": "random"}),
        }
    )
    return resolved.model_copy(
        update={
            "run": run,
            "model": model,
            "micro_batch": micro_batch,
            "accumulation": accumulation,
            "global_batch": micro_batch * accumulation * layout.data_parallel,
        }
    )


def _candidates(resolved: ResolvedRun) -> Iterator[tuple[ModelSpec, int]]:
    """Small models and lengths, the smallest first."""
    model, layout = resolved.model, resolved.run.layout
    common = gcd(model.num_heads, model.num_kv_heads)
    length = _like(resolved.run.data.sequence_length, LENGTH, 2 * layout.cp * layout.tp)
    sizes: dict[str, Any] = {
        "hidden": _like(model.hidden, HIDDEN, layout.shard * layout.tp),
        "ffn": _like(model.ffn, FFN, layout.tp),
        "vocab": _like(model.vocab, VOCAB, layout.tp * layout.shard),
        "num_layers": _like(model.num_layers, 2, layout.pp),
        "max_positions": min(model.max_positions, length),
        "head_dim": min(model.head_dim, HEAD_DIM),
    }
    if model.sliding_window is not None:
        whole = resolved.run.data.sequence_length
        sizes["sliding_window"] = max(1, model.sliding_window * length // max(whole, 2 * model.sliding_window))
    for divisor in sorted((n for n in range(1, common + 1) if common % n == 0), reverse=True):
        heads = {"num_heads": model.num_heads // divisor, "num_kv_heads": model.num_kv_heads // divisor}
        yield model.model_copy(update=sizes | heads), length


def _like(size: int, small: int, unit: int) -> int:
    """The smallest number from `small` up that leaves the same rest as `size` when divided by `unit`; never more than
    `size`."""
    return min(size, next(n for n in range(small, small + unit) if n % unit == size % unit))
