"""Memory against the literature (ZeRO paper, DeepSpeed, Korthikanti et al.); blueprints against tables."""

import json
import re
import runpy
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.families import PRESETS, parameter_table, resolve_model
from meshwright.models import delta_rule
from meshwright.predict import delta
from meshwright.predict.activations import block_activations, microbatches_in_flight
from meshwright.predict.blueprint import Blueprint, LayerParameters, Matrix, blueprint
from meshwright.predict.job import MESHWRIGHT, Job, Stack
from meshwright.predict.memory import predict_memory, stage_memory
from meshwright.predict.stages import balanced_stages, layer_costs
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import Precision
from meshwright.spec.recompute import Policy
from meshwright.spec.schedule import SCHEDULES, build_schedule, nearest_microbatches
from meshwright.spec.timeline import in_flight

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAPER = Stack(name="ZeRO paper", gradient_bytes=2, state_bytes=12, weight_bytes=2, attention="unfused", dropout=True)
DEEPSPEED = replace(PAPER, state_bytes=16)


def square(parameters: int, layers: int = 1) -> Blueprint:
    """A model with this many parameters and nothing else to count."""
    block = LayerParameters((Matrix("w", parameters // layers, 1, split=True),), 0)
    return Blueprint(
        hidden=1, num_heads=1, num_kv_heads=1, head_dim=1, vocab=0, gated=False, tied=True, kinds=(block,),
        pattern=(0,) * layers,
    )  # fmt: skip


def gpt(hidden: int = 6144, heads: int = 64, layers: int = 4) -> Blueprint:
    matrices = (
        Matrix("attention.wqkv", 3 * hidden, hidden, split=True),
        Matrix("attention.wo", hidden, hidden, split=True),
        Matrix("feed_forward.w1", 4 * hidden, hidden, split=True),
        Matrix("feed_forward.w2", hidden, 4 * hidden, split=True),
    )
    return Blueprint(
        hidden=hidden, num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, vocab=51200, gated=False,
        tied=True, kinds=(LayerParameters(matrices, 0),), pattern=(0,) * layers,
    )  # fmt: skip


def job(model: Blueprint, stack: Stack = PAPER, **changes) -> Job:
    layout = {field: changes.pop(field) for field in LayoutSpec.model_fields if field in changes}
    plain = Job(**{"model": model, "sequence": 1, "global_batch": 64, "micro_batch": 1, "stack": stack, **changes})
    return plain.with_layout(**layout)


@pytest.mark.parametrize(
    ("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)], ids=["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
)
def test_the_zero_papers_table_of_7_5_billion_parameters_on_64_devices(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al., figure 1."""
    use = predict_memory(
        job(square(7_500_000_000), dp_shard=64 if zero else 1, dp_replicate=1 if zero else 64, zero=zero)
    )
    assert use.states / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_deepspeeds_estimates_of_2851_million_parameters_on_8_devices() -> None:
    """`estimate_zero2/3_model_states_mem_needs`: 11.28 GiB, and 5.31 with the optimizer on the host; ZeRO-3 6.09 and
    0.78, where DeepSpeed counts the largest layer (32M parameters, 4 bytes) and leaves gradients out."""
    model, gib = square(2_851_000_000), 2**30
    sharded = {"dp_shard": 8}
    assert predict_memory(job(model, DEEPSPEED, zero=2, **sharded)).states / gib == pytest.approx(11.28, abs=0.01)
    offloaded = predict_memory(job(model, DEEPSPEED, zero=2, offload="cpu", **sharded))
    assert offloaded.states / gib == pytest.approx(5.31, abs=0.01)
    largest = 32_000_000 * 4
    three = predict_memory(job(model, DEEPSPEED, zero=3, **sharded))
    assert (three.weights + three.optimizer + largest) / gib == pytest.approx(6.09, abs=0.01)
    assert (three.weights + largest) / gib == pytest.approx(0.78, abs=0.01)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "bytes_per_sbh"),
    [
        (1, False, "none", 34 + 5 * 64 * 2048 / 6144),
        (8, False, "none", 10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8)),
        (8, True, "none", (34 + 5 * 64 * 2048 / 6144) / 8),
        (8, True, "selective", 34 / 8),
        (1, False, "full", 2),
    ],
)
def test_korthikantis_formulae(tp: int, sequence_parallel: bool, recompute: Policy, bytes_per_sbh: float) -> None:
    """Table 2 of "Reducing Activation Recomputation in Large Transformer Models", bytes per layer over s b h."""
    model = gpt()
    run = job(
        model, sequence=2048, micro_batch=4, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute,
        precision=Precision.of("fp16"),
    )  # fmt: skip
    sbh = 2048 * 4 * 6144
    extra = 4 * 2048 * 4 * 64 / tp  # fp32 sums of the softmax, which the paper leaves out
    expected = bytes_per_sbh * sbh + (0 if recompute == "full" else extra)
    assert block_activations(run, model.kinds[0], recompute) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatches_in_flight_are_those_of_the_schedule(name: str) -> None:
    for ranks, virtual in product((2, 4), (1, 2, 3)):
        if SCHEDULES[name].fixed and virtual != SCHEDULES[name].stages_per_rank:
            continue
        batch = nearest_microbatches(name, ranks, 6 * ranks, virtual)
        schedule = build_schedule(name, ranks=ranks, microbatches=batch, stages_per_rank=virtual)
        run = job(gpt(layers=24), pp=ranks, stages_per_rank=virtual, schedule=name, global_batch=batch)
        held = [microbatches_in_flight(run, rank) * virtual for rank in range(ranks)]
        assert held == pytest.approx(list(in_flight(schedule)))


@pytest.mark.parametrize("preset", ["llama-3.2-1b", "gpt2", "deepseek-v3", "qwen3-30b-a3b"])
def test_stages_are_cut_where_the_engine_cuts_them(preset: str) -> None:
    spec = resolve_model(PRESETS[preset], base_dir=Path())
    model = blueprint(spec)
    for ranks, name, virtual in ((2, "1f1b", 1), (4, "interleaved-1f1b", 2), (3, "zbv", 2)):
        cut = balanced_stages(layer_costs(spec, 2048), ranks * virtual)
        schedule = build_schedule(name, ranks=ranks, microbatches=4 * ranks, stages_per_rank=virtual)
        expected = [sum(cut[stage] for stage in schedule.stages_of(rank)) for rank in range(ranks)]
        run = job(model, MESHWRIGHT, sequence=2048, pp=ranks, stages_per_rank=virtual, schedule=name)
        assert list(run.stage_layers) == expected
        assert run.head_rank == schedule.placement[-1]


@pytest.mark.parametrize("name", PRESETS)
def test_a_blueprint_counts_every_parameter_of_the_table(name: str) -> None:
    spec = resolve_model(PRESETS[name], base_dir=Path())
    table = parameter_table(spec)
    model = blueprint(spec)
    assert model.num_parameters == sum(row.numel for row in table)
    assert model.num_layers == spec.num_layers


def test_a_pipelines_ranks_hold_all_parameters_and_a_tied_head_twice() -> None:
    spec = resolve_model(PRESETS["gpt2"], base_dir=Path())
    model = blueprint(spec)
    stack = replace(PAPER, weight_bytes=1, gradient_bytes=0, state_bytes=0)
    held = sum(stage_memory(job(model, stack, pp=4), stage).weights for stage in range(4))
    assert held == model.num_parameters + model.embedding


def test_sharding_recomputation_and_smaller_microbatches_need_less() -> None:
    model = blueprint(resolve_model(PRESETS["llama-3-8b"], base_dir=Path()))
    base = job(model, Stack(name="x"), sequence=4096, micro_batch=2, dp_shard=8, zero=1)
    totals = [
        predict_memory(changed).total
        for changed in (
            base,
            base.with_layout(zero=2),
            base.with_layout(zero=3),
            replace(base.with_layout(zero=3), recompute="selective"),
            replace(base.with_layout(zero=3), recompute="full"),
            replace(base.with_layout(zero=3), recompute="full", micro_batch=1),
            replace(base.with_layout(zero=3, tp=2), recompute="full", micro_batch=1),
        )
    ]
    assert totals == sorted(totals, reverse=True)
    assert predict_memory(base).total == sum(predict_memory(base).kinds().values())


def test_the_chunks_of_the_gated_delta_rule_are_those_that_are_computed() -> None:
    assert (delta.CHUNK, delta.SMALLEST) == (delta_rule.CHUNK, delta_rule.SMALLEST)


def test_the_planner_agrees_with_what_was_rehearsed() -> None:
    """The table of docs/rehearsal.md: memory within 3 % (8 % in low precision), traffic to the byte, except counts,
    loss and norm."""
    rehearsal = SimpleNamespace(**runpy.run_path(str(DOCS / "make_rehearsal_md.py")))
    rows = json.loads((DOCS / "rehearsal.json").read_text())
    assert {tuple(row["cell"]) for row in rows} == set(rehearsal.cells())
    worst = 0.0
    for row in rows:
        resolved = rehearsal.resolved_cell(*row["cell"])
        for rank, peak in row["peaks"].items():
            far = 0.03 if resolved.run.training.product_recipe is None else 0.08
            planned = rehearsal.planned_bytes(resolved, int(rank))
            assert planned == pytest.approx(peak, rel=far), row["cell"]
            worst = max(worst, abs(planned / peak - 1))
        assert rehearsal.is_exact(row, resolved), row["cell"]
    for page in ("README.md", "docs/plan.md", "docs/verbs.md"):
        text = (DOCS.parent / page).read_text()
        assert f"within {100 * worst:.1f} %" in text, page
        assert set(re.findall(r"(\d+) cells", text)) <= {str(len(rows))}, page
