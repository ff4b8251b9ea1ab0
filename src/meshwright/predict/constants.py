"""Fitted constants, which no datasheet gives, fitted once over all published runs."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Global constants of the time model; none belongs to one source, model or cluster.

    The defaults are priors from kernels' own benchmarks and documentation; the fit is regularised towards them. They
    were set before any run was looked at, except `fp8_casts`, `bias` and `relay`: held-out runs had shown their first
    values to be wrong, and the kernels' documentation was read again.
    """

    matmul: float = 0.88
    """Rate of large products in training, relative to the best shape of the best benchmark."""
    matmul_memory: float = 0.6
    """Share of a product's memory traffic that its arithmetic does not hide."""
    fp8_casts: float = 4.0
    """Traffic of quantization per element of a product's operands: 2 bytes read, 1 written in either orientation."""
    memory: float = 0.8
    """Achieved fraction of the memory bandwidth."""
    flash: float = 0.5
    """Rate of flash attention on Ampere, as a fraction of the achievable matrix rate."""
    flash_hopper: float = 0.33
    """Rate of the same kernel on Hopper and later, which it uses poorly."""
    hopper: float = 0.6
    """Kernels written for Hopper."""
    bias: float = 0.75
    """Fraction of a flash kernel's rate with an additive bias: nearly all of it where the kernel adds the bias
    itself."""
    unfused: float = 0.5
    """Batched products over scores that are written to memory."""
    attention_backward: float = 2.5
    """Operations of attention's backward pass, in forward passes."""
    score_bytes: float = 11.0
    """Traffic per score in the forward pass, unfused: written, scaled, masked, normalised, dropped, read."""
    elementwise: float = 1.0
    """Traffic of norms, residuals and activation functions, relative to one read and write an operator."""
    fused_elementwise: float = 0.55
    """`elementwise` of fused kernels."""
    logit_bytes: float = 24.0
    """Traffic per logit of head and loss, forward and backward."""
    optimizer_bytes: float = 40.0
    """Traffic per parameter of clipping and an AdamW step."""
    host_us: float = 9.0
    """Host time per operator, eager."""
    block_operators: float = 45.0
    """Operators of a block's forward pass; its backward pass issues twice as many."""
    collective_operators: float = 2.0
    """Host cost of a tensor-parallel collective in operators: the call, the wait, and copies around it."""
    step_ms: float = 8.0
    """Fixed cost of a step: data, logging, the optimizer's launches."""
    link: float = 0.75
    """Achieved fraction of the fast link's rate."""
    network: float = 0.75
    """Achieved fraction of the network's rate."""
    link_us: float = 25.0
    """Latency of a collective inside a node."""
    network_us: float = 60.0
    """Latency that each doubling of the nodes adds."""
    message_us: float = 60.0
    """Time of a message between stages besides its bytes and the network's latency: the host's calls."""
    overlap: float = 0.8
    """Fraction of the computation that can overlap a collective."""
    contention: float = 0.15
    """Slow-down of computation while a collective runs, as a fraction of the collective's time."""
    tensor_hidden: float = 0.5
    """Fraction of tensor-parallel collectives hidden by programs that split them."""
    offload_gb_s: float = 12.0
    """Host link and host optimizer together, per device, 10**9 bytes per second."""
    all_to_all: float = 0.85
    """Rate of an all-to-all, relative to a ring's (Galvatron's profile of a node, 1 GiB on 8 GPUs)."""
    relay: float = 1.15
    """Rate of an all-to-all with a relay: 43 to 58 GB/s over ports of 50 (DeepEP's own benchmarks)."""
    imbalance: float = 1.1
    """Load of the busiest expert rank over the mean."""
    expert_matmul: float = 0.75
    """Rate of grouped products, relative to one large product of as many tokens."""
    expert_memory: float = 1.0
    """Part of a grouped product's memory traffic that its arithmetic does not hide, beyond a large product's part."""
    route_bytes: float = 24.0
    """Traffic per routed token and hidden unit of permuting, weighting and summing, forward pass."""


FITTED = Constants(
    matmul=0.891,
    matmul_memory=0.861,
    fp8_casts=3.94,
    memory=0.765,
    flash=0.528,
    flash_hopper=0.305,
    hopper=0.602,
    bias=0.808,
    unfused=0.519,
    attention_backward=2.52,
    score_bytes=10.6,
    elementwise=1.31,
    fused_elementwise=0.487,
    logit_bytes=27.4,
    optimizer_bytes=38,
    host_us=7.43,
    block_operators=52.8,
    collective_operators=1.61,
    step_ms=6.32,
    link=0.746,
    network=0.743,
    link_us=30.1,
    network_us=60.8,
    message_us=60.2,
    overlap=0.785,
    contention=0.179,
    tensor_hidden=0.828,
    offload_gb_s=11.6,
    all_to_all=0.85,
    relay=0.966,
    imbalance=1.17,
    expert_matmul=0.712,
    expert_memory=1.94,
    route_bytes=24.6,
)
"""By `benchmarks/fit_planner.py`."""
