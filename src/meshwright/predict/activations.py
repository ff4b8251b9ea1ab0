"""Activation memory in bytes: tensors saved for backward passes, and tensors that live while one runs.

After Korthikanti et al. ("Reducing Activation Recomputation in Large Transformer Models", 2022, section 4), itemised so
that flash attention, gated feed-forward layers, experts and each recomputation policy are sums of the same items.
"""

import functools
from collections.abc import Callable, Sequence
from math import inf
from typing import assert_never

from meshwright.predict.blueprint import LayerParameters
from meshwright.predict.delta import products_of_delta, saved_by_delta
from meshwright.predict.job import Groups, Job, Kinds, adapted
from meshwright.predict.pipeline import most_in_flight
from meshwright.spec.precision import FP32
from meshwright.spec.recompute import Policy


def pass_activations(job: Job, stages: Sequence[Groups]) -> float:
    """Saved activations of one microbatch in all blocks of a rank's stages."""
    return sum([group_activations(job, policy, kinds) for groups in stages for policy, kinds in groups])


def group_activations(job: Job, policy: Policy, kinds: Kinds) -> float:
    """Saved activations of one microbatch in some blocks."""
    return sum([count * block_activations(job, job.model.kinds[kind], policy) for kind, count in kinds])


def saved_activations(job: Job, stage: int, one_pass: float, *, at_loss: bool = False) -> float:
    """A stage's saved activations over all microbatches in flight, at the peak or when losses are computed; `one_pass`
    is from `pass_activations`."""
    flying = microbatches_in_flight(job, stage, at_loss=at_loss)
    total = flying * one_pass * (1 - job.offload_activations)
    if job.layout.tiers.activations == "host":  # a block's own, and those of the block before on their way back
        total = 0.0 if at_loss else 2 * one_pass / max(1, job.stage_layers[stage])
    elif job.offload_activations:  # one chunk on its way to the host, one on its way back
        total += 2 * one_pass / job.layout.virtual_stages
    if job.stack.dropout and stage == 0:
        total += flying * job.stream_tokens * job.model.hidden
    # The first block counts its input as its own; the output of the last one is kept as well.
    return total + flying * job.stream_bytes * job.layout.virtual_stages


def microbatches_in_flight(job: Job, stage: int, *, at_loss: bool = False) -> float:
    """Microbatches whose activations a rank of a stage holds at its peak, or when it computes losses, in whole passes
    through the rank."""
    if job.layout.pp == 1:
        return 1
    return most_in_flight(
        job.layout.schedule, stage, job.microbatches, job.layout.virtual_stages, job.cut, at_loss=at_loss
    )


def _once(figure: Callable[[Job, LayerParameters, Policy], float]) -> Callable[[Job, LayerParameters, Policy], float]:
    """Cache a job's figure of a block: all pipeline ranks ask for the same ones."""

    @functools.wraps(figure)
    def remembered(job: Job, block: LayerParameters, policy: Policy) -> float:
        key = figure, id(block), policy
        size = job.of_blocks.get(key)
        if size is None:
            size = job.of_blocks[key] = figure(job, block, policy)
        return size

    return remembered


@_once
def block_activations(job: Job, block: LayerParameters, policy: Policy) -> float:
    """Bytes that one block saves of one microbatch for its backward pass, by recomputation policy."""
    match policy:
        case "none":
            return _saved_everything(job, block) + _beside(job, block, policy)
        case "full":
            share = job.recompute_share
            kept = share * job.stream_bytes + (0.0 if share == 1 else (1 - share) * _saved_everything(job, block))
            return kept + _beside(job, block, policy)
        case "selective":
            if job.stack.attention == "unfused":  # as Korthikanti et al. mean it: all but the scores
                return _saved_everything(job, block) - _score_bytes(job, block)
            return _saved_selectively(job, block) + _beside(job, block, policy)
        case _:
            assert_never(policy)


def passing_activations(job: Job, stages: Sequence[Groups]) -> tuple[float, float]:
    """Recomputed activations and activation gradients, in the last block's backward pass and in any before it; less the
    memory that later blocks of its stage have freed by then."""
    last, before = 0.0, -inf
    for groups in stages:
        freed = 0.0
        for policy, kinds in reversed(groups):
            blocks = [job.model.kinds[kind] for kind, _ in kinds]
            passing = max([_passing(job, block, policy) for block in blocks])
            if not freed:
                last = max(last, passing)
            if freed or len(groups) == 1 or sum([count for _, count in kinds]) > 1:
                gone = freed or max([block_activations(job, block, policy) for block in blocks])
                before = max(before, passing - gone)
            if len(groups) > 1:
                freed += group_activations(job, policy, kinds)
    return last, before


