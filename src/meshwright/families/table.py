"""The one place that declares a model's parameters: every tensor's name, named dims, shape and how it is
drawn."""

from collections.abc import Iterator
from math import sqrt
from typing import Literal

from meshwright.spec.model import ModelSpec, Parameter

Init = Literal["normal", "ones", "zeros"]


def dim_sizes(spec: ModelSpec) -> dict[str, int]:
    """Size of every named dim."""
    return {
        "vocab": spec.vocab,
        "embed": spec.hidden,
        "heads": spec.num_heads * spec.head_dim,
        "kv_heads": spec.num_kv_heads * spec.head_dim,
        "head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "positions": spec.max_positions,
        "experts": spec.num_experts,
        "expert_ffn": spec.expert_ffn,
    }


def parameter_table(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Every parameter of the model in the order of `named_parameters()`; a tied head is absent.

    Matrices are drawn from a normal distribution with standard deviation `init_std`, except those that write
    to the residual stream (`wo`, `w2`): theirs is init_std / sqrt(2 * num_layers), so that the stream's
    variance does not grow with depth (Radford et al., 2019). Norms start at one, biases at zero.
    """
    return tuple(_rows(spec))


def active_parameters(spec: ModelSpec) -> int:
    """Parameters that one token meets: all but the experts that it is not sent to."""
    return sum(active_numel(spec, row) for row in parameter_table(spec))


def active_numel(spec: ModelSpec, row: Parameter) -> int:
    """Elements of one parameter that one token meets."""
    of_all_experts = len(row.dims) == 3
    return row.numel // spec.num_experts * spec.experts_per_token if of_all_experts else row.numel


def _rows(spec: ModelSpec) -> Iterator[Parameter]:
    sizes = dim_sizes(spec)

    def row(name: str, *dims: str, init: Init = "normal", std: float = spec.init_std) -> Parameter:
        shape = tuple(sizes[dim] for dim in dims)
        return Parameter(name=name, dims=dims, shape=shape, init=init, init_std=std if init == "normal" else 0.0)

    def linear(name: str, out: str, into: str, bias: bool = False, std: float = spec.init_std) -> Iterator[Parameter]:
        yield row(f"{name}.weight", out, into, std=std)
        if bias:
            yield row(f"{name}.bias", out, init="zeros")

    def norm(name: str, dim: str = "embed") -> Iterator[Parameter]:
        yield row(f"{name}.weight", dim, init="ones")
        if spec.norm == "layernorm":
            yield row(f"{name}.bias", dim, init="zeros")

    residual_std = spec.init_std / sqrt(2 * spec.num_layers)
    yield row("tok_embeddings.weight", "vocab", "embed")
    if spec.positions == "learned":
        yield row("pos_embeddings.weight", "positions", "embed")
    for i in range(spec.num_layers):
        attention, feed_forward = f"layers.{i}.attention", f"layers.{i}.feed_forward"
        yield from norm(f"{attention}_norm")
        yield from linear(f"{attention}.wq", "heads", "embed", spec.qkv_bias)
        yield from linear(f"{attention}.wk", "kv_heads", "embed", spec.qkv_bias)
        yield from linear(f"{attention}.wv", "kv_heads", "embed", spec.qkv_bias)
        yield from linear(f"{attention}.wo", "embed", "heads", spec.output_bias, residual_std)
        if spec.qk_norm:
            yield from norm(f"{attention}.q_norm", "head_dim")
            yield from norm(f"{attention}.k_norm", "head_dim")
        yield from norm(f"{feed_forward}_norm")
        if spec.is_moe(i):
            yield row(f"{feed_forward}.router.weight", "experts", "embed")
            yield row(f"{feed_forward}.experts.w1.weight", "experts", "expert_ffn", "embed")
            yield row(f"{feed_forward}.experts.w2.weight", "experts", "embed", "expert_ffn", std=residual_std)
            yield row(f"{feed_forward}.experts.w3.weight", "experts", "expert_ffn", "embed")
            continue
        yield from linear(f"{feed_forward}.w1", "ffn", "embed", spec.ffn_bias)
        yield from linear(f"{feed_forward}.w2", "embed", "ffn", spec.ffn_bias, residual_std)
        if spec.activation == "swiglu":
            yield from linear(f"{feed_forward}.w3", "ffn", "embed", spec.ffn_bias)
    yield from norm("norm")
    if not spec.tied_embeddings:
        yield row("output.weight", "vocab", "embed")
