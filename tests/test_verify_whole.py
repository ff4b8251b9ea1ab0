"""`verify` proves whole steps as training makes them, evaluation, margins and number formats: right ones are equal, and
faults that single steps cannot show are found and named."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from meshwright import torch_internals
from meshwright.cli.main import main
from meshwright.comm import collectives
from meshwright.comm.quantize import Coded
from meshwright.models.moe import Router
from meshwright.optim.balance import ExpertBalance
from meshwright.optim.loss_scale import LossScaler
from meshwright.parallel import data as data_parallel
from meshwright.parallel.error_feedback import ErrorFeedback
from meshwright.parallel.pipedream import _StreamPass
from meshwright.prove import whole
from meshwright.prove.formats import narrow_sum
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.state import MasterWeights, TieredStore
from meshwright.testing.equivalence import build_here
from meshwright.testing.proof import prove
from meshwright.testing.ranks import RankPool
from meshwright.trainer.step import TrainStep
from tiny import tiny_run

PREFERENCE = {"preference": {"beta": 0.5}}
FEEDBACK = LayoutSpec(dp_shard=2, quantized_gradients="int4", gradient_error_feedback=True)
QUANTIZED = LayoutSpec(dp_shard=2, quantized_weights="int8", quantized_gradients="int8")
OFFLOADED = LayoutSpec.model_validate({"dp_shard": 2, "offload": {"optimizer": "host"}})
RECOMPUTED = {"num_layers": 4, "recompute": "full"}
FALLING = {"lr_schedule": {"name": "linear", "warmup": 0}, "steps": 12}
EXPERTS = {"family": "deepseek_v3"}
DROPOUT = {"finetune": {"method": "lora", "rank": 3, "dropout": 0.5}}
PIPEDREAM = LayoutSpec(pp=2, schedule="pipedream-2bw")


def run_of(layout: LayoutSpec, shrunk: bool = False, **options: Any) -> ResolvedRun:
    return tiny_run(layout, accumulation=3, **options).model_copy(update={"shrunk": shrunk})


def both_of(layout: LayoutSpec, own: str = "bf16", **options: Any) -> tuple[ResolvedRun, ResolvedRun]:
    """The run in float64, and in the recipe's precision."""
    return run_of(layout, precision="fp64", **options), run_of(layout, precision=own, **options)


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (FEEDBACK, {"shrunk": True}),
        (QUANTIZED, {"shrunk": True}),
        (OFFLOADED, {"shrunk": True}),
        (PIPEDREAM, {"num_layers": 4}),
        (LayoutSpec(pp=2, dp_replicate=2, schedule="pipedream-2bw"), {"num_layers": 4, "tied": True}),
        (LayoutSpec(cp=2, tp=2), PREFERENCE),
        (LayoutSpec(pp=2, dp_shard=2), PREFERENCE),
        (LayoutSpec(dp_shard=2, ep=2), {"family": "deepseek_v3"}),
        (LayoutSpec(tp=2), {"family": "gpt2", "finetune": {"method": "lora", "rank": 3}}),
        (LayoutSpec(dp_shard=2), {"optimizer": {"name": "muon", "eps": 0.1}}),
        (LayoutSpec(), {}),
        (LayoutSpec.model_validate({"offload": {"optimizer": "host"}}), {"shrunk": True}),
        (LayoutSpec(tp=2), {"own": "fp16", "finetune": {"method": "lora", "rank": 3, "dropout": 0.5}}),
        (LayoutSpec(dp_shard=2, ep=2), {"own": "fp16", "family": "deepseek_v3"}),
        (LayoutSpec(dp_shard=2), {"own": "nvfp4", "width": 64}),
        (LayoutSpec(tp=2), {"reduce_dtype": "bf16"}),
    ],
)
def test_right_ones_are_equal(ranks: RankPool, tmp_path: Path, layout: LayoutSpec, options: dict[str, Any]) -> None:
    run, own = both_of(layout, **options)
    proof = prove(ranks, tmp_path, run, own=own)
    assert proof.equal, proof.location
    names = [comparison.name for comparison in proof.whole]
    assert {"evaluation", "step 4"} <= set(names)
    assert ("skipped step" in names) != layout.asynchronous
    assert ("margins" in names) == ("preference" in options)
    assert ("repeated gradient" in names) == layout.gradient_error_feedback
    if not layout.asynchronous:
        (skipped,) = (comparison for comparison in proof.whole if comparison.name == "skipped step")
        assert skipped.numbers["skipped"].equal


def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    return mock.patch.object(owner, name, replacement)


def errors_forgotten_each_step() -> Any:
    begin = ErrorFeedback.begin
    return patch(ErrorFeedback, "begin", lambda self, scale: (self.drop(), begin(self, scale)))


def errors_kept_over_a_skipped_step() -> Any:
    return patch(ErrorFeedback, "drop", lambda self: None)


def finiteness_judged_by_the_loss() -> Any:
    norm = TrainStep.norm
    return patch(TrainStep, "norm", lambda self: norm(self).nan_to_num(posinf=1e300))


