"""Parameter tables: every tensor's name, named dims, shape and initialization."""

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt
from typing import Literal, assert_never

from meshwright.families.foreign import foreign_state, foreign_table
from meshwright.families.plugged import own_table
from meshwright.families.registry import FAMILIES
from meshwright.spec.layers import AttentionSpec, DenseSpec, ExpertsSpec, GatedDeltaSpec, LatentSpec, LayerSpec
from meshwright.spec.model import ModelSpec, Parameter

Init = Literal["normal", "ones", "zeros", "decays"]


def dim_sizes(spec: ModelSpec) -> dict[str, int]:
    """Size of every named dim that the model has."""
    keys, values = spec.delta_key_heads * spec.delta_key_dim, spec.delta_heads * spec.delta_value_dim
    kv_heads = spec.num_kv_heads * (spec.head_dim if spec.kv_rank is None else spec.nope_head_dim + spec.v_head_dim)
    return {
        "vocab": spec.vocab,
        "embed": spec.hidden,
        "heads": spec.num_heads * spec.head_dim,
        "gated_heads": 2 * spec.num_heads * spec.head_dim,
        "kv_heads": kv_heads,
        "head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "positions": spec.max_positions,
        "experts": spec.num_experts,
        "expert_ffn": spec.expert_ffn,
        "shared_ffn": spec.shared_width,
        "v_heads": spec.num_heads * spec.v_head_dim,
        "q_rank": spec.q_rank or 0,
        "kv_rank": spec.kv_rank or 0,
        "query_heads": spec.num_heads,
        "bias": 1,
        "kv_latent": (spec.kv_rank or 0) + spec.rope_head_dim,
        "delta_qkv": 2 * keys + values,
        "delta_qkvz": 2 * keys + 2 * values,
        "delta_values": values,
        "delta_heads": spec.delta_heads,
        "delta_gates": 2 * spec.delta_heads,
        "delta_value_dim": spec.delta_value_dim,
        "channel": 1,
        "kernel": spec.delta_kernel,
        "one": 1,
    }


