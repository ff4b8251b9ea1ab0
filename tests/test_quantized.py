"""Quantized collectives: the wire's format, its error, its bytes, and training with it on several layouts."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.comm.quantize import Coded
from meshwright.machine import Machine
from meshwright.predict.blueprint import blueprint
from meshwright.predict.engine import engine_job
from meshwright.predict.memory import predict_memory
from meshwright.predict.traffic import predict_traffic
from meshwright.prove.gathered import round_blocks
from meshwright.rehearse.rank import rehearse_rank
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.fit import quantized_misfits
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.pieces import PieceSizes
from meshwright.spec.quantized import SCALE_BYTES, code_bytes, levels, num_blocks, sent_bytes
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import build_here, loader_for, whole_of_all
from meshwright.testing.proof import prove
from meshwright.testing.ranks import RankPool
from meshwright.trainer.resolve import resolve_run
from test_rehearse import real, rehearsed
from test_traffic import counted_and_predicted
from tiny import tiny_run

BLOCK = PieceSizes().block


def quantized(values: torch.Tensor, sent: Any, row: int | None = None) -> torch.Tensor:
    """A flat tensor as the receiver decodes it, if it is sent as one part; `row`: see `Coded`."""
    result = values.clone().view(1, -1)
    size = num_blocks(values.numel(), row) * SCALE_BYTES + code_bytes(values.numel(), sent)
    coded = Coded(torch.empty(1, size, dtype=torch.uint8), values.numel(), sent, row)
    coded.write(result)
    coded.read(result)
    return result.view(-1)


INT8 = {"quantized_weights": "int8", "quantized_gradients": "int8"}
INT4 = {"quantized_weights": "int8", "quantized_gradients": "int4"}


@pytest.mark.parametrize("sent", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numbers", [1, 7, 255, 256, 257, 1024, 1301])
def test_every_number_is_off_by_at_most_half_a_step(sent: Any, dtype: torch.dtype, numbers: int) -> None:
    values = torch.randn(numbers, generator=torch.Generator().manual_seed(numbers)).mul(3.7).to(dtype)
    found = quantized(values, sent)
    for start in range(0, numbers, BLOCK):
        block, ours = values[start : start + BLOCK].double(), found[start : start + BLOCK].double()
        room = block.abs().max() * (0.5 / levels(sent) + 2 * torch.finfo(torch.float32).eps)
        room = room + ours.abs() * torch.finfo(dtype).eps / 2
        assert bool(((ours - block).abs() <= room).all())
    assert sent_bytes(numbers, sent, 8, matrix=True) == num_blocks(numbers) * 4 + -(
        -numbers * (8 if sent == "int8" else 4) // 8
    )


@pytest.mark.parametrize("sent", ["int8", "int4"])
def test_codes_and_zeros_come_back_as_they_are(sent: Any) -> None:
    most = levels(sent)
    values = torch.arange(-most, most + 1, dtype=torch.float32).repeat(40)[: 2 * BLOCK + 3]
    values[-1] = most
    assert torch.equal(quantized(values, sent), values)
    assert not quantized(torch.zeros(300), sent).any()


@pytest.mark.parametrize("sent", ["int8", "int4"])
@pytest.mark.parametrize("row", [7, 256, 601])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_definition_that_proofs_use_is_what_ranks_receive(sent: Any, row: int, dtype: torch.dtype) -> None:
    values = torch.randn(3, row, generator=torch.Generator().manual_seed(row), dtype=dtype)
    values[1, : BLOCK + 1] = 0
    received, defined = quantized(values.flatten(), sent, row), values.clone()
    round_blocks(defined, sent)
    assert torch.equal(defined.flatten(), received)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = bad
    found = quantized(values, "int8")
    assert not found[BLOCK : 2 * BLOCK].isfinite().any()
    assert torch.equal(found[:BLOCK], values[:BLOCK])


def test_rows_are_coded_apart_and_where_they_are_told() -> None:
    values = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    size = sent_bytes(300, "int4", 4, matrix=True)
    wire = torch.zeros(3, size + 9, dtype=torch.uint8)
    coded, back = Coded(wire[:, 5 : 5 + size], 300, "int4"), torch.empty(3, 400)
    coded.write(values.clone())
    coded.read(back[:, 7:307])
    for row in range(3):
        assert torch.equal(back[row, 7:307], quantized(values[row], "int4"))
    assert not wire[:, :5].any()
    assert not wire[:, 5 + size :].any()


def _trained(resolved: ResolvedRun) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of two steps, and the first step's gradients. Collective."""
    trainer, losses, gradients = build_here(resolved), [], {}
    with loader_for(trainer) as loader:
        for step in (1, 2):
            loss, _ = trainer.train_step.gradients(loader.microbatches(step - 1))
            losses.append(loss)
            gradients = gradients or whole_of_all(trainer, {n: p.grad for n, p in trainer.parameters.items()})
            trainer.train_step.update(step, trainer.train_step.gradient_norm())
            trainer.store.zero_grad()
    return losses, gradients


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dp_shard": 2, "zero": 3}, {"precision": "bf16"}),
    ({"dp_shard": 2, "zero": 3}, {"accumulation": 2, "family": "gpt2"}),
    ({"dp_shard": 2, "zero": 2}, {"precision": "fp32", "tied": True}),
    ({"dp_shard": 2, "zero": 1}, {"accumulation": 2}),
    ({"cp": 2, "zero": 3}, {}),
]


