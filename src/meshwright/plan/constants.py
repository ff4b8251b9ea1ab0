"""The one place for the numbers that no datasheet gives: fitted once, over all published runs together."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Global constants of the time model; none belongs to one source, model or cluster."""

    matmul: float = 0.86
    """Large products in training, relative to the best shape of the best benchmark."""
    matmul_memory: float = 0.492
    """Share of a product's memory traffic that its arithmetic does not hide."""
    small_fp8: float = 1.02
    """fp8 products in training, relative to the same."""
    fp8_casts: float = 5.27
    """Bytes of quantization per element of a product's operands."""
    memory: float = 0.766
    """Achieved part of the memory bandwidth."""
    flash: float = 0.624
    """Flash attention on Ampere, part of the achievable matrix rate."""
    flash_hopper: float = 0.345
    """The same kernel on Hopper and later, which it does not use well."""
    hopper: float = 0.584
    """Kernels written for Hopper."""
    bias: float = 0.681
    """What an additive bias leaves of a flash kernel's rate."""
    unfused: float = 0.522
    """Batched products over scores that are written to memory."""
    attention_backward: float = 2.46
    """Operations of attention's backward pass, in forward passes."""
    score_bytes: float = 10.0
    """Traffic per score in the forward pass, unfused: written, scaled, masked, normalised, dropped, read."""
    elementwise: float = 1.29
    """Traffic of norms, residuals and activation functions, relative to one read and write an operator."""
    fused_elementwise: float = 0.55
    """The same in fused kernels."""
    logit_bytes: float = 26.0
    """Traffic per logit of head and loss, forward and backward."""
    optimizer_bytes: float = 38.3
    """Traffic per parameter of clipping and an AdamW step."""
    host_us: float = 9.25
    """Host time per operator, eager."""
    block_operators: float = 38.2
    """Operators of a block's forward pass; its backward pass issues twice as many."""
    step_ms: float = 7.66
    """What a step costs apart from its parts: data, logging, the optimizer's launches."""
    link: float = 0.913
    """Achieved part of the fast link's rate."""
    network: float = 0.711
    """Achieved part of the network's rate."""
    link_us: float = 24.3
    """Latency of a collective inside a node."""
    network_us: float = 60.0
    """Latency that each doubling of the nodes adds."""
    overlap: float = 0.717
    """Part of the computation behind which a collective can hide."""
    contention: float = 0.175
    """Slow-down of computation while a collective runs, as a part of the collective's time."""
    tensor_hidden: float = 0.702
    """Part of tensor-parallel collectives that a program which cuts them up hides."""
    offload_gb_s: float = 12.0
    """Host link and host optimizer together, per device, 10**9 bytes per second."""
    all_to_all: float = 0.612
    """Rate of an all-to-all, relative to a ring's."""
    imbalance: float = 1.18
    """Busiest expert rank over the mean."""
    expert_matmul: float = 0.601
    """Grouped products, relative to one large product of as many tokens."""
    route_bytes: float = 23.4
    """Traffic per routed token and hidden unit of permuting, weighing and summing, forward pass."""


FITTED = Constants()
