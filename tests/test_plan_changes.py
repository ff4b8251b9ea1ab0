"""Changes of a recipe that compete in a plan's search: named, searched as if alone, explained, written, or refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.predict.changes import CHANGES, GROUPS, LAST_RESORT, asked_changes, named
from meshwright.predict.explain import describe_candidate
from meshwright.predict.recipe import choice_reason, plan_recipe, planned_run
from meshwright.predict.search import Variant, search
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import load_recipe

RECIPE = """\
model: gpt2
data: {sequence_length: 1024}
training: {global_batch: 32, micro_batch: auto}
layout: auto
cluster: 2xh100
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RECIPE)
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("cluster", "precision", "emulated"),
    [("2xh100", "precision=fp8", False), ("2xa100", "precision=fp8", True), ("2xb200", "precision=nvfp4", True),
     ("2xh100", "low_precision={recipe: blockwise} training.precision=fp8", True)],
)  # fmt: skip
@pytest.mark.every(1)
def test_an_emulated_precision_is_not_predicted_as_native(
    recipe: Path, capsys: pytest.CaptureFixture, cluster: str, precision: str, emulated: bool
) -> None:
    words = [f"cluster={cluster}", "layout={dp_shard: 2}", "training.micro_batch=4"]
    steps = []
    for settings in (["training.precision=bf16"], re.split(r" (?=training)", f"training.{precision}")):
        _, facts = plan_recipe(load_recipe(recipe, [*words, *settings]), base_dir=recipe.parent)
        steps.append(facts["given"]["step_time"]["value"])
    assert (steps[1] > steps[0]) == emulated
    assert (facts["emulated"] is not None) == emulated
    if emulated:
        assert 0.3 < facts["emulated"]["saved"] < 1
    assert main(["plan", str(recipe), *words, *settings, "--top", "1"]) == 0
    assert ("training.precision=bf16: " in capsys.readouterr().out) == emulated


def test_a_considered_format_without_kernels_is_predicted_as_native(recipe: Path) -> None:
    """And refused, so its rows say what the device could do."""
    _, facts = plan_recipe(
        load_recipe(recipe, ["cluster=2xb200"]), base_dir=recipe.parent, consider=asked_changes("mxfp8")
    )
    native = facts["strategies"]["with mxfp8"]
    assert native["step_time"]["value"] < facts["chosen"]["step_time"]["value"]
    assert native["reason"].startswith("refused")


def test_names_join_groups_and_refuse_what_contradicts() -> None:
    assert [change.name for change in asked_changes("states,fp8+8bit_states,fp8")] == [
        *GROUPS["states"],
        "fp8+8bit_states",
        "fp8",
    ]
    both = named("fp8+8bit_states")
    assert both.overrides == ("training.precision=fp8", "training.optimizer.name=adamw_8bit")
    assert not both.exact
    assert named("parameters").layout == {"offload": "cpu"}
    assert all(named(name) for names in GROUPS.values() for name in names)
    assert all(change.exact for change in LAST_RESORT)
    exact = {"activations", "optimizer", "parameters", "disk", "disk_parameters"}
    assert {name for name, change in CHANGES.items() if change.exact} == exact
    with pytest.raises(UserError, match=r"both set layout.offload.optimizer"):
        named("optimizer+disk")
    with pytest.raises(UserError, match="--consider fp9: known changes are offload, "):
        asked_changes("fp9")


@pytest.mark.slow
def test_a_change_is_searched_as_if_it_were_alone(recipe: Path) -> None:
    """The best layout of a change among others is the best of a separate search with that recipe."""
    run = load_recipe(recipe)
    changes = asked_changes("activations,8bit_states,int8_weights,fp8")
    plan, facts = plan_recipe(run, base_dir=recipe.parent, consider=changes)
    plain = search(plan.case.base, plan.case.cluster, top=1)
    assert plan.searched.legal > plain.legal
    for change in changes:
        limits = replace(plan.case.limits, change=change)
        best = plan.searched.strategies[f"with {change.name}"]
        base = replace(best.job, recompute="none", micro_batch=1)
        alone = search(base, plan.case.cluster, top=1, limits=limits)
        assert min(one.time.total for one in alone.strategies.values()) == pytest.approx(best.time.total)
        assert best.change == change
    assert facts["strategies"]["with fp8"]["step_time"]["low"] < facts["strategies"]["with fp8"]["step_time"]["value"]
    assert plan.searched.strategies["with int8_weights"].job.layout.quantized_weights == "int8"
    unasked, facts = plan_recipe(run, base_dir=recipe.parent)
    assert not unasked.considered
    assert not any(name.startswith("with ") for name in unasked.searched.strategies)
    assert facts["chosen"]["change"] is None


