"""Writes docs/guides.md, claims of comparison guides checked by the planner: run it after changing the planner."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from meshwright.families import PRESETS, resolve_model
from meshwright.predict.blueprint import Blueprint, LayerParameters, Matrix, blueprint
from meshwright.predict.candidate import Candidate, evaluate
from meshwright.predict.constants import FITTED
from meshwright.predict.hardware import resolve_cluster
from meshwright.predict.job import MESHWRIGHT, QUANTIZED, Job, Stack, adapter_parameters
from meshwright.predict.memory import predict_memory
from meshwright.predict.methods import METHODS, by_method
from meshwright.predict.search import search
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import Precision
from meshwright.validate.models import Completion, published_model

PAGE = Path(__file__).with_name("guides.md")
GB = 1e9
PAPER = Stack(name="ZeRO paper", gradient_bytes=2, state_bytes=12)

BEGIN = """\
# Common claims, checked by the planner

Claims from common comparison guides, each with the planner's figures and a verdict. The planner assumes bf16 with fp32
master weights and AdamW unless stated otherwise ([its error](plan-validation.md)). Numbers marked *published* are
measurements from `benchmarks/published_runs.csv`.

| claim | computed | verdict |
|---|---|---|
"""

TREE = """\

## The decision tree, computed

The fastest layout that fits, with 4096 tokens per sequence, 4 sequences per device and any recomputation:

| parameters | devices | fastest | step | MFU | second | rule of thumb |
|---|---|---|---|---|---|---|
"""

RULES = {
    "gpt2": "DDP below 1B",
    "llama-3.2-1b": "DDP or ZeRO at 1B",
    "llama-3-8b": "ZeRO to 30B",
    "llama-2-13b": "ZeRO to 30B",
    "llama-3-70b": "Megatron + ZeRO to 100B",
    "llama-3.1-405b": "Megatron beyond 100B",
}


def model(name: str) -> Blueprint:
    """A published model."""
    return blueprint(resolve_model(PRESETS[name], base_dir=Path()))


def gpt(hidden: int, heads: int, layers: int) -> Blueprint:
    """A GPT of that size with Megatron's vocabulary."""
    return published_model(Completion({"layers": str(layers), "hidden": str(hidden), "heads": str(heads)}))


def known_model(name: str) -> Blueprint:
    """A published model that the trainer has no preset of."""
    return published_model(Completion({"model_name": name}))


def cluster(name: str) -> ClusterSpec:
    """A cluster by its short name."""
    return resolve_cluster(name, base_dir=Path())


def page() -> str:
    """The whole page."""
    return "\n".join([BEGIN.rstrip(), *_claims(), TREE.rstrip(), *_tree()]) + "\n"


def _claims() -> Iterator[str]:
    yield from _state_claims()
    yield from _small_claims()
    yield from _speed_claims()
    yield from _first_claims()
    yield from _network_claims()
    yield from _finetune_claims()
    yield from _offload_claims()


