"""A parameter table condensed to the inputs of the cost model: matrices, attention and experts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.families import parameter_table
from meshwright.families.flops import mixer_flops_per_token
from meshwright.families.split import TP_SPLITS
from meshwright.spec.layers import AttentionSpec, GatedDeltaSpec, MixerSpec
from meshwright.spec.model import ModelSpec, Parameter


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of a block: every token is multiplied by it or, with experts, by `top_k` of them."""

    name: str
    out: int
    into: int
    split: bool
    """Whether tensor parallelism gives a rank only a share of it."""
    experts: int = 0
    """Number of parallel matrices of this shape, one per expert; 0 for a dense one."""
    keys: bool = False
    """Whether it computes keys or values, which are replicated if there are more tensor-parallel ranks than heads."""

    @property
    def numel(self) -> int:
        """Parameters, all experts together."""
        return self.out * self.into * max(1, self.experts)


@dataclass(frozen=True)
class LayerParameters:
    """One layer's parameters by kind."""

    matrices: tuple[Matrix, ...]
    vectors: int
    """Parameters of norms and biases, which nothing splits."""
    head_norms: bool = False
    """Whether queries and keys are normed."""
    window: int | None = None
    """Keys that a query sees at most."""
    delta: GatedDeltaSpec | None = None
    """The gated delta rule, if the block has it in the place of attention."""
    gated_heads: bool = False
    """Whether attention's outputs are multiplied by gates as wide."""

    @cached_property
    def dense(self) -> int:
        """Parameters of matrices that tensor parallelism splits, experts left out."""
        return sum(matrix.numel for matrix in self.matrices if matrix.split and not matrix.experts)

    @cached_property
    def keys(self) -> int:
        """Parameters among `dense` that compute keys and values."""
        return sum(matrix.numel for matrix in self.matrices if matrix.keys)

    def on_rank(self, tp: int, kv_heads: int) -> float:
        """Parameters that one of `tp` ranks holds, experts left out."""
        copied = self.keys if kv_heads % tp else 0
        return (self.dense - copied) / tp + copied + self.whole

    @cached_property
    def whole(self) -> int:
        """Parameters that every tensor-parallel rank holds."""
        return self.vectors + sum(matrix.numel for matrix in self.matrices if not matrix.split and not matrix.experts)

    @cached_property
    def experts(self) -> int:
        """Parameters of all experts."""
        return sum(matrix.numel for matrix in self.matrices if matrix.experts)

    @cached_property
    def num_experts(self) -> int:
        """Experts of the layer; 0 for a dense layer."""
        return max((matrix.experts for matrix in self.matrices), default=0)

    @cached_property
    def feed_forward(self) -> tuple[Matrix, ...]:
        """The feed-forward matrices."""
        return tuple(matrix for matrix in self.matrices if not matrix.name.startswith("attention"))

    @property
    def numel(self) -> int:
        """All parameters of the block."""
        return self.dense + self.whole + self.experts


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model as the planner sees it."""

    name: str = "model"
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    """Whether the feed-forward layer multiplies two projections (SwiGLU)."""
    tied: bool
    wide_norms: bool = False
    """Whether norms copy their inputs in fp32 or wider."""
    positions: int = 0
    """Rows of a learned position embedding."""
    final: int = 0
    """Parameters of the last norm."""
    top_k: int = 0
    """Experts per token."""
    kinds: tuple[LayerParameters, ...]
    """The different blocks."""
    pattern: tuple[int, ...]
    """Kind of every layer, first to last."""

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.pattern)

    @cached_property
    def blocks(self) -> tuple[LayerParameters, ...]:
        """The block of every layer."""
        return tuple(self.kinds[kind] for kind in self.pattern)

    @cached_property
    def kind_counts(self) -> tuple[int, ...]:
        """Layers of every kind."""
        return tuple(self.pattern.count(kind) for kind in range(len(self.kinds)))

    @cached_property
    def embedding(self) -> int:
        """Parameters of the token embedding, and of the head if it is untied."""
        return self.vocab * self.hidden

    @cached_property
    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        ends = self.embedding * (1 if self.tied else 2) + self.positions * self.hidden + self.final
        return ends + sum(block.numel for block in self.blocks)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied by, including the head but not the embedding's look-up."""
        total = self.embedding
        for block in self.blocks:
            for matrix in block.matrices:
                total += matrix.out * matrix.into * (self.top_k if matrix.experts else 1)
        return total

    def attention_flops(self, block: LayerParameters, sequence: int, *, causal: bool) -> float:
        """Forward operations of scores and values of one token in a block."""
        if block.delta is not None:
            return mixer_flops_per_token(block.delta, sequence)
        span = min(sequence, block.window or sequence)
        whole = 4.0 * self.num_heads * self.head_dim * span
        return whole / 2 if causal and span == sequence else whole

    def model_flops(self, sequence: int) -> float:
        """Training operations of one token, PaLM's convention: 6 per active parameter, attention in full."""
        attention = sum(
            count * self.attention_flops(block, sequence, causal=False)
            for block, count in zip(self.kinds, self.kind_counts, strict=True)
        )
        return 6.0 * self.active_parameters + 3 * attention


