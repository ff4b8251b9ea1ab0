"""The program that trained a published run, inferred from its words, year and sharding."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from meshwright.predict.job import Stack
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
    adapts="attention",
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


@dataclass(frozen=True)
class Fact:
    """One property of a program, whatever its others are, that a row's words state."""

    words: re.Pattern[str]
    stack: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The fields of the stack that it determines."""


LOSSES = (
    # The logits are computed again, tile by tile, in the backward pass; the gradient of the hidden states remains.
    Fact(re.compile(r"cut.?cross.?entropy|\bcce\b|logits not stored"), {"logit_bytes": 0.0, "hidden_bytes": 2.0}),
    # Chunks of as many logits as there are numbers in the hidden states, in bf16 and fp32, beside the same gradient.
    Fact(re.compile(r"liger"), {"logit_bytes": 0.0, "hidden_bytes": 8.0}),
)
"""What a program stores of its logits, if not all of them."""
MOMENTS = (Fact(re.compile(r"8.?bit adam|adamw?_(?:bnb_)?8.?bit"), {"state_bytes": 6.0}),)
"""How a program stores the optimizer's moments, if not in fp32: Dettmers et al., "8-bit Optimizers", 2022."""
LAUNCHES = (
    # NVIDIA's submissions of this benchmark set MCORE_CUDA_GRAPH=1, AMD's False.
    Fact(
        re.compile(r"(?<!no )cuda.?graphs|(?<!no )(?<!cuda )\bgraphs\b|mlperf.*llama2_70b_lora(?!.*\bmi3\d\dx)"),
        {"graphs": True},
    ),
)
"""How a program starts its operators, if not one by one from the host."""
ADAPTED = (
    Fact(re.compile(r"\bq ?, ?v\b|\bon attention\b|attention only"), {"adapts": "attention"}),
    Fact(re.compile(r"megatron.*all-linear"), {"adapts": "experts"}),
    Fact(re.compile(r"all-linear"), {"adapts": "all"}),
)
"""The matrices that get adapters, where a row names them."""
EXCHANGES = (
    Fact(re.compile(r"all-to-all|torch dispatch"), {"expert_relay": False}),
    Fact(re.compile(r"deepep|hybridep"), {"expert_relay": True, "fused_routing": True}),
)
"""How tokens reach their experts, if not as the program's kind sends them."""
OVERLAPS = (Fact(re.compile(r"dualpipe|(?<!no )ep overlap|1f1b overlap"), {"overlap_experts": True}),)
LOADS = (
    Fact(
        re.compile(r"forced? balance|force-balanced|loads forced to be equal|balanced (?:gate|routing)"),
        {"balanced_experts": True},
    ),
)
FACTS = (LOSSES, MOMENTS, LAUNCHES, ADAPTED, EXCHANGES, OVERLAPS, LOADS)
"""Of each, the first whose words a row has."""

FLASH = re.compile(r"(?<!no )(?<!without )(?:flash|xformers)")
KERNELS = re.compile(r"transformer engine|\bte\b|triton|liger|fused|torch\.compile|\bjax\b|\bxla\b")
PLAIN = re.compile(
    r"hugging ?face|transformers|\beager\b|\bpeft\b|\btrl\b|axolotl|llama-?factory|torchtune|litgpt|nanogpt|unsloth|"
    r"deepspeed|zero[ _-]?(?:stage)?[ _-]?[23]|\bddp\b"
)
RECIPES = re.compile(r"nemo|megatron.?bridge|overlap")


def software(read: Completion, precision: Precision) -> Stack:
    """The properties of a row's program: its kind's, and what the row's words say about each."""
    words = " ".join((read.text("source"), read.text("notes"), read.text("zero_stage_or_fsdp"))).lower()
    stack = _kind(read, words, precision)
    for facts in FACTS:
        if properties := next((fact for fact in facts if fact.words.search(words)), None):
            stack = replace(stack, **properties.stack)
    return stack


def _kind(read: Completion, words: str, precision: Precision) -> Stack:
    """The kind of a row's program.

    fp16, and years before 2023, had no flash attention unless the row says so. FSDP, and DeepSpeed's ZeRO-2 and 3, run
    a model's modules unchanged unless the row names kernels or compilation. All other rows are Megatron Core; its
    makers' tuned recipes, for example those in fp8, hide tensor-parallel messages and keep gradients in bf16.
    """
    sharding, year = read.text("zero_stage_or_fsdp").lower(), (read.count("year") or 2024)
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
