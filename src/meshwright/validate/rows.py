"""A row of a table of published runs, read as a job, a cluster and a measurement.

Rows lack inputs. `Completion` records the rule that filled each gap; docs/plan-validation.md lists the rules.
"""

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from meshwright.predict.blueprint import Blueprint
from meshwright.predict.hardware import device_cluster, is_known, nearest_device
from meshwright.predict.job import QUANTIZED, Job, Stack, adapter_parameters
from meshwright.predict.memory import predict_memory
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import BF16, Precision
from meshwright.validate.models import Completion, Row, published_model
from meshwright.validate.software import FSDP, LEGACY, MEGATRON, software
from meshwright.validate.words import (
    gigabytes,
    link_rate,
    node_rate,
    number_of,
    precision_of,
    ran_out,
    recompute_of,
    says_yes,
    zero_of,
)

ADAPTERS = 0.01
"""Parameters of adapters of the usual ranks, relative to the model's, if the row states no rank."""
EIGHT_BITS = 1.0
"""Bytes of a weight of a base in int8; its scales, one a row, hardly count."""
DOCUMENT = 1024
"""Tokens of a document in packed sequences of which a row says no more."""

MANY_SEQUENCES = 2**19
"""A batch of at least this size is in tokens."""

OTHER_LINK = 0.4
"""A stated rate inside the node is another link than the device's own if it is less than this fraction of its rate;
else it is the same link, counted in another way."""


@dataclass(frozen=True)
class PublishedRun:
    """One row: model and cluster, measurement, and how its gaps were filled."""

    id: str
    source: str
    job: Job
    cluster: ClusterSpec
    seconds: float | None
    """Measured seconds of a step; None if the row has no time."""
    memory_gb: float | None
    """Measured peak memory of a device, 10**9 bytes."""
    memory_kind: Literal["device", "allocated", "states"]
    """The kind of memory figure: from the driver, from the allocator, or calculated."""
    out_of_memory: bool
    completed: tuple[str, ...] = ()
    """Names of the inputs that a rule supplied."""
    unknown_device: str = ""
    """The row's device, if the hardware table does not have it."""


def read_row(row: Row) -> PublishedRun:
    """One row, completed. Raises `UserError` with the reason if that is impossible."""
    read = Completion(row)
    notes, memory = read.text("notes"), read.text("memory_gb_per_gpu")
    model = published_model(read)
    precision = Precision.of(precision_of(read.text("precision")) or read.rule("precision", BF16.name))
    stack = software(read, precision)
    job = _layout(read, model, precision, stack)
    cluster = _cluster(read, job.layout.world_size)
    job = _fitting(read, job, cluster)
    gib = 2**30 / 1e9 if "GiB" in notes + memory or "MiB" in memory else 1.0
    kind = "states" if "ANALYTIC" in notes else "allocated" if "llocated" in notes else "device"
    if kind == "states":  # the ZeRO paper's 16 bytes per parameter, no gradient in fp32
        job = replace(job, stack=replace(job.stack, state_bytes=12.0))
    measured = None if ran_out(memory) else gigabytes(memory)
    return PublishedRun(
        id=row["id"],
        source=row["source"] or "",
        job=job,
        cluster=cluster,
        seconds=_seconds(read, job, cluster),
        memory_gb=measured * gib if measured else None,
        memory_kind=kind,
        out_of_memory=ran_out(memory),
        completed=tuple(dict.fromkeys(read.completed)),
        unknown_device=read.text("gpu") if "gpu" in read.completed else "",
    )


