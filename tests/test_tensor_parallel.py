"""The shapes that each rank stores of a split model, byte for byte, and layouts that do not fit a model."""

import re
from math import prod
from typing import Any

import pytest
import torch

from losses import logits_of, summed_loss
from meshwright.families import parameter_table
from meshwright.families.split import kept_shape, rows_of_layers, split_dim
from meshwright.models import loss as loss_module
from meshwright.optim.shards import local, part_like, whole
from meshwright.parallel.pipeline import plan_stages
from meshwright.parallel.traffic import Traffic
from meshwright.spec.fit import find_misfits, tensor_notes
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import Outcome, build_here, loader_for, one_step
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from test_equivalence import assert_equal
from tiny import tiny_run

VOCAB = 500

Shapes = dict[str, list[tuple[int, ...]]]


def kept(run: ResolvedRun) -> tuple[tuple[int, int, int], Shapes]:
    """This rank's coordinates (pp, tp, shard), and shapes of its stored part of each parameter, gradient and moment.
    Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        trainer.train_step.gradients(loader.microbatches(0))
    pp, tp, shard = (0 if trainer.meshes is None else trainer.meshes.rank_along(axis) for axis in ("pp", "tp", "shard"))
    shapes: Shapes = {}
    for name, parameter in trainer.parameters.items():
        moments = [state for key, state in trainer.optimizers.state_of(parameter).items() if key != "step"]
        assert parameter.grad is not None
        assert torch.equal(part_like(whole(parameter), parameter), local(parameter))
        shapes[name] = [tuple(local(tensor).shape) for tensor in (parameter, parameter.grad, *moments)]
    return (pp, tp, shard), shapes


SPLITS = {(layout.tp, layout.pp, layout.data_parallel, layout.zero_stage): name for name, layout in LAYOUTS.items()}
"""One layout for each set of degrees that the table reads."""


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [name for name in SPLITS.values() if LAYOUTS[name].world_size < 8])
def test_every_rank_keeps_exactly_what_the_table_says(ranks: RankPool, name: str) -> None:
    """For weights, gradients and both moments of AdamW, all with the same number of bytes per element."""
    layout, family = LAYOUTS[name], ("gpt2", "qwen2", "qwen3")[len(name) % 3]
    run = tiny_run(layout, family=family, tied=len(name) % 2 == 0)
    table = parameter_table(run.model)
    for (pp_rank, tp_rank, shard_rank), shapes in ranks.run(layout.world_size, kept, run):
        expected = {
            row.name: [kept_shape(row, run.model, layout, tp_rank=tp_rank, shard_rank=shard_rank)] * 4
            for row in rows_of_layers(table, run.model, layers_of(run, pp_rank))
        }
        assert shapes == expected


def layers_of(run: ResolvedRun, pp_rank: int) -> list[int]:
    """The layers of a pipeline rank's stages."""
    if run.run.layout.pp == 1:
        return list(range(run.model.num_layers))
    stages = plan_stages(run)
    return [layer for stage in stages.schedule.stages_of(pp_rank) for layer in stages.layers[stage]]


def test_named_dims_alone_say_what_is_split() -> None:
    model = tiny_run(LayoutSpec(), family="gpt2").model
    dims = {row.name: split_dim(row, model, 2) for row in parameter_table(model) if "layers.1" not in row.name}
    columns = [f"layers.0.attention.{name}" for name in ("wq", "wk", "wv")] + ["layers.0.feed_forward.w1"]
    expected = {f"{name}.{kind}" for name in columns for kind in ("weight", "bias")}
    assert {name for name, dim in dims.items() if dim == 0} == {"tok_embeddings.weight", "output.weight", *expected}
    assert {name for name, dim in dims.items() if dim == 1} == {
        "layers.0.attention.wo.weight",
        "layers.0.feed_forward.w2.weight",
    }