def _state_claims() -> Iterator[str]:
    eight = model("llama-3-8b")
    ddp = Job(
        model=eight, sequence=4096, global_batch=8, micro_batch=1, recompute="full", layout=LayoutSpec(dp_replicate=8)
    )
    use = predict_memory(ddp)
    yield _line(
        "8B model, 8 x H100: DDP with AdamW in 70 GB",
        f"{use.total / GB:.0f} GB with full recomputation, {use.optimizer / GB:.0f} of them optimizer state",
        "refuted: the optimizer alone does not fit; ZeRO-1 and higher do",
    )
    small = Job(model=model("gpt2"), sequence=1024, global_batch=16, micro_batch=8, precision=Precision.of("fp32"),
                stack=replace(MESHWRIGHT, weight_bytes=0, state_bytes=12))  # fmt: skip
    use = predict_memory(small)
    yield _line(
        "GPT-2 124M in fp32: parameters 496 MB, gradients 496, optimizer 992; peak about 8 GB",
        f"weights and moments {use.optimizer / 1e6:.0f} MB, gradients {use.gradients / 1e6:.0f} MB; "
        f"{use.total / GB:.1f} GB with a microbatch of 8",
        "reproduced for the state; the peak depends on the batch, and logits need not be materialized",
    )
    kinds = (LayerParameters((Matrix("w", 7_500_000_000, 1, split=True),), 0),)
    paper = Blueprint(hidden=1, num_heads=1, num_kv_heads=1, head_dim=1, vocab=0, gated=False, tied=True,
                      kinds=kinds, pattern=(0,))  # fmt: skip
    sizes = []
    for layout in (LayoutSpec(dp_replicate=64), *(LayoutSpec(zero=zero, dp_shard=64) for zero in (1, 2, 3))):
        job = Job(model=paper, sequence=1, global_batch=64, micro_batch=1, stack=PAPER, layout=layout)
        sizes.append(f"{predict_memory(job).states / GB:.1f}")
    yield _line("7.5B on 64 devices: 120 / 31.4 / 16.6 / 1.9 GB by ZeRO stage", " / ".join(sizes) + " GB", "reproduced")
    big = gpt(12288, 96, 96)
    base = Job(model=big, sequence=2048, global_batch=1024, micro_batch=1, layout=LayoutSpec(dp_shard=1024, zero=3))
    none, full = predict_memory(base), predict_memory(replace(base, recompute="full"))
    yield _line(
        "175B, ZeRO-3 on 1024 A100: about 100 GB of activations, does not fit",
        f"activations {none.activations / GB:.0f} GB without recomputation, {full.activations / GB:.0f} GB with full "
        f"recomputation ({full.total / GB:.0f} GB in total)",
        "true only without recomputation; with it, the model fits easily",
    )
    megatron = replace(base.with_layout(dp_shard=8, tp=8, pp=16, zero=0, dp_replicate=8), recompute="full")
    use = predict_memory(replace(megatron.with_layout(dp_shard=1), stack=PAPER))
    yield _line(
        "the same, TP 8 x PP 16 x DP 8: 5.5 + 5.5 + 16.5 + about 10 GB",
        f"weights {use.weights / GB:.1f}, gradients {use.gradients / GB:.1f}, optimizer {use.optimizer / GB:.1f}, "
        f"activations {use.activations / GB:.1f} GB",
        "reproduced for the optimizer; weights and gradients take half as much, in 16 bits",
    )


def _speed_claims() -> Iterator[str]:
    eight, h100 = model("llama-3-8b"), cluster("8xh100")
    base = Job(model=eight, sequence=8192, global_batch=128, micro_batch=1, layout=LayoutSpec(dp_shard=8, zero=3))
    bf16, fp8 = evaluate(base, h100), evaluate(replace(base, precision=Precision.of("fp8")), h100)
    yield _line(
        "8B on 8 x H100: bf16 has 60 % of fp8's speed",
        f"{fp8.time.total / bf16.time.total:.0%} (the same layout)",
        "reproduced in direction; the size depends on what else is quantized",
    )
    policies = {
        policy: evaluate(replace(base, recompute=policy, global_batch=64), h100).time.total
        for policy in ("none", "selective", "full")
    }
    yield _line(
        "recomputation costs 20 %",
        f"full {policies['full'] / policies['none'] - 1:.0%}, selective "
        f"{policies['selective'] / policies['none'] - 1:.0%} (llama-3-8b)",
        "too low for full, far too high for selective",
    )
    a100 = cluster("1024xa100-80g")
    best = search(Job(model=gpt(12288, 96, 96), sequence=2048, global_batch=1536, micro_batch=1), a100, top=1).ranked[0]
    days = 300e9 / (best.tokens_per_second * 1024) / 86400
    yield _line(
        "175B on 1024 A100: 140 TFLOP/s each, 52 % of peak, 34 days for 300B tokens",
        f"{best.mfu:.0%} of peak, {days:.0f} days with today's kernels ({best.strategy}); published in 2021: "
        "148 TFLOP/s, recomputation counted",
        "reproduced; flash attention and less recomputation improve on it today",
    )
    step = evaluate(
        Job(model=gpt(20480, 128, 105), sequence=2048, global_batch=2240, micro_batch=1, recompute="full",
            layout=LayoutSpec(tp=8, pp=35, dp_shard=8, zero=1)),
        cluster("2240xa100-80g"),
    )  # fmt: skip
    yield _line(
        "MT-NLG 530B, TP 8 x PP 35 x DP 8: about 72 GB",
        f"{step.memory.total / GB:.0f} GB ({step.memory_bytes.low / GB:.0f} to {step.memory_bytes.high / GB:.0f})",
        "refuted at a microbatch of 1, which needs a third; the rest is room for larger microbatches",
    )
    sizes = [replace(base, micro_batch=size, recompute="full") for size in (1, 2, 4, 8)]
    gains = [evaluate(job, h100).tokens_per_second for job in sizes]
    yield _line(
        "more batch is not always better: throughput saturates",
        "microbatch 1, 2, 4, 8: " + ", ".join(f"{gain:.0f}" for gain in gains) + " tokens/s/device",
        "reproduced",
    )


