"""The program that trained a published run, inferred from its words, year and sharding."""

import re
from dataclasses import replace

from meshwright.plan.job import Stack
from meshwright.spec.precision import BF16, FP16, Precision
from meshwright.validate.models import Completion
from meshwright.validate.words import says_yes

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
    expert_relay=True,
    saves_products=False,
    adapts_all=False,
    python=3.5,
)
FSDP = Stack(name="PyTorch FSDP", attention="flash", reduce_bytes=2.0, logit_bytes=6.0, casts_when_gathering=True)
EAGER = Stack(
    name="PyTorch with unfused modules, by itself or under DeepSpeed",
    attention="flash",
    reduce_bytes=2.0,
    python=2.0,
    spread=0.2,
)

UNSEEN = 0.12
"""Spread for a program used in a way that no fitted run used it (Megatron Core in bf16, older ones in bf16 or with
flash attention): about the error of whole sources left out of the fit."""

FUSED_YEAR = 2020
"""The year from which Megatron fuses chains of element-wise operators into one kernel."""

FLASH = re.compile(r"(?<!no )(?<!without )(?:flash|xformers)")
KERNELS = re.compile(r"transformer engine|\bte\b|triton|liger|fused|torch\.compile|\bjax\b|\bxla\b")
PLAIN = re.compile(
    r"hugging ?face|transformers|\beager\b|\bpeft\b|\btrl\b|axolotl|llama-?factory|torchtune|litgpt|nanogpt|unsloth|"
    r"deepspeed|zero[ _-]?(?:stage)?[ _-]?[23]|\bddp\b"
)
RECIPES = re.compile(r"nemo|megatron.?bridge|overlap")


def software(read: Completion, precision: Precision) -> Stack:
    """The properties of a row's program.

    fp16, and years before 2023, had no flash attention unless the row says so. FSDP, and DeepSpeed's ZeRO-2 and 3, run
    a model's modules unchanged unless the row names kernels or compilation. All other rows are Megatron Core; its
    makers' tuned recipes, for example those in fp8, hide tensor-parallel messages and keep gradients in bf16.
    """
    sharding, year = read.text("zero_stage_or_fsdp").lower(), (read.count("year") or 2024)
    words = " ".join((read.text("source"), read.text("notes"), sharding)).lower()
    quantized = precision.recipe is not None
    kernels = bool(says_yes(read.text("compile"))) or bool(KERNELS.search(words)) or quantized
    if precision.compute == FP16 or year < 2023:
        return _classic(words, year, precision)
    if "sdp" in sharding and "megatron" not in sharding:  # FSDP, FSDP2, HSDP
        bias = "alibi" in words
        mixed = "amp" in read.text("precision")  # a separate policy for reductions: fp32
        return replace(
            FSDP,
            attention="flash-bias" if bias else "hopper" if "transformer engine" in words else "flash",
            fused=kernels,
            reduce_bytes=4.0 if mixed else 2.0,
            expert_relay="deepep" in words,
        )
    split = read.degree("tp") * read.degree("pp") > 1
    if PLAIN.search(words) and not split and not re.search(r"megatron|nemo", words):
        return replace(EAGER, fused=kernels, attention="unfused" if _no_flash(words) else "flash")
    if quantized:
        return replace(MEGATRON, gradient_bytes=2.0, reduce_bytes=2.0, overlap_tensor=True)
    return replace(
        MEGATRON,
        spread=UNSEEN,
        overlap_tensor=bool(RECIPES.search(words)),
        reduce_bytes=2.0 if re.search(r"zero", sharding) and "megatron" not in words else 4.0,
    )


def _classic(words: str, year: int, precision: Precision) -> Stack:
    """Earlier Megatron and DeepSpeed; DeepSpeed's bf16 optimizer accumulates in fp32, in addition to bf16 gradients."""
    flash = bool(FLASH.search(words)) and not _no_flash(words)
    usual = precision.compute == FP16 and not flash and year >= FUSED_YEAR
    stack = replace(
        LEGACY,
        fused=year >= FUSED_YEAR,
        attention="flash" if flash else "unfused",
        spread=0.0 if usual else UNSEEN,
    )
    return stack if precision.products != BF16.name else replace(stack, gradient_bytes=6.0, state_bytes=12.0)


def _no_flash(words: str) -> bool:
    return bool(re.search(r"(?:no|without) flash", words))
