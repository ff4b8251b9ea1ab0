"""The one place that says what is predicted: a model, a batch, a layout and the habits of the software that runs it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from meshwright.plan.blueprint import Blueprint

Attention = Literal["unfused", "flash", "flash-bias", "hopper"]
"""unfused holds all scores; flash is FlashAttention-2; flash-bias the same with an additive bias (ALiBi); hopper are
the kernels written for Hopper and later (FlashAttention-3, cuDNN)."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Habits of a training program that a layout does not say."""

    name: str
    attention: Attention = "flash"
    fused: bool = False
    """Whether chains of element-wise operators are compiled or written as one kernel."""
    gradient_bytes: float = 4.0
    """Bytes per parameter of a gradient while it accumulates."""
    reduce_bytes: float = 4.0
    """Bytes per parameter of a gradient on the wire."""
    state_bytes: float = 12.0
    """Bytes per parameter of master weights and optimizer state."""
    weight_bytes: float = 2.0
    """Bytes per parameter of the weights that the model computes with."""
    casts_when_gathering: bool = False
    """Whether ZeRO-3 keeps only master weights and makes the low-precision ones as it gathers them (FSDP)."""
    dropout: bool = False
    overlap_gradients: bool = True
    """Whether gradients travel while the backward pass still computes."""
    overlap_tensor: bool = False
    """Whether tensor-parallel collectives are cut up and hidden behind matrix products."""
    expert_relay: bool = False
    """Whether a token crosses to another node once for all of its experts there, and is copied on inside the node."""
    logit_bytes: float = 10.0
    """Live bytes per logit of a loss that holds them all: low precision, fp32 copy, and the gradient of both."""
    balanced: bool = False
    """Whether the pipeline's last stage gets fewer layers for having the head."""
    chunked_loss: bool = False
    """Whether logits exist for a chunk of tokens at a time only."""
    group_shards: bool = True
    """Whether state is sharded over context-parallel ranks too."""
    saves_products: bool = True
    """Whether selective recomputation keeps the results of matrix products, not their operands."""
    bucket_bytes: float = 0.0
    """Buffers, besides the gradients, that they are collected in before they travel."""
    fragmentation: float = 0.1
    """What a caching allocator holds beyond live tensors, as a share of what comes and goes in a step."""
    context_bytes: float = 2.2e9
    """What driver, libraries and communicators take of a GPU before the first tensor."""
    python: float = 1.0
    """Host time per operator, relative to an eager PyTorch program."""


MESHWRIGHT = Stack(name="meshwright", chunked_loss=True, casts_when_gathering=True, balanced=True)
"""The engine of this repository: FSDP2, fp32 master weights and reductions, SDPA, chunked loss."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One way to train one model."""

    model: Blueprint
    sequence: int
    """Tokens of a sequence."""
    global_batch: int
    """Sequences per optimizer step."""
    micro_batch: int
    """Sequences that a data-parallel rank runs at once."""
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    """Stages that a pipeline rank runs in turn."""
    schedule: str = "1f1b"
    zero: int = 0
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks split the sequence between matrix products."""
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_share: float = 1.0
    """Share of the blocks that recompute."""
    precision: str = "bf16"
    offload: Literal["none", "optimizer", "cpu"] = "none"
    offload_activations: float = 0.0
    """Share of the activations that is kept in host memory."""
    lora: bool = False
    """Whether only low-rank adapters are trained."""
    stack: Stack = MESHWRIGHT

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of a data-parallel rank and step, at least one."""
        return max(1, -(-self.global_batch // (self.dp * self.micro_batch)))

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return {"fp64": 8, "fp32": 4}.get(self.precision, 2)

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO splits what it splits."""
        return self.dp_shard * (self.cp if self.stack.group_shards else 1)

    @cached_property
    def stage_kinds(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every pipeline rank (kind of block, number of them)."""
        if len(self.model.kinds) == 1:
            return tuple(((0, count),) for count in self.stage_layers)
        found, start = [], 0
        for count in self.stage_layers:
            stop = start + count
            here = self.model.pattern[start:stop]
            found.append(tuple((kind, here.count(kind)) for kind in sorted(set(here))))
            start = stop
        return tuple(found)

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of every pipeline rank, first to last; where they do not divide, the middle ranks take one more."""
        layers, pp = self.model.num_layers, self.pp
        last = layers // pp
        if self.stack.balanced and pp > 1:  # the head weighs as much as so many layers
            last = max(1, min(last, round((layers + self.model.head_layers) / pp - self.model.head_layers)))
            each, left = divmod(layers - last, pp - 1)
            return (*(each + (stage < left) for stage in range(pp - 1)), last)
        each, left = divmod(layers, pp)
        counts = [each] * pp
        middle_first = sorted(range(self.pp), key=lambda stage: abs(stage - (self.pp - 1) / 2))
        for stage in middle_first[:left]:
            counts[stage] += 1
        return tuple(counts)
