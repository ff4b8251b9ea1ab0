"""Error feedback: nothing of a gradient is lost, on any layout; a resumed run continues with the same errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.manifest import checkpoint_name
from meshwright.comm.quantize import Coded
from meshwright.parallel.error_feedback import ErrorFeedback, KeptErrors
from meshwright.parallel.quantized import QuantizedReduceScatter, Rounding
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.pieces import PieceSizes
from meshwright.spec.quantized import KEPT, SentPart, bytes_each, levels
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for, whole_of_all
from meshwright.testing.proof import prove
from meshwright.testing.ranks import RankPool
from meshwright.trainer.probes import ComingBatch, trial_steps
from meshwright.trainer.setup import Trainer
from meshwright.trainer.state import describe_restored, gradient_errors, restore
from test_quantized import peaks
from test_resume import differences, uninterrupted
from test_traffic import counted_and_predicted
from tiny import tiny_run

BLOCK = PieceSizes().block

INT4 = {"quantized_gradients": "int4", "gradient_error_feedback": True}


def layout_of(**fields: Any) -> LayoutSpec:
    return LayoutSpec.model_validate({"dp_shard": 2, **INT4, **fields})


def sent(kept: KeptErrors, values_RN: torch.Tensor) -> torch.Tensor:
    """A reduction of one matrix in int4 as its receivers decode it."""
    (piece,) = kept.matrices
    rows = torch.empty(len(values_RN), piece.sent_bytes(4), dtype=torch.uint8)
    coded, decoded = Coded(rows, piece.numbers, "int4", piece.row), torch.empty_like(values_RN, dtype=torch.float32)
    kept.write(piece, values_RN, coded)
    coded.read(decoded)
    return decoded


def kept_of(matrix: SentPart, scale: float = 1.0) -> KeptErrors:
    kept = KeptErrors([matrix], 2)
    kept.allocate(torch.device("cpu"))
    ErrorFeedback([kept]).begin(scale)
    return kept


def errors_of(kept: KeptErrors) -> torch.Tensor:
    (piece,) = kept.matrices
    decoded = torch.empty(kept.ranks, piece.numbers)
    kept.of(piece).read(decoded)
    return decoded


MATRIX = SentPart("wq", 3 * 300, 300, matrix=True, sent="int4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_sent_is_the_gradient_but_for_the_last_error(dtype: torch.dtype) -> None:
    generator, kept = torch.Generator().manual_seed(0), kept_of(MATRIX)
    true, received, room = (torch.zeros(2, MATRIX.numbers, dtype=torch.float64) for _ in range(3))
    for _ in range(30):
        gradient = torch.randn(2, MATRIX.numbers, generator=generator).to(dtype)
        gradient[:, ::7] = 0.05  # less than half a step: without feedback it would never arrive
        true += gradient
        received += sent(kept, gradient.clone())
        room += kept.of(MATRIX).scales.amax() / 2  # an error itself is rounded when it is kept
    assert bool(((true - received - errors_of(kept)).abs() <= room * (1 + 1e-4)).all())
    assert errors_of(kept).abs().max() <= 5 * 0.5 / levels("int4"), "half a step"
    assert received[:, ::7].min() > 1


def test_errors_do_not_depend_on_the_loss_scale() -> None:
    plain, scaled = kept_of(MATRIX), kept_of(MATRIX, 2.0**10)
    for seed in range(3):
        gradient = torch.randn(2, MATRIX.numbers, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(sent(plain, gradient.clone()) * 2**10, sent(scaled, gradient * 2**10))
        assert torch.equal(plain.bytes_RB, scaled.bytes_RB)


def test_a_block_ends_with_its_row() -> None:
    """The gradient of a rare token's row is not rounded to zero because of a frequent one's."""
    rows = torch.ones(4, 96)
    rows[1::2] = 1e-3
    piece = SentPart("w1", rows.numel(), 96, matrix=True, sent="int4")
    coded = Coded(torch.empty(1, piece.sent_bytes(4), dtype=torch.uint8), piece.numbers, "int4", 96)
    coded.write(rows.reshape(1, -1).clone())
    decoded = torch.empty(1, piece.numbers)
    coded.read(decoded)
    torch.testing.assert_close(decoded.view(4, 96), rows, rtol=1e-6, atol=0.0)
    assert piece.sent_bytes(4) == 4 * 96 // 2 + 4 * 4
    wide = SentPart("wo", 2 * (BLOCK + 1), BLOCK + 1, matrix=True, sent="int8")
    assert wide.sent_bytes(4) == wide.numbers + 4 * 4


def means(resolved: ResolvedRun, count: int) -> dict[str, torch.Tensor]:
    """The mean of the first step's gradients, computed `count` times from the same weights. Collective."""
    trainer, total = build_here(resolved), dict[str, torch.Tensor]()
    with loader_for(trainer) as loader:
        for _ in range(count):
            trainer.train_step.gradients(loader.microbatches(0))
            found = whole_of_all(trainer, {name: one.grad for name, one in trainer.parameters.items()})
            total = {name: gradient + total.get(name, 0) for name, gradient in found.items()}
            trainer.store.zero_grad()
    return {name: gradient / count for name, gradient in total.items()}


