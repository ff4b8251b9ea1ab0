"""A job to predict: model, batch, layout and the behaviour of the software that runs it."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, assert_never

from meshwright.families.flops import finetuning_flops
from meshwright.predict.blueprint import Blueprint, LayerParameters, Matrix
from meshwright.predict.stages import balanced_stages
from meshwright.spec.layout import AXES, LayoutSpec
from meshwright.spec.precision import MIXED, Precision
from meshwright.spec.recompute import Counts, Policy, RecomputeSpec, stage_counts
from meshwright.spec.schedule import SCHEDULES

Attention = Literal["unfused", "flash", "flash-bias", "hopper"]
"""unfused stores all scores; flash is FlashAttention-2; flash-bias the same with an additive bias (ALiBi); hopper means
kernels written for Hopper and later (FlashAttention-3, cuDNN)."""


Adapts = Literal["all", "attention", "experts"]
Kinds = tuple[tuple[int, int], ...]
"""(kind of block, number of them)."""
Groups = tuple[tuple[Policy, Kinds], ...]
"""A stage's layers by recomputation policy, first to last."""

ONE_RANK = LayoutSpec()

QUANTIZED = 0.5 + 0.127 / 8
"""Bytes of a weight in four bits, with its share of the doubly quantized scales (Dettmers et al., "QLoRA", 2023)."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Behaviour of a training program beyond its layout."""

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
    """Whether ZeRO-3 keeps only master weights and casts them as it gathers them (FSDP)."""
    dropout: bool = False
    overlap_gradients: bool = True
    """Whether gradient communication overlaps the backward pass."""
    offloads_gradients: bool = True
    """Whether offloading moves gradients and parameters to the host too, not only the optimizer."""
    overlap_tensor: bool = False
    """Whether tensor-parallel collectives are split and hidden behind matrix products."""
    expert_relay: bool = False
    """Whether a token is sent to another node once for all of its experts there, and copied inside the node."""
    fused_routing: bool = False
    """Whether the exchange of tokens also orders them by expert, as DeepEP and HybridEP do with their kernels."""
    overlap_experts: bool = False
    """Whether experts' exchange of one microbatch is hidden behind the computation of another."""
    balanced_experts: bool = False
    """Whether every expert gets the same number of tokens."""
    logit_bytes: float = 10.0
    """Live bytes per logit of an unchunked loss: low precision, fp32 copy, and the gradient of both."""
    balanced: bool = False
    """Whether the pipeline's last stage gets fewer layers because it has the head."""
    chunked_loss: bool = False
    """Whether logits exist only for a chunk of tokens at a time."""
    hidden_bytes: float = 0.0
    """Live bytes per number of the hidden states in a loss that is fused with the head and stores no logits."""
    chunk_bytes: int = 2**30
    wide_bytes: int = 2**28
    """Size of a chunk of logits, and the part of it held in fp32 at a time; on a GPU."""
    keeps_gathered: bool = False
    """Whether tensor-parallel ranks keep the gathered sequence, instead of gathering it again."""
    splits_experts: bool = True
    """Whether tensor parallelism splits experts: without expert parallelism."""
    group_shards: bool = True
    """Whether state is sharded over context-parallel ranks too."""
    saves_products: bool = True
    """Whether selective recomputation keeps the results of matrix products, not their operands."""
    bucket_bytes: float = 0.0
    """Buffers that gradients are collected in before communication, besides the gradients themselves."""
    fragmentation: float = 0.1
    """A caching allocator's memory beyond live tensors, as a share of a step's transient memory."""
    context_bytes: float = 1.0e9
    """GPU memory of driver and libraries before the first tensor."""
    communicator_bytes: float = 0.5e9
    """Buffers of the communicator of all ranks, and of each axis of more than one."""
    python: float = 1.0
    """Host time per operator, relative to an eager PyTorch program."""
    graphs: bool = False
    """Whether blocks are replayed as CUDA graphs, whose operators cost the host nothing."""
    coded_inputs: Literal["none", "inner", "all"] = "none"
    """Inputs of fp8 layers that are saved in one byte per number. inner: of feed-forward layers' last matrices; all:
    also the outputs of norms."""
    emulated: bool = False
    """Whether products in low precision are emulated: operands are quantized, decoded and multiplied in fp32."""
    adapts: Adapts = "all"
    """Matrices with adapters: all but experts', attention's alone, or experts' too."""
    spread: float = 0.0
    """Added standard deviation of the step time's logarithm, for programs with few published runs."""


