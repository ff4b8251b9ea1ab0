"""Step time: the pipeline equals its schedule, parts add up, and costlier settings cost more."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.families import PRESETS, resolve_model
from meshwright.predict.blueprint import blueprint
from meshwright.predict.constants import FITTED
from meshwright.predict.hardware import device_cluster
from meshwright.predict.interval import NOMINAL, PredictionInterval, time_sigma
from meshwright.predict.job import Job, Stack
from meshwright.predict.pipeline import PROBE_RANKS, pipeline_seconds
from meshwright.predict.step_time import predict_step_time
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import Precision
from meshwright.spec.schedule import SCHEDULES, build_schedule, nearest_microbatches
from meshwright.spec.timeline import StageCosts, simulate

H100 = device_cluster("h100", 64)
MODEL = blueprint(resolve_model(PRESETS["llama-3-70b"], base_dir=Path()))
JOB = Job(
    model=MODEL, sequence=4096, global_batch=512, micro_batch=1, recompute="full", stack=Stack(name="test"),
    layout=LayoutSpec(dp_shard=64, zero=3),
)  # fmt: skip


def seconds(job: Job, cluster=H100) -> float:
    return predict_step_time(job, cluster).total


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if not kind.asynchronous])
@pytest.mark.parametrize("ranks", [4, 9])
def test_the_pipelines_time_is_its_schedules(name: str, ranks: int) -> None:
    """Equal stages as short as the probe's pipeline: exact; more ranks, one 20 % slower, messages: within 6 %."""
    virtual = SCHEDULES[name].stages_per_rank
    microbatches = nearest_microbatches(name, ranks, 3 * ranks, virtual)
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches, stages_per_rank=virtual)
    for slower, send in ((0.0, 0.0), (0.2, 0.1)):
        forward = [1.0 + slower * (rank == ranks // 2) for rank in range(ranks)]
        costs = [forward[schedule.placement[stage]] / virtual for stage in range(schedule.num_stages)]
        simulated = simulate(
            schedule,
            StageCosts(forward=(*costs,), backward_input=(*costs,), backward_weight=(*costs,), transfer=send / virtual),
        ).duration
        backward = [2 * time for time in forward]
        predicted = pipeline_seconds(forward, backward, microbatches, virtual, send / virtual, name)
        exact = ranks <= PROBE_RANKS and not slower
        assert predicted.total == pytest.approx(simulated, rel=1e-9 if exact else 0.06)
        assert predicted.total - predicted.bubble == pytest.approx(microbatches * 3 * max(forward))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp_shard": 8, "dp_replicate": 8},
        {"dp_shard": 1, "dp_replicate": 8, "zero": 0, "tp": 8},
        {"dp_shard": 2, "zero": 1, "tp": 8, "pp": 4},
        {"dp_shard": 2, "zero": 1, "tp": 4, "pp": 8, "schedule": "interleaved-1f1b", "stages_per_rank": 5},
        {"dp_shard": 4, "cp": 4, "tp": 4, "zero": 1},
    ],
)
def test_the_parts_add_up(layout: dict) -> None:
    job = JOB.with_layout(**layout)
    assert job.layout.world_size == 64
    time = predict_step_time(job, H100)
    parts = (time.compute, time.tensor, time.context, time.expert, time.data, time.pipeline, time.bubble, time.update)
    assert min(parts) >= 0
    assert time.total == pytest.approx(sum(parts))
    model_seconds = 512 * 4096 * MODEL.model_flops(4096) / (64 * 989e12)
    assert 1.5 < time.total / model_seconds < 6


def test_what_must_cost_more_costs_more() -> None:
    assert seconds(replace(JOB, recompute="none")) < seconds(replace(JOB, recompute="selective")) < seconds(JOB)
    assert seconds(JOB) < seconds(replace(JOB, global_batch=1024)) < 2.1 * seconds(JOB)
    slow = H100.model_copy(update={"network_gb_s": 1.0})
    assert seconds(JOB, slow) > 1.5 * seconds(JOB)
    # Sharding inside the node alone is the cure for a slow network.
    assert seconds(JOB.with_layout(dp_shard=8, dp_replicate=8), slow) < 0.8 * seconds(JOB, slow)
    assert seconds(replace(JOB, precision=Precision.of("fp32"))) > 5 * seconds(JOB)


def test_tensor_parallelism_pays_where_it_leaves_the_node() -> None:
    inside = JOB.with_layout(tp=8, dp_shard=8, zero=1)
    across = JOB.with_layout(tp=16, dp_shard=4, zero=1)
    # Twice the microbatches, and each collective slower.
    assert predict_step_time(across, H100).tensor > 1.3 * 2 * predict_step_time(inside, H100).tensor


