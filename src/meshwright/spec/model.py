"""Models: sizes and switches, and the rows of a parameter table."""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from meshwright.spec.base import Spec
from meshwright.spec.foreign import ForeignModel, Fp8Files, Wrapper
from meshwright.spec.layers import (
    ActivationName,
    ExpertsSpec,
    LayerSpec,
    NormsName,
    QkNormName,
    Rope,
    RopeScaling,
    RouterScores,
    layers_of,
)
from meshwright.spec.plugins import Pluggable

WIDEST, DEEPEST, LONGEST = 10**7, 10**4, 10**12
"""Limits: the largest width, number of heads or vocabulary; the largest number of layers or experts; the most
positions. No model exceeds them; larger sizes are refused before any computation."""


class ModelFields(Spec):
    """The recipe's `model:` section: a published name or Hugging Face directory, or a family with sizes, or a name with
    some sizes changed. Missing sizes come from the name or the family."""

    name: str | None = Field(default=None, min_length=1)
    """A published name (`llama-3.2-1b`), the path of a Hugging Face directory, or the hub's id of a model in the local
    cache (`meta-llama/Llama-3.2-1B`, once `hf download` has fetched it). `model: NAME` is short for this."""
    weights: Literal["auto", "random", "pretrained"] = "auto"
    """Initial weights: randomly initialized, or the Hugging Face directory's. auto: pretrained if `name` is a Hugging
    Face directory with weights, else random. Adapters need pretrained weights unless the recipe sets random."""
    family: str | None = None
    """Architecture if no name is given: gpt2, llama, mistral, qwen2, qwen3, qwen3_5, gemma3, olmo3, smollm3, mixtral,
    qwen3_moe, qwen3_next, qwen3_5_moe, deepseek_v3, glm4_moe, minimax_m2 or gpt_oss; or your own model, an entry point
    of the group meshwright.models. With the name of a Hugging Face directory, transformers: that library computes the
    model."""
    dims: dict[str, str] | None = None
    """Of a model that transformers computes: dims of parameters in place of derived ones, by patterns of names, as
    `check --table` prints them, or `whole`: {model.layers.*.mlp.up_proj.weight: "ffn, in"}. They must pass the slice
    test too."""
    hidden: int | None = Field(default=None, ge=1, le=WIDEST)
    """Width of the residual stream."""
    num_layers: int | None = Field(default=None, ge=1, le=DEEPEST)
    """Number of blocks."""
    num_heads: int | None = Field(default=None, ge=1, le=WIDEST)
    """Query heads."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=WIDEST)
    """Key and value heads (grouped-query attention when fewer than num_heads)."""
    head_dim: int | None = Field(default=None, ge=1, le=WIDEST)
    """Width of one head; default hidden / num_heads."""
    ffn: int | None = Field(default=None, ge=1, le=WIDEST)
    """Width of the feed-forward layer; default 4 hidden for gpt2, else 8/3 hidden rounded up to 256s."""
    vocab: int | None = Field(default=None, ge=1, le=WIDEST)
    """Rows of the embedding; default the published size, else the tokenizer's."""
    max_positions: int | None = Field(default=None, ge=1, le=LONGEST)
    """Longest sequence that the model supports."""
    norm_eps: float | None = Field(default=None, gt=0)
    """Epsilon of the norms."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Base of the rotary embedding."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary embedding's frequencies for a longer context."""
    sliding_window: int | None = Field(default=None, ge=1, le=LONGEST)
    """Attention to at most this many previous positions."""
    window_theta: float | None = Field(default=None, gt=0)
    """gemma3: base of the rotary embedding in layers with the sliding window."""
    query_scalar: int | None = Field(default=None, ge=1)
    """gemma3: attention scores are divided by its root; default head_dim."""
    qk_norm: QkNormName | None = None
    """glm4_moe: RMSNorm of queries and keys, over each head (heads) or none."""
    tied_embeddings: bool | None = None
    """Use the embedding matrix as the output head as well."""
    init_std: float | None = Field(default=None, gt=0)
    """Standard deviation of randomly initialized matrices."""
    num_experts: int | None = Field(default=None, ge=1, le=DEEPEST)
    """Experts that the router chooses from (mixtral, qwen3_moe, deepseek_v3, glm4_moe, minimax_m2)."""
    experts_per_token: int | None = Field(default=None, ge=1, le=DEEPEST)
    """Experts that each token is sent to."""
    expert_ffn: int | None = Field(default=None, ge=1, le=WIDEST)
    """Width of one expert; default ffn. In mixtral always ffn."""
    balance_loss: float | None = Field(default=None, ge=0)
    """Coefficient of the load-balancing loss, which is part of the gradient but not of the reported loss; 0 disables
    it."""
    router_z_loss: float | None = Field(default=None, ge=0)
    """Coefficient of the router's z-loss (Zoph et al., "ST-MoE", 2022), which keeps its logits small; part of the
    gradient but not of the reported loss. Default 0: none."""
    balance_rate: float | None = Field(default=None, ge=0)
    """deepseek_v3, glm4_moe, minimax_m2: change per step of the bias of experts with more or less load than the
    mean."""
    shared_experts: int | None = Field(default=None, ge=0, le=DEEPEST)
    """deepseek_v3, glm4_moe: experts that process every token, in addition to the routed ones."""
    dense_layers: int | None = Field(default=None, ge=0)
    """deepseek_v3, glm4_moe: number of first layers that are dense, of width ffn."""
    router_groups: int | None = Field(default=None, ge=1)
    """deepseek_v3, glm4_moe: groups of experts, of which a token uses only the best router_top_groups."""
    router_top_groups: int | None = Field(default=None, ge=1)
    """deepseek_v3, glm4_moe: number of groups that each token uses."""
    router_scale: float | None = Field(default=None, gt=0)
    """deepseek_v3, glm4_moe: factor of the routed experts' output."""
    q_rank: int | None = Field(default=None, ge=1, le=WIDEST)
    """deepseek_v3: width of the latent that queries are computed from; default none, computed from the residual
    stream."""
    kv_rank: int | None = Field(default=None, ge=1, le=WIDEST)
    """deepseek_v3: width of the latent that keys and values are computed from."""
    nope_head_dim: int | None = Field(default=None, ge=1, le=WIDEST)
    """deepseek_v3: width of a head's part without positions."""
    rope_head_dim: int | None = Field(default=None, ge=2, le=WIDEST)
    """Width of a head's rotated part; in deepseek_v3 all heads share its key (deepseek_v3, glm4_moe, minimax_m2)."""
    v_head_dim: int | None = Field(default=None, ge=1, le=WIDEST)
    """deepseek_v3: width of a head's values."""
    shared_ffn: int | None = Field(default=None, ge=1, le=WIDEST)
    """qwen3_next, qwen3_5_moe: width of the expert that processes every token."""
    delta_heads: int | None = Field(default=None, ge=1, le=WIDEST)
    """qwen3_next, qwen3_5, qwen3_5_moe: heads of values in layers with the gated delta rule."""
    delta_key_heads: int | None = Field(default=None, ge=1, le=WIDEST)
    """qwen3_next, qwen3_5, qwen3_5_moe: their heads of queries and keys."""
    delta_key_dim: int | None = Field(default=None, ge=1, le=WIDEST)
    """qwen3_next, qwen3_5, qwen3_5_moe: width of a head's queries and keys in these layers."""
    delta_value_dim: int | None = Field(default=None, ge=1, le=WIDEST)
    """qwen3_next, qwen3_5, qwen3_5_moe: width of a head's values in these layers."""