def test_pruning_with_changes_is_brute_force(recipe: Path) -> None:
    plan, _ = plan_recipe(load_recipe(recipe), base_dir=recipe.parent)
    cluster = plan.case.cluster.model_copy(update={"memory_gb": 8.0})
    beside = [
        Variant(plan.case.base, replace(plan.case.limits, change=named(name)))
        for name in ("activations", "optimizer", "int4_gradients")
    ]
    fast = search(plan.case.base, cluster, top=3, beside=beside)
    slow = search(plan.case.base, cluster, top=3, beside=beside, prune=False)
    assert fast.ranked == slow.ranked
    assert (fast.chosen, fast.fastest, fast.strategies) == (slow.chosen, slow.fastest, slow.strategies)
    assert fast.looked_at < slow.looked_at == slow.legal


@pytest.mark.slow
def test_a_change_that_is_chosen_is_told_and_written(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    written = recipe.parent / "plan.yaml"
    words = ["plan", str(recipe), "model=llama-3.2-1b", "data.sequence_length=4096", "training.micro_batch=1"]
    assert main([*words, "--consider", "fp8,mxfp8", "--write", str(written)]) == 0
    shown = capsys.readouterr().out
    assert "changed    training.precision=fp8 (--consider); results differ from the recipe's" in shown
    assert re.search(r"^\* .* precision=fp8$", shown, re.MULTILINE)
    assert load_recipe(written).training.precision == "fp8"
    assert main([*words, "--consider", "fp8,mxfp8", "--explain", "search"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"^  mxfp8  [\d.]+ GB \([\d.]+ to [\d.]+\), .* s \(.*\), other arithmetic: refused", shown, re.MULTILINE
    )


def test_what_says_nothing_on_a_cluster_is_refused(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    for words, problem in (
        (["--cluster", "a100", "--consider", "fp8"], "A100-SXM-80GB has no fp8 matrix products"),
        (["--cluster", "local", "--consider", "activations"], "saves nothing on a CPU"),
        (["--consider", "bf16_states", "training.optimizer.name=muon", "training.precision=fp32"], ""),
    ):
        status = main(["plan", str(recipe), *words])
        assert (status == 2) == bool(problem)
        assert problem in capsys.readouterr().err


def test_where_nothing_fits_an_exact_change_is_taken_and_said(recipe: Path) -> None:
    """One GPU with room for the weights, but not for optimizer state and activations."""
    words = ["model=llama-3.2-1b", "training.global_batch=4", "data.sequence_length=8192", "cluster=card.yaml"]
    (recipe.parent / "card.yaml").write_text(
        "{name: ours, device: card, devices: 1, per_node: 1, domain: 1, memory_gb: 9, memory_gb_s: 900, "
        "tflops: {bf16: 70}, link_gb_s: 25, network_gb_s: 3}"
    )
    run = load_recipe(recipe, words)
    plan, facts = plan_recipe(run, base_dir=recipe.parent)
    chosen = plan.chosen
    assert chosen is not None
    assert facts["last_resort"]
    assert chosen.change in LAST_RESORT
    assert "no layout fits without it" in choice_reason(plan)
    assert "offload=" in describe_candidate(chosen)
    written = planned_run(run, plan)
    assert written.layout.offload != "none"
    assert (written.training.precision, written.training.optimizer) == (run.training.precision, run.training.optimizer)
    plain = search(plan.case.base, plan.case.cluster, top=1)
    assert not plain.ranked


def test_a_change_may_switch_something_on() -> None:
    change = named("int4_gradients_with_feedback")
    assert change.layout == {"quantized_gradients": "int4", "gradient_error_feedback": True}
    assert change.overrides[-1] == "layout.gradient_error_feedback=true"
