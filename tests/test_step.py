"""A step apart from the gradient: non-finite policies, loss scaling, token counts, compilation, determinism."""

import functools
import math
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from losses import logits_of
from meshwright.data import loader
from meshwright.data.loader import HostBatch
from meshwright.models.loss import IGNORED
from meshwright.optim.loss_scale import LossScaler
from meshwright.spec.batch import Batch
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import Outcome, build_here, largest_difference, loader_for, one_step, whole
from meshwright.testing.layouts import LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.evaluate import Evaluation, evaluate
from meshwright.trainer.setup import Trainer
from meshwright.trainer.step import NonFiniteError
from tiny import GLOBAL_BATCH, SEQUENCE_LENGTH, STRATEGIES, tiny_run


def poison(trainer: Trainer, where: str) -> None:
    """Make the next loss, or one element of one gradient on one rank, NaN."""
    if where == "loss":
        trainer.model.norm.register_forward_hook(lambda module, inputs, output: output * math.nan)
    elif trainer.worker.rank == trainer.worker.world_size - 1:
        block = trainer.model.layers["1"]
        block.register_full_backward_hook(
            lambda module, before, after: tuple(g if g is None else g * math.nan for g in before)
        )


def poisoned_step(run: ResolvedRun, where: str) -> tuple[str, bool, dict[str, Any], bool]:
    """Train a good step, then a poisoned one: (the result, weights unchanged, scaler, all finite). Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        trainer.train_step(1, loader.microbatches(0))
        before = {name: whole(tensor) for name, tensor in trainer.parameters.items()}
        poison(trainer, where)
        try:
            happened = "skipped" if trainer.train_step(2, loader.microbatches(1)).skipped else "trained"
        except NonFiniteError as error:
            happened = str(error)
    after = {name: whole(tensor) for name, tensor in trainer.parameters.items()}
    untouched = all(torch.equal(before[name], after[name]) for name in before)
    scaler = trainer.train_step.scaler.state() if trainer.train_step.scaler else {}
    return happened, untouched, scaler, all(tensor.isfinite().all() for tensor in after.values())


@pytest.mark.every(3)
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero-3", "hybrid-2"])
def test_not_finite_never_reaches_the_weights(ranks: RankPool, strategy: str, where: str) -> None:
    layout = STRATEGIES[strategy]
    skip = tiny_run(layout, precision="fp32", non_finite="skip")
    for answer in ranks.run(layout.world_size, poisoned_step, skip, where):
        assert answer == ("skipped", True, {}, True)
    stop = tiny_run(layout, precision="fp32")
    for happened, untouched, _, _ in ranks.run(layout.world_size, poisoned_step, stop, where):
        assert happened.startswith("step 2: loss ")
        assert "training.non_finite=skip" in happened
        assert untouched


def test_fp16_overflow_halves_the_scale_on_every_rank(ranks: RankPool) -> None:
    layout = STRATEGIES["zero-3"]
    run = tiny_run(layout, precision="fp16")
    for happened, untouched, scaler, _ in ranks.run(layout.world_size, poisoned_step, run, "gradient"):
        assert (happened, untouched) == ("skipped", True)
        assert scaler == {"scale": 2.0**15, "finite_steps": 0}


def test_loss_scaler_grows_after_finite_steps_and_never_falls_below_one() -> None:
    scaler = LossScaler(scale=4.0, growth_interval=3)
    for _ in range(3):
        scaler.update(finite=True)
    assert scaler.scale == 8
    scaler.update(finite=True)
    other = LossScaler()
    other.load(scaler.state())
    assert other.state() == {"scale": 8.0, "finite_steps": 1}
    for _ in range(9):
        scaler.update(finite=False)
    assert scaler.scale == 1


def test_loss_is_per_trained_token_whatever_the_split() -> None:
    """A microbatch with two labels and one with sixteen weigh two and sixteen, not one and one."""
    trainer = build_here(tiny_run(LayoutSpec(), accumulation=GLOBAL_BATCH))
    generator = np.random.default_rng(0)
    inputs = generator.integers(0, 50, (2, SEQUENCE_LENGTH))
    labels = generator.integers(0, 50, (2, SEQUENCE_LENGTH))
    labels[0, 2:] = IGNORED
    batches = [Batch(inputs[:1], labels[:1]), Batch(inputs[1:], labels[1:])]
    loss, trained = trainer.train_step.gradients(batches)
    assert trained == 2 + SEQUENCE_LENGTH
    logits = logits_of(trainer.model, torch.from_numpy(inputs))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(labels).flatten())
    assert loss == pytest.approx(expected.item(), rel=1e-14)
    expected_gradients = torch.autograd.grad(expected, list(trainer.parameters.values()))
    expected_gradients = dict(zip(trainer.parameters, expected_gradients, strict=True))
    gradients = {name: whole(tensor.grad) for name, tensor in trainer.parameters.items()}
    assert largest_difference(gradients, expected_gradients)[0] < 1e-14


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_what_is_behind_the_last_label_changes_no_gradient(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Padded rows are cut after the longest of their microbatch, or all their padding is left out; each number of
    tokens is reported correctly."""
    monkeypatch.setattr(loader, "LENGTH_MULTIPLE", 4)
    numbers, columns = np.random.default_rng(0).integers(0, 50, (2, 4, SEQUENCE_LENGTH)), np.arange(SEQUENCE_LENGTH)
    behind = columns >= np.array([[5], [9], [3], [7]])
    whole_rows = Batch(numbers[0], np.where(behind, IGNORED, numbers[1]), behind.astype(np.int64))
    found = []
    microbatches = whole_rows, loader._cut(whole_rows), loader._joined(whole_rows)
    for microbatch in microbatches:
        trainer = build_here(tiny_run(LayoutSpec(), family=family))
        loss, trained = trainer.train_step.gradients([microbatch])
        assert trained == 24
        found.append((loss, {name: whole(tensor.grad) for name, tensor in trainer.parameters.items()}))
        assert trainer.train_step.tokens == microbatch.tokens.size
    assert [microbatch.tokens.shape for microbatch in microbatches] == [(4, 16), (4, 12), (1, 24)]
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-14)
        assert largest_difference(gradients, found[0][1])[0] < 1e-13