def blueprint(spec: ModelSpec) -> Blueprint:
    """The blueprint of a model that meshwright can build."""
    return condense(
        _named_as_ours(spec),
        [layer.mixer for layer in spec.layers],
        hidden=spec.hidden,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab,
        gated=spec.gated,
        tied=spec.tied_embeddings,
        wide_norms=spec.norm == "offset_rmsnorm",
        positions=spec.max_positions if spec.positions == "learned" else 0,
        top_k=spec.experts_per_token,
        name=spec.family,
    )


def _named_as_ours(spec: ModelSpec) -> Iterable[Parameter]:
    """The rows of the table, with blocks renamed to `layers.N.` whatever their names in the architecture."""
    table = parameter_table(spec)
    if spec.foreign is None:
        return table
    blocks = f"{spec.foreign.blocks}."
    return [
        replace(row, name=f"layers.{row.name.removeprefix(blocks)}") for row in table if row.name.startswith(blocks)
    ]


def condense(table: Iterable[Parameter], mixers: Sequence[MixerSpec] = (), **sizes) -> Blueprint:
    """A blueprint from parameter rows; rows of blocks are named `layers.N.`; `mixers`: of the layers, if they are
    known; `sizes` as in `Blueprint`."""
    layers: dict[str, list[Parameter]] = {}
    final = 0
    for row in table:
        if row.name.startswith("norm."):
            final += row.numel
        if row.name.startswith("layers."):
            layers.setdefault(row.name.split(".", 2)[1], []).append(row)
    kinds: dict[LayerParameters, int] = {}
    pattern = []
    seen: dict[Any, LayerParameters] = {}
    for index, rows in enumerate(layers.values()):
        mixer = mixers[index] if mixers else None
        key = mixer, tuple(row.shape for row in rows)
        if key not in seen:
            seen[key] = _block(rows, mixer)
        pattern.append(kinds.setdefault(seen[key], len(kinds)))
    return Blueprint(kinds=tuple(kinds), pattern=tuple(pattern), final=final, **sizes)


def _block(rows: list[Parameter], mixer: MixerSpec | None) -> LayerParameters:
    matrices, vectors = [], 0
    for row in rows:
        if len(row.shape) == 1 or ("experts" in row.dims and len(row.shape) == 2 and row.dims[0] == "experts"):
            vectors += row.numel
            continue
        experts = row.shape[0] if row.dims[0] == "experts" else 0
        dims, shape = row.dims[-2:], row.shape[-2:]
        if row.dims[-1] == "kernel":  # of a convolution, a row for each channel
            dims, shape = (row.dims[0], row.dims[-1]), (row.shape[0], row.shape[-1])
        name = row.name.split(".", 2)[2].removesuffix(".weight")
        split, keys = bool(TP_SPLITS & set(dims)), "kv_heads" in dims
        matrices.append(Matrix(name, shape[0], shape[1], split, experts, keys))
    head_norms = any(row.name.endswith("attention.q_norm.weight") for row in rows)
    delta = mixer if isinstance(mixer, GatedDeltaSpec) else None
    window = None if mixer is None else mixer.window
    gated = isinstance(mixer, AttentionSpec) and mixer.gated
    return LayerParameters(tuple(matrices), vectors, head_norms, window, delta, gated)