def parameter_table(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Every parameter of the model in the order of `named_parameters()`; a tied head is absent.

    Matrices are drawn from a normal distribution with standard deviation `init_std`, except those that write
    to the residual stream (`wo`, `w2`): theirs is init_std / sqrt(2 * num_layers), so that the stream's
    variance does not grow with depth (Radford et al., 2019). Norms start at one, biases at zero.
    """
    if spec.foreign is not None:
        return foreign_table(spec.foreign, spec.vocab)
    if spec.family not in FAMILIES:
        return own_table(spec, dim_sizes(spec))
    return tuple(_rows(spec))


def active_parameters(spec: ModelSpec) -> int:
    """Parameters that one token uses: all except the experts that it is not routed to."""
    return sum(active_numel(spec, row) for row in parameter_table(spec))


def active_numel(spec: ModelSpec, row: Parameter) -> int:
    """Elements of one parameter that one token uses."""
    of_all_experts = len(row.dims) == 3 and row.dims[0] == "experts"
    return row.numel // row.shape[0] * spec.experts_per_token if of_all_experts else row.numel


def state_table(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Every tensor that is stored and saved like a parameter, but not trained: the module's buffers, in order."""
    if spec.foreign is not None:
        return foreign_state(spec.foreign)
    rows, kinds = _Rows(spec), [layer.feed_forward for layer in spec.layers]
    balanced = (i for i, kind in enumerate(kinds) if isinstance(kind, ExpertsSpec) and kind.router.balancing)
    return tuple(rows.row(f"layers.{i}.feed_forward.router.bias", "experts", init="zeros") for i in balanced)


def _rows(spec: ModelSpec) -> Iterator[Parameter]:
    rows = _Rows(spec)
    yield rows.row("tok_embeddings.weight", "vocab", "embed")
    match spec.positions:
        case "learned":
            yield rows.row("pos_embeddings.weight", "positions", "embed")
        case "rope":
            pass
        case _:
            assert_never(spec.positions)
    for i, layer in enumerate(spec.layers):
        yield from rows.layer(f"layers.{i}", layer)
    yield from rows.norm("norm")
    if not spec.tied_embeddings:
        yield rows.row("output.weight", "vocab", "embed")


class _Rows:
    """Makes the rows of one model's modules."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.sizes = spec, dim_sizes(spec)
        self.residual_std = spec.init_std / sqrt(2 * spec.num_layers)

    def row(self, name: str, *dims: str, init: Init = "normal", std: float | None = None) -> Parameter:
        shape = tuple(self.sizes[dim] for dim in dims)
        drawn = self.spec.init_std if std is None else std
        return Parameter(name=name, dims=dims, shape=shape, init=init, init_std=drawn if init == "normal" else 0.0)

    def linear(
        self, name: str, out: str, into: str, bias: bool = False, std: float | None = None
    ) -> Iterator[Parameter]:
        yield self.row(f"{name}.weight", out, into, std=std)
        if bias:
            yield self.row(f"{name}.bias", out, init="zeros")

    def norm(self, name: str, dim: str = "embed") -> Iterator[Parameter]:
        match self.spec.norm:
            case "layernorm":
                yield self.row(f"{name}.weight", dim, init="ones")
                yield self.row(f"{name}.bias", dim, init="zeros")
            case "rmsnorm":
                yield self.row(f"{name}.weight", dim, init="ones")
            case "offset_rmsnorm":
                yield self.row(f"{name}.weight", dim, init="zeros")
            case _:
                assert_never(self.spec.norm)

    def layer(self, name: str, layer: LayerSpec) -> Iterator[Parameter]:
        """All rows of a layer."""
        for part, rows in (("attention", self._mixer), ("feed_forward", self._feed_forward)):
            if layer.norms_inputs:
                yield from self.norm(f"{name}.{part}_norm")
            yield from rows(f"{name}.{part}", layer)
            if layer.norms_outputs:
                yield from self.norm(f"{name}.{part}_post_norm")

    def _mixer(self, name: str, layer: LayerSpec) -> Iterator[Parameter]:
        match layer.mixer:
            case AttentionSpec() as kind:
                return self.attention(name, kind)
            case LatentSpec() as kind:
                return self.latent_attention(name, kind)
            case GatedDeltaSpec() as kind:
                return self.gated_delta(name, kind)
            case _:
                assert_never(layer.mixer)

    def _feed_forward(self, name: str, layer: LayerSpec) -> Iterator[Parameter]:
        match layer.feed_forward:
            case DenseSpec():
                return self.feed_forward(name)
            case ExpertsSpec() as kind:
                return self.experts(name, kind)
            case _:
                assert_never(layer.feed_forward)

    def attention(self, name: str, kind: AttentionSpec) -> Iterator[Parameter]:
        yield from self.linear(f"{name}.wq", "gated_heads" if kind.gated else "heads", "embed", kind.qkv_bias)
        yield from self.linear(f"{name}.wk", "kv_heads", "embed", kind.qkv_bias)
        yield from self.linear(f"{name}.wv", "kv_heads", "embed", kind.qkv_bias)
        yield from self.linear(f"{name}.wo", "embed", "heads", kind.output_bias, self.residual_std)
        if kind.sinks:
            yield self.row(f"{name}.sinks.weight", "query_heads")
        match kind.qk_norm:
            case "none":
                pass
            case "heads":
                yield from self.norm(f"{name}.q_norm", "head_dim")
                yield from self.norm(f"{name}.k_norm", "head_dim")
            case "all":
                yield from self.norm(f"{name}.q_norm", "heads")
                yield from self.norm(f"{name}.k_norm", "kv_heads")
            case _:
                assert_never(kind.qk_norm)

    def latent_attention(self, name: str, kind: LatentSpec) -> Iterator[Parameter]:
        if kind.q_rank is None:
            yield from self.linear(f"{name}.wq", "heads", "embed")
        else:
            yield from self.linear(f"{name}.wq_a", "q_rank", "embed")
            yield from self.norm(f"{name}.q_norm", "q_rank")
            yield from self.linear(f"{name}.wq_b", "heads", "q_rank")
        yield from self.linear(f"{name}.wkv_a", "kv_latent", "embed")
        yield from self.norm(f"{name}.kv_norm", "kv_rank")
        yield from self.linear(f"{name}.wkv_b", "kv_heads", "kv_rank")
        yield from self.linear(f"{name}.wo", "embed", "v_heads", std=self.residual_std)

    def gated_delta(self, name: str, kind: GatedDeltaSpec) -> Iterator[Parameter]:
        segments = kind.segments
        if kind.by_key_head:
            yield from self.linear(f"{name}.w_qkvz", "delta_qkvz", "embed")
            yield from self.linear(f"{name}.w_ba", "delta_gates", "embed")
        else:
            yield replace(self.row(f"{name}.w_qkv.weight", "delta_qkv", "embed"), segments=segments)
            yield from self.linear(f"{name}.w_z", "delta_values", "embed")
            yield from self.linear(f"{name}.w_b", "delta_heads", "embed")
            yield from self.linear(f"{name}.w_a", "delta_heads", "embed")
        convolution = self.row(f"{name}.convolution.weight", "delta_qkv", "channel", "kernel", std=self.spec.init_std)
        yield replace(convolution, segments=segments)
        yield self.row(f"{name}.decay.log_rate", "delta_heads", init="decays")
        yield self.row(f"{name}.decay.bias", "delta_heads", init="ones")
        yield self.row(f"{name}.norm.weight", "delta_value_dim", init="ones")
        yield from self.linear(f"{name}.w_out", "embed", "delta_values", std=self.residual_std)

    def feed_forward(self, name: str, width: str = "ffn") -> Iterator[Parameter]:
        bias = self.spec.ffn_bias
        yield from self.linear(f"{name}.w1", width, "embed", bias)
        yield from self.linear(f"{name}.w2", "embed", width, bias, self.residual_std)
        if self.spec.gated:
            yield from self.linear(f"{name}.w3", width, "embed", bias)

    def experts(self, name: str, kind: ExpertsSpec) -> Iterator[Parameter]:
        yield self.row(f"{name}.router.weight", "experts", "embed")
        if kind.bias:
            yield self.row(f"{name}.router.logit_bias", "experts", init="zeros")
        for part, out, into, std in (
            ("w1", "expert_ffn", "embed", None),
            ("w2", "embed", "expert_ffn", self.residual_std),
            ("w3", "expert_ffn", "embed", None),
        ):
            yield self.row(f"{name}.experts.{part}.weight", "experts", out, into, std=std)
            if kind.bias:
                yield self.row(f"{name}.experts.{part}.bias", "experts", out, "bias", init="zeros")
        if kind.shared:
            yield from self.feed_forward(f"{name}.shared", "shared_ffn")
        if kind.shared_gated:
            yield from self.linear(f"{name}.shared_gate", "one", "embed")