def test_low_precision_gradients_add_up_in_full_precision() -> None:
    """Twelve microbatches summed in bf16 would lose bits that fp32 keeps; reduce_dtype sets the dtype."""
    gradients = {}
    for reduce_dtype in ("fp32", "bf16"):
        trainer = build_here(tiny_run(LayoutSpec(), precision="bf16", accumulation=12, reduce_dtype=reduce_dtype))
        with loader_for(trainer) as loader:
            trainer.train_step.gradients(loader.microbatches(0))
        gradients[reduce_dtype] = {name: whole(tensor.grad) for name, tensor in trainer.parameters.items()}
    assert all(tensor.dtype == torch.float32 for tensor in gradients["fp32"].values())
    rounded = {name: tensor.bfloat16().float() for name, tensor in gradients["fp32"].items()}
    assert largest_difference(rounded, gradients["fp32"])[0] > 0  # fp32 sums use bits that bf16 lacks
    kept = {name: tensor.bfloat16().float() for name, tensor in gradients["bf16"].items()}
    assert largest_difference(kept, gradients["bf16"])[0] == 0


def evaluation(run: ResolvedRun) -> tuple[float, int, float]:
    """(loss, tokens, loss of the training step that follows). Collective."""
    trainer = build_here(run)

    def measured(batches: list[HostBatch]) -> Evaluation:
        return evaluate(
            trainer.train_step.passes, batches, trainer.device, repeats_loss=trainer.train_step.repeats_loss
        )

    with loader_for(trainer) as loader:
        found = measured(loader.microbatches(0))
        trainer.train_step(1, loader.microbatches(0))
        again = measured(loader.microbatches(0))
        step = trainer.train_step(2, loader.microbatches(0))
    assert again.loss == pytest.approx(step.loss, rel=1e-12)  # evaluation saw the updated weights
    return found.loss, found.tokens, step.loss