CONVERGING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"zero": 3}, {"accumulation": 2}),
    ({"zero": 2}, {"precision": "fp16"}),
    ({"zero": 1}, {"accumulation": 2, "tied": True}),
    ({"dp_replicate": 2, "zero": 2}, {"accumulation": 2}),
    ({"tp": 2}, {"family": "gpt2"}),
    ({"ep": 2, "tp": 2}, {"family": "mixtral"}),
    ({"pp": 2}, {}),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("fields", "options"), CONVERGING, ids=str)
def test_errors_do_not_add_up_on_any_layout(ranks: RankPool, fields: dict[str, Any], options: dict[str, Any]) -> None:
    """The mean of n equal steps is the gradient up to the last errors, each at most half a step, over n."""
    layout, count = layout_of(**fields), 12
    plain, fed, lost = (
        ranks.run(layout.world_size, means, tiny_run(layout.model_copy(update=how), **options), times)[0]
        for how, times in (
            ({"quantized_gradients": "none", "gradient_error_feedback": False}, 1),
            ({}, count),
            ({"gradient_error_feedback": False}, 1),
        )
    )
    for name, gradient in plain.items():
        if gradient.dim() >= 2:
            off, alone = ((one[name] - gradient).norm() / gradient.norm() for one in (fed, lost))
            assert off < 3 * max(alone, 0.05) / count + (0.01 if "precision" in options else 0.002), name


def test_a_resumed_run_has_the_same_errors(ranks: RankPool, tmp_path: Path) -> None:
    run = tiny_run(layout_of(), precision="fp32", accumulation=2, steps=4)
    assert not any(ranks.run(2, differences, run, tmp_path, [2]))


def other_layout(run: ResolvedRun, root: Path) -> tuple[str, bool]:
    """The report of a run that continues from step 2, and whether its errors are zero. Collective."""
    trainer = build_here(run)
    trainer.train_step(1, list(loader_for(trainer).microbatches(0)))
    saved = restore(trainer, root / checkpoint_name(2))
    return describe_restored(trainer, saved), not any(one.any() for one in gradient_errors(trainer).values())


def test_another_layout_drops_the_errors_and_says_so(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, uninterrupted, tiny_run(layout_of(), steps=4), tmp_path, [2])
    dropped = "dropped   the errors of quantized gradients"
    for layout, kept in ((layout_of(), True), (layout_of(zero=2), False), (LayoutSpec(dp_shard=2), False)):
        for told, zero in ranks.run(2, other_layout, tiny_run(layout, steps=4), tmp_path):
            assert ("errors of gradients" in told) is kept
            assert (dropped in told) is not kept
            assert zero is not kept


def not_finite(run: ResolvedRun) -> tuple[bool, bool, bool]:
    """Whether there are errors after a step; whether the next, with a loss scale that overflows, is skipped; whether
    no error is left. Collective."""
    trainer = build_here(run)
    scaler = trainer.train_step.scaler
    assert scaler is not None
    with loader_for(trainer) as loader:
        trainer.train_step(1, loader.microbatches(0))
        before = any(one.any() for one in gradient_errors(trainer).values())
        scaler.scale = 2.0**40
        skipped = trainer.train_step(2, loader.microbatches(1)).skipped
        gone = not any(one.any() for one in gradient_errors(trainer).values())
        scaler.scale = 2.0**10
        after = trainer.train_step(3, loader.microbatches(2))
    assert not after.skipped
    return before, skipped, gone


def test_a_skipped_step_leaves_no_errors(ranks: RankPool) -> None:
    run = tiny_run(layout_of(zero=2), precision="fp16")
    assert ranks.run(2, not_finite, run) == [(True, True, True)] * 2


def probed(run: ResolvedRun) -> list[bool]:
    """Whether the errors of a step survive trial steps, and gradients that are only measured. Collective."""
    trainer, found = build_here(run), []

    def errors(trainer: Trainer) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in gradient_errors(trainer).items()}

    with loader_for(trainer) as loader:
        trainer.step = 1
        trainer.train_step(1, loader.microbatches(0))
        before = errors(trainer)
        with trial_steps(trainer, loader) as step:
            step(0, 1e-2)
            found.append(not all(torch.equal(one, before[name]) for name, one in errors(trainer).items()))
        found.append(all(torch.equal(one, before[name]) for name, one in errors(trainer).items()))
        ComingBatch(trainer, loader).gradient_norm([1.0, 1.0])
        found.append(all(torch.equal(one, before[name]) for name, one in errors(trainer).items()))
    return found