def margins_of_another_rank() -> Any:
    margins_of = whole.margins_of
    return patch(whole, "margins_of", lambda *arguments: np.roll(margins_of(*arguments), 2))


def means_of_ranks_averaged() -> Any:
    def mean_of_means(totals: torch.Tensor) -> torch.Tensor:
        terms = totals[-1].item()
        all_terms = collectives.all_reduce_(totals[-1:].clone()).item()
        share = totals / terms / torch.distributed.get_world_size() * all_terms
        return torch.cat((collectives.all_reduce_(share)[:-1], totals.new_tensor([all_terms])))

    return mock.patch("meshwright.trainer.evaluate.collectives", mock.Mock(all_reduce_=mean_of_means))


def backward_with_the_newest_weights() -> Any:
    backward = _StreamPass.backward

    def newest(self: _StreamPass, action: Any) -> None:
        assert self.newest is not None
        self.stash[action.microbatch] = self.newest
        backward(self, action)

    return patch(_StreamPass, "backward", newest)


def copies_not_refreshed() -> Any:
    return patch(MasterWeights, "put", lambda self, bucket: None)


def gradients_reduced_in_bf16() -> Any:
    policy = data_parallel._policy

    def narrow(precision: Any) -> Any:
        made = policy(precision)
        if made.reduce_dtype is None:
            return made
        return type(made)(made.param_dtype, torch.bfloat16, None, made.cast_forward_inputs)

    return patch(data_parallel, "_policy", narrow)


def only_the_first_bucket_is_written() -> Any:
    put = TieredStore.put

    def first(self: TieredStore, bucket: Any) -> None:
        before = {name: parameter.clone() for name, parameter in bucket.parameters.items()}
        put(self, bucket)
        for name, parameter in bucket.parameters.items():
            if bucket.index == 1:
                parameter.copy_(before[name] * (1 + 1e-6))

    return patch(TieredStore, "put", first)


def every_block_takes_the_first_scale() -> Any:
    scales = Coded.scales.fget  # type: ignore[attr-defined]
    return mock.patch.object(Coded, "scales", property(lambda self: scales(self)[:, :1].repeat(1, self.blocks)))


def last_batch_never_applied() -> Any:
    return patch(TrainStep, "finish", lambda self, step: None)


def gradients_left_by_a_skipped_step() -> Any:
    """What a skipped step leaves is added to the next gradient."""
    update = TrainStep.update

    def leave(self: TrainStep, step: int, gnorm: float, lr: float | None = None) -> None:
        if getattr(self, "left", False):
            gnorm *= 1.5
        update(self, step, gnorm, lr)

    call = TrainStep.__call__

    def noticed(self: TrainStep, step: int, microbatches: Any) -> Any:
        result = call(self, step, microbatches)
        self.left = result.skipped  # type: ignore[attr-defined]
        return result

    return mock.patch.multiple(TrainStep, update=leave, __call__=noticed)


def gradients_left_scaled() -> Any:
    """The optimizer gets gradients times the loss scale, on one process too."""
    factor = TrainStep.gradient_factor
    return patch(TrainStep, "gradient_factor", lambda self, gnorm: factor(self, gnorm) * self._scale)


def scale_adapted_on_one_rank() -> Any:
    update = LossScaler.update

    def on_the_first(self: LossScaler, *, finite: bool) -> None:
        if not torch.distributed.get_rank():
            update(self, finite=finite)

    return patch(LossScaler, "update", on_the_first)


def schedule_counts_updates() -> Any:
    """Every update counts as a step of the schedule; a skipped step does not."""
    update = TrainStep.update

    def counting(self: TrainStep, step: int, gnorm: float, lr: float | None = None) -> None:
        self.updates = getattr(self, "updates", 0) + 1  # type: ignore[attr-defined]
        update(self, step, gnorm, self.lr_factor(self.updates) if lr is None else lr)  # type: ignore[attr-defined]

    return patch(TrainStep, "update", counting)


def load_kept_over_a_skipped_step() -> Any:
    begin = ExpertBalance.begin

    def keeping(self: ExpertBalance, sequence_weight: float) -> None:
        kept = [router.load_E for router in self.routers]
        begin(self, sequence_weight)
        for router, load_E in zip(self.routers, kept, strict=True):
            router.load_E = load_E

    return patch(ExpertBalance, "begin", keeping)


