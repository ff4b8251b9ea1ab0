"""The traffic of every strategy in a step: counted in torch's collectives, and equal to the formulas to the byte."""

from collections import Counter
from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.parallel.traffic import Traffic, axis_names, ranks_of
from meshwright.predict.traffic import predict_traffic, traffic_without_maxima
from meshwright.rehearse.fake import fake_rank
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.layouts import EXPERT_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool
from tiny import GLOBAL_BATCH, tiny_run


def counted_and_predicted(resolved: ResolvedRun) -> tuple[Counter, Counter]:
    """Bytes by kind and axis on this rank; axes of the same ranks have one name."""
    trainer = build_here(resolved)
    with loader_for(trainer) as loader:
        microbatches = loader.microbatches(0)
        with Traffic(trainer.meshes) as traffic:
            trainer.train_step.gradients(microbatches)
    counted = Counter({key: count.bytes for key, count in traffic.counts.items()})
    if trainer.meshes is None or dist.group.WORLD is None:
        return counted, traffic_without_maxima(resolved)
    meshes, names = trainer.meshes, axis_names(trainer.meshes)
    found = {axis: meshes.axis(axis) for axis in ("pp", "cp", "tp", "ep", "shard", "replicate")}
    if meshes.experts is not None:
        of_experts = set(meshes.experts.mesh_dim_names or ()) & {"shard", "replicate"}
        found |= {f"expert {axis}": meshes.experts[axis] for axis in of_experts}
    groups = {axis: mesh.get_group() for axis, mesh in found.items() if mesh is not None} | {"world": dist.group.WORLD}
    predicted: Counter[Any] = Counter()
    for (kind, axis), size in traffic_without_maxima(resolved).items():
        predicted[kind, names.get(ranks_of(groups[axis]), "world")] += size
    return counted, predicted


def on_a_fake_rank(resolved: ResolvedRun) -> tuple[Counter, Counter]:
    """`counted_and_predicted` on the first rank of a group whose collectives do nothing: the amount that a rank sends
    does not depend on the received numbers."""
    size = resolved.run.layout.world_size
    with fake_rank(0, size) if size > 1 else nullcontext():
        return counted_and_predicted(resolved)


def first_rank(resolved: ResolvedRun) -> tuple[Counter, Counter]:
    """`on_a_fake_rank` in a separate process, because torch keeps meshes for the life of a process."""
    with closing(RankPool()) as pool:
        return pool.run(1, on_a_fake_rank, resolved)[0]


def options_of(layout: LayoutSpec, families: tuple[str, ...], turn: int) -> dict[str, Any]:
    """Families, recomputation, precision and ties alternate."""
    return {
        "family": families[turn % len(families)],
        "recompute": ("none", "selective", "full", {"full": 1})[turn // 3 % 4],
        "precision": ("fp32", "fp64", "bf16")[turn % 3],
        "accumulation": 3 if GLOBAL_BATCH // layout.data_parallel % 3 == 0 else 2,
        "tied": turn % 2 == 1,
    }


@pytest.mark.every(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_counted_is_what_was_predicted(name: str) -> None:
    """(`test_rehearse.py` compares these counts with real ranks.)"""
    layout = LAYOUTS[name]
    options = options_of(layout, ("llama", "gpt2", "qwen3", "gemma3", "olmo3"), list(LAYOUTS).index(name))
    counted, predicted = first_rank(tiny_run(layout, **options))
    assert counted == predicted, options


@pytest.mark.every(3)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["tp", "tp-wide", "zero-3-tp"])
def test_norms_over_all_heads(name: str, recompute: str) -> None:
    counted, predicted = first_rank(tiny_run(LAYOUTS[name], family="olmo3", recompute=recompute, accumulation=3))
    assert counted == predicted


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "sharding", "tied"),
    [
        ("interleaved-1f1b", {"dp_replicate": 2}, True),
        ("interleaved-1f1b", {"dp_shard": 2, "zero": 1}, False),
        ("interleaved-1f1b", {"dp_shard": 2, "zero": 2}, True),
        ("interleaved-1f1b", {"dp_shard": 2}, False),
        ("zbv", {"dp_replicate": 2}, True),
        ("zbv", {"dp_shard": 2, "zero": 1}, True),
        ("zbv", {"dp_shard": 2, "zero": 2}, False),
        ("zbv", {"dp_shard": 2}, True),
        ("dualpipev", {"dp_shard": 2, "zero": 2}, False),
        ("looped-bfs", {"dp_shard": 2}, False),
        ("interleaved-zero-bubble", {"dp_shard": 2}, True),
    ],
)
def test_ranks_with_several_stages(schedule: str, sharding: dict[str, int], tied: bool) -> None:
    """Embedding and head are gathered only for the stages that need them."""
    layout = LayoutSpec.model_validate({"pp": 2, "schedule": schedule} | sharding)
    run = tiny_run(layout, accumulation=6, num_layers=5, tied=tied, recompute={"full": 1})
    counted, predicted = first_rank(run)
    assert counted == predicted


