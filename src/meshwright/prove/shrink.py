"""A small run that takes the same code paths as a large one. Without torch.

Everything that matters to a layout stays: degrees, numbers of stages and microbatches, ratios of heads, divisibility.
Sizes that only cost time shrink: width, depth, vocabulary, length.
"""

from collections.abc import Iterator
from math import gcd, lcm
from pathlib import Path
from typing import Any

from meshwright.families import low_precision_layers, low_precision_misfits, parameter_table
from meshwright.spec.actions import ScheduleError
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FullSpec
from meshwright.spec.fit import find_misfits
from meshwright.spec.low_precision import BLOCKS
from meshwright.spec.model import ModelSpec
from meshwright.spec.recompute import Recompute, of_counts, stage_counts
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import TrainingSpec

HEAD_DIM, HIDDEN, FFN, LENGTH, VOCAB, EXPERTS = 8, 32, 48, 288, 96, 4
"""Minimum sizes, which no layout enlarges. The length has positions that bf16 and a byte cannot distinguish."""

HIDDEN_OF_BLOCKS = 64
"""Width of a model with 8-bit moments: its matrices reach the 4,096 numbers from which moments are quantized."""


def shrink(resolved: ResolvedRun) -> ResolvedRun:
    """The run with a small model and batch. Its weights, adapters included, are random, because no file has its shapes.

    Raises `UserError` if no small model fits the layout although the large one does.
    """
    run, layout = resolved.run, resolved.run.layout
    if resolved.model.foreign is not None:
        raise UserError(f"{run.model.name} is computed by transformers and cannot be shrunk; use --no-shrink")
    stages = _stage_layers(resolved.stage_layers)
    kinds = len(_pattern(resolved.model)["window_layers"])
    layers = sum(stages) if stages else min(max(2, kinds), resolved.model.num_layers)
    for model, length in _candidates(resolved, layers):
        training = _kept_layers(run.training, model)
        misfits = low_precision_misfits(training, parameter_table(model), model, run.finetune, layout, length)
        if not find_misfits(layout, model, length) and not misfits:
            break
    else:
        raise UserError(f"no small model fits the layout {layout.strategy}; use --no-shrink")
    run = run.model_copy(
        update={
            "data": run.data.model_copy(update={"sequence_length": length}),
            "model": run.model.model_copy(update={"weights": "random"}),
            "checkpoint": run.checkpoint.model_copy(update={"start_from": None}),
        }
    )
    if run.finetune is not None and not isinstance(run.finetune, FullSpec):
        run = run.model_copy(update={"finetune": run.finetune.model_copy(update={"start_from": None})})
    recompute = _recompute(resolved, stages or (layers,))
    run = run.model_copy(update={"training": training.model_copy(update={"recompute": recompute})})
    micro_batch, accumulation = min(resolved.micro_batch, 2), _accumulation(resolved)
    return resolved.model_copy(
        update={
            "run": run,
            "model": model,
            "micro_batch": micro_batch,
            "accumulation": accumulation,
            "global_batch": micro_batch * accumulation * layout.data_parallel,
            "stage_layers": stages,
            "shrunk": True,
        }
    )


def _kept_layers(training: TrainingSpec, model: ModelSpec) -> TrainingSpec:
    """The same with only those full-precision layer patterns that match a layer of the small model."""
    if training.product_recipe is None:
        return training

    def keeping(patterns: list[str]) -> TrainingSpec:
        low_precision = training.low_precision.model_copy(update={"keep": tuple(patterns)})
        return training.model_copy(update={"low_precision": low_precision})

    table, patterns = parameter_table(model), list[str]()
    for pattern in training.low_precision.keep:
        try:
            low_precision_layers(table, keeping([*patterns, pattern]))
        except UserError:
            continue
        patterns.append(pattern)
    return keeping(patterns)


def _stage_layers(large: tuple[int, ...]) -> tuple[int, ...]:
    """One layer in the shortest stages, and a second or third one in those that have more."""
    return tuple(min(3, 1 + layers - min(large)) for layers in large)


def _recompute(resolved: ResolvedRun, stages: tuple[int, ...]) -> Recompute:
    """The recomputation of small stages: one layer of each policy that the large stage uses; if it uses only one
    policy, all layers."""
    counts = []
    for (full, selective), large, small in zip(
        stage_counts(resolved.run.training.recompute, resolved.stages), resolved.stages, stages, strict=True
    ):
        fewer = small if full == large else min(full, 1)
        counts.append((fewer, small - fewer if full + selective == large else min(selective, 1, small - fewer)))
    return of_counts(counts, stages)


def _accumulation(resolved: ResolvedRun) -> int:
    """Three microbatches if the recipe has several: a first, a last and one between; or the next number that the
    pipeline accepts."""
    layout, most = resolved.run.layout, resolved.accumulation
    if layout.pp == 1:
        return 3 if most > 1 else 1
    for count in range(3, most):
        try:
            layout.pipeline_schedule(microbatches=count, base_dir=Path(resolved.base_dir))
        except ScheduleError:
            continue
        return count
    return most


