"""The search: equal to brute force, at any size; reasons, reliefs, and recipes that train."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.families import PRESETS, resolve_model
from meshwright.families.flops import flops_per_token
from meshwright.machine import Machine
from meshwright.predict import search as search_module
from meshwright.predict.account import explain_field
from meshwright.predict.blueprint import Blueprint, LayerParameters, Matrix, blueprint
from meshwright.predict.candidate import Candidate, complexity, evaluate, family_name
from meshwright.predict.engine import engine_job, layout_check, passes, refusal
from meshwright.predict.explain import bandwidth, binding, in_fp8, relief, why_not
from meshwright.predict.hardware import device_cluster, local_cluster, resolve_cluster
from meshwright.predict.job import MESHWRIGHT, Job
from meshwright.predict.layouts import SearchLimits, divisors, layouts
from meshwright.predict.memory import RankMemory, least_memory, predict_memory
from meshwright.predict.recipe import choice_reason, plan_recipe, planned_run
from meshwright.predict.search import Enough, recomputing_least, search
from meshwright.predict.step_time import StepModel
from meshwright.spec.cluster import ClusterSpec, CollectiveCost, Measured
from meshwright.spec.data import DataSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.precision import Precision
from meshwright.spec.recipe import dump_recipe, load_recipe
from meshwright.spec.recompute import Recompute, RecomputeSpec, of_counts, plain_recompute
from meshwright.spec.run import Run
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: llama-3-8b
data: {sequence_length: 8192}
training: {global_batch: 128, steps: 1000}
layout: auto
cluster: 8xh100
"""
SMALL = ["model=gpt2", "data.sequence_length=512", "training.micro_batch=1", "cluster=2xh100"]
"""Settings that are planned ten times as fast."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(RECIPE)
    return tmp_path / "run.yaml"


def instance(seed: int) -> tuple[Job, ClusterSpec, SearchLimits]:
    """A small random model, batch, cluster and limit; the first layers of a model of experts have none."""
    rng = random.Random(seed)
    heads = rng.choice([4, 6, 8])
    hidden, experts = 128 * heads, rng.choice([0, 0, 4])
    attention = [Matrix(f"attention.{name}", hidden, hidden, split=True) for name in ("wq", "wo")]
    kinds = tuple(
        LayerParameters((
            *attention,
            Matrix("feed_forward.w1", 4 * hidden, hidden, split=True, experts=number),
            Matrix("feed_forward.w2", hidden, 4 * hidden, split=True, experts=number),
        ), 4 * hidden)
        for number in dict.fromkeys((0, experts))
    )  # fmt: skip
    layers = rng.choice([3, 4, 6])
    model = Blueprint(
        hidden=hidden, num_heads=heads, num_kv_heads=heads, head_dim=128, vocab=rng.choice([1000, 32000]), gated=False,
        tied=bool(seed % 2), kinds=kinds, pattern=(0,) * (layers // 3) + (len(kinds) - 1,) * (layers - layers // 3),
        top_k=2 if experts else 0,
    )  # fmt: skip
    job = Job(
        model=model, sequence=rng.choice([512, 2048, 8192]), global_batch=rng.choice([4, 6, 8, 16]), micro_batch=1,
        recompute=rng.choice(["none", "full"]),
    )  # fmt: skip
    cluster = device_cluster(rng.choice(["a100", "h100", "v100"]), rng.choice([1, 2, 4, 6]))
    share = rng.choice([0.02, 0.05, 0.1, 1.0])  # so that for some all layouts fit, for some none
    limits = SearchLimits(recompute=rng.random() < 0.7, offload=rng.random() < 0.3)
    return job, cluster.model_copy(update={"memory_gb": cluster.memory_gb * share}), limits


def every_recomputation(model: StepModel, enough: Enough, *_: object) -> Recompute:
    """The result of `least_recompute`, by trying all numbers of layers of every rank."""
    job, counts = model.job, [(0, 0)] * len(model.job.cut)
    for rank, stages in enumerate(job.stages):
        layers = range(max(job.cut[stage] for stage in stages) + 1)
        tried = ((full, selective) for full in layers for selective in layers if full + selective < len(layers))
        fitting = (some for some in tried if enough(RankMemory(job, rank).use(job.grouped(rank, *some))))
        best = min(fitting, key=lambda some, rank=rank: (model.repeated(job.grouped(rank, *some)), some))
        for stage in stages:
            counts[stage] = min(best[0], job.cut[stage]), min(best[1], job.cut[stage] - min(best[0], job.cut[stage]))
    return of_counts(counts, job.cut)


def simplest(every: Sequence[Candidate], runs: Callable[[Job], bool]) -> Candidate | None:
    """The right choice among the layouts that run and cost at most 3 % more than the best."""
    running = [candidate for candidate in every if runs(candidate.job)]
    limit = 1.03 * min((candidate.cost for candidate in running), default=0.0)
    return min(
        (candidate for candidate in running if candidate.cost <= limit),
        key=lambda one: (one.verdict == "tight", complexity(one.job.layout), one.cost, one.memory.total),
        default=None,
    )


@pytest.mark.slow
def test_the_pruned_search_is_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 random instances: the same ranking, including recomputation, the same best of every strategy, and the same
    choice, the simplest of the layouts that are about as fast."""
    skipped, found, simpler = 0, Counter(), 0
    for seed in range(80):
        job, cluster, limits = instance(seed)
        runs = (lambda job: job.layout.tp == 1) if seed % 3 else lambda job: True
        fast = search(job, cluster, top=3, limits=replace(limits, runs=runs))
        with monkeypatch.context() as patch:
            patch.setattr(search_module, "least_recompute", every_recomputation)
            slow = search(job, cluster, top=10**6, limits=replace(limits, runs=runs), prune=False)
        assert [candidate.job for candidate in fast.ranked] == [candidate.job for candidate in slow.ranked[:3]], seed
        expected = simplest(slow.ranked, runs)
        assert fast.chosen == slow.chosen == expected, seed
        assert fast.fastest == slow.fastest, seed
        simpler += fast.chosen != fast.fastest
        assert fast.strategies == slow.strategies, seed
        assert fast.legal == slow.legal == slow.looked_at
        skipped += slow.looked_at - fast.looked_at
        found.update(type(candidate.job.recompute).__name__ for candidate in fast.ranked)
    assert skipped > 80
    assert found["RecomputeSpec"] > 8
    assert simpler > 1