@pytest.mark.parametrize(
    ("layout", "model", "tokens", "message"),
    [
        ({"tp": 3}, {}, 12, "layout.tp=3: 4 query heads cannot be split evenly over 3 ranks; the nearest .* is tp=2"),
        ({"tp": 8}, {}, 16, "4 query heads cannot be split evenly over 8 ranks; the nearest legal layout is tp=4"),
        (
            {"tp": 4},
            {"num_heads": 12, "num_kv_heads": 6},
            16,
            "6 key/value heads can neither be split over 4 ranks nor replicated evenly on them; .* tp=2",
        ),
        ({"tp": 4}, {"ffn": 42}, 16, "a feed-forward layer of width 42 cannot be split evenly over 4 ranks; .* tp=2"),
        ({"tp": 4}, {}, 18, "4 ranks share the sequence between blocks, and 18 tokens .* tp=2"),
        ({"tp": 4}, {"vocab": 5}, 16, "a vocabulary of 5 leaves the last of 4 ranks without a row; .* tp=2"),
        (
            {"tp": 4, "dp_shard": 5},
            {},
            16,
            "a vocabulary of 50 cannot be split evenly over 4 ranks, .* 24 of them .* over 5 ranks; .* tp=2",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(
    layout: dict[str, int], model: dict[str, int], tokens: int, message: str
) -> None:
    spec = tiny_run(LayoutSpec()).model.model_copy(update=model)
    (problem,) = find_misfits(LayoutSpec.model_validate(layout), spec, tokens)
    assert re.search(message, problem), problem


def test_check_says_what_is_not_shared_evenly() -> None:
    model = tiny_run(LayoutSpec()).model
    assert tensor_notes(LayoutSpec(), model) == tensor_notes(LayoutSpec(tp=2), model) == ""
    assert tensor_notes(LayoutSpec(tp=4), model) == (
        "2 key/value heads for 4 ranks, so wk and wv are replicated; "
        "50 tokens for 4 ranks, so the last has 11 of them and the others 13"
    )


def largest_tensor_with_a_whole_vocabulary(run: ResolvedRun) -> int:
    """Most elements of a tensor in a step whose last dim is the vocabulary, or the vocabulary padded to 512.
    Collective."""

    class Widest(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] in (VOCAB, 512):
                self.seen = max(self.seen, out.numel())
            return out

    trainer = build_here(run)
    with loader_for(trainer) as loader, Widest() as widest:
        trainer.train_step.gradients(loader.microbatches(0))
    return widest.seen


def test_no_rank_ever_holds_a_row_of_logits(ranks: RankPool) -> None:
    single, split = (tiny_run(LAYOUTS[name]) for name in ("single", "zero-3-tp"))
    model = single.model.model_copy(update={"vocab": VOCAB})
    single, split = (run.model_copy(update={"model": model}) for run in (single, split))
    assert largest_tensor_with_a_whole_vocabulary(single) > 0
    assert ranks.run(4, largest_tensor_with_a_whole_vocabulary, split) == [0] * 4


def ask_for(run: ResolvedRun, what: str) -> str:
    """A split model's error for tokens without labels, or for an unknown token. Collective."""
    trainer = build_here(run)
    tokens = torch.full((1, 16), 50 if what == "unknown token" else 0)
    try:
        logits_of(trainer.model, tokens) if what == "logits" else summed_loss(trainer.model, tokens, tokens)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("what", "message"), [("logits", "has all logits"), ("unknown token", "outside")])
def test_nothing_wrong_is_computed_in_silence(ranks: RankPool, what: str, message: str) -> None:
    for answer in ranks.run(2, ask_for, tiny_run(LAYOUTS["tp"]), what):
        assert message in answer


def one_step_in_small_chunks(run: ResolvedRun) -> Outcome | None:
    """A first step whose loss is computed a few tokens at a time. Collective."""
    usual = loss_module.CHUNK_BYTES
    loss_module.CHUNK_BYTES = {"cpu": 128 * 8 * 7}
    try:
        return one_step(run)
    finally:
        loss_module.CHUNK_BYTES = usual


@pytest.mark.slow
def test_ranks_with_unequal_shares_of_the_vocabulary_cut_the_tokens_alike(ranks: RankPool) -> None:
    """257 tokens over 4 ranks: 65 rows and 62, padded to 128 and 64."""
    alone, split = (tiny_run(layout) for layout in (LayoutSpec(), LAYOUTS["tp-wide"]))
    model = alone.model.model_copy(update={"vocab": 257})
    expected = one_step(alone.model_copy(update={"model": model}))
    outcome = ranks.run(4, one_step_in_small_chunks, split.model_copy(update={"model": model}), timeout=30)[0]
    assert expected is not None
    assert_equal(outcome, expected)


def summed_over_tp(run: ResolvedRun) -> int:
    """The bytes that this rank sends in all-reduces over its tensor-parallel group in a second step. Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        trainer.train_step(1, loader.microbatches(0))
        with Traffic(trainer.meshes) as traffic:
            trainer.train_step(2, loader.microbatches(1))
    return traffic.counts["all-reduce", "tp"].bytes


def test_norms_gradients_are_summed_over_tp_in_the_dtype_of_reduction(ranks: RankPool) -> None:
    """Else bf16 would round the sums of ranks, and nothing else of the step would tell."""
    layout = LAYOUTS["zero-2-tp"]
    runs = [tiny_run(layout, precision="bf16", reduce_dtype=reduce, accumulation=2) for reduce in ("fp32", "bf16")]
    in_fp32, in_bf16 = (ranks.run(layout.world_size, summed_over_tp, run)[0] for run in runs)
    norms = sum(prod(row.shape) for row in parameter_table(runs[0].model) if "norm" in row.name)
    assert in_fp32 - in_bf16 == norms * (4 - 2) * 2  # bytes of fp32 and bf16, microbatches