def test_probes_leave_the_errors_as_they_were(ranks: RankPool) -> None:
    assert ranks.run(2, probed, tiny_run(layout_of())) == [[True, True, True]] * 2


PROVED: list[Any] = [
    ({"zero": 3, "quantized_weights": "int8"}, {"accumulation": 3}),
    ({"zero": 1}, {"precision": "bf16", "optimizer": {"name": "muon"}}),
    *(
        pytest.param(fields, options, marks=pytest.mark.slow)
        for fields, options in (
            ({"dp_replicate": 2}, {"accumulation": 2, "tied": True}),
            ({"tp": 2}, {"family": "gpt2"}),
            ({"pp": 2}, {"tied": True}),
        )
    ),
]


@pytest.mark.every(2)
@pytest.mark.parametrize(("fields", "options"), PROVED, ids=str)
def test_layouts_are_proved_with_the_errors_that_a_step_inherits(
    ranks: RankPool, tmp_path: Path, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    proof = prove(ranks, tmp_path, tiny_run(layout_of(**fields), **options))
    assert proof.equal, proof.location
    assert len(proof.comparisons) > 1, "later steps begin with errors"
    for comparison in proof.comparisons:
        assert comparison.rounded
        if "precision" not in options:
            shares = [difference.share for difference in comparison.gradients.values()]
            assert 0.05 < max(shares) <= 1, "the room is that of the errors, no more"


def off_by(steps: list[list[float]]) -> list[tuple[float, float]]:
    """Of each step, reductions of gradients of these sizes: the largest error of this rank's sum, and the largest that
    a proof allows. Collective."""
    rank, piece = dist.get_rank(), SentPart("wq", 4 * 64, 64, matrix=True, sent="int4")
    reduction, found = QuantizedReduceScatter([piece], kept_of(piece)), []
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(0)
    assert group is not None
    for sizes in steps:
        reduction.rounding, off = Rounding(), torch.zeros(piece.numbers, dtype=torch.float64)
        for size in sizes:
            gradients = size * torch.randn(2, 2, piece.numbers, dtype=torch.float64, generator=generator)
            summed = torch.empty(piece.numbers, dtype=torch.float64)
            reduction(summed, gradients[rank].flatten().clone(), group, dist.ReduceOp.SUM)
            off += summed - gradients[:, rank].sum(0)
        found.append((float(off.abs().max()), float(reduction.rounding.most["wq"])))
    return found


def test_a_proof_allows_the_errors_before_and_after_a_step_and_no_more(ranks: RankPool) -> None:
    """In the second step hardly anything but the first one's last error, in the third hardly anything but its own."""
    for found in ranks.run(2, off_by, [[1.0, 1.0, 1.0], [1e-3], [1e-3, 1.0]]):
        for off, allowed in found:
            assert 0.5 * allowed < off <= allowed


@pytest.mark.parametrize("sent", ["int8", pytest.param("int4", marks=pytest.mark.exhaustive)])
def test_rehearsal_and_plan_know_the_errors(sent: str) -> None:
    """A byte of every matrix and its scales, on each of four ranks that share everything else."""
    found = []
    for feeds in (True, False):
        pool = RankPool()  # a process can be only one rank
        try:
            layout = {"zero": 3, "quantized_gradients": sent, "gradient_error_feedback": feeds}
            found += pool.run(1, peaks, layout)
        finally:
            pool.close()
    (rehearsed, predicted), (less, predicted_less) = found
    ends = 2 * 32000 * 512
    more = bytes_each(KEPT) * (ends + 2 * (4 * 512 * 512 + 3 * 512 * 1024))
    if sent == "int4":  # codes of embeddings and head on their way out and in, now in int8
        more += 2 * (bytes_each("int8") - bytes_each("int4")) * ends
    assert predicted - predicted_less == pytest.approx(more, rel=1e-5)  # the last norm counts among the ends
    assert rehearsed - less == pytest.approx(more, rel=0.001)


def test_embeddings_and_head_are_sent_in_int8(ranks: RankPool) -> None:
    """Counted and predicted bytes agree; without feedback everything is in int4."""
    for fields in ({"zero": 3}, {"gradient_error_feedback": False}):
        run = tiny_run(layout_of(**fields), precision="fp32", accumulation=2)
        for counted, predicted in ranks.run(2, counted_and_predicted, run):
            assert counted == predicted
    layout = layout_of()
    assert layout.gradient_format(("vocab", "embed")) == "int8"
    assert layout.gradient_format(("ffn", "embed")) == "int4"
    assert layout_of(gradient_error_feedback=False).gradient_format(("vocab", "embed")) == "int4"


def test_feedback_without_quantization_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient_error_feedback=true with quantized_gradients=none: no gradient"):
        LayoutSpec.model_validate({"dp_shard": 2, "gradient_error_feedback": True})