def _network_claims() -> Iterator[str]:
    forty, base_rate = gpt(8192, 64, 48), 400
    job = Job(
        model=forty,
        sequence=2048,
        global_batch=64,
        micro_batch=4,
        recompute="full",
        layout=LayoutSpec(dp_shard=16, zero=3),
    )
    sent = 3 * 2 * forty.num_parameters * (1 - 1 / 2)
    yield _line(
        "ZeRO-3 on N nodes sends 48 M / N bits a step and node: 40B on 2 nodes, 120 GB",
        f"{sent / GB:.0f} GB leave a node per microbatch (two gathers and a reduction in bf16)",
        "right for one microbatch; accumulation multiplies it",
    )
    shares = []
    for rate in (100, base_rate, 1600, 3200):
        where = cluster(f"16xa100-80g@{rate}Gb/s")
        found, hybrid = evaluate(job, where), evaluate(job.with_layout(dp_shard=8, dp_replicate=2), where)
        share, ratio = found.time.data / found.time.total, hybrid.time.total / found.time.total
        shares.append(f"{rate} Gb/s: {share:.0%}, {ratio:.2f}x")
    yield _line(
        "slow links: shard inside the node (hybrid, hpZ); 64 devices need 1000 Gbit/s",
        "ZeRO-3's exposed share of the step and hybrid's step time relative to it, 40B on 2 nodes: "
        + "; ".join(shares),
        "reproduced in direction; hybrid keeps a full copy per node, where 40B with AdamW does not fit",
    )
    long = Job(
        model=model("llama-3-8b"), sequence=131072, global_batch=64, micro_batch=1, recompute="full",
        layout=LayoutSpec(dp_shard=64, zero=3),
    )  # fmt: skip
    rows = []
    for cp in (1, 2, 4, 8):
        found = evaluate(long.with_layout(cp=cp, dp_shard=64 // cp), cluster("64xh100"))
        rows.append(f"cp={cp}: {found.memory.total / GB:.0f} GB, {found.time.total:.0f} s")
    yield _line(
        "ring attention for long contexts",
        "8B at 128k tokens on 64 H100: " + "; ".join(rows),
        "reproduced: memory requires it",
    )
    tensor = evaluate(
        Job(
            model=gpt(12288, 96, 96),
            sequence=2048,
            global_batch=64,
            micro_batch=1,
            recompute="full",
            layout=LayoutSpec(tp=8, pp=8),
        ),
        cluster("64xa100-80g"),
    )
    yield _line(
        "Megatron: TP costs 5-10 %, the pipeline's bubble 10-15 %",
        f"tensor {tensor.time.tensor / tensor.time.total:.0%}, bubble {tensor.time.bubble / tensor.time.total:.0%} "
        "(175B, TP 8 x PP 8, 64 microbatches)",
        "reproduced",
    )


def _small_claims() -> Iterator[str]:
    big = gpt(12288, 96, 96).num_parameters
    yield _line(
        "175B on one GPU: 700 GB of parameters, 700 of gradients, 1400 of Adam's states",
        f"{4 * big / GB:.0f} + {4 * big / GB:.0f} + {8 * big / GB:.0f} GB in fp32",
        "reproduced",
    )
    xl, medium = model("gpt2-xl").num_parameters, model("gpt2-medium").num_parameters
    yield _line(
        "GPT-2 1.5B: 6 GB of parameters a GPU under DDP, 1.5 on 4 sharded; 350M: 1.4 GB in fp32, 175 MB in 4 bits",
        f"{4 * xl / GB:.1f} and {xl / GB:.1f} GB; {4 * medium / GB:.2f} GB and {QUANTIZED * medium / 1e6:.0f} MB",
        "reproduced",
    )
    small = model("gpt2").num_parameters
    yield _line(
        "GPT-2 124M in fp32, FSDP2 on 4 GPUs: 124 + 124 + 248 MB",
        f"{small / 1e6:.0f} + {small / 1e6:.0f} + {2 * small / 1e6:.0f} MB",
        "reproduced",
    )


def _first_claims() -> Iterator[str]:
    job = Job(
        model=model("llama-3-8b"), sequence=8192, global_batch=64, micro_batch=1, layout=LayoutSpec(dp_shard=8, zero=3)
    )
    h100 = cluster("8xh100")
    plain = evaluate(job, h100)
    variants = {
        "without flash attention": replace(job, stack=replace(MESHWRIGHT, attention="unfused")),
        "in fp32": replace(job, precision=Precision.of("fp32"), stack=replace(MESHWRIGHT, weight_bytes=4.0)),
        "compiled": replace(job, stack=replace(MESHWRIGHT, fused=True)),
        "with full recomputation": replace(job, recompute="full"),
    }
    shown = []
    for words, changed in variants.items():
        found = evaluate(changed, h100)
        ratio = found.time.total / plain.time.total
        shown.append(f"{words} {ratio:.2f}x the time, {found.memory.total / GB:.0f} GB")
    yield _line(
        "have first: flash attention, recomputation, bf16, accumulation, torch.compile",
        f"8B on 8 x H100, {plain.memory.total / GB:.0f} GB: " + "; ".join(shown),
        "reproduced for bf16 and flash attention; recomputation trades time for memory; accumulation changes neither",
    )
    a100 = cluster("8xa100-80g")
    rate = a100.achievable_tflops["bf16"] * FITTED.matmul * FITTED.flash
    yield _line(
        "FlashAttention-2: 220 TFLOP/s on an A100 of 312",
        f"{rate:.0f} TFLOP/s fit published training runs best, forward and backward, masked scores not counted",
        "the kernel's best case; training runs reach three fifths of it",
    )
    wide = [
        evaluate(replace(job.with_layout(dp_shard=8 * n), global_batch=8 * n), cluster(f"{8 * n}xh100"))
        for n in (1, 16, 128)
    ]
    yield _line(
        "scaling efficiency 85 to 92 %",
        "8B, ZeRO-3, 1 sequence per device: "
        + ", ".join(f"{8 * n} devices {one.mfu / wide[0].mfu:.0%}" for n, one in zip((1, 16, 128), wide, strict=True)),
        "not reproduced: the planner predicts neither congestion nor failures, and without them almost nothing is lost",
    )


def _finetune_claims() -> Iterator[str]:
    small = model("gpt2")
    trained = adapter_parameters(small, 8)
    yield _line(
        "GPT-2 124M: LoRA trains 0.6 MB (0.5 %), QLoRA's base is 62 MB",
        f"rank 8 beside every matrix: {2 * trained / 1e6:.1f} MB in bf16 ({trained / small.num_parameters:.1%}); "
        f"base {QUANTIZED * small.num_parameters / 1e6:.0f} MB in 4 bits, without quantizing the embedding "
        f"{(QUANTIZED * (small.num_parameters - small.embedding) + 2 * small.embedding) / 1e6:.0f}",
        "reproduced for the attention matrices alone; embeddings are not quantized in practice",
    )
    one = Job(model=model("llama-3.2-1b"), sequence=2048, global_batch=16, micro_batch=4)
    single, four = evaluate(one, cluster("1xa100-80g")), cluster("4xa100-80g")
    ratios = {
        "DDP on 4": evaluate(replace(one.with_layout(dp_replicate=4), global_batch=64), four),
        "FSDP2 on 4": evaluate(replace(one.with_layout(dp_shard=4, zero=3), global_batch=64), four),
        "LoRA": evaluate(by_method(one, METHODS["lora"]), cluster("1xa100-80g")),
        "QLoRA": evaluate(by_method(one, METHODS["qlora"]), cluster("1xa100-80g")),
    }
    speeds = {
        name: found.tokens_per_second * found.cluster.devices / single.tokens_per_second
        for name, found in ratios.items()
    }
    yield _line(
        "relative speed: DDP on 4 GPUs 3.8x, FSDP2 3.2x, LoRA 1.2x, QLoRA 0.9x",
        "1.2B, A100: " + ", ".join(f"{name} {speed:.2f}x" for name, speed in speeds.items()),
        "reproduced for DDP and LoRA (a frozen matrix saves a third of its arithmetic, and its adapter costs "
        "half of that); not for FSDP2, which loses nothing inside a node, nor for QLoRA, whose kernels take longer "
        "than the memory traffic of unpacking four bits",
    )
    sizes = []
    for name in ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b"):
        job = Job(model=model(name), sequence=512, global_batch=1, micro_batch=1, recompute="full")
        sizes.append(
            f"{name} " + ", ".join(f"{m} {predict_memory(by_method(job, METHODS[m])).total / GB:.1f}" for m in METHODS)
        )
    yield _line(
        "an 8 GB card: LoRA, a 4 GB card: QLoRA",
        "GB at 512 tokens: " + "; ".join(sizes),
        "true for 1B to 3B; 8B needs a 24 GB card for LoRA and 12 GB for QLoRA",
    )
    falcon = known_model("falcon-180b")
    job = Job(
        model=falcon,
        sequence=2048,
        global_batch=64,
        micro_batch=1,
        recompute="full",
        layout=LayoutSpec(dp_shard=8, zero=3),
    )
    found = evaluate(by_method(job, METHODS["lora"]), cluster("8xa100-80g"))
    minutes = 15000 * 3 * 2048 / (found.tokens_per_second * 8) / 60
    yield _line(
        "Falcon-180B, LoRA on 8 x A100-80GB: 15k samples, 3 epochs of 2048 tokens in 153 minutes",
        f"{found.memory.total / GB:.0f} GB; {minutes:.0f} minutes if every sample had 2048 tokens",
        "tight; the claimed time fits samples a seventh as long, as instructions are, packed into rows",
    )
    forty = known_model("falcon-40b").num_parameters
    yield _line(
        "Falcon-40B needs over 1.5 TB of host memory on 8 processes without sharded initialisation",
        f"{8 * 4 * forty / 1e12:.2f} TB in fp32 for eight full copies; initialized or read shard by shard, "
        f"{4 * forty / GB:.0f} GB in total",
        "reproduced; here every rank fills its own shard, so no process ever holds a copy",
    )


def _offload_claims() -> Iterator[str]:
    v100 = cluster("1xv100-32g")
    ten = gpt(4096, 32, 50)
    job = Job(model=ten, sequence=1024, global_batch=32, micro_batch=4, recompute="full",
              precision=Precision.of("fp16")).with_layout(offload="cpu", zero=2)  # fmt: skip
    found, none = evaluate(job, v100), evaluate(job.with_layout(offload="none"), v100)
    done = 8 * ten.num_parameters * found.tokens_per_second / 1e12
    yield _line(
        "ZeRO-Offload: 10B on one V100-32GB at 40 TFLOP/s; DDP reaches 1.4B at 30",
        f"{ten.num_parameters / GB:.1f}B: {found.memory.total / GB:.0f} GB on the device and "
        f"{found.memory.host / GB:.0f} on the host, {none.memory.total / GB:.0f} GB without; {done:.0f} TFLOP/s, "
        "recomputation counted",
        "reproduced",
    )
    twenty = 20e12
    yield _line(
        "ZeRO-Infinity: 20T parameters on 512 V100 at 49 TFLOP/s each, from NVMe",
        f"states of {16 * twenty / 1e12:.0f} TB are {16 * twenty / 512 / GB:.0f} GB per device, far more than fit",
        "not computed further",
    )
    yield _line(
        "ZeRO sends 2, 2, 2 and 3 psi by stage; ZeRO++ a quarter of ZeRO-3's",
        "gathers and reductions of the whole model per microbatch: 2, 2, 2, 3; int8 halves the first gather, the "
        "second stays inside the node, int4 quarters the gradients: 0.5 + 0 + 0.25 = 0.75 of 3",
        "reproduced; the trainer has all three: `quantized_weights`, hybrid sharding, `quantized_gradients`",
    )


def _tree() -> Iterator[str]:
    for name, rule in RULES.items():
        devices = 1024 if "405b" in name else 64 if "70b" in name else 8
        blue = model(name)
        sequence = min(4096, 1024 if name == "gpt2" else 4096)
        job = Job(model=blue, sequence=sequence, global_batch=4 * devices, micro_batch=1)
        found = search(job, cluster(f"{devices}xh100"))
        ranked = sorted(found.strategies.items(), key=lambda entry: (entry[1].verdict != "fits", entry[1].time.total))
        best = found.chosen or ranked[0][1]
        second = next(entry for entry in ranked if entry[1].strategy != best.strategy)
        yield (
            f"| {blue.num_parameters / 1e9:.1f}B | {devices} x H100 | {_strategy(best)} | {best.time.total:.2f} s | "
            f"{best.mfu:.0%} | {second[0]}, {second[1].time.total / best.time.total - 1:+.0%} | {rule} |"
        )


def _strategy(candidate: Candidate) -> str:
    return candidate.strategy


def _line(claim: str, computed: str, verdict: str) -> str:
    return f"| {claim} | {computed} | {verdict} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