def _both(cases: list[tuple[dict[str, Any], dict[str, Any]]], how: dict[str, str]) -> list[tuple[Any, Any, Any]]:
    found = []
    for layout, options in cases:
        plain, rounded = (
            tiny_run(LayoutSpec.model_validate({**layout, **sent}), **options) for sent in (dict[str, str](), how)
        )
        found.append((_trained(plain), _trained(rounded), counted_and_predicted(rounded)))
    return found


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("how", [INT8, INT4], ids=["int8", "int4"])
def test_bytes_are_those_predicted_and_training_is_near(ranks: RankPool, how: dict[str, str]) -> None:
    for found in ranks.run(2, _both, LAYOUTS, how):
        for (losses, gradients), (ours, theirs), (counted, predicted) in found:
            assert counted == predicted
            assert ours != losses
            assert ours == pytest.approx(losses, rel=2e-3)
            for name, gradient in gradients.items():
                if gradient.dim() < 2:  # not quantized; a key's bias has only rounding as gradient
                    continue
                off = (theirs[name] - gradient).norm() / gradient.norm()
                assert off < (0.08 if how is INT8 else 0.4), name


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"quantized_weights": "int8"}, "quantized_weights=int8 with zero=0 and dp_shard=1: no rank gathers weights"),
        ({"dp_replicate": 2, "quantized_gradients": "int4"}, "no rank scatters gradients; the nearest legal layout is"),
    ],
)
def test_layouts_that_send_nothing_are_refused(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayoutSpec.model_validate(layout)


def too_small() -> Any:
    """A rank that decodes gathered weights with scales that are one percent too small."""
    scales = Coded.scales.fget
    assert scales is not None
    return mock.patch.object(Coded, "scales", property(lambda coded: 0.99 * scales(coded)))


PROVED: list[Any] = [
    ({"dp_shard": 2, "zero": 3, **INT4}, {"accumulation": 3}),
    ({"dp_shard": 2, "zero": 2, **INT8}, {"precision": "bf16", "optimizer": {"name": "muon"}}),
    *(
        pytest.param(layout, options, marks=pytest.mark.slow)
        for layout, options in (
            ({"dp_replicate": 2, "dp_shard": 2, **INT8}, {"accumulation": 2, "tied": True}),
            ({"dp_shard": 2, "tp": 2, **INT4}, {"family": "gpt2"}),
            ({"dp_shard": 2, "pp": 2, **INT4}, {"tied": True}),
            ({"dp_shard": 2, "cp": 2, "ep": 2, **INT8}, {"family": "mixtral"}),
        )
    ),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("layout", "options"), PROVED, ids=str)
def test_layouts_are_proved_to_the_quantization_step(
    ranks: RankPool, tmp_path: Path, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    proof = prove(ranks, tmp_path, tiny_run(LayoutSpec.model_validate(layout), **options))
    assert proof.equal, proof.location
    for comparison in proof.comparisons:
        assert comparison.rounded
        if "precision" not in options:
            assert comparison.loss.by < 1e-12, "one process computes with the weights that ranks gather"
            shares = [difference.share for difference in comparison.gradients.values()]
            assert 0.05 < max(shares) <= 1, "the room is that of the step, no more"


@pytest.mark.slow
def test_a_wrong_scale_is_found(ranks: RankPool, tmp_path: Path) -> None:
    layout = LayoutSpec.model_validate({"dp_shard": 2, "quantized_weights": "int8"})
    proof = prove(ranks, tmp_path, tiny_run(layout), too_small)
    assert not proof.equal
    assert proof.location is not None
    assert proof.location.phase == "forward"


@pytest.mark.exhaustive
def test_a_rehearsed_rank_sends_what_a_real_one_sends(ranks: RankPool) -> None:
    run = tiny_run(LayoutSpec.model_validate({"dp_shard": 2, **INT4}), precision="bf16", accumulation=3)
    outcomes, apart = ranks.run(2, real, run), RankPool()  # a process can be only one rank
    try:
        (fake,) = apart.run(1, rehearsed, run, 1)
    finally:
        apart.close()
    assert fake == outcomes[1]


def peaks(layout: dict[str, Any]) -> tuple[float, float]:
    """The peak of rank 0 of four in a rehearsal, and in the planner."""
    sizes = {"family": "llama", "hidden": 512, "num_layers": 2, "num_heads": 8, "ffn": 1024, "vocab": 32000}
    sections = {
        "model": {**sizes, "max_positions": 128},
        "data": {"sequence_length": 128},
        "training": {"micro_batch": 1, "global_batch": 8},
        "layout": {"dp_shard": 4, **layout},
    }
    machine = Machine("gpu", "NVIDIA H100 80GB HBM3", 8, 80 * 10**9, 10**12)
    run = resolve_run(Run.model_validate(sections), base_dir=Path(), machine=machine)
    batch, micro = run.global_batch, run.micro_batch
    job = engine_job(run.run, blueprint(run.model), global_batch=batch, micro_batch=micro)
    return rehearse_rank(run, 0, on_gpu=True)["peak"], predict_memory(job).allocated


@pytest.mark.slow
def test_the_planner_knows_the_peak_of_a_reduction_in_codes() -> None:
    """Codes sent and received, with the gradients that they were computed from; FSDP2 of 2.15 has already released the
    embeddings' gradients."""
    apart = RankPool()
    try:
        ((rehearsed_peak, predicted),) = apart.run(1, peaks, {"zero": 2, "quantized_gradients": "int8"})
    finally:
        apart.close()
    released = 32000 * 512 * 2 if torch.__version__ >= "2.15" else 0
    assert predicted - released == pytest.approx(rehearsed_peak, rel=0.01)


def test_what_cannot_be_combined_is_refused() -> None:
    layout = LayoutSpec.model_validate({"dp_shard": 2, "pp": 2, "schedule": "zbv", **INT4})
    lora = LoraSpec.model_validate({"method": "lora", "base": "nf4"})
    found = quantized_misfits(layout, lora)
    assert [sentence.split(":")[0] for sentence in found] == [
        "layout.quantized_weights=int8 with finetune.base=nf4",
        "layout.quantized_gradients=int4 with layout.schedule=zbv",
    ]
    run = {"model": "llama-3-8b", "layout": {"dp_shard": 2, **INT8}, "guards": {"verify_every": 10}}
    with pytest.raises(ValueError, match=r"cannot reproduce the rounding of layout\.quantized_weights=int8"):
        Run.model_validate(run)


def test_plans_count_a_quarter_and_an_eighth() -> None:
    """Relative to fp32's bytes, plus the scales: 4 bytes for 256 numbers."""
    layout = LayoutSpec(dp_shard=2)
    plain, rounded = (
        predict_traffic(tiny_run(LayoutSpec.model_validate({"dp_shard": 2, **how}), precision="fp32", width=1024))
        for how in (dict[str, str](), INT4)
    )
    assert layout.shard == 2
    gathered = rounded["all-gather", "shard"] / plain["all-gather", "shard"]
    assert gathered == pytest.approx((1 + 4 / 256) / 4, rel=0.01)
    reduced = rounded["all-to-all", "shard"] / plain["reduce-scatter", "shard"]
    assert reduced == pytest.approx((1 / 2 + 4 / 256) / 4, rel=0.01)
