"""A step waits for its device once; what experts, and some options, add is listed here."""

from collections import Counter
from typing import Any

import pytest
import torch

from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.host_reads import host_reads
from meshwright.testing.layouts import LAYOUTS as TESTED
from tiny import tiny_run

ONCE = {"trainer/step.py:__call__": 1}
"""The loss and the gradient norm, read together before the update."""

HOST = {"comm/objects.py:_reduced": 2}
"""Counts of tokens, a tensor of the host that is made, summed over gloo, and read."""

ON_THE_HOST = ("optim/parameterwise.py:next_step", "models/masks.py:spans", "models/batch.py:move")
"""Steps of optimizers that count them on the host; spans of documents in the attention of CPUs, where GPUs take the
documents' offsets; batches, which GPUs get from pinned memory without a wait."""

LAYOUTS: dict[str, LayoutSpec] = {
    **TESTED,
    "quantized": LayoutSpec(dp_shard=2, quantized_weights="int8", quantized_gradients="int8"),
    "cp-ring": LayoutSpec(cp=2, cp_method="ring"),
    "cp-all-gather": LayoutSpec(cp=2, cp_method="all_gather"),
    "cp-ulysses": LayoutSpec(cp=2, cp_method="ulysses"),
    "pp-zero-bubble": LayoutSpec(pp=2, schedule="interleaved-zero-bubble", stages_per_rank=1),
    "pp-tp-zero-1": LayoutSpec(pp=2, tp=2, dp_shard=2, zero=1),
    "pipedream": LayoutSpec(pp=2, schedule="pipedream-2bw"),
    "offload": LayoutSpec(dp_shard=2, offload="cpu"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt2 tied": {"family": "gpt2", "tied": True},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "muon": {"optimizer": {"name": "muon", "eps": 0.1}},
    "8 bit": {"optimizer": {"name": "adamw_8bit"}, "precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16 weights": {
        "precision": "bf16",
        "master_dtype": "bf16",
        "optimizer": {"name": "adamw", "rounding": "stochastic"},
    },
    "fp16": {"precision": "fp16"},
    "lora": {"finetune": {"method": "lora", "rank": 3}},
    "preference": {"preference": {"beta": 0.5}},
}
MICROBATCHES = 3


def reads_of_a_step(run: ResolvedRun, documents: bool = False) -> Counter[str]:
    """The places at which this rank's third step waits."""
    trainer = build_here(run)
    with loader_for(trainer, documents=documents) as loader:
        for step in (1, 2):
            trainer.train_step(step, loader.microbatches(step - 1))
        microbatches = loader.microbatches(2)
        with host_reads() as counts:
            trainer.train_step(3, microbatches)
    return Counter({place: count for place, count in counts.items() if place not in ON_THE_HOST})


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.every(4)
def test_a_layout_waits_once(ranks, name: str) -> None:
    run = tiny_run(LAYOUTS[name], accumulation=MICROBATCHES if LAYOUTS[name].data_parallel < 3 else 1)
    for counts in ranks.run(run.run.layout.world_size, reads_of_a_step, run):
        assert counts == ONCE | HOST


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_waits_once(ranks, name: str) -> None:
    run = tiny_run(LayoutSpec(), accumulation=MICROBATCHES, **OPTIONS[name])
    (counts,) = ranks.run(1, reads_of_a_step, run)
    assert counts == ONCE | HOST


@pytest.mark.parametrize("layout", [LayoutSpec(), LayoutSpec(dp_shard=2), LayoutSpec(tp=2), LayoutSpec(pp=2)])
def test_documents_wait_for_nothing_more(ranks, layout) -> None:
    run = tiny_run(layout, accumulation=MICROBATCHES)
    for counts in ranks.run(layout.world_size, reads_of_a_step, run, True):
        assert counts == ONCE | HOST


def test_experts_wait_for_their_load(ranks) -> None:
    """It is read with the update. Row counts stay on the device: one kernel multiplies all experts, except in fp64."""
    run = tiny_run(LayoutSpec(), family="mixtral", accumulation=MICROBATCHES, precision="fp32")
    (counts,) = ranks.run(1, reads_of_a_step, run)
    assert counts == ONCE | HOST | {"optim/balance.py:update": 1}


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_experts_in_low_precision_wait_for_their_rows(ranks, precision: str) -> None:
    """Their rows' counts become shapes of quantized matrices: three matrices a layer and microbatch."""
    run = tiny_run(LayoutSpec(), family="mixtral", accumulation=MICROBATCHES, precision=precision, width=64)
    (counts,) = ranks.run(1, reads_of_a_step, run)
    rows = {"models/moe.py:read_counts": 3 * run.model.num_layers * MICROBATCHES}
    assert counts == ONCE | HOST | {"optim/balance.py:update": 1} | rows


@pytest.mark.parametrize(("recompute", "passes"), [("none", 1), ("full", 2)])
def test_expert_parallel_ranks_wait_for_the_rows_that_they_exchange(ranks, recompute: str, passes: int) -> None:
    """Their counts become shapes: once in a layer's forward pass of a microbatch, and when it is recomputed."""
    layout = LayoutSpec(dp_shard=2, ep=2)
    run = tiny_run(layout, family="mixtral", accumulation=MICROBATCHES, precision="fp32", recompute=recompute)
    rows = {"models/moe.py:read_counts": passes * run.model.num_layers * MICROBATCHES}
    for counts in ranks.run(2, reads_of_a_step, run):
        assert counts == ONCE | HOST | {"optim/balance.py:update": 1} | rows


def wait(kind: str, x: torch.Tensor) -> None:
    """Wait for a device in one way, if `x` [1] were on it."""
    match kind:
        case "item":
            x.item()
        case "float":
            float(x)
        case "bool":
            bool(x > 0)
        case "tolist":
            x.tolist()
        case "nonzero":
            x.nonzero()
        case "mask":
            x[x > 0]
        case "new_tensor":
            x.new_tensor(1.0)
        case "tensor":
            torch.tensor([1.0], device=x.device)
        case "cpu":
            x.cpu()


def planted(kind: str) -> Counter[str]:
    """The places that a function with a wait has."""
    x = torch.ones(1)
    with host_reads() as counts:
        wait(kind, x)
    return counts


KINDS = ["item", "float", "bool", "tolist", "nonzero", "mask", "new_tensor", "tensor", "cpu"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_seen(kind: str) -> None:
    assert planted(kind) == {"elsewhere": 1}
    assert planted("") == {}


class InBackward(torch.autograd.Function):
    """The identity, whose backward pass waits in one way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any):
        wait(ctx.kind, grad_outputs[0])
        return grad_outputs[0], None


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_seen_in_a_backward_pass(kind: str) -> None:
    y = InBackward.apply(torch.ones(1, requires_grad=True), kind)
    with host_reads() as counts:
        y.sum().backward()
    assert counts == {"elsewhere": 1}