@pytest.mark.every(3)
@pytest.mark.parametrize("name", list(EXPERT_PARALLEL)[::3])
def test_experts(ranks: RankPool, name: str) -> None:
    """Routing decides how much each rank sends, so the sums over a stage's ranks are compared."""
    layout = EXPERT_PARALLEL[name]
    families = ("mixtral", "deepseek_v3", "qwen3_moe", "glm4_moe", "minimax_m2")
    options = options_of(layout, families, list(EXPERT_PARALLEL).index(name))
    if name == "zero-3-ep":
        options["precision"] = "nvfp4"  # rows go to experts with the numbers of their tokens
    outcomes = ranks.run(layout.world_size, counted_and_predicted, tiny_run(layout, **options))
    outcomes = outcomes[: layout.world_size // layout.pp]
    sent = [Counter(), Counter()]  # axes of the same ranks have one name, so all-to-alls over all axes
    for sides in outcomes:
        for total, side in zip(sent, sides, strict=True):
            for key in [key for key in side if key[0] == "all-to-all"]:
                total[key] += side.pop(key)
    assert sent[0] == sent[1], options
    counted, predicted = outcomes[0]
    assert counted == predicted, options


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"tp": 2}, {"recompute": {"full": 1}, "finetune": {"method": "lora", "rank": 4}}),
        (
            {"tp": 4},
            {"recompute": "selective", "finetune": {"method": "lora", "rank": 4, "targets": ["w2"], "dora": True}},
        ),
        ({"tp": 2, "dp_shard": 2}, {"recompute": "full", "finetune": {"method": "ia3"}}),
        (
            {"tp": 2, "dp_shard": 2, "zero": 1},
            {"finetune": {"method": "lora", "rank": 4, "targets": ["layers.1.*.w1"]}},
        ),
        ({"tp": 2, "pp": 2}, {"recompute": "full", "finetune": {"method": "lora", "rank": 4, "targets": ["wo"]}}),
    ],
    ids=str,
)
def test_adapters_under_tensor_parallelism(ranks: RankPool, layout: dict[str, int], options: dict[str, Any]) -> None:
    """Layers before the first adapter have no backward pass."""
    degrees = LayoutSpec.model_validate(layout)
    counted, predicted = ranks.run(degrees.world_size, counted_and_predicted, tiny_run(degrees, **options))[0]
    assert counted == predicted


def test_runs_that_the_formulas_do_not_cover() -> None:
    with pytest.raises(ValueError, match="pipedream-2bw, whose steps overlap"):
        predict_traffic(tiny_run(LayoutSpec(pp=2, schedule="pipedream-2bw")))
    with pytest.raises(ValueError, match="ZeRO-3 under schedule dualpipev"):
        predict_traffic(tiny_run(LayoutSpec(pp=2, dp_shard=2, schedule="dualpipev"), accumulation=6, num_layers=4))
    assert not predict_traffic(tiny_run(LayoutSpec()))


def test_states_that_ranks_pass_on_are_not_predicted() -> None:
    """The formulas know attention's exchanges alone."""
    with pytest.raises(ValueError, match="not predicted for the gated delta rule under context parallelism"):
        predict_traffic(tiny_run(LayoutSpec(cp=2), family="qwen3_5"))