MESHWRIGHT = Stack(
    name="meshwright",
    chunked_loss=True,
    keeps_gathered=True,
    casts_when_gathering=True,
    balanced=True,
    splits_experts=False,
)
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
    layout: LayoutSpec = ONE_RANK
    """Not always legal: a search tries layouts before it checks them, and published runs used other programs."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks split the sequence between matrix products."""
    document: int | None = None
    """Tokens of a document, outside which a token of a packed sequence does not attend; None: the sequence."""
    recompute: Policy | RecomputeSpec = "none"
    recompute_share: float = 1.0
    """Share of the blocks that recompute, spread over the model, if `recompute` is a word."""
    precision: Precision = MIXED
    offload_activations: float = 0.0
    """Share of the activations kept in host memory."""
    adapters: float | None = None
    """Parameters of low-rank adapters, the only ones trained; None: the whole model is trained."""
    adapter_rank: int = 0
    """Rank of adapters beside every matrix; 0 without adapters, or where they are factors."""
    adapter_dropout: bool = False
    """Whether adapters apply dropout to their input."""
    frozen_bytes: float | None = None
    """Bytes of a frozen weight, if it is stored in fewer than the computation uses."""
    stack: Stack = MESHWRIGHT

    def with_layout(self, **changes: Any) -> "Job":
        """The same job in another layout, legal or not (`LayoutSpec.problem`)."""
        return replace(self, layout=self.layout.model_copy(update=changes))

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of a data-parallel rank and step, at least one."""
        return max(1, -(-self.global_batch // (self.layout.data_parallel * self.micro_batch)))

    @cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank."""
        return self.micro_batch * self.sequence / self.layout.cp

    @cached_property
    def width(self) -> int:
        """Bytes per number of an activation."""
        return self.precision.compute.bytes

    @cached_property
    def stream_tokens(self) -> float:
        """Tokens of the residual stream that one rank keeps."""
        return self.tokens / (self.layout.tp if self.sequence_parallel else 1)

    @cached_property
    def stream_bytes(self) -> float:
        """Bytes of the residual stream between two blocks."""
        return self.stream_tokens * self.model.hidden * self.width

    @cached_property
    def of_blocks(self) -> dict[Any, float]:
        """Cache of `predict/activations.py` for this job's blocks."""
        return {}

    @cached_property
    def shards(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.layout.dp_shard * (self.layout.cp if self.stack.group_shards else 1)

    @property
    def communicators(self) -> int:
        """Groups of ranks that a rank communicates with."""
        several = sum(getattr(self.layout, axis) > 1 for axis in (*AXES, "ep"))
        return several + (self.layout.world_size > 1)

    @cached_property
    def alone(self) -> bool:
        """Whether a single process trains, without process groups."""
        return self.layout.alone

    @property
    def keeps_masters(self) -> bool:
        """Whether a single process's optimizer has full-precision weights beside the model's."""
        return self.alone and self.stack.weight_bytes > 0

    @property
    def master_bytes(self) -> float:
        """Bytes of a weight that the optimizer updates and the model computes with."""
        return min(self.stack.gradient_bytes, self.precision.master.bytes)

    @property
    def frozen(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.adapters is not None

    @property
    def flops_per_token(self) -> float:
        """Operations of training, as `families/flops.py` counts them."""
        whole = self.model.model_flops(self.sequence)
        if self.adapters is None:
            return whole
        return finetuning_flops(whole, self.model.active_parameters, self.adapters if self.adapter_rank else 0.0)

    @cached_property
    def head_rank(self) -> int:
        """The pipeline rank that holds the last stage; the first rank if stages go there and back (V shape)."""
        return 0 if self.layout.pp > 1 and _is_v(self.layout.schedule) else self.layout.pp - 1

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of every pipeline rank, first to last, of all its stages."""
        return tuple(sum(count for _, count in kinds) for kinds in self.stage_kinds)

    @cached_property
    def stage_kinds(self) -> tuple[Kinds, ...]:
        """The blocks of every pipeline rank."""
        return _stage_kinds(self.model.pattern, self.spans)

    @cached_property
    def spans(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every pipeline rank, (first, one past the last) layer of each of its stages."""
        return _spans(self.cut, self.layout.pp, _is_v(self.layout.schedule))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """For every pipeline rank, the numbers of its stages."""
        return _places(len(self.cut), self.layout.pp, _is_v(self.layout.schedule))

    @cached_property
    def counts(self) -> tuple[Counts, ...]:
        """The recomputation of every stage."""
        return stage_counts(self.recompute, self.cut)

    def groups(self, rank: int) -> tuple[Groups, ...]:
        """The recomputation of a pipeline rank, in each of its stages."""
        counts = (self.counts[stage] for stage in self.stages[rank])
        return tuple(
            _groups(self.model.pattern[slice(*span)], *c) for span, c in zip(self.spans[rank], counts, strict=True)
        )

    def grouped(self, rank: int, full: int, selective: int) -> tuple[Groups, ...]:
        """The same if the first `full` layers of each stage recompute everything, and the next `selective` layers
        recompute selectively."""
        return tuple(_groups(self.model.pattern[slice(*span)], full, selective) for span in self.spans[rank])

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """Layers of every stage; a rank has `layout.virtual_stages` of them."""
        stages = self.layout.pp * self.layout.virtual_stages
        if not self.stack.balanced or self.model.num_layers < stages:
            return _even_cut(self.model.num_layers, stages)
        costs = [block_flops(self.model, kind, self.sequence) for kind in range(len(self.model.kinds))]
        head = 2.0 * self.model.embedding
        if len(costs) > 1:
            layers = [costs[kind] for kind in self.model.pattern]
            return _balanced((*layers[:-1], layers[-1] + head), stages)
        return _cut_before_head(self.model.num_layers, stages, head / costs[0])


def adapter_parameters(model: Blueprint, rank: int, adapts: Adapts = "all") -> int:
    """Parameters of adapters beside matrices of attention, feed-forward layers and experts (Hu et al., 2021)."""
    return sum(
        rank * (matrix.out + matrix.into) * max(1, matrix.experts)
        for block in model.blocks
        for matrix in adapted(block, rank, adapts)
    )


def adapted(block: LayerParameters, rank: int, adapts: Adapts = "all") -> Sequence[Matrix]:
    """A block's matrices that have an adapter of a rank beside them."""
    return [m for m in block.matrices if has_adapter(m, adapts) and min(m.out, m.into) > rank]


def has_adapter(matrix: Matrix, adapts: Adapts) -> bool:
    """Whether a matrix has an adapter beside it, if its rank allows one."""
    match adapts:
        case "attention":
            return matrix.name.startswith("attention")
        case "all":
            return not matrix.experts
        case "experts":
            return True
        case _:
            assert_never(adapts)


def block_flops(model: Blueprint, kind: int, sequence: int) -> float:
    """Forward operations of one token in a block of a kind, for balancing stages."""
    block = model.kinds[kind]
    active = (m.out * m.into * (model.top_k if m.experts else 1) for m in block.matrices)
    return 2.0 * sum(active) + model.attention_flops(block, sequence, causal=False)


_balanced = functools.lru_cache(maxsize=256)(balanced_stages)
"""Cache size for a search, which asks the same for every candidate with as many stages."""


@functools.lru_cache(maxsize=4096)
def _kinds(pattern: tuple[int, ...]) -> Kinds:
    return tuple(sorted(Counter(pattern).items()))


@functools.lru_cache(maxsize=4096)
def _stage_kinds(pattern: tuple[int, ...], ranks: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[Kinds, ...]:
    return tuple(_kinds(tuple(layer for span in spans for layer in pattern[slice(*span)])) for spans in ranks)


@functools.lru_cache(maxsize=4096)
def _groups(pattern: tuple[int, ...], full: int, selective: int) -> Groups:
    behind = full + selective
    parts: tuple[tuple[Policy, tuple[int, ...]], ...] = (
        ("full", pattern[:full]), ("selective", pattern[full:behind]), ("none", pattern[behind:])
    )  # fmt: skip
    return tuple((policy, _kinds(layers)) for policy, layers in parts if layers)


@functools.lru_cache(maxsize=4096)
def _places(stages: int, ranks: int, v: bool) -> tuple[tuple[int, ...], ...]:
    turns = range(stages // ranks)
    return tuple(
        tuple(turn * ranks + (ranks - 1 - rank if v and turn % 2 else rank) for turn in turns) for rank in range(ranks)
    )


@functools.lru_cache(maxsize=4096)
def _spans(cut: tuple[int, ...], ranks: int, v: bool) -> tuple[tuple[tuple[int, int], ...], ...]:
    ends = tuple(accumulate(cut, initial=0))
    return tuple(tuple((ends[stage], ends[stage + 1]) for stage in here) for here in _places(len(cut), ranks, v))


def _is_v(schedule: str) -> bool:
    return schedule in SCHEDULES and SCHEDULES[schedule].shape == "v"


def _even_cut(layers: int, stages: int) -> tuple[int, ...]:
    """Equal stages; where layers do not divide, those in the middle take one more."""
    each, left = divmod(layers, stages)
    counts = [each] * stages
    for stage in sorted(range(stages), key=lambda stage: abs(stage - (stages - 1) / 2))[:left]:
        counts[stage] += 1
    return tuple(counts)


@functools.cache
def _cut_before_head(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """The result of `balanced_stages` for equal layers and a head worth `head` of them, in closed form."""
    if stages == 1:
        return (layers,)
    best, of_last = (float("inf"), float("inf")), 0
    for last in range(1, layers - stages + 2):
        each, left = divmod(layers - last, stages - 1)
        squares = left * (each + 1) ** 2 + (stages - 1 - left) * each**2 + (last + head) ** 2
        work = max(each + (left > 0), last + head), float(squares)
        if work < best:
            best, of_last = work, last
    each, left = divmod(layers - of_last, stages - 1)
    return (*(each + (stage < left) for stage in range(stages - 1)), of_last)