def test_what_the_host_cannot_issue_in_time_hides_messages() -> None:
    """With a small model: the device sends while it waits, so faster links save nothing."""
    gpt2 = blueprint(resolve_model(PRESETS["gpt2"], base_dir=Path()))
    small = replace(JOB.with_layout(tp=4, dp_shard=16, zero=0), model=gpt2, sequence=512)
    fast = H100.model_copy(update={"link_gb_s": 2 * H100.link_gb_s})
    bound, free = predict_step_time(small, H100), predict_step_time(small, fast)
    assert free.tensor < bound.tensor
    assert free.tensor + free.host == pytest.approx(bound.tensor + bound.host)
    assert predict_step_time(JOB.with_layout(tp=4, dp_shard=16), H100).host == 0


def test_more_microbatches_shrink_the_bubble() -> None:
    few = predict_step_time(replace(JOB.with_layout(pp=8, dp_shard=8, zero=1), global_batch=64), H100)
    many = predict_step_time(replace(JOB.with_layout(pp=8, dp_shard=8, zero=1), global_batch=512), H100)
    assert few.bubble / few.total > 2 * many.bubble / many.total


def test_experts_cost_their_dispatch() -> None:
    model = blueprint(resolve_model(PRESETS["qwen3-30b-a3b"], base_dir=Path()))
    job = replace(JOB.with_layout(ep=8, zero=1, dp_shard=64), model=model)
    near, far = predict_step_time(job, H100), predict_step_time(job.with_layout(ep=64), H100)
    assert 0 < near.expert < far.expert
    assert predict_step_time(job.with_layout(ep=1), H100).expert == 0


def test_experts_cost_less_where_loads_are_equal_and_their_exchange_is_hidden() -> None:
    model = blueprint(resolve_model(PRESETS["qwen3-30b-a3b"], base_dir=Path()))
    job = replace(JOB.with_layout(ep=8, zero=1, dp_shard=64), model=model)
    plain, equal, hidden = (
        predict_step_time(replace(job, stack=replace(JOB.stack, **changes)), H100)
        for changes in ({}, {"balanced_experts": True}, {"overlap_experts": True})
    )
    assert equal.expert == pytest.approx(plain.expert / FITTED.imbalance)
    assert FITTED.contention * plain.expert == pytest.approx(hidden.expert), "computation hides all of it"
    assert equal.compute < plain.compute == hidden.compute


def test_graphs_cost_the_host_nothing_and_documents_shorten_attention() -> None:
    short = replace(JOB, sequence=128, global_batch=64, stack=replace(JOB.stack, python=5))
    eager = predict_step_time(short, H100)
    graphs = predict_step_time(replace(short, stack=replace(short.stack, graphs=True)), H100)
    assert graphs.host == 0 < eager.host
    assert graphs.total < eager.total
    packed = seconds(replace(JOB, document=512))
    attention = seconds(JOB) - seconds(replace(JOB, document=1))
    assert seconds(JOB) - packed == pytest.approx(attention * (1 - 511 / (JOB.sequence - 1)), rel=0.05)
    assert seconds(replace(JOB, document=10 * JOB.sequence)) == seconds(JOB)


def test_adapters_read_and_write_beside_their_matrices() -> None:
    whole = replace(JOB.with_layout(dp_shard=1, zero=0), recompute="none", global_batch=8)
    few, none = (replace(whole, adapters=1e7, stack=replace(JOB.stack, adapts=which)) for which in ("attention", "all"))
    bare = replace(whole, adapters=1e7, model=replace(MODEL, kinds=tuple(
        replace(kind, matrices=tuple(replace(m, name=f"x.{m.name}") for m in kind.matrices)) for kind in MODEL.kinds
    )), stack=replace(JOB.stack, adapts="attention"))  # fmt: skip
    one = H100.model_copy(update={"devices": 1})
    times = [seconds(job, one) for job in (bare, few, none)]
    assert times == sorted(times)
    assert times[0] < 0.98 * times[1] < 0.95 * times[2]
    assert times[2] < seconds(whole, one)  # no gradients of the matrices: saves a third of the arithmetic


def test_intervals_hold_their_value_and_widen_with_what_is_unsure() -> None:
    interval = PredictionInterval.spread(2.0, 0.1)
    assert interval.low < interval.value < interval.high
    assert interval.high / interval.value == pytest.approx(interval.value / interval.low)
    assert NOMINAL == 0.8
    time = predict_step_time(JOB, H100)
    unmeasured = H100.model_copy(update={"achievable_tflops": {}})
    assert time_sigma(time, JOB, unmeasured) > time_sigma(time, JOB, H100)
    assert time_sigma(time, JOB, H100, completed=5) > time_sigma(time, JOB, H100)