def _layout(read: Completion, model: Blueprint, precision: Precision, stack: Stack) -> Job:
    tp, pp, cp, dp = _degrees(read, model)
    sharding = read.text("zero_stage_or_fsdp")
    # A modern Megatron's distributed optimizer is ZeRO-1, stated or not.
    stated = zero_of(sharding)
    zero = (1 if stack.name == MEGATRON.name else 0) if stated is None or "ddp" in sharding.lower() else stated
    shard = dp if zero else 1
    group = re.search(r"shard group=(\d+)", sharding)
    if group or "HSDP" in sharding:
        inside = int(group[1]) if group else (read.count("gpus_per_node") or 8)
        shard = max(part for part in range(1, min(dp, inside) + 1) if dp % part == 0)
    micro = read.given("micro_batch", 1)
    sequence = read.given("seq_len", 2048)
    parallel = says_yes(read.text("sequence_parallel"))
    stated_policy = recompute_of(read.text("recompute"))
    recompute, share = stated_policy or (read.rule("recompute", "none"), 1.0)
    ep = min(read.degree("ep"), dp * cp * tp)
    words = (read.text("model_name") + " " + read.text("notes")).lower()
    experts = max(block.num_experts for block in model.kinds)
    virtual = min(read.degree("vpp"), max(1, model.num_layers // pp)) if pp > 1 else 1
    layout = {
        "pp": pp,
        "dp_replicate": dp // shard,
        "dp_shard": shard,
        "cp": cp,
        "tp": tp,
        "ep": min(ep, experts) if experts else 1,
        "schedule": "interleaved-1f1b" if virtual > 1 else "1f1b",
        "stages_per_rank": virtual,
        "zero": zero if dp > 1 else min(zero, 1),
        "offload": "cpu" if _offloads(read) else "none",
    }
    return Job(
        model=model,
        sequence=sequence,
        global_batch=_sequences(read, sequence) or read.rule("global_batch", micro * dp),
        micro_batch=micro,
        layout=LayoutSpec().model_copy(update=layout),
        sequence_parallel=stack.name != LEGACY.name if parallel is None else parallel,
        recompute=recompute,
        recompute_share=share,
        precision=precision,
        offload_activations=_alpha(read.text("offload")),
        document=read.rule("document", DOCUMENT) if PACKED.search(words) else None,
        adapters=_adapters(words, model, stack),
        frozen_bytes=QUANTIZED if "qlora" in words else EIGHT_BITS if "base in int8" in words else None,
        stack=replace(stack, offloads_gradients=False),
    )


PACKED = re.compile(r"\bpacking\b|packed documents")
"""Words of rows whose sequences are packed from documents that do not attend to one another."""


def _adapters(words: str, model: Blueprint, stack: Stack) -> float | None:
    """Trained parameters if the model's own are frozen: as counted by the row, by the adapters' rank, or as usual."""
    if counted := re.search(r"trainable (\d+)", words):
        return float(counted[1])
    if "lora" not in words.replace("lora-required", ""):
        return None
    rank = re.search(r"lora,? (?:q,v )?r ?=?(\d+)", words)
    return adapter_parameters(model, int(rank[1]), stack.adapts) if rank else ADAPTERS * model.num_parameters


def _sequences(read: Completion, sequence: int) -> int | None:
    """Sequences of a batch; a batch in tokens, recognised by its words or its size, is divided by the sequence
    length."""
    count = read.count("global_batch")
    if count is None or not ("tok" in read.text("global_batch").lower() or count >= MANY_SEQUENCES):
        return count
    return max(1, round(count / sequence))


def _offloads(read: Completion) -> bool:
    """Whether the optimizer's state is on the host: by its own column, else by the row's notes."""
    column = read.text("offload").lower()
    return "optimizer" in column or (not column and "cpu offload" in (read.row["source"] + read.text("notes")).lower())


def _degrees(read: Completion, model: Blueprint) -> tuple[int, int, int, int]:
    """(tp, pp, cp, dp) for the row's devices: stages with no device left, or without a layer, are removed."""
    tp, pp, cp = (read.degree(axis) for axis in ("tp", "pp", "cp"))
    gpus = read.given("gpus", tp * pp * cp * read.degree("dp"))
    wanted = tp, pp, cp
    tp = min(tp, gpus)
    cp = min(cp, gpus // tp)
    pp = min(pp, gpus // (tp * cp), model.num_layers)
    read.completed += [
        axis for axis, was, now in zip(("tp", "pp", "cp"), wanted, (tp, pp, cp), strict=True) if was != now
    ]
    dp = max(1, gpus // (tp * pp * cp))
    batch = _sequences(read, read.count("seq_len") or 2048) or 0
    if batch and dp > batch and dp % batch == 0:  # with more data-parallel ranks than sequences, ranks share them
        read.completed.append("cp")
        cp, dp = cp * dp // batch, batch
    return tp, pp, cp, dp


def _fitting(read: Completion, job: Job, cluster: ClusterSpec) -> Job:
    """If sharding or recomputation is not stated: the least with which the run fits, else all, because it did run.

    Pipelines are not sharded further. FSDP's "selective" alone means some of the blocks: as few quarters as fit.
    """
    quarters = [replace(job, recompute="full", recompute_share=quarter / 4) for quarter in (1, 2, 3, 4)]
    layout = job.layout
    stages = [layout.zero_stage]
    if not read.row.get("zero_stage_or_fsdp") and layout.data_parallel > 1 and layout.pp == 1:
        stages += [stage for stage in (1, 2, 3) if stage > layout.zero_stage]
    policies = [job]
    if job.recompute == "selective" and job.stack.name == FSDP.name:
        policies = quarters
    elif "recompute" in read.completed:
        policies = [job, replace(job, recompute="selective")]  # full recomputation would have been mentioned
    tried = job
    for stage, policy in product(stages, policies):
        shard = layout.dp_shard if stage == layout.zero_stage else layout.data_parallel
        tried = policy.with_layout(zero=stage, dp_shard=shard, dp_replicate=layout.data_parallel // shard)
        if predict_memory(tried).total <= cluster.memory_gb * 1e9:
            break
    if tried.layout.zero_stage != layout.zero_stage:
        read.completed.append("zero_stage_or_fsdp")
    return tried


def _alpha(text: str) -> float:
    match = re.search(r"alpha=([\d.]+)", text)
    return min(1.0, number_of(match[1]) or 0.0) if match else 0.0


def _cluster(read: Completion, world: int) -> ClusterSpec:
    """The device's row, with the network that the row names, or else the default node for the device's generation."""
    per_node = read.count("gpus_per_node") or 8
    text = read.text("interconnect")
    node, link = node_rate(text, per_node), link_rate(text)
    if node is None:
        read.completed.append("interconnect")
    gpu = read.text("gpu") or read.rule("gpu", "A100-80GB-SXM")
    if not is_known(gpu):
        gpu = nearest_device(gpu) or usual_device(read.count("year") or 2024)
        read.completed.append("gpu")
    size = re.search(r"(?<!\d)\d{2,3}(?= ?g(?:i?b)?(?![a-z]))", read.text("gpu").lower())
    if size and is_known(f"{gpu} {size[0]}gb"):  # the device's memory size that its words name
        gpu = f"{gpu} {size[0]}gb"
    cluster = device_cluster(gpu, world, per_node=per_node, node_gb_s=node)
    if link and link < OTHER_LINK * cluster.link_gb_s:
        cluster = cluster.model_copy(update={"link_gb_s": link})
    return cluster


def usual_device(year: int) -> str:
    """The usual device of large runs in a year, for rows that name none."""
    return next(
        name for until, name in ((2020, "V100"), (2022, "A100"), (2024, "H100"), (9999, "B200")) if year <= until
    )


def _seconds(read: Completion, job: Job, cluster: ClusterSpec) -> float | None:
    """Measured seconds of a step: as stated, from tokens per second, or from FLOP/s by the source's own convention."""
    stated, rate = read.number("step_time_s"), read.number("tokens_per_s_per_gpu")
    gpus = read.count("gpus") or job.layout.world_size
    tokens = job.global_batch * job.sequence
    if stated:
        return stated / 1e3 if re.search(r"\d ?ms\b", read.text("step_time_s")) else stated
    if rate:
        return tokens / (rate * gpus)
    notes, flops = read.text("notes"), read.number("tflops_per_gpu")
    if flops is None:
        flops = _from_utilisation(read, job, cluster)
    if flops is None or "global_batch" in read.completed:
        return None
    model = job.model
    per_token = model.model_flops(job.sequence)
    if "incl. recompute" in notes or "8*N*T" in notes:
        per_token = per_token * 4 / 3 - model.embedding * 2 if "SC21" in notes else 8.0 * model.num_parameters
    return tokens * per_token / (flops * 1e12 * gpus)


def _from_utilisation(read: Completion, job: Job, cluster: ClusterSpec) -> float | None:
    """TFLOP/s per device, from the model FLOPs utilisation, a percentage or a fraction of the datasheet's rate."""
    share = read.number("mfu")
    if share is None:
        return None
    return (share / 100 if share > 1 else share) * cluster.peak(job.precision)
