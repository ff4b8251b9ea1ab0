"""A layer of a model as a value: what mixes its tokens, what computes each of them, and where its norms are.

A `ModelSpec` has a model's sizes and options; `layers_of` says what they mean for each layer. Everything that depends
on a layer reads this value: tables, modules, masks, caches and plans. Without torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from meshwright.spec.base import Spec

if TYPE_CHECKING:
    from meshwright.spec.model import ModelSpec

ActivationName = Literal["silu", "gelu_tanh", "clamped_silu"]
"""Activation functions of feed-forward layers and experts; gelu_tanh is GELU with the tanh approximation, clamped_silu
gpt_oss's: x sigmoid(alpha x) of a clamped x, times one more than the other projection, which is clamped too."""

QkNormName = Literal["none", "heads", "all"]
"""RMSNorm of queries and keys before rope: none, over each head (qwen3), or over all heads at once (olmo3)."""

RouterScores = Literal["softmax", "sigmoid"]
"""Scores from a router's logits: probabilities over all experts, or an independent score for each."""

NormsName = Literal["before", "after", "both"]
"""Where a layer's two parts are normed: their inputs, their outputs (olmo3), or both (gemma3)."""


class RopeScaling(Spec):
    """Scaling of the rotary embeddings' frequencies for a longer context (`rope_type` in Hugging Face's config)."""

    kind: Literal["llama3", "yarn", "linear"] = "llama3"
    """llama3 (Dubey et al., 2024), yarn (Peng et al., 2023), or linear: all frequencies divided by factor."""
    factor: float = Field(gt=0)
    """Scaled context length relative to the original one, for low frequencies."""
    original_max_positions: int = Field(default=8192, ge=1)
    """Context length of the pretraining before scaling."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """llama3: wavelengths above original_max_positions / low_freq_factor are scaled fully."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """llama3: wavelengths below original_max_positions / high_freq_factor are not scaled."""
    beta_fast: float = Field(default=32.0, gt=0)
    """yarn: frequencies with more rotations than this in the original context are not scaled."""
    beta_slow: float = Field(default=1.0, gt=0)
    """yarn: frequencies with fewer rotations than this in the original context are scaled fully."""
    mscale: float | None = None
    """yarn: growth of the rotated dims with log(factor), with mscale_all_dim; default as published."""
    mscale_all_dim: float | None = None
    """yarn: growth of all dims of queries and keys with log(factor) (deepseek_v3)."""
    attention_factor: float | None = None
    """yarn: factor of cosines and sines; default from factor and mscale."""
    truncate: bool = True
    """yarn: whether the bounds between scaled and unscaled frequencies are whole pairs."""


class Rope(Spec):
    """A rotary table: the base of its frequencies, and their scaling."""

    theta: float = Field(gt=0)
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of heads, each with its own queries; some share keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: queries and keys are not rotated (NoPE, or learned positions)."""
    rotated: int
    """Width of a head's rotated part, its first."""
    window: int | None
    """Keys that a query sees at most, itself included."""
    qk_norm: QkNormName
    qkv_bias: bool
    output_bias: bool
    sinks: bool
    """Whether each head has a learned score of a key without value."""
    scale: float
    """The factor of the scores, besides one over the root of head_dim."""
    gated: bool
    """Whether each head's output is multiplied by the sigmoid of a gate, which is as wide."""

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Latent attention (deepseek_v3): keys and values are expanded from one latent."""

    heads: int
    head_dim: int
    rope: Rope | None
    rotated: int
    """Width of a head's rotated part, whose key all heads share."""
    nope: int
    """Width of a head's part without positions."""
    value_dim: int
    kv_rank: int
    q_rank: int | None
    window: None = None


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """The gated delta rule (Yang et al., "Gated Delta Networks", 2024): each head has a state, a matrix that maps keys
    to values; a token lets it decay, and corrects the value that it returns for the token's key."""

    heads: int
    """Heads of values, each with a state."""
    key_heads: int
    """Heads of queries and keys; several heads of values share one."""
    key_dim: int
    """Width of a head's queries and keys."""
    value_dim: int
    """Width of a head's values."""
    kernel: int
    """Tokens that the convolution of queries, keys and values sees."""
    by_key_head: bool
    """Whether one matrix has queries, keys, values and output gates, key head by key head, and another the gates of a
    token (qwen3_next); if not, queries, keys and values are one matrix, and each gate another (qwen3_5)."""
    rope: None = None
    rotated: int = 0
    window: None = None

    @property
    def keys(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.heads * self.value_dim

    @property
    def segments(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values in the convolution."""
        return self.keys, self.keys, self.values


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A feed-forward layer that computes every token."""

    width: int
    activation: ActivationName
    gated: bool
    bias: bool


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How experts are chosen, and their outputs weighed."""

    scores: RouterScores
    normalised: bool
    """Whether the chosen experts' scores are divided by their sum."""
    scale: float
    """The factor of the experts' sum."""
    groups: int
    top_groups: int
    """Groups of experts that a token uses."""
    balancing: bool
    """Whether a bias, which is not trained, is added to the scores to choose experts."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A feed-forward layer of experts, of which a router chooses some for each token."""

    count: int
    chosen: int
    """Experts of a token."""
    width: int
    """Width of one expert."""
    activation: ActivationName
    bias: bool
    """Whether experts and router have biases, which are trained."""
    shared: int
    """Width of the experts that compute every token, together."""
    shared_gated: bool
    """Whether their output is multiplied by the sigmoid of a number that is computed from the token."""
    router: RouterSpec


MixerSpec = AttentionSpec | LatentSpec | GatedDeltaSpec
"""What mixes the tokens of a layer."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer."""

    mixer: MixerSpec
    feed_forward: DenseSpec | ExpertsSpec
    norms: NormsName

    @property
    def norms_inputs(self) -> bool:
        """Whether its parts' inputs are normed."""
        return self.norms != "after"

    @property
    def norms_outputs(self) -> bool:
        """Whether its parts' outputs are normed."""
        return self.norms != "before"


@lru_cache(maxsize=256)
def layers_of(spec: "ModelSpec") -> tuple[LayerSpec, ...]:
    """Every layer, first to last; equal layers are one object."""
    known: dict[LayerSpec, LayerSpec] = {}
    return tuple(known.setdefault(layer, layer) for layer in (_layer(spec, i) for i in range(spec.num_layers)))


def _layer(spec: "ModelSpec", layer: int) -> LayerSpec:
    dense = DenseSpec(width=spec.ffn, activation=spec.activation, gated=spec.gated, bias=spec.ffn_bias)
    return LayerSpec(
        mixer=_mixer(spec, layer),
        feed_forward=_experts(spec) if spec.num_experts and layer >= spec.dense_layers else dense,
        norms=spec.norms,
    )


def _mixer(spec: "ModelSpec", layer: int) -> MixerSpec:
    if spec.kv_rank is not None:
        return _latent(spec, spec.kv_rank)
    return _gated_delta(spec) if _at(spec.delta_layers, layer) else _attention(spec, layer)


def _gated_delta(spec: "ModelSpec") -> GatedDeltaSpec:
    return GatedDeltaSpec(
        heads=spec.delta_heads,
        key_heads=spec.delta_key_heads,
        key_dim=spec.delta_key_dim,
        value_dim=spec.delta_value_dim,
        kernel=spec.delta_kernel,
        by_key_head=spec.delta_by_key_head,
    )


def _attention(spec: "ModelSpec", layer: int) -> AttentionSpec:
    windowed = spec.sliding_window is not None and _at(spec.window_layers, layer)
    rotates = spec.positions == "rope" and _at(spec.rope_layers, layer)
    table = spec.window_rope if windowed else spec.rope
    return AttentionSpec(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rope=table if rotates else None,
        rotated=spec.rotated_dim,
        window=spec.sliding_window if windowed else None,
        qk_norm=spec.qk_norm,
        qkv_bias=spec.qkv_bias,
        output_bias=spec.output_bias,
        sinks=spec.sinks,
        scale=1.0 if spec.query_scalar is None else (spec.head_dim / spec.query_scalar) ** 0.5,
        gated=spec.attention_gate,
    )


def _latent(spec: "ModelSpec", kv_rank: int) -> LatentSpec:
    return LatentSpec(
        heads=spec.num_heads,
        head_dim=spec.head_dim,
        rope=spec.rope,
        rotated=spec.rotated_dim,
        nope=spec.nope_head_dim,
        value_dim=spec.v_head_dim,
        kv_rank=kv_rank,
        q_rank=spec.q_rank,
    )


def _experts(spec: "ModelSpec") -> ExpertsSpec:
    return ExpertsSpec(
        count=spec.num_experts,
        chosen=spec.experts_per_token,
        width=spec.expert_ffn,
        activation=spec.activation,
        bias=spec.expert_bias,
        shared=spec.shared_width,
        shared_gated=spec.shared_gate,
        router=RouterSpec(
            scores=spec.router_scores,
            normalised=spec.router_normalised,
            scale=spec.router_scale,
            groups=spec.router_groups,
            top_groups=spec.router_top_groups,
            balancing=spec.router_bias,
        ),
    )


def _at(pattern: Sequence[bool], layer: int) -> bool:
    """A layer's place in a pattern, which repeats."""
    return pattern[layer % len(pattern)]
