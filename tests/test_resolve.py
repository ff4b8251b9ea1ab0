"""Every `auto` becomes a value with a reason; batches that cannot be split are refused with one that can."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from meshwright.machine import Machine
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.recompute import RecomputeSpec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run

H100 = Machine(kind="gpu", name="NVIDIA H100 80GB HBM3", devices=8, memory_bytes=80 * 2**30)


def run(model: Any = "llama-3-8b", **sections: Any) -> Run:
    return Run.model_validate({"model": model, **sections})


def test_the_batch_is_accumulated_where_it_does_not_fit() -> None:
    recipe = run(
        training={"global_batch": 64, "recompute": "none"},
        data={"sequence_length": 4096},
        layout={"dp_shard": 8},
    )
    resolved = resolve_run(recipe, base_dir=Path(), machine=H100)
    assert resolved.micro_batch * resolved.accumulation * 8 == resolved.global_batch == 64
    assert resolved.micro_batch < 8
    assert "GiB" in resolved.reasons["training.micro_batch"]
    cheaper = recipe.model_copy(update={"training": recipe.training.model_copy(update={"recompute": "full"})})
    assert resolve_run(cheaper, base_dir=Path(), machine=H100).micro_batch > resolved.micro_batch


def test_a_model_far_too_large_still_gets_the_smallest_microbatch_and_says_so() -> None:
    resolved = resolve_run(run("llama-3.1-405b"), base_dir=Path(), machine=H100)
    assert resolved.micro_batch == 1
    assert resolved.reasons["training.micro_batch"].startswith("the smallest possible; 1 would need about")


@pytest.mark.parametrize("layout", [{"dp_shard": 8}, "auto"])
@pytest.mark.parametrize(("scaling", "factor"), [("sqrt", 2.0), ("linear", 4.0)])
def test_a_learning_rate_given_for_a_batch_is_scaled_to_the_run_s(layout: Any, scaling: str, factor: float) -> None:
    optimizer = {"lr": 1e-3, "muon_lr": 0.01, "lr_base_batch": 16, "lr_scaling": scaling}
    recipe = run(training={"global_batch": 64, "optimizer": optimizer}, data={"sequence_length": 4096}, layout=layout)
    resolved = resolve_run(recipe, base_dir=Path(), machine=H100)
    rates = resolved.run.training.optimizer
    assert (rates.lr, rates.muon_lr, rates.lr_base_batch) == (factor * 1e-3, factor * 0.01, None)
    assert resolved.given == recipe
    assert resolved.reasons["training.optimizer.lr"].endswith(f"0.001 for 16 sequences, scaled ({scaling}) to 64")
    assert resolve_run(resolved.run, base_dir=Path(), machine=H100).run.training.optimizer == rates  # not twice


def test_the_recipe_as_given_is_read_from_an_older_version_s_run() -> None:
    optimizer = {"lr": 1e-3, "lr_base_batch": 16, "lr_scaling": "sqrt"}
    recipe = run(training={"global_batch": 64, "optimizer": optimizer}, layout={"dp_shard": 8})
    resolved = resolve_run(recipe, base_dir=Path(), machine=H100)
    saved = dump_recipe(resolved)
    older = saved.replace("\ngiven:", "\nasked:")
    assert older != saved
    assert parse_spec(older, ResolvedRun) == parse_spec(saved, ResolvedRun)
    assert parse_spec(older, ResolvedRun).given == recipe


SMALL = Machine(kind="gpu", name="NVIDIA A100-SXM4-40GB", devices=8, memory_bytes=40 * 2**30)
LONG: dict[str, Any] = {"data": {"sequence_length": 8192}, "layout": {"dp_shard": 8}}


def test_where_no_microbatch_fits_the_least_recomputation_that_would_is_taken() -> None:
    """Unless the recipe sets recomputation and the place of activations; then the error names it."""
    taken = resolve_run(run(**LONG, training={"global_batch": 16}), base_dir=Path(), machine=SMALL)
    assert isinstance(taken.run.training.recompute, RecomputeSpec)
    assert "without it, the smallest microbatch would need" in taken.reasons["training.recompute"]
    assert not taken.reasons["training.micro_batch"].startswith("the small")
    assert taken.given is not None
    assert "recompute" not in taken.given.training.model_fields_set
    assert taken.run.layout.offload == "none"
    fixed = LONG | {"layout": {"dp_shard": 8, "offload": "none"}}
    own = {"global_batch": 16, "recompute": "none"}
    resolved = resolve_run(run(**fixed, training=own), base_dir=Path(), machine=SMALL)
    assert resolved.given is None
    _, _, advice = resolved.reasons["training.micro_batch"].rpartition("this would fit: ")
    [override] = shlex.split(advice)  # as a shell takes it
    key, _, value = override.partition("=")
    assert key == "training.recompute"
    assert RecomputeSpec.model_validate(yaml.safe_load(value)) == taken.run.training.recompute


def test_recomputation_is_chosen_for_products_as_this_gpu_computes_them() -> None:
    """Selective recomputation keeps the results of products, in fp32 where a GPU without fp8 emulates them."""
    training = {"global_batch": 128, "precision": "fp8"}
    layout = {"dp_shard": 8, "offload": "none"}
    recipe = run(data={"sequence_length": 1024}, layout=layout, training=training)
    machines = [Machine("gpu", name, 8, 34 * 2**30) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")]
    hopper, ampere = (resolve_run(recipe, base_dir=Path(), machine=machine).run.training for machine in machines)
    assert isinstance(hopper.recompute, RecomputeSpec)
    assert isinstance(ampere.recompute, RecomputeSpec)
    assert hopper.recompute.selective
    assert not hopper.recompute.full
    assert ampere.recompute.full


def test_where_recomputation_may_not_help_activations_move_to_the_host() -> None:
    recipe = run(**LONG, training={"global_batch": 16, "recompute": "none"})
    taken = resolve_run(recipe, base_dir=Path(), machine=SMALL)
    assert taken.run.layout.tiers.activations == "host"
    assert taken.run.training.recompute == "none"
    assert "recomputation alone is not enough" in taken.reasons["layout.offload"]
    selective = run(**LONG, training={"global_batch": 16, "recompute": "selective"})
    assert resolve_run(selective, base_dir=Path(), machine=SMALL).run.layout.offload == "none"


def test_a_batch_in_tokens() -> None:
    recipe = run(training={"global_batch_tokens": 2**19}, data={"sequence_length": 2048})
    resolved = resolve_run(recipe, base_dir=Path(), machine=H100)
    assert (resolved.global_batch, resolved.tokens_per_step) == (256, 2**19)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"global_batch": 10}, "layout": {"dp_shard": 4}}, "the nearest multiple is 8"),
        ({"training": {"global_batch_tokens": 1000}, "data": {"sequence_length": 256}}, "nearest multiple is 1024"),
        ({"training": {"global_batch": 12, "micro_batch": 5}}, "the nearest divisor is 4"),
        (
            {"training": {"recompute": {"full": 33}}},
            r"training.recompute.full=33: the model has 32 layers, so the most is 32$",
        ),
        (
            {"training": {"recompute": {"full": 8, "selective": 1}}, "layout": {"pp": 4, "stage_layers": [9, 8, 8, 7]}},
            r"training.recompute.selective=1: pipeline stage 1 has 8 layers, so the most is 0 besides full=8$",
        ),
        (
            {"training": {"recompute": {"full": 1, "selective": []}}, "layout": {"pp": 2}},
            r"selective=\[\] has 0 numbers, and the layout has 2 pipeline stages; give 2, or one number for all",
        ),
        (
            {"training": {"recompute": {"full": [8, 8]}}},
            r"full=\[8, 8\] has 2 numbers, and the layout has 1 pipeline stage; give 1, or one number for all",
        ),
        ({"data": {"sequence_length": 9000}}, "use data.sequence_length=8192 or raise model.max_positions"),
    ],
)
def test_refused_with_what_would_work(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_run(run(**sections), base_dir=Path(), machine=H100)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"zero": 0, "dp_shard": 4}, "zero=0 with dp_shard=4: .* dp_replicate=4, dp_shard=1, zero=0"),
        ({"zero": 2, "dp_replicate": 4}, "zero=2 with dp_shard=1: .* dp_replicate=1, dp_shard=4, zero=2"),
        ({"zero": 3}, "nearest legal layout is zero=0"),
        ({"dp_shard": 0, "tp": 2}, "dp_shard=0: a degree is at least 1"),
    ],
)
def test_illegal_layouts_name_the_nearest_legal_one(degrees: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LayoutSpec.model_validate(degrees)


@pytest.mark.parametrize("recompute", ["full", {"full": 1}])
def test_full_recomputation_of_compiled_split_blocks_is_refused(recompute: Any) -> None:
    training = {"compile": True, "recompute": recompute}
    with pytest.raises(UserError, match="use recompute=selective, or compile=false"):
        resolve_run(run(training=training, layout={"tp": 2}), base_dir=Path(), machine=H100)
    resolve_run(run(training=training | {"recompute": "selective"}, layout={"tp": 2}), base_dir=Path(), machine=H100)