def test_every_peak_exceeds_the_quick_bound() -> None:
    """Over random jobs' layouts, whatever they recompute; and the bound is near enough to say something."""
    large = Job(
        model=blueprint(resolve_model(PRESETS["llama-3-70b"], base_dir=Path())), sequence=8192, global_batch=64,
        micro_batch=1,
    )  # fmt: skip
    jobs = [(*instance(seed), 7) for seed in range(40)]
    shares = []
    for seed, (job, cluster, limits, nth) in enumerate(
        [*jobs, (large, device_cluster("h100", 16), SearchLimits(), 29)]
    ):
        for layout, micro in list(layouts(job, cluster, limits))[::nth]:
            tried = replace(job, layout=layout, micro_batch=micro)
            least = least_memory(tried)
            for recompute in ("none", "selective", "full"):
                total = predict_memory(replace(tried, recompute=recompute)).total
                assert least <= total, (seed, layout, recompute)
            shares.append(least / total)
    assert len(shares) > 100
    assert sorted(shares)[len(shares) // 2] > 0.7
    assert max(shares) > 0.95


def test_ranks_may_be_looked_at_alone() -> None:
    """No mix of ranks' recomputation in a pipeline is faster than each rank with its own least."""
    model = blueprint(resolve_model(PRESETS["llama-3-8b"], base_dir=Path()))
    job = Job(
        model=replace(model, pattern=(0,) * 10), sequence=8192, global_batch=64, micro_batch=4, layout=LayoutSpec(pp=2)
    )
    cluster = device_cluster("h100", 2)
    found, times = recomputing_least(job, cluster), []
    assert found.recompute == RecomputeSpec(full=(2, 0), selective=(3, 0))
    for counts in product(*([(f, s) for f in range(n + 1) for s in range(n + 1 - f)] for n in job.cut)):
        tried = evaluate(replace(job, recompute=of_counts(counts, job.cut)), cluster)
        if tried.verdict == "fits":
            times.append(tried.time.total)
    assert len(times) > 10
    assert evaluate(found, cluster).time.total == min(times)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_what_layouts_share_is_the_same_for_each(precision: str) -> None:
    """A layout takes the same time in the search and alone, including weights that are quantized once a step."""
    for seed in range(6):
        job, _, _ = instance(seed)
        job = replace(job, precision=Precision.of(precision), global_batch=16)
        for found in search(job, device_cluster("h100", 4), top=100, prune=False).ranked:
            assert found.time.total == pytest.approx(evaluate(found.job, found.cluster).time.total, rel=1e-12)


@pytest.mark.slow
def test_every_layout_is_legal_and_different() -> None:
    base = Job(model=blueprint(resolve_model(PRESETS["qwen3-30b-a3b"], base_dir=Path())), sequence=4096,
               global_batch=64, micro_batch=1)  # fmt: skip
    cluster = device_cluster("h100", 32)
    found = list(layouts(base, cluster, SearchLimits()))
    assert len(set(found)) == len(found) > 500
    for layout, micro_batch in found:
        job = replace(base, layout=layout, micro_batch=micro_batch)
        assert job.layout.world_size == 32
        assert job.global_batch == job.layout.data_parallel * job.micro_batch * job.microbatches
        assert sum(job.stage_layers) == base.model.num_layers
        assert family_name(layout)
    assert {layout.ep for layout, _ in found} == {1, 2, 4, 8, 16, 32}
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


@pytest.mark.exhaustive
def test_a_large_job_is_planned_in_the_time_of_a_keystroke() -> None:
    """405B on 1024 devices: all layouts ordered, most never evaluated. docs/plan.md measures the time."""
    model = blueprint(resolve_model(PRESETS["llama-3.1-405b"], base_dir=Path()))
    base = Job(model=model, sequence=8192, global_batch=2048, micro_batch=1)
    found = search(base, device_cluster("h100", 1024), top=5)
    best = found.ranked[0]
    assert best.verdict == "fits"
    assert best.job.layout.tp <= 8  # tensor parallelism stays in the node
    assert 0.35 < best.mfu < 0.6
    assert found.looked_at < 0.75 * found.legal
    assert {"DDP", "ZeRO-1", "ZeRO-3"} <= set(found.strategies)


@pytest.mark.slow
def test_reasons_name_the_memory_that_lacks_or_the_time_that_is_lost() -> None:
    model = blueprint(resolve_model(PRESETS["llama-3-8b"], base_dir=Path()))
    base = Job(model=model, sequence=8192, global_batch=128, micro_batch=1)
    found = search(base, device_cluster("h100", 8))
    best = found.ranked[0]
    assert why_not(found.strategies["DDP"], best).startswith("needs 15")
    assert "84.6 available; largest term optimizer 96.4 GB" in why_not(found.strategies["DDP"], best)
    assert why_not(found.strategies["TP"], best).endswith(" s instead of 0 s")
    assert why_not(best, best) == "chosen"


@pytest.mark.exhaustive
def test_no_reason_contradicts_itself() -> None:
    """The cost that a slower layout is said to have is larger than in the other layout, in the displayed figures, for
    any pair of layouts."""
    model = blueprint(resolve_model(PRESETS["llama-3-70b"], base_dir=Path()))
    base = Job(model=model, sequence=4096, global_batch=64, micro_batch=1)
    found = search(base, resolve_cluster("16xh100@100Gb/s", base_dir=Path()), top=40)
    fitting = [one for one in (*found.ranked, *found.strategies.values()) if one.verdict != "does not fit"]
    compared = Counter()
    for one, other in product(fitting, fitting):
        said = why_not(one, other)
        if " slower: " not in said:
            continue
        assert one.time.total > other.time.total
        cause = re.search(r"slower: (.*?) ([\d.]+) s instead of ([\d.]+) s$", said)
        assert cause, said
        assert float(cause[2]) > float(cause[3]), said
        compared[cause[1]] += 1
    assert compared["forward and backward passes"] > 10
    assert len(compared) > 3


@pytest.mark.exhaustive
def test_speed_outranks_what_stays_free() -> None:
    """70B over 25 Gb/s: an offloading layout is chosen before one that fits and takes an hour; if nodes have no memory
    for offloading, a tight layout is chosen."""
    model = blueprint(resolve_model(PRESETS["llama-3-70b"], base_dir=Path()))
    base = Job(model=model, sequence=4096, global_batch=64, micro_batch=1)
    slow = resolve_cluster("16xh100@25Gb/s", base_dir=Path())
    chosen = search(base, slow).chosen
    assert chosen
    assert (chosen.verdict, chosen.job.layout.offload) == ("fits", "cpu")
    assert chosen.time.total < 30
    bare = search(base, slow.model_copy(update={"host_memory_gb": 1.0}))
    assert bare.chosen
    assert bare.chosen.verdict == "tight"
    assert bare.chosen.time.total < 30
    fitting = evaluate(replace(base.with_layout(dp_shard=2, tp=8, zero=3), recompute="full"), slow)
    assert fitting.verdict == "fits"
    assert fitting.time.total > 3000


def test_the_cheapest_relief_is_one_that_fits() -> None:
    model = blueprint(resolve_model(PRESETS["llama-3-8b"], base_dir=Path()))
    cluster = device_cluster("h100", 8)
    job = Job(model=model, sequence=8192, global_batch=128, micro_batch=2, layout=LayoutSpec(dp_shard=8, zero=3))
    assert evaluate(job, cluster).verdict == "does not fit"
    words = relief(job, cluster, 0.1)
    assert words is not None
    assert words.startswith(("recompute=selective", "micro_batch=1"))
    assert relief(replace(job, model=replace(model, pattern=(0,) * 2000)), cluster, 0.1) is None


def test_a_cpu_is_not_relieved_by_its_own_memory() -> None:
    """`check` advised offload=cpu to a run on a CPU."""
    model = blueprint(resolve_model(PRESETS["gpt2"], base_dir=Path()))
    cluster = local_cluster(Machine("cpu", "cpu", 1, 2_300_000_000), 1)
    job = Job(model=model, sequence=128, global_batch=1, micro_batch=1, stack=replace(MESHWRIGHT, context_bytes=0.45e9))
    assert evaluate(job, cluster).verdict == "does not fit"
    words = relief(job, cluster, 0.1)
    assert words is not None
    assert words.startswith("offload={optimizer: disk")


@pytest.mark.exhaustive
def test_the_simplest_of_equally_fast_layouts_is_chosen_and_written(recipe: Path) -> None:
    """Not the one that is 2 % faster with more stages: predictions are off by more."""
    words = ["model=llama-3-70b", "data.sequence_length=4096", "training.global_batch=64", "cluster=16xh100@25Gb/s"]
    run = load_recipe(recipe, words)
    plan, facts = plan_recipe(run, base_dir=recipe.parent)
    chosen, fastest = plan.chosen, plan.searched.fastest
    assert chosen
    assert fastest
    assert complexity(chosen.job.layout) < complexity(fastest.job.layout)
    assert fastest.time.total < chosen.time.total <= 1.03 * fastest.time.total
    assert facts["fastest"]["text"] != facts["chosen"]["text"]
    assert "the simplest within 3% of the fastest of " in choice_reason(plan)
    written = planned_run(run, plan).layout
    assert written == chosen.job.layout


def test_a_slow_network_is_told_how_slow() -> None:
    model = blueprint(resolve_model(PRESETS["llama-3-70b"], base_dir=Path()))
    slow = resolve_cluster("64xh100@100Gb/s", base_dir=Path())
    job = Job(
        model=model,
        sequence=4096,
        global_batch=64,
        micro_batch=1,
        recompute="full",
        layout=LayoutSpec(dp_shard=64, zero=3),
    )
    words = bandwidth(evaluate(job, slow))
    assert words is not None
    assert "ZeRO-3 needs" in words
    assert bandwidth(evaluate(job, device_cluster("h100", 8))) is None


def test_what_the_engine_cannot_run_is_said() -> None:
    spec = resolve_model(PRESETS["llama-3-8b"], base_dir=Path())
    job = Job(
        model=blueprint(spec), sequence=8192, global_batch=128, micro_batch=1, layout=LayoutSpec(dp_shard=8, zero=3)
    )
    check = layout_check(Run(model=ModelFields(name="llama-3-8b"), data=DataSpec(sequence_length=8192)), spec, "gpu")
    assert refusal(job, check) is None
    assert passes(check)(job.with_layout(dp_shard=4, tp=2))
    assert not passes(check)(job.with_layout(dp_shard=1, tp=64, zero=0))
    misfit = refusal(job.with_layout(dp_shard=1, tp=64, zero=0), check)
    assert misfit is not None
    assert "32 query heads cannot be split evenly over 64 ranks" in misfit
    illegal = refusal(job.with_layout(dp_replicate=8, dp_shard=1), check)
    assert illegal is not None
    assert illegal.startswith("zero=3 with dp_shard=1")


@pytest.mark.slow
def test_a_plan_for_people(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", str(recipe)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-3-8b: 8.03B parameters; 128 x 8192 tokens a step\n8 x H100-SXM-80GB")
    assert "* " in text
    assert "does not fit needs 153 GB, 84.6 available; largest term optimizer 96.4 GB" in text
    assert re.search(r"^  TP +fits +4% slower.* 76\.\d GB  dp_shard=4 tp=2 zero=3$", text, re.MULTILINE)
    assert re.search(r"^  lora +fits .* tok/s/dev  dp_shard=8 zero=2 micro_batch=1 ", text, re.MULTILINE)
    assert max(map(len, text.split("the best layout of each strategy")[1].splitlines())) <= 140
    plan, _ = plan_recipe(load_recipe(recipe, SMALL), base_dir=recipe.parent)
    for field in ("memory", "time", "mfu", "cost", "search"):
        assert len(explain_field(plan, field).splitlines()) > 2
    with pytest.raises(ValueError, match="choose one of memory, time, mfu, cost, search"):
        explain_field(plan, "luck")


@pytest.mark.parametrize("method", ["lora", "qlora", "ia3"])
def test_what_fine_tuning_counts_and_explains(recipe: Path, method: str) -> None:
    """The same count of operations for plans and training; notes that say how frozen weights are stored."""
    tuned = f"finetune={{method: {method}}}"
    run = load_recipe(recipe, ["model=llama-3-8b", "data.sequence_length=1024", tuned])
    plan, facts = plan_recipe(run, base_dir=recipe.parent, cluster="1xrtx3090")
    assert plan.chosen
    assert plan.chosen.job.flops_per_token == flops_per_token(plan.case.spec, 1024, run.finetune)
    rate = plan.chosen.tokens_per_second * plan.chosen.job.flops_per_token / 1e12
    assert facts["chosen"]["mfu"] == pytest.approx(rate / plan.case.cluster.tflops["bf16"])
    assert "4 FLOP per frozen parameter in use" in explain_field(plan, "mfu")
    memory = explain_field(plan, "memory")
    assert ("0.516 bytes per parameter of blocks" in memory) == (method == "qlora")
    assert "12 bytes per parameter of adapters" in memory
    assert "in transit" not in memory


def test_what_does_not_fit_is_explained(recipe: Path) -> None:
    words = ["model=llama-3-70b", "training.global_batch=8", "layout=auto"]
    plan, _ = plan_recipe(load_recipe(recipe, words), base_dir=recipe.parent, cluster="1xrtx3090")
    least = min(candidate.memory.total for candidate in plan.searched.strategies.values())
    text = explain_field(plan, "memory")
    assert text.startswith("nothing fits; the layout that needs least memory is ")
    assert f"{least / 1e9:.2f} GB" in text
    assert re.search(r"needs \d+ GB.* available", explain_field(plan, "search"))
    words[-1] = "training.micro_batch=1"
    words.append("layout={dp_shard: 2}")
    plan, _ = plan_recipe(load_recipe(recipe, words), base_dir=recipe.parent, cluster="1xrtx3090")
    assert explain_field(plan, "memory").startswith("nothing fits; the recipe's own layout is ZeRO-")


@pytest.mark.slow
def test_a_plan_for_machines_and_a_recipe_that_trains(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    written = recipe.parent / "plan.yaml"
    assert main(["plan", str(recipe), "--json", "--top", "3", "--write", str(written)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["plan", str(recipe), "--write", str(written)]) == 2, "it would overwrite the recipe"
    chosen = facts["chosen"]
    assert chosen["runs_today"]
    assert chosen["step_time"]["low"] < chosen["step_time"]["value"] < chosen["step_time"]["high"]
    assert sum(chosen["memory"].values()) == pytest.approx(chosen["memory_total"]["value"], rel=1e-6)
    assert len(facts["candidates"]) == 3
    assert (facts["methods"]["lora"]["strategy"], facts["methods"]["lora"]["reason"]) == ("ZeRO-2", None)
    run = load_recipe(written)
    assert not run.layout.choose
    assert run.layout.world_size == 8
    assert run.training.micro_batch == chosen["micro_batch"]
    resolved = resolve_run(run, base_dir=recipe.parent)
    assert resolved.accumulation == chosen["accumulation"]


@pytest.mark.exhaustive
def test_some_layers_recompute_where_that_suffices(recipe: Path) -> None:
    """The written recipe trains with it."""
    run = load_recipe(recipe, ["model=llama-3-70b", "cluster=64xh100"])
    plan, facts = plan_recipe(run, base_dir=recipe.parent, limits=SearchLimits(micro_batch=False))
    assert re.search(r"recompute=\w+:\d+", facts["chosen"]["text"])
    (recipe.parent / "plan.yaml").write_text(dump_recipe(planned_run(run, plan)))
    chosen = load_recipe(recipe.parent / "plan.yaml")
    assert facts["chosen"]["recompute"] == plain_recompute(chosen.training.recompute)
    machine = Machine("gpu", "H100", 8, round(plan.case.cluster.memory_gb * 1e9))
    resolved = resolve_run(chosen, base_dir=recipe.parent, machine=machine)
    assert len(resolved.recompute) == 80
    assert len(set(resolved.recompute)) > 1


@pytest.mark.slow
def test_a_layout_that_does_not_fit_gets_its_relief(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["plan", str(recipe), "layout={dp_replicate: 2}", "training.micro_batch=1", "cluster=2xh100"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "> " in text
    assert "relief     the recipe's layout does not fit with its margin; cheapest: zero=" in text


def test_a_layout_that_fits_only_by_offloading_says_so(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", str(recipe), "training.global_batch=8", "--cluster", "1xh100", "--top", "1"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^\* .* offload=cpu ", shown, re.MULTILINE)
    assert re.search(r"^memory .* GB; 128\.\d GB per device in host memory$", shown, re.MULTILINE)


def test_a_host_too_small_to_offload_to_is_the_reason(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    """A machine with a GeForce card has less memory than a server."""
    assert main(["plan", str(recipe), "training.global_batch=8", "data.sequence_length=512", "--cluster", "rtx5090"])
    shown = capsys.readouterr().out
    assert re.search(r"  CPU offload +does not fit needs 128 GB of host memory per node, 57.6 avail", shown)
    assert re.search(
        r"^  full   does not fit: needs 129 GB of host memory per node, 57.6 available, with", shown, re.MULTILINE
    )


def test_what_takes_most_binds() -> None:
    """Computation if it is largest, the optimizer if offloading makes it largest; then the next."""
    model = blueprint(resolve_model(PRESETS["llama-3-8b"], base_dir=Path()))
    job = Job(
        model=model,
        sequence=8192,
        global_batch=128,
        micro_batch=1,
        recompute="full",
        layout=LayoutSpec(dp_shard=4, tp=2, zero=3),
    )
    cluster = device_cluster("h100", 8)
    found = evaluate(job, cluster)
    said = re.fullmatch(
        r"computation, (\d+)% of the step \(recomputation (\d+)%\); then exposed tensor-parallel communication, "
        r"(\d+)%; memory is \d+% full",
        binding(found),
    )
    assert said
    parts = found.time.compute, found.time.recompute, found.time.tensor
    assert [int(share) for share in said.groups()] == [round(100 * part / found.time.total) for part in parts]
    alone = Job(model=model, sequence=512, global_batch=1, micro_batch=1, layout=LayoutSpec(offload="cpu"))
    assert binding(evaluate(alone, device_cluster("h100", 1))).startswith("the optimizer, with transfers of its state")


def test_a_recipe_for_one_device_has_its_own_row_and_what_it_costs(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    (recipe.parent / "ours.yaml").write_text(
        "{name: ours, device: card, devices: 1, per_node: 1, domain: 1, memory_gb: 25, memory_gb_s: 900, "
        "tflops: {bf16: 70}, link_gb_s: 25, network_gb_s: 3, price_per_hour: 0.3, currency: euros}"
    )
    words = [
        "plan",
        str(recipe),
        "--cluster",
        "ours.yaml",
        "model=gpt2",
        "data.sequence_length=512",
        "training.steps=3",
    ]
    own = ["training.micro_batch=2", "training.recompute=full"]
    for layout, row in (("layout={dp_replicate: 1}", True), ("layout={}", True), ("layout=auto", False)):
        assert main([*words, *own, layout]) == 0
        shown = capsys.readouterr().out
        assert bool(re.search(r"^> .*zero=0 micro_batch=2 recompute=full$", shown, re.MULTILINE)) is row
    assert "\nours: 1 x card, 25.0 GB each" in shown
    assert re.search(r"^run +3 steps: .*, 0\.00\d+ \(0\.00\d+-0\.00\d+\) euros$", shown, re.MULTILINE)


def test_a_tight_choice_is_called_tight(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    cluster = resolve_cluster("rtx3090", base_dir=recipe.parent).model_copy(update={"host_memory_gb": 0.1})
    (recipe.parent / "bare.yaml").write_text(dump_recipe(cluster))
    words = ["model=gpt2", "data.sequence_length=512", "cluster=bare.yaml"]
    assert main(["plan", str(recipe), "--margin", "0.9", "--top", "1", *words]) == 0
    shown = capsys.readouterr().out
    assert "may run out of memory; every layout that leaves 90% of it free (--margin) takes at least 2 times" in shown
    assert re.search(r"^\* .* tight +", shown, re.MULTILINE)
    plan, _ = plan_recipe(load_recipe(recipe, words), base_dir=recipe.parent, top=1, limits=SearchLimits(margin=0.9))
    assert plan.chosen
    assert "that is tight (each one that fits takes at least 2 times as long) on 1 x RTX 3090" in choice_reason(plan)


@pytest.mark.slow
def test_a_refused_layout_has_no_row(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    """The recipe's own layout: the reason for its refusal is shown, without unreachable figures."""
    assert main(["plan", str(recipe), *SMALL, "cluster=6xh100", "layout={dp_shard: 6}"]) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"^>", shown, re.MULTILINE)
    assert "refused    the recipe's own layout: training.global_batch=128 sequences cannot be split over 6" in shown


@pytest.mark.exhaustive
def test_the_layout_that_is_asked_about_is_explained(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    """The recipe's own layout, if it gives one, not the one that would be chosen."""
    words = ["plan", str(recipe), "--explain", "memory", "cluster=4xh100", "training.micro_batch=1"]
    assert main([*words, "layout={dp_shard: 2, tp: 2}"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("the recipe's own layout is TP + ZeRO-3: dp_shard=2 tp=2 ")
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("ZeRO-3: dp_shard=4 ")


def test_nothing_fits_is_a_finding(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", str(recipe), "--cluster", "1xt4"]) == 1
    assert "no layout that this version's trainer supports fits" in capsys.readouterr().out
    assert main(["plan", str(recipe), "--margin", "2"]) == 2
    assert main(["plan", str(recipe), "--cluster", "8xabacus"]) == 2


@pytest.mark.slow
def test_layout_auto_is_resolved_before_the_run_with_its_reason(recipe: Path) -> None:
    resolved = resolve_run(load_recipe(recipe), base_dir=recipe.parent)
    assert resolved.run.layout.world_size == 8
    assert "the fastest of" in resolved.reasons["layout"]
    assert resolved.given is not None
    assert resolved.given.layout.choose
    assert resolved.plan is not None
    assert resolved.plan["chosen"]["micro_batch"] == resolved.micro_batch
    some = resolve_run(load_recipe(recipe, ["training.recompute={full: 2}"]), base_dir=recipe.parent)
    assert some.run.training.recompute == RecomputeSpec(full=2)
    kept = load_recipe(recipe, ["training.recompute=full", "training.micro_batch=2"])
    resolved = resolve_run(kept, base_dir=recipe.parent)
    assert (resolved.run.training.recompute, resolved.micro_batch) == ("full", 2)
    with pytest.raises(ValueError, match=r"layout: auto, but no layout fits 1 x T4: .*needs"):
        resolve_run(load_recipe(recipe, ["cluster=1xt4"]), base_dir=recipe.parent)
    with pytest.raises(ValueError, match="auto lets the planner decide every degree"):
        load_recipe(recipe, ["layout={choose: true, dp_shard: 2}"])


@pytest.mark.slow
def test_a_plan_never_loads_torch(recipe: Path) -> None:
    code = "import sys, meshwright.cli.main as cli; cli.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "plan", str(recipe), *SMALL], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_calibrated_machine_replaces_the_datasheet() -> None:
    model = blueprint(resolve_model(PRESETS["gpt2"], base_dir=Path()))
    job = Job(
        model=model,
        sequence=1024,
        global_batch=16,
        micro_batch=2,
        precision=Precision.of("fp32"),
        layout=LayoutSpec(dp_shard=2, zero=3),
    )
    guess = device_cluster("a100", 2)
    measured = Measured(
        matmul_tflops={"fp32": 0.1}, matmul_half_us={"fp32": 5.0}, memory_gb_s=10, attention_tflops=0.05, host_us=3,
        collectives={"link": CollectiveCost(latency_us=100, bandwidth_gb_s=1)},
    )  # fmt: skip
    slow = guess.model_copy(update={"measured": measured})
    assert evaluate(job, slow).time.compute > 20 * evaluate(job, guess).time.compute
    flops = 16 / 2 * 1024 * model.model_flops(1024)
    assert evaluate(job, slow).time.compute > flops / 0.1e12
    assert evaluate(job, slow).time.data > 10 * evaluate(job, guess).time.data


@pytest.mark.slow
def test_what_this_version_cannot_run_is_said_beside(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    run = load_recipe(recipe)
    plan, facts = plan_recipe(run, base_dir=recipe.parent, limits=SearchLimits(micro_batch=False))
    assert 0.1 < facts["fp8"]["saved"] < 0.5
    assert facts["fp8"]["step_time"] == pytest.approx((1 - facts["fp8"]["saved"]) * plan.chosen.time.total)
    assert in_fp8(evaluate(plan.chosen.job, device_cluster("a100", 8))) is None
    words = ["model=llama-3-70b", "cluster=2xh100", "training.global_batch=8"]
    assert main(["plan", str(recipe), *words, "data.sequence_length=2048"]) == 1
    text = capsys.readouterr().out
    assert "would fit  finetune.method=qlora (" in text
    assert "offload={optimizer: disk, parameters: disk}" in text


@pytest.mark.every(1)
@pytest.mark.parametrize(
    "words",
    [
        "finetune={method: qlora}",
        "finetune={method: qlora, double_quantization: false}",
        "finetune={method: qlora, base: int8}",
        "finetune={method: lora, targets: [wq, output], rank: 3}",
        "training.preference={}",
        "training.optimizer.name=paged_adamw|model=llama-3.2-1b|cluster=1xh100",
    ],
)
def test_what_plan_chooses_check_accepts(recipe: Path, words: str) -> None:
    """Twelve short sequences for eight devices, which data parallelism alone cannot use."""
    run = load_recipe(recipe, ["training.global_batch=12", "data.sequence_length=1024", *words.split("|")])
    plan, facts = plan_recipe(run, base_dir=recipe.parent)
    chosen = planned_run(run, plan)
    machine = Machine("gpu", "H100", 8, round(plan.case.cluster.memory_gb * 1e9))
    assert resolve_run(chosen, base_dir=recipe.parent, machine=machine).micro_batch == facts["chosen"]["micro_batch"]
    if words == "finetune={method: qlora}":
        assert "set double_quantization=false" in facts["strategies"]["TP"]["missing"]
        assert chosen.layout.tp == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "finetune={method: qlora}",
        "finetune={method: qlora, base: int8}",
        "finetune={method: lora, rank: 3, dora: true}",
        "finetune={method: ia3}",
    ],
)
def test_whatever_the_search_calls_runnable_is_not_refused(recipe: Path, words: str) -> None:
    """Every layout of four devices, fine-tuned; some are refused, and the search knows them."""
    short = ["training.global_batch=4", "training.micro_batch=1", "data.sequence_length=1024", "model=gpt2", words]
    run, machine = load_recipe(recipe, short), Machine("gpu", "H100", 8, 80 * 2**30)
    spec = resolve_model(run.model, base_dir=recipe.parent)
    check = layout_check(run, spec, "gpu")
    base = engine_job(run, blueprint(spec), global_batch=4, micro_batch=1, layout=LayoutSpec(dp_replicate=2))
    found = layouts(base, device_cluster("h100", 4), SearchLimits(micro_batch=False))
    everything = [replace(base, layout=layout, micro_batch=micro) for layout, micro in found]
    runnable = [job for job in everything if passes(check)(job)]
    for job in runnable:
        resolved = resolve_run(run.model_copy(update={"layout": job.layout}), base_dir=recipe.parent, machine=machine)
        assert resolved.accumulation == job.microbatches
    assert len(runnable) > 10
    assert (len(runnable) < len(everything)) == (words == "finetune={method: qlora}")


def test_a_batch_too_small_for_the_devices_is_the_reason(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    """Memory was not computed, so no layout is reported to lack it; the named remedies do help."""
    words = ["training.global_batch=8", "data.sequence_length=256", "layout={dp_shard: 2}", "model=gpt2"]
    assert main(["plan", str(recipe), *words, "--cluster", "832xh100"]) == 1
    text = capsys.readouterr().out
    assert "training.global_batch=8 sequences cannot be split over 832 data-parallel ranks" in text
    assert "what works: 32 devices or training.global_batch=832" in text
    assert "> the recipe's own" in text
    assert "does not fit" not in text
    assert "nothing that" not in text
    for remedy in (["--cluster", "32xh100"], ["--cluster", "832xh100", "training.global_batch=832"]):
        assert main(["plan", str(recipe), *words, *remedy]) == 0
    with pytest.raises(ValueError, match=r"no suitable layout: training\.global_batch=8 sequences cannot be split"):
        resolve_run(load_recipe(recipe, [*words[:2], "model=gpt2", "cluster=832xh100"]), base_dir=recipe.parent)