@pytest.mark.every(3)
@pytest.mark.parametrize("strategy", [*(name for name in STRATEGIES if name != "single"), "tp-wide", "zero-3-tp"])
def test_evaluation_is_the_same_on_every_layout_and_leaves_training_alone(ranks: RankPool, strategy: str) -> None:
    expected = evaluation(tiny_run(LayoutSpec()))
    layout = LAYOUTS[strategy]
    for answer in ranks.run(layout.world_size, evaluation, tiny_run(layout)):
        assert answer == pytest.approx(expected, rel=1e-12)


def two_steps(run: ResolvedRun) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after two steps. Collective."""
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        losses = [trainer.train_step(step + 1, loader.microbatches(step)).loss for step in range(2)]
    return losses, {name: whole(tensor) for name, tensor in trainer.parameters.items()}


def test_a_deterministic_run_repeats_bit_for_bit(ranks: RankPool) -> None:
    run = tiny_run(STRATEGIES["zero-3"], precision="bf16", deterministic=True)
    (losses, weights), (losses_again, weights_again) = (ranks.run(4, two_steps, run)[0] for _ in range(2))
    assert losses == losses_again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def traced_step(run: ResolvedRun) -> Outcome | None:
    """A first step with blocks compiled without code generation, which would be slow. Collective."""
    with mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager")):
        return one_step(run)


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [(LayoutSpec(dp_shard=2), "selective"), (LayoutSpec(), "none"), (LayoutSpec(dp_replicate=2), "full")],
    ids=["zero-3", "single", "ddp"],
)
def test_compiled_blocks_compute_the_same(ranks: RankPool, layout: LayoutSpec, recompute: str) -> None:
    """torch.compile may fuse and so reorder; fp32 sums over a block's width differ only by their rounding. Code is
    generated for one process only: it is the same on every rank."""
    compiled = tiny_run(layout, precision="fp32", compile=True, recompute=recompute)
    step = one_step if layout.world_size == 1 else traced_step
    outcome = ranks.run(layout.world_size, step, compiled, timeout=400)[0]
    expected = one_step(tiny_run(LayoutSpec(), precision="fp32"))
    assert expected is not None
    tolerance = GLOBAL_BATCH * SEQUENCE_LENGTH * torch.finfo(torch.float32).eps
    assert outcome.loss == pytest.approx(expected.loss, rel=tolerance)
    difference, name = largest_difference(outcome.gradients, expected.gradients)
    assert difference <= tolerance * max(g.abs().max().item() for g in expected.gradients.values()), name


class Attended(TorchDispatchMode):
    """Counts how often attention is computed, not how often its saved result is used."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recompute", "norms", "attended"),
    [
        ("selective", [2, 2, 2], 3),
        ("full", [2, 2, 2], 6),
        ({"full": 1}, [2, 1, 1], 4),
        ({"full": 1, "selective": [1]}, [2, 2, 1], 4),
        ({"selective": 2}, [2, 2, 1], 3),
    ],
    ids=str,
)
def test_recomputation_really_recomputes(recompute: Any, norms: list[int], attended: int) -> None:
    """How often every layer computes its norm, and all of them attention; gradients are equal bit for bit."""
    gradients = []
    for mode in ("none", recompute):
        trainer = build_here(tiny_run(LayoutSpec(), recompute=mode, num_layers=3))
        calls = Counter()
        for layer, block in trainer.model.layers.items():
            block.attention_norm.register_forward_hook(lambda *_, layer=layer, calls=calls: calls.update([layer]))
        with loader_for(trainer) as loader, Attended() as attention:
            trainer.train_step.gradients(loader.microbatches(0))
        gradients.append({name: whole(tensor.grad) for name, tensor in trainer.parameters.items()})
    assert [calls[str(layer)] for layer in range(3)] == norms
    assert attention.count == attended
    assert largest_difference(*gradients)[0] == 0
