"""The one place that reads a table of published training runs: each row as a job, a cluster and what was measured.

Rows lack inputs. `Completion` says by which rule each gap was filled; the rules are those of docs/plan-validation.md.
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from meshwright.plan.blueprint import Blueprint
from meshwright.plan.hardware import device_cluster
from meshwright.plan.job import Job, Stack
from meshwright.plan.memory import predict_memory
from meshwright.plan.published_models import Completion, Row, published_model
from meshwright.spec.cluster import ClusterSpec

LEGACY = Stack(
    name="Megatron or DeepSpeed before flash attention",
    attention="unfused",
    fused=True,
    gradient_bytes=2.0,
    reduce_bytes=2.0,
    state_bytes=16.0,
    dropout=True,
    bucket_bytes=1e9,
    overlap_gradients=False,
    group_shards=False,
    python=2.0,
)
MEGATRON = Stack(
    name="Megatron Core with Transformer Engine",
    attention="hopper",
    fused=True,
    overlap_tensor=True,
    expert_relay=True,
    saves_products=False,
    python=3.0,
)
FSDP = Stack(name="PyTorch FSDP", attention="flash", reduce_bytes=2.0, logit_bytes=6.0, casts_when_gathering=True)


@dataclass(frozen=True)
class PublishedRun:
    """One row: what ran where, what was measured, and how its gaps were filled."""

    id: str
    source: str
    job: Job
    cluster: ClusterSpec
    seconds: float | None
    """Measured seconds of a step; None where the row has no time."""
    memory_gb: float | None
    """Measured peak memory of a device, 10**9 bytes."""
    memory_kind: Literal["device", "allocated", "states"]
    """What was counted: by the driver, by the allocator, or on paper."""
    out_of_memory: bool
    completed: tuple[str, ...] = ()
    """Names of the inputs that a rule supplied."""


def read_published(path: Path) -> tuple[list[PublishedRun], dict[str, str]]:
    """All rows that can be predicted, and id -> reason of those that cannot."""
    runs, refused = [], {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and not {"id", "source", "gpus", "gpu"} <= set(rows[0]):
        raise ValueError(f"{path} has no columns id, source, gpu and gpus: it is no table of published runs")
    for row in rows:
        try:
            runs.append(read_row(row))
        except ValueError as error:
            refused[row["id"]] = str(error)
    return runs, refused


def read_row(row: Row) -> PublishedRun:
    """One row, completed. Raises `ValueError` with the reason where it cannot be."""
    read = Completion(row)
    notes, memory = row.get("notes", ""), (row.get("memory_gb_per_gpu") or "").strip()
    model = published_model(read)
    precision = _precision(read)
    stack = _stack(read, precision)
    job = _layout(read, model, precision, stack)
    cluster = _cluster(read, job.world)
    job = _fitting(read, job, cluster)
    gib = 2**30 / 1e9 if "GiB" in notes else 1.0
    kind = "states" if "ANALYTIC" in notes else "allocated" if "llocated" in notes else "device"
    if kind == "states":  # the ZeRO paper's 16 bytes per parameter, no gradient in fp32
        job = replace(job, stack=replace(stack, state_bytes=12.0))
    return PublishedRun(
        id=row["id"],
        source=row["source"],
        job=job,
        cluster=cluster,
        seconds=_seconds(read, job, cluster),
        memory_gb=None if memory in ("", "OOM") else float(memory) * gib,
        memory_kind=kind,
        out_of_memory=memory == "OOM",
        completed=tuple(dict.fromkeys(read.completed)),
    )


def _precision(read: Completion) -> str:
    text = read.row.get("precision", "").lower()
    for precision in ("nvfp4", "fp4", "fp8", "fp16", "bf16", "fp32"):
        if precision in text:
            return "fp4" if "fp4" in precision else precision
    read.completed.append("precision")
    return "bf16"


def _stack(read: Completion, precision: str) -> Stack:
    """Software follows from precision, year and sharding: fp16 and years before 2023 had no flash attention."""
    row = read.row
    sharding, year = row.get("zero_stage_or_fsdp", ""), int(read.number("year") or 2024)
    if precision == "fp16" or year < 2023:
        if precision == "bf16":  # DeepSpeed's BF16_Optimizer accumulates in fp32, beside bf16 gradients
            return replace(LEGACY, gradient_bytes=6.0, state_bytes=12.0)
        return LEGACY
    if "SDP" in sharding and "Megatron" not in sharding:  # FSDP, FSDP2, HSDP
        bias = "alibi" in row.get("notes", "").lower()
        quantized = precision in ("fp8", "fp4")
        mixed = "amp" in row.get("precision", "")  # a policy of its own for reductions: fp32
        return replace(
            FSDP,
            attention="flash-bias" if bias else "flash",
            fused=row.get("compile", "") in ("y", "yes", "true") or quantized,
            reduce_bytes=4.0 if mixed else 2.0,
        )
    # Recipes tuned for fp8 also keep and reduce gradients in bf16.
    return replace(MEGATRON, gradient_bytes=2.0, reduce_bytes=2.0) if precision in ("fp8", "fp4") else MEGATRON


def _layout(read: Completion, model: Blueprint, precision: str, stack: Stack) -> Job:
    row = read.row
    tp, pp, cp, ep = (read.degree(axis) for axis in ("tp", "pp", "cp", "ep"))
    gpus = int(read.given("gpus", tp * pp * cp))
    dp = max(1, gpus // (tp * pp * cp))
    batch = read.number("global_batch")
    if batch and dp > batch and dp % batch == 0:  # more data-parallel ranks than sequences share them
        read.completed.append("cp")
        cp, dp = cp * dp // int(batch), int(batch)
    sharding = row.get("zero_stage_or_fsdp", "")
    zero, shard = _zero(sharding, dp, stack)
    group = re.search(r"shard group=(\d+)", sharding)
    if group or "HSDP" in sharding:
        shard = min(dp, int(group[1]) if group else int(read.number("gpus_per_node") or 8))
    micro = int(read.given("micro_batch", 1))
    parallel = (row.get("sequence_parallel") or "").lower()
    recompute, share = _recompute(read, stack)
    return Job(
        model=model,
        sequence=int(read.given("seq_len", 2048)),
        global_batch=int(read.given("global_batch", micro * dp)),
        micro_batch=micro,
        pp=pp,
        dp_replicate=dp // shard,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        ep=min(ep, dp * cp * tp),
        virtual_stages=read.degree("vpp"),
        zero=zero if dp > 1 else min(zero, 1),
        sequence_parallel=parallel == "y" if parallel else stack is not LEGACY and stack.attention != "unfused",
        recompute=recompute,
        recompute_share=share,
        precision=precision,
        offload="optimizer" if "optimizer" in row.get("offload", "") else "none",
        offload_activations=_alpha(row.get("offload", "")),
        lora="lora" in (row.get("model_name", "") + row.get("notes", "")).lower().replace("lora-required", ""),
        stack=stack,
    )


def _zero(text: str, dp: int, stack: Stack) -> tuple[int, int]:
    """Stage and ranks that share; a modern Megatron's distributed optimizer is ZeRO-1 also where nobody says so."""
    stage = 1 if stack.attention == "hopper" else 0
    if found := re.search(r"zero-?(\d)", text.lower()):
        stage = int(found[1])
    elif "optimizer+grad" in text:
        stage = 2
    elif "FSDP" in text or "HSDP" in text:
        stage = 3
    elif "distributed" in text:
        stage = 1
    return stage, dp if stage else 1