@_once
def _passing(job: Job, block: LayerParameters, policy: Policy) -> float:
    """Activations that one block recomputes before its backward pass, besides its saved ones, and gradients of
    activations while the feed-forward layer's backward pass runs: of the stream, and of the layer's inner tensors
    beyond those that it frees meanwhile."""
    inner, again = inner_bytes(job, block), 0.0
    if policy != "none":
        again = block_activations(job, block, "none") - block_activations(job, block, policy)
    if not job.stack.chunked_loss:  # other programs' fused operators free what they read only when they have ended
        return again + (2 * inner + 2 * job.stream_bytes)
    return again + (
        job.stream_bytes + (max(2 * inner, inner + _whole(job)) if job.model.gated else inner + _whole(job))
    )


def inner_bytes(job: Job, block: LayerParameters) -> float:
    """Bytes of a tensor as wide as the widest feed-forward layer of a block."""
    widest = max((inner * per_token for inner, per_token, _ in _inner_widths(job, block)), default=0)
    return job.tokens / job.layout.tp * widest * job.width


def _saved_everything(job: Job, block: LayerParameters) -> float:
    """Norms' inputs and outputs, attention's operands and result, the feed-forward layer's steps."""
    width, tokens = job.width, job.tokens / job.layout.tp
    saved = 2 * job.stream_bytes * _norm_copies(job) + _normed(job)
    if job.stack.dropout:
        saved += 2 * job.stream_tokens * job.model.hidden
    saved += tokens * _mixed(job, block)
    if job.stack.attention == "unfused":
        saved += _score_bytes(job, block)
    for inner, per_token, routed in _inner_widths(job, block):
        saved += tokens * per_token * inner * (width * _inner_steps(job) - _less_in_codes(job, "inner", "all"))
        if routed:
            saved += tokens * per_token * (2 * width - _less_in_codes(job, "all")) * job.model.hidden
    return saved - _normed_in_codes(job, block)


def _less_in_codes(job: Job, *kinds: str) -> int:
    """Bytes of a number that are saved where a layer in fp8 keeps codes of its input: none where it is frozen."""
    return job.width - 1 if job.stack.coded_inputs in kinds and not job.frozen else 0


def _normed_in_codes(job: Job, block: LayerParameters) -> float:
    """Bytes saved of the norms' outputs in codes; a router reads the number that experts' rows are copied from."""
    dense = 2 - any(routed for *_, routed in _inner_widths(job, block))
    return dense * _normed(job) / 2 * _less_in_codes(job, "all") / job.width


def _saved_selectively(job: Job, block: LayerParameters) -> float:
    """The block's input, and the results of matrix products and attention."""
    model, width, tokens = job.model, job.width, job.tokens / job.layout.tp
    if not job.stack.saves_products:  # norms and activation functions are computed again, all else is kept
        saved = 2 * job.stream_bytes + tokens * width * (2 * model.num_heads + 2 * kv_heads(job)) * model.head_dim
        return saved + sum(
            tokens * width * per_token * inner * (2 if model.gated else 1)
            for inner, per_token, _ in _inner_widths(job, block)
        )
    # Also the whole result of a row-wise product, before the sum over ranks is scattered.
    saved = 3 * job.stream_bytes + (2 * _whole(job) if job.stack.keeps_gathered else 0.0)
    saved += tokens * _mixed_selectively(job, block)
    for inner, per_token, routed in _inner_widths(job, block):
        saved += tokens * width * per_token * (inner * (2 if model.gated else 1) + (2 * model.hidden if routed else 0))
    wider = FP32.bytes - width if job.stack.emulated else 0.0  # results of emulated products
    return saved + max(0.0, wider) * _product_results(job, block)


def _product_results(job: Job, block: LayerParameters) -> float:
    """Numbers that the matrix products of a block return."""
    model, tokens = job.model, job.tokens / job.layout.tp
    summed = (_whole(job) or job.stream_bytes) / job.width  # before the sum over tensor-parallel ranks is scattered
    results = summed + tokens * (model.num_heads + 2 * kv_heads(job)) * model.head_dim
    for inner, per_token, routed in _inner_widths(job, block):
        results += tokens * per_token * inner * (2 if model.gated else 1)
        results += tokens * per_token * model.hidden if routed else summed
    return results