def _candidates(resolved: ResolvedRun, layers: int) -> Iterator[tuple[ModelSpec, int]]:
    """Small models and lengths, the smallest first."""
    model, layout = resolved.model, resolved.run.layout
    blocks = resolved.run.training.optimizer.name == "adamw_8bit" and layout.tp == 1
    hidden, ffn = (HIDDEN_OF_BLOCKS, HIDDEN_OF_BLOCKS) if blocks else (HIDDEN, FFN)
    block = BLOCKS.get(resolved.run.training.product_recipe or "", 1)
    sharers = layout.dp_shard * layout.cp * layout.tp
    columns = lcm(sharers, layout.tp * block if layout.tp > 1 else 1)
    runs = lcm(layout.tp, block if layout.cp > 1 else 1)
    length = _like(resolved.run.data.sequence_length, LENGTH, 2 * layout.cp * runs)
    sizes: dict[str, Any] = {
        "hidden": _like(model.hidden, hidden, sharers),
        "ffn": _like(model.ffn, ffn, columns),
        "vocab": _like(model.vocab, VOCAB, sharers),
        "num_layers": layers,
        "max_positions": min(model.max_positions, length),
        "head_dim": _like(model.head_dim, HEAD_DIM, block) if layout.tp > 1 else min(model.head_dim, HEAD_DIM),
    }
    if model.sliding_window is not None:
        whole = resolved.run.data.sequence_length
        sizes["sliding_window"] = max(1, model.sliding_window * length // max(whole, 2 * model.sliding_window))
    sizes |= _pattern(model)
    if model.num_experts:
        chosen, groups = model.experts_per_token, model.router_groups
        # Twice as many as are chosen; half of them get most tokens, so that the others sometimes get none.
        fewest = max(EXPERTS, 2 * chosen + 2, 2 * groups, -(-chosen // model.router_top_groups) * groups)
        sizes["num_experts"] = _like(model.num_experts, fewest, lcm(layout.ep, groups))
        sizes["expert_ffn"] = _like(model.expert_ffn, FFN, columns)
        sizes["dense_layers"] = min(model.dense_layers, layers - 1)
    if model.kv_rank is not None:
        sizes |= {"kv_rank": 2 * HEAD_DIM, "q_rank": model.q_rank and HEAD_DIM + 4}
        sizes |= {"nope_head_dim": HEAD_DIM - 4, "rope_head_dim": 4, "v_head_dim": HEAD_DIM - 2, "head_dim": HEAD_DIM}
    elif model.rope_head_dim:
        sizes["rope_head_dim"] = max(2, model.rope_head_dim * sizes["head_dim"] // model.head_dim // 2 * 2)
    if any(model.delta_layers):
        keys = min(model.delta_key_heads, -(-2 // layout.tp) * layout.tp)
        sizes |= {"delta_key_heads": keys, "delta_heads": keys * (model.delta_heads // model.delta_key_heads)}
        sizes |= {"delta_key_dim": min(model.delta_key_dim, HEAD_DIM)}
        sizes |= {"delta_value_dim": min(model.delta_value_dim, HEAD_DIM - 2)}
    if model.shared_ffn:
        sizes["shared_ffn"] = _like(model.shared_ffn, FFN, columns)
    if model.query_scalar is not None:
        sizes["query_scalar"] = max(1, model.query_scalar * sizes["head_dim"] // model.head_dim)
    common = gcd(model.num_heads, model.num_kv_heads)
    # At least two key and value heads, if the model has two: a single one cannot be misplaced.
    divisors = (n for n in range(1, common + 1) if common % n == 0 and (n == 1 or model.num_kv_heads // n > 1))
    for divisor in sorted(divisors, reverse=True):
        heads = {"num_heads": model.num_heads // divisor, "num_kv_heads": model.num_kv_heads // divisor}
        yield model.model_copy(update=sizes | heads), length


def _pattern(model: ModelSpec) -> dict[str, tuple[bool, ...]]:
    """Patterns in which each combination of window, rotation and gated delta rule, of those that the layers have, comes
    once."""
    names = ("window_layers", "rope_layers", "delta_layers")
    patterns: list[tuple[bool, ...]] = [getattr(model, name) for name in names]
    places = (tuple(pattern[i % len(pattern)] for pattern in patterns) for i in range(model.num_layers))
    few = dict.fromkeys(places)
    return dict(zip(names, zip(*few, strict=True), strict=True))


def _like(size: int, small: int, unit: int) -> int:
    """The smallest number from `small` up that is congruent to `size` modulo `unit`; never more than `size`."""
    return min(size, next(n for n in range(small, small + unit) if n % unit == size % unit))
