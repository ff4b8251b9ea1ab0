"""The one place that reads a table of published training runs: each row as a job, a cluster and what was measured.

Rows lack inputs. `Completion` says by which rule each gap was filled; the rules are those of docs/plan-validation.md.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from meshwright.plan.blueprint import Blueprint, condense
from meshwright.plan.hardware import device_cluster
from meshwright.plan.job import Job, Stack
from meshwright.plan.memory import predict_memory
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.model import Parameter

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

VOCABULARIES = {
    "llama-2": 32000,
    "llama2": 32000,
    "llama-3": 128256,
    "llama3": 128256,
    "qwen": 151936,
    "gpt-oss": 201088,
    "deepseek": 129280,
    "nemotron": 256000,
    "mixtral": 32000,
    "grok": 131072,
    "kimi": 163840,
    "bloom": 250880,
}
"""Vocabularies by family; 51200, Megatron's padded GPT-2 vocabulary, where no name helps."""

KNOWN: dict[str, dict[str, float]] = {
    "llama2-34b": {"layers": 48, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 22016, "vocab": 32000},
    "nemotron_3_nano": {
        "layers": 52,
        "hidden": 2688,
        "heads": 32,
        "kv_heads": 2,
        "ffn": 1856,
        "experts": 128,
        "top_k": 6,
        "moe_layers": 23,
    },
    "qwen3-next-80b": {
        "layers": 48,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 2,
        "ffn": 512,
        "experts": 512,
        "top_k": 10,
    },
    "deepseek-v3": {"ffn": 2048, "dense_ffn": 18432, "dense_layers": 3, "shared": 1, "kv_heads": 4},
    "mixtral-8x7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "experts": 8, "top_k": 2},
    "mixtral-8x22b": {"layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn": 16384, "experts": 8, "top_k": 2},
    "llama-like-7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008, "vocab": 32000},
    "llama-like-70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 32000},
}
"""Published architectures whose sizes tables of runs leave out."""

Row = Mapping[str, str]


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


@dataclass
class Completion:
    """One row being read; every rule that had to speak is written down."""

    row: Row
    completed: list[str] = field(default_factory=list)

    def number(self, column: str) -> float | None:
        """The column's number, or None."""
        text = (self.row.get(column) or "").strip()
        try:
            return float(text) if text else None
        except ValueError:
            return None

    def given(self, column: str, default: float) -> float:
        """The column's number, or what the rule says."""
        value = self.number(column)
        if value is None:
            self.completed.append(column)
            return default
        return value

    def degree(self, column: str) -> int:
        """A degree, 1 where the table is silent (not counted: silence is how tables say 1)."""
        return max(1, int(self.number(column) or 1))


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
    model = _model(read)
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


def _model(read: Completion) -> Blueprint:
    """Sizes from the columns, else from the architecture's name, else from the parameter count alone."""
    name = read.row.get("model_name", "").lower().replace(" ", "-")
    known = next((sizes for key, sizes in KNOWN.items() if key in name), {})
    params = read.number("params_b")
    size = {}
    for column, key in (("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("ffn_hidden", "ffn")):
        size[key] = read.number(column)
        if size[key] is None and key in known:
            size[key] = known[key]
            read.completed.append(column)
    if name.startswith("deepseek-v3"):
        size["ffn"] = known["ffn"]
    vocab = read.number("vocab")
    if vocab is None:
        vocab = known.get("vocab") or next((rows for key, rows in VOCABULARIES.items() if key in name), 51200)
        read.completed.append("vocab")
    if size["hidden"] is None:
        if params is None:
            raise ValueError("neither sizes nor a parameter count")
        read.completed += ["layers", "hidden"]
        # GPT sizes keep hidden near 128 layers, so parameters are near 12 x 128**2 layers**3.
        size["layers"] = max(1, round((params * 1e9 / 196608) ** (1 / 3)))
        size["hidden"] = 128 * size["layers"]
        matrices = params * 1e9 - vocab * size["hidden"]
        size["ffn"] = max(1.0, (matrices / size["layers"] - 4 * size["hidden"] ** 2) / 2 / size["hidden"])
    hidden = int(size["hidden"])
    if size["layers"] is None:
        if params is None:
            raise ValueError("no number of layers and no parameter count")
        read.completed.append("layers")
        size["layers"] = round((params * 1e9 - vocab * hidden) / (12 * hidden**2))
    heads = int(size["heads"] or read.given("heads", max(1, hidden // 128)))
    kv_heads = int(read.number("kv_heads") or known.get("kv_heads") or heads)
    experts = int(read.number("n_experts") or known.get("experts") or 0)
    top_k = int(read.number("top_k") or known.get("top_k") or 1) if experts else 0
    ffn = int(size["ffn"] or read.given("ffn_hidden", 4 * hidden))
    sizes = _Sizes(int(size["layers"]), hidden, heads, kv_heads, ffn, int(vocab), experts, top_k, known)
    return (
        min(sizes.candidates(), key=lambda plan: abs(plan.num_parameters - (params or 0) * 1e9))
        if params
        else (sizes.build(gated=bool(experts) or ffn != 4 * hidden, tied=not experts and ffn == 4 * hidden))
    )


@dataclass(frozen=True)
class _Sizes:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int
    top_k: int
    known: Mapping[str, float]

    def candidates(self) -> list[Blueprint]:
        """Gated or not, tied or not: the one whose parameters come closest to the published count is meant."""
        return [self.build(gated=gated, tied=tied) for gated in (False, True) for tied in (True, False)]

    def build(self, *, gated: bool, tied: bool) -> Blueprint:
        rows = [row for layer in range(self.layers) for row in self._block(layer, gated)]
        head_dim = 128 if self.kv_heads < self.heads and self.hidden % self.heads else self.hidden // self.heads
        if self.experts:
            head_dim = max(64, head_dim)
        return condense(
            rows,
            name="published",
            hidden=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=head_dim,
            vocab=self.vocab,
            gated=gated,
            tied=tied,
            top_k=self.top_k,
        )

    def _block(self, layer: int, gated: bool) -> Iterable[Parameter]:
        head_dim = max(1, self.hidden // self.heads)
        moe_layers = int(self.known.get("moe_layers", self.layers))
        sparse = (
            self.experts
            and layer >= self.known.get("dense_layers", 0)
            and layer < moe_layers + self.known.get("dense_layers", 0)
        )
        ffn = self.ffn if sparse or not self.experts else int(self.known.get("dense_ffn", self.ffn))

        def row(name: str, dims: str, *shape: int) -> Parameter:
            return Parameter(name=f"layers.{layer}.{name}", dims=tuple(dims.split()), shape=shape, init="normal")

        yield row("norms.weight", "embed", 4 * self.hidden)
        yield row("attention.wq.weight", "heads embed", self.heads * head_dim, self.hidden)
        yield row("attention.wk.weight", "kv_heads embed", self.kv_heads * head_dim, self.hidden)
        yield row("attention.wv.weight", "kv_heads embed", self.kv_heads * head_dim, self.hidden)
        yield row("attention.wo.weight", "embed heads", self.hidden, self.heads * head_dim)
        names = ("w1", "w3", "w2") if gated else ("w1", "w2")
        for name in names:
            dims, shape = ("embed ffn", (self.hidden, ffn)) if name == "w2" else ("ffn embed", (ffn, self.hidden))
            if sparse:
                yield row(f"experts.{name}.weight", f"experts {dims}", self.experts, *shape)
            else:
                yield row(f"feed_forward.{name}.weight", dims, *shape)
            if sparse and self.known.get("shared"):
                yield row(f"shared.{name}.weight", dims, *shape)


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