FamilyName = Literal[
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "gemma3",
    "olmo3",
    "smollm3",
    "mixtral",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "transformers",
]
"""Our families, and the name for any other architecture in a Hugging Face directory."""


def _qk_norm(value: Any) -> Any:
    """Files of older versions say whether each head is normed."""
    return {True: "heads", False: "none"}[value] if isinstance(value, bool) else value


class ModelSpec(Spec):
    """A complete model: every size and option that families, models and planner need."""

    family: Annotated[FamilyName, Pluggable("models")]
    hidden: int = Field(ge=1, le=WIDEST)
    num_layers: int = Field(ge=1, le=DEEPEST)
    num_heads: int = Field(ge=1, le=WIDEST)
    num_kv_heads: int = Field(ge=1, le=WIDEST)
    head_dim: int = Field(ge=1, le=WIDEST)
    ffn: int = Field(ge=1, le=WIDEST)
    vocab: int = Field(ge=1, le=WIDEST)
    max_positions: int = Field(ge=1, le=LONGEST)
    norm: Literal["rmsnorm", "layernorm", "offset_rmsnorm"]
    """offset_rmsnorm (gemma3): RMSNorm that adds one to its weight."""
    norm_eps: float = Field(ge=0, allow_inf_nan=False)
    norms: NormsName = "before"
    activation: ActivationName
    gated: bool
    """Whether feed-forward layers multiply the activation with a second projection (SwiGLU, GeGLU: Shazeer, 2020)."""
    positions: Literal["rope", "learned"]
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    rope_layers: tuple[bool, ...] = Field(default=(True,), min_length=1)
    """The layers that rotate queries and keys, from the first on; the pattern repeats."""
    qk_norm: Annotated[QkNormName, BeforeValidator(_qk_norm)] = "none"
    query_scalar: int | None = Field(default=None, ge=1)
    """Scores are divided by its root; default head_dim."""
    sinks: bool = False
    """Whether each head has a learned score of a key without value (gpt_oss)."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    ffn_bias: bool = False
    sliding_window: int | None = Field(default=None, ge=1, le=LONGEST)
    window_layers: tuple[bool, ...] = Field(default=(True,), min_length=1)
    """The layers that have the sliding window, from the first on; the pattern repeats."""
    window_theta: float | None = Field(default=None, gt=0)
    """Base of the rotary embedding in layers with the window; default rope_theta."""
    window_scaled: bool = True
    """Whether rope_scaling applies to layers with the window."""
    tied_embeddings: bool = False
    embedding_scaled: bool = False
    """Whether embeddings are multiplied by the root of hidden (gemma3)."""
    init_std: float = Field(default=0.02, gt=0)
    num_experts: int = Field(default=0, ge=0, le=DEEPEST)
    """Experts that the router chooses from; 0: every layer is dense."""
    experts_per_token: int = Field(default=0, ge=0, le=DEEPEST)
    expert_ffn: int = Field(default=0, ge=0, le=WIDEST)
    """Width of one expert."""
    expert_bias: bool = False
    """Whether experts and router have biases, which are trained (gpt_oss)."""
    glu_alpha: float = Field(default=1.702, gt=0, strict=True)
    glu_limit: float = Field(default=7.0, gt=0, strict=True)
    """Factor and bound of the activation clamped_silu."""
    router_scores: RouterScores = "softmax"
    router_normalised: bool = False
    """Whether the chosen experts' scores are divided by their sum."""
    router_scale: float = Field(default=1.0, gt=0)
    router_groups: int = Field(default=1, ge=1)
    router_top_groups: int = Field(default=1, ge=1)
    router_bias: bool = False
    """Whether a bias is added to each expert's score to choose experts. It is changed by balance_rate, not trained."""
    balance_loss: float = Field(default=0.0, ge=0)
    router_z_loss: float = Field(default=0.0, ge=0)
    balance_rate: float = Field(default=0.0, ge=0)
    shared_experts: int = Field(default=0, ge=0, le=DEEPEST)
    shared_ffn: int = Field(default=0, ge=0, le=WIDEST)
    """Width of all shared experts together; 0: of shared_experts of width expert_ffn."""
    shared_gate: bool = False
    """Whether the shared experts' output is multiplied by a gate, a number for each token (qwen3_next)."""
    dense_layers: int = Field(default=0, ge=0)
    kv_rank: int | None = Field(default=None, ge=1, le=WIDEST)
    """Latent attention (deepseek_v3); None: keys and values are computed from the residual stream."""
    q_rank: int | None = Field(default=None, ge=1, le=WIDEST)
    nope_head_dim: int = Field(default=0, ge=0, le=WIDEST)
    rope_head_dim: int = Field(default=0, ge=0, le=WIDEST)
    """Width of a head's rotated part; with latent attention head_dim = nope_head_dim + rope_head_dim, otherwise 0 for
    the whole head."""
    v_head_dim: int = Field(default=0, ge=0, le=WIDEST)
    """With latent attention; otherwise values are as wide as keys."""
    attention_gate: bool = False
    """Whether the outputs of attention's heads are multiplied by gates (qwen3_next)."""
    delta_layers: tuple[bool, ...] = Field(default=(False,), min_length=1)
    """The layers that have the gated delta rule instead of attention, from the first on; the pattern repeats."""
    delta_heads: int = Field(default=0, ge=0, le=WIDEST)
    delta_key_heads: int = Field(default=0, ge=0, le=WIDEST)
    delta_key_dim: int = Field(default=0, ge=0, le=WIDEST)
    delta_value_dim: int = Field(default=0, ge=0, le=WIDEST)
    delta_kernel: int = Field(default=4, ge=2, le=64)
    """Tokens that the convolution of queries, keys and values sees."""
    delta_by_key_head: bool = False
    """How its matrices are stored (`GatedDeltaSpec`)."""
    foreign: ForeignModel | None = None
    """Only for the family transformers; the sizes above then come from config.json and are used by plans."""
    wrapper: Wrapper | None = None
    """If this is the text model inside a multimodal one: the rest."""
    fp8: Fp8Files | None = None
    """If the Hugging Face directory stores matrices in fp8: in which form."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Every layer, first to last."""
        bare = self
        if self.foreign is not None or self.wrapper is not None:  # large, and without effect here
            bare = self.model_copy(update={"foreign": None, "wrapper": None})
        return layers_of(bare)  # pyright: ignore[reportArgumentType]

    def layer(self, index: int) -> LayerSpec:
        """One layer."""
        return self.layers[index]

    def is_moe(self, layer: int) -> bool:
        """Whether the feed-forward of layer `layer` consists of experts."""
        return isinstance(self.layer(layer).feed_forward, ExpertsSpec)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its layers, None for full attention."""
        return tuple(dict.fromkeys(layer.mixer.window for layer in self.layers))

    @property
    def rope(self) -> Rope:
        """The rotary table of layers with full attention."""
        return Rope(theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def window_rope(self) -> Rope:
        """The rotary table of layers with the window."""
        return Rope(
            theta=self.window_theta or self.rope_theta, scaling=self.rope_scaling if self.window_scaled else None
        )

    @property
    def shared_width(self) -> int:
        """Width of the experts that process every token, together."""
        return self.shared_ffn or self.shared_experts * self.expert_ffn

    @property
    def rotated_dim(self) -> int:
        """Width of a head's rotated part."""
        return self.rope_head_dim or self.head_dim


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One row of the parameter table: a tensor of the model, with named dims.

    A weight's dims are (out, in); `families/split.py` determines which of them tensor parallelism splits.
    """

    name: str
    """Name in `named_parameters()`, e.g. `layers.0.attention.wq.weight`."""
    dims: tuple[str, ...]
    """Named dims: vocab, embed, heads (num_heads * head_dim), kv_heads, query_heads (num_heads), head_dim, ffn,
    positions, experts, expert_ffn, shared_ffn, bias (1, of experts' biases); gated_heads (queries and gates); of latent
    attention v_heads, q_rank, kv_rank, kv_latent; of the gated delta rule delta_qkv (queries, keys and values),
    delta_qkvz (also output gates), delta_values, delta_heads, delta_gates (two for each head), delta_value_dim, channel
    (1) and kernel; of a shared expert's gate one (1); of adapters rank."""
    shape: tuple[int, ...]
    """Global shape."""
    init: Literal["normal", "uniform", "ones", "zeros", "decays", "row_norms", "quantized"]
    """Initialization of a new weight. decays: logarithms of uniform numbers between 0 and 16; row_norms: the 2-norms of
    the rows of its module's weight; quantized: from it."""
    init_std: float = 0.0
    """Standard deviation if init is normal or uniform."""
    trained: bool = True
    """Whether training changes it; if not, it has no gradient, no optimizer state and no copy in full precision."""
    adapter: bool = False
    """Whether fine-tuning has added it to the model."""
    storage: Literal["float", "int8", "uint8", "int32"] = "float"
    """Dtype of the stored tensor: float, the model's; or the integer type of a quantized matrix."""
    lr_ratio: float = 1.0
    """Its learning rate as a multiple of the run's."""
    segments: tuple[int, ...] = ()
    """Runs along the dim that tensor-parallel ranks split, each evenly; empty if there is one (`SplitParameter`)."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)