def routers_in_the_compute_dtype() -> Any:
    forward = Router.forward

    def narrow(self: Router, x_BTD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights_BTK, *chosen = forward(self, x_BTD)
        return weights_BTK.to(x_BTD.dtype), *chosen

    return patch(Router, "forward", narrow)


def parts_of_sums_in_bf16() -> Any:
    param = torch_internals.FSDPParam
    if hasattr(param, "may_reduce_grad_outside_dp"):  # PyTorch 2.15 sums in the reduction dtype where this says so
        return patch(param, "may_reduce_grad_outside_dp", property(lambda self: False))
    return patch(torch_internals, "sum_parts_in_reduce_dtype", lambda module: None)


def last_microbatch_only() -> Any:
    """One process keeps the gradient of the last microbatch, in fp32 and more than bf16 numbers."""
    accumulate_into = MasterWeights._accumulate_into

    def replaced(self: MasterWeights, master: torch.Tensor) -> Any:
        accumulate = accumulate_into(self, master)

        def forget(parameter: torch.Tensor) -> None:
            master.grad = None
            accumulate(parameter)
            assert master.grad is not None
            master.grad.mul_(1 + 2.0**-12)

        return forget

    return patch(MasterWeights, "_accumulate_into", replaced)


def dropout_off_after_an_evaluation() -> Any:
    evaluate = whole.evaluate

    def ended(passes: Any, *arguments: Any, **options: Any) -> Any:
        result = evaluate(passes, *arguments, **options)
        passes.model.eval()
        return result

    return patch(whole, "evaluate", ended)


@pytest.mark.parametrize(
    ("plant", "layout", "options", "phase", "name"),
    [
        (errors_forgotten_each_step, FEEDBACK, {}, "whole", r"repeated gradient: "),
        (errors_kept_over_a_skipped_step, FEEDBACK, {}, "whole", r"skipped step: gradient_errors\."),
        (finiteness_judged_by_the_loss, LayoutSpec(dp_shard=2), {}, "whole", r"skipped step: norm"),
        (margins_of_another_rank, LayoutSpec(dp_shard=2), PREFERENCE, "whole", r"margins: pair 0"),
        (means_of_ranks_averaged, LayoutSpec(dp_shard=2), {}, "whole", r"evaluation: loss"),
        (backward_with_the_newest_weights, PIPEDREAM, RECOMPUTED, "whole", r"step 3: norm"),
        (last_batch_never_applied, PIPEDREAM, {"num_layers": 4}, "whole", r"last update: "),
        (gradients_left_by_a_skipped_step, LayoutSpec(dp_shard=2), {}, "whole", r"step 6: tok_embeddings\.weight"),
        (copies_not_refreshed, LayoutSpec(), {}, "formats", r"the copy of .* is not its master"),
        (
            gradients_reduced_in_bf16,
            LayoutSpec(dp_shard=2),
            {},
            "formats",
            r"the gradient of .* was summed in torch\.bfl",
        ),
        (gradients_left_scaled, LayoutSpec(dp_replicate=2), {"own": "fp16"}, "formats", r"step 1: .* in fp16"),
        (scale_adapted_on_one_rank, LayoutSpec(tp=2), {"own": "fp16"}, "formats", r"skipped step: loss scale in fp16"),
        (schedule_counts_updates, LayoutSpec(dp_shard=2), FALLING, "whole", r"step 6: "),
        (load_kept_over_a_skipped_step, LayoutSpec(dp_shard=2), EXPERTS, "whole", r"step 6: load of experts"),
        (
            routers_in_the_compute_dtype,
            LayoutSpec(dp_shard=2),
            EXPERTS,
            "formats",
            r"the choice of .*router was computed",
        ),
        (
            parts_of_sums_in_bf16,
            LayoutSpec(tp=2),
            {},
            "formats",
            r"the gradient of .*norm\.weight is not the sum of its",
        ),
        (last_microbatch_only, LayoutSpec(), {}, "formats", r"the gradient of .* is not the sum of its microbatches'"),
        (dropout_off_after_an_evaluation, LayoutSpec(dp_shard=2), DROPOUT, "whole", r"step 3: loss"),
        (only_the_first_bucket_is_written, OFFLOADED, {"shrunk": True}, "update", r"layers\.0\..*"),
        (every_block_takes_the_first_scale, QUANTIZED, {"shrunk": True}, "forward", r"tok_embeddings"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_faults_are_named(
    ranks: RankPool, tmp_path: Path, plant: Any, layout: LayoutSpec, options: dict[str, Any], phase: str, name: str
) -> None:
    run, own = both_of(layout, **options)
    location = prove(ranks, tmp_path, run, plant, own=own).location
    assert location is not None
    assert location.phase == phase, location
    assert re.match(name, location.name), location


@pytest.mark.slow
def test_the_verb_proves_a_late_pipeline_by_its_definition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model: llama-3-8b\nlayout: {pp: 2, schedule: pipedream-2bw}\ntraining: {steps: 9}\n")
    assert main(["verify", str(recipe)]) == 0
    report = capsys.readouterr().out
    assert "against    its definition on one process: 4 steps with the gradient of the batch before, fp64" in report
    assert "last update" in report
    assert "gradients summed in fp32, copies equal to their masters" in report


@pytest.mark.parametrize(("size", "wrong"), [(1.0, True), (2.0**-13, False)])
def test_a_gradient_that_is_all_rounding_is_not_judged_by_its_bits(size: float, wrong: bool) -> None:
    """Its numbers fit bf16 in both cases. Small ones may be rounding alone, as those of a key's bias."""
    trainer = build_here(tiny_run(LayoutSpec(), precision="bf16"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.parameters.items():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.grad = size * drawn.bfloat16().float() if name == "output.weight" else drawn
    location = narrow_sum(trainer)
    assert (None if location is None else location.name) == (
        "the gradient of output.weight was summed in torch.bfloat16" if wrong else None
    )