def _recompute(read: Completion, stack: Stack) -> tuple[Literal["none", "selective", "full"], float]:
    text = (read.row.get("recompute") or "").lower()
    if not text:
        read.completed.append("recompute")
        return "none", 1.0
    if text.startswith(("selective-layer", "selective-op")):  # every other block, every other matrix product
        return "full", 0.5
    if text.startswith("selective"):
        return "selective", 1.0
    return ("full", 1.0) if text.startswith("full") else ("none", 1.0)


def _fitting(read: Completion, job: Job, cluster: ClusterSpec) -> Job:
    """Where sharding or recomputation is not stated, the least of it with which the run fits: it did run.

    FSDP's "selective" alone means some of the blocks: as few quarters of them as fit.
    """
    if job.recompute == "selective" and job.stack.name == FSDP.name:
        tries = [replace(job, recompute="full", recompute_share=quarter / 4) for quarter in (1, 2, 3, 4)]
        fitting = (tried for tried in tries if predict_memory(tried).total <= cluster.memory_gb * 1e9)
        return next(fitting, tries[-1])
    stages = [job.zero]
    if not read.row.get("zero_stage_or_fsdp") and job.dp > 1:
        stages += [stage for stage in (1, 2, 3) if stage > job.zero]
    policies: list[Literal["none", "selective", "full"]] = [job.recompute]
    if "recompute" in read.completed:
        policies = ["none", "selective"]  # recomputing everything would have been worth a word
    for stage in stages:
        for policy in policies:
            shard = job.dp_shard if stage == job.zero else job.dp
            tried = replace(job, zero=stage, dp_shard=shard, dp_replicate=job.dp // shard, recompute=policy)
            if predict_memory(tried).total <= cluster.memory_gb * 1e9:
                if stage != job.zero:
                    read.completed.append("zero_stage_or_fsdp")
                return tried
    return job


def _alpha(text: str) -> float:
    found = re.search(r"alpha=([\d.]+)", text)
    return float(found[1]) if found else 0.0


def _cluster(read: Completion, world: int) -> ClusterSpec:
    """The device's row, and the network that the row names; a node's default for the device's generation else."""
    gpu = read.row.get("gpu", "")
    if not gpu:
        read.completed.append("gpu")
        gpu = "A100-80GB-SXM"
    per_node = int(read.number("gpus_per_node") or 8)
    text = read.row.get("interconnect", "")
    node = _node_rate(text, per_node)
    if node is None:
        read.completed.append("interconnect")
    cluster = device_cluster(gpu, max(world, 1), per_node=per_node, node_gb_s=node)
    link = re.search(r"([\d.]+) GB/s intra", text)
    return cluster.model_copy(update={"link_gb_s": float(link[1])}) if link else cluster


def _node_rate(text: str, per_node: int) -> float | None:
    """A node's network in GB/s, one way: `1600 Gbps`, `4x Omni-Path (100 Gb)`, `8x50 GB/s`, `400 Gb/s per GPU`."""
    patterns = (
        (r"(\d+)x[^0-9]*(\d+) ?Gb", lambda found: float(found[1]) * float(found[2]) / 8),
        (r"(\d+)x(\d+) ?GB/s", lambda found: float(found[1]) * float(found[2])),
        (r"(\d+) ?Gb/s per GPU", lambda found: per_node * float(found[1]) / 8),
        (r"(\d+) ?(?:Gbps|Gb/s)", lambda found: float(found[1]) / 8),
    )
    if "GB/s" in text and (found := re.search(patterns[1][0], text)):
        return patterns[1][1](found)
    for pattern, rate in patterns:
        if found := re.search(pattern, text):
            return rate(found)
    return 50.0 if "4x Omni-Path" in text else None


def _seconds(read: Completion, job: Job, cluster: ClusterSpec) -> float | None:
    """Measured seconds of a step: as stated, from tokens per second, or from FLOP/s by the source's own convention."""
    stated, rate = read.number("step_time_s"), read.number("tokens_per_s_per_gpu")
    gpus = read.number("gpus") or job.world
    tokens = job.global_batch * job.sequence
    if stated:
        return stated
    if rate:
        return tokens / (rate * gpus)
    notes, flops = read.row.get("notes", ""), read.number("tflops_per_gpu")
    if flops is None or "global_batch" in read.completed:
        return None
    model = job.model
    per_token = model.model_flops(job.sequence)
    if "incl. recompute" in notes or "8*N*T" in notes:
        per_token = per_token * 4 / 3 - model.embedding * 2 if "SC21" in notes else 8.0 * model.num_parameters
    return tokens * per_token / (flops * 1e12 * gpus)