def _beside(job: Job, block: LayerParameters, policy: Policy) -> float:
    """Bytes of adapters' tensors: a single process's cast of A, at least until the forward pass ends; A x, if products
    are saved; scaled B and the dropped-out x with its mask, if everything is saved."""
    if not job.adapter_rank:
        return 0.0
    matrices, rank = adapted(block, job.adapter_rank, job.stack.adapts), job.adapter_rank
    inputs, outputs = (sum(getattr(matrix, side) for matrix in matrices) for side in ("into", "out"))
    saved = job.width * rank * inputs / job.layout.tp if job.alone else 0.0
    if policy != "full":
        saved += job.width * rank * job.tokens * len(matrices)
    if policy == "none":
        saved += job.width * rank * outputs / job.layout.tp
        saved += job.tokens * inputs * (job.width + 1) if job.adapter_dropout else 0.0
    return saved


def _normed(job: Job) -> float:
    """Bytes of both norms' outputs, which matrix products read; of all tensor-parallel ranks if they stay gathered."""
    return 2 * (_whole(job) if job.stack.keeps_gathered and job.layout.tp > 1 else job.stream_bytes)


def _whole(job: Job) -> float:
    """Bytes of the residual stream of all tensor-parallel ranks; 0 if they do not share it."""
    return job.tokens * job.model.hidden * job.width if job.layout.tp > 1 and job.sequence_parallel else 0.0


def kv_heads(job: Job) -> float:
    """Key heads of all tensor-parallel ranks together, copies included."""
    return max(job.model.num_kv_heads, job.layout.tp) if job.stack.keeps_gathered else job.model.num_kv_heads


def _queries_and_keys(job: Job) -> float:
    """Bytes of a token's queries and keys."""
    return job.width * (job.model.num_heads + kv_heads(job)) * job.model.head_dim


def _projected(job: Job, block: LayerParameters) -> float:
    """Bytes of a token's queries, keys and values, and of the inputs of the heads' norms."""
    return (
        _queries_and_keys(job) * (1 + block.head_norms * _norm_copies(job))
        + job.width * kv_heads(job) * job.model.head_dim
    )


def _norm_copies(job: Job) -> float:
    """Bytes of what a norm keeps of its input, by those of the input."""
    return max(job.width, FP32.bytes) / job.width if job.model.wide_norms else 1.0


def _mixed(job: Job, block: LayerParameters) -> float:
    """Bytes of a token between the block's first norm and the last product of attention, or what is in its place."""
    if block.delta is not None:
        return saved_by_delta(block.delta, job.sequence, job.width)
    gates = 2 * job.width * job.model.num_heads * job.model.head_dim if block.gated_heads else 0
    return _projected(job, block) + _attended(job) + gates


def _mixed_selectively(job: Job, block: LayerParameters) -> float:
    """The results of matrix products and of attention among them."""
    if block.delta is not None:
        return products_of_delta(block.delta, job.sequence, job.width)
    gates = job.width * job.model.num_heads * job.model.head_dim if block.gated_heads else 0
    values = job.width * kv_heads(job) * job.model.head_dim
    return _queries_and_keys(job) + values + _attended(job) + gates


def _attended(job: Job) -> float:
    """Bytes of a token's attention result and each head's logsumexp in fp32. Under context parallelism the result is
    copied before the next matrix product."""
    model, copies = job.model, 2 if job.layout.cp > 1 and job.stack.keeps_gathered else 1
    return job.width * copies * model.num_heads * model.head_dim + 4 * model.num_heads


def _score_bytes(job: Job, block: LayerParameters) -> float:
    """Softmax, its dropout mask and result: 5 bytes per score."""
    span = min(job.sequence, block.window or job.sequence)
    return 5 * job.tokens / job.layout.tp * span * job.model.num_heads


def _inner_widths(job: Job, block: LayerParameters) -> list[tuple[int, float, bool]]:
    """(width, visits per token, whether routed) of every feed-forward layer of a block, shared experts included."""
    model = job.model
    return [
        (matrix.into, model.top_k if matrix.experts else 1, bool(matrix.experts))
        for matrix in block.feed_forward
        if matrix.out == model.hidden and matrix.into > 1
    ]


def _inner_steps(job: Job) -> int:
    """Number of saved tensors of the feed-forward layer's width."""
    if not job.model.gated:
        return 2  # before and after the activation function
    return 3 if job.stack.fused else 4  # both projections, the product, and the activated gate if it is eager
