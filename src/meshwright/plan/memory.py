"""The one place that predicts what a rank holds in memory at the peak of a step, by kind, in bytes.

State follows the ZeRO paper (Rajbhandari et al., 2020, section 3), tensor by tensor; activations follow Korthikanti et
al. ("Reducing Activation Recomputation in Large Transformer Models", 2022, section 4), itemised so that flash
attention, gated feed-forward layers, experts and each recomputation policy are sums of the same items. How many
microbatches a pipeline stage holds follows from its schedule.
"""

from dataclasses import dataclass
from math import ceil

from meshwright.plan.blueprint import Block
from meshwright.plan.job import Job
from meshwright.plan.pipeline import most_in_flight
from meshwright.spec.schedule import is_asynchronous

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "fragmentation", "context")


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank at the peak of a step."""

    weights: float
    """Weights that the model computes with, gathered copies included."""
    gradients: float
    optimizer: float
    """Master weights and the optimizer's moments."""
    activations: float
    logits: float
    communication: float
    """Buckets and gathered layers in flight."""
    fragmentation: float
    context: float
    host: float = 0.0
    """State that offloading keeps in host memory; not part of the device's total."""
    stage: int = 0
    """The pipeline stage that needs most."""

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer: what the ZeRO paper counts."""
        return self.weights + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """What the allocator has given out."""
        return self.states + self.activations + self.logits + self.communication

    @property
    def total(self) -> float:
        """What the device reports as used."""
        return self.allocated + self.fragmentation + self.context

    @property
    def least(self) -> float:
        """With an allocator under pressure, which gives back what it holds in reserve."""
        return self.allocated + self.context

    def kinds(self) -> dict[str, float]:
        """Bytes by kind, in the order of `KINDS`."""
        return {kind: getattr(self, kind) for kind in KINDS}


def predict_memory(job: Job) -> MemoryUse:
    """The rank that needs most, over all pipeline stages."""
    stages = {0, 1, job.pp - 1} & set(range(job.pp))
    return max((stage_memory(job, stage) for stage in stages), key=lambda use: use.total)


def stage_memory(job: Job, stage: int) -> MemoryUse:
    """Peak bytes of a rank of pipeline stage `stage`."""
    model, stack = job.model, job.stack
    held, experts = held_parameters(job, stage)
    shards = job.shards
    apart = job.ep > 1 or not job.stack.splits_experts  # experts have other data-parallel ranks than the rest
    expert_shards = max(1, job.dp_shard * job.cp * job.tp // job.ep) if apart else shards

    def sharded(from_stage: int, bytes_each: float) -> float:
        if job.zero >= from_stage:
            return bytes_each * (held / shards + experts / expert_shards)
        return bytes_each * (held + experts)

    trainable = 1.0 if job.adapters is None else job.adapters / model.num_parameters
    if job.frozen:  # kept in the precision of computation; matrices of blocks perhaps in fewer bits
        saved = stack.weight_bytes - (job.frozen_bytes or stack.weight_bytes)
        packed = held - end_parameters(job, stage)
        weights = sharded(3, stack.weight_bytes) - saved * packed / (shards if job.zero >= 3 else 1)
    else:
        weights = 0.0 if job.zero >= 3 and stack.casts_when_gathering else sharded(3, stack.weight_bytes)
    optimizer = sharded(1, stack.state_bytes) * trainable
    gradients = sharded(2, stack.gradient_bytes) * trainable
    if is_asynchronous(job.schedule):  # the weights and the gradient of two batches
        weights, gradients = 2 * weights, 2 * gradients
    host = 0.0
    if job.offload != "none":
        host, optimizer = optimizer, 0.0
    if job.offload == "cpu":
        host, gradients = host + gradients, 0.0
    moments = (_at_loss(job, stage), _in_backward(job, stage)) if stack.chunked_loss else (_at_once(job, stage),)
    peak = max(moments, key=lambda moment: moment.total)
    return MemoryUse(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=peak.activations,
        logits=peak.logits,
        communication=peak.transit + (stack.bucket_bytes if job.dp > 1 and job.zero < 3 else 0.0),
        fragmentation=stack.fragmentation * peak.total,
        context=stack.context_bytes + job.communicators * stack.communicator_bytes,
        host=host,
        stage=stage,
    )


@dataclass(frozen=True)
class Moment:
    """Bytes of what comes and goes in a step, at one time of it."""

    activations: float
    logits: float
    transit: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.activations + self.logits + self.transit


def _at_once(job: Job, stage: int) -> Moment:
    """Programs that hold all logits: they live while the last block's backward pass begins."""
    logits = head_bytes(job) if stage == job.head_rank else 0.0
    return Moment(saved_activations(job, stage) + passing_activations(job, stage), logits, _gathered(job))


def _gathered(job: Job) -> float:
    """Two layers' weights, one used and one arriving, and a layer's gradient on its way out."""
    stack = job.stack
    if job.zero < 3 or job.shards == 1:
        return stack.weight_bytes * _largest_layer(job) if job.frozen_bytes else 0.0
    ends = job.model.embedding * (1 if job.model.tied else 2) / job.tp
    layer = _largest_layer(job)
    return 2 * stack.weight_bytes * max(layer, ends / 2) + (stack.weight_bytes + stack.reduce_bytes) * layer


def _largest_layer(job: Job) -> float:
    """Parameters of a tensor-parallel rank's largest block."""
    model = job.model
    return max(block.on_rank(job.tp, model.num_kv_heads) + block.experts / job.ep for block in model.kinds)


def _at_loss(job: Job, stage: int) -> Moment:
    """All activations are saved, nothing is gathered but what embeds and the head."""
    if stage != job.head_rank:
        return Moment(0.0, 0.0, 0.0)
    gathered = job.stack.weight_bytes * end_parameters(job, stage) if job.zero >= 3 else 0.0
    return Moment(saved_activations(job, stage), head_bytes(job), gathered)


def _in_backward(job: Job, stage: int) -> Moment:
    """The last block's backward pass: its temporaries, weights gathered, gradients on their way."""
    stack, layer, ends = job.stack, _largest_layer(job), end_parameters(job, stage)
    transit = stack.weight_bytes * layer if job.frozen_bytes else 0.0
    if job.zero >= 3:
        transit += stack.weight_bytes * (ends + 2 * layer)
    if job.zero >= 2 and not job.frozen:  # the head's gradient waits for the embedding's
        transit += stack.weight_bytes * ends + (stack.weight_bytes + stack.reduce_bytes) * layer
    elif job.dp * job.cp > 1 and not job.frozen:
        transit += stack.reduce_bytes * layer
    return Moment(saved_activations(job, stage) + passing_activations(job, stage), 0.0, transit)


def held_parameters(job: Job, stage: int) -> tuple[float, float]:
    """(dense, expert) parameters of one rank of a stage; a tied head counts again where it has a stage of its own."""
    model = job.model
    dense = experts = 0.0
    for kind, count in job.stage_kinds[stage]:
        block = model.kinds[kind]
        dense += count * block.on_rank(job.tp, model.num_kv_heads)
        experts += count * block.experts / _expert_split(job)
    return dense + end_parameters(job, stage), experts


def _expert_split(job: Job) -> int:
    """Ranks among which the experts are divided before ZeRO divides what is left."""
    return job.ep if job.ep > 1 or not job.stack.splits_experts else job.tp


def end_parameters(job: Job, stage: int) -> float:
    """Parameters of embeddings, last norm and head on one rank of a stage."""
    model, first, head = job.model, stage == 0, stage == job.head_rank
    tables = first + (head and not (model.tied and first))
    return first * model.positions * model.hidden + head * model.final + tables * model.embedding / job.tp


def saved_activations(job: Job, stage: int) -> float:
    """Bytes that backward passes wait for, over all microbatches in flight."""
    model, kinds = job.model, job.stage_kinds[stage]
    flying = microbatches_in_flight(job, stage)
    saved = sum(count * block_activations(job, model.kinds[kind]) for kind, count in kinds)
    total = flying * saved * (1 - job.offload_activations)
    if job.offload_activations:  # one chunk on its way to the host, one on its way back
        total += 2 * saved / job.virtual_stages
    if stage == 0:
        dropped = 1 if job.stack.dropout else 0
        total += flying * stream_tokens(job) * model.hidden * (job.width + dropped)
    return total


def passing_activations(job: Job, stage: int) -> float:
    """Bytes of one block's backward pass: what it computes again, and gradients of activations."""
    blocks = [job.model.kinds[kind] for kind, _ in job.stage_kinds[stage]]
    if not blocks:
        return 0.0
    again = max(block_activations(job, block, recompute="none") for block in blocks) if job.recompute == "full" else 0.0
    return again + max(backward_bytes(job, block) for block in blocks)


def microbatches_in_flight(job: Job, stage: int) -> float:
    """Microbatches whose activations a rank of a stage holds at its peak, in whole passes through the rank."""
    if job.pp == 1:
        return 1
    return most_in_flight(job.schedule_name, job.pp, stage, job.microbatches, job.virtual_stages)


def stream_tokens(job: Job) -> float:
    """Tokens of the residual stream that one rank keeps."""
    return job.tokens / (job.tp if job.sequence_parallel else 1)


def block_activations(job: Job, block: Block, recompute: str | None = None) -> float:
    """Bytes that one block keeps of one microbatch for its backward pass, by recomputation policy."""
    policy = job.recompute if recompute is None else recompute
    stream, tokens, width, hidden = stream_tokens(job), job.tokens / job.tp, job.width, job.model.hidden
    everything = _saved_everything(job, block, stream, tokens)
    if policy == "none":
        return everything
    if policy == "full":
        kept = stream * hidden * width
        return job.recompute_share * kept + (1 - job.recompute_share) * everything
    if job.stack.attention == "unfused":  # selective as Korthikanti et al. mean it: all but the scores
        return everything - _score_bytes(job, tokens)
    return _saved_selectively(job, block, stream, tokens)


def _saved_everything(job: Job, block: Block, stream: float, tokens: float) -> float:
    """Norms' inputs and outputs, attention's operands and result, the feed-forward layer's steps."""
    model, width = job.model, job.width
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    masks = 2 if job.stack.dropout else 0
    saved = stream * model.hidden * (4 * width + masks)
    saved += tokens * (width * (2 * heads + 2 * kv_heads) + 4 * model.num_heads)
    if job.stack.attention == "unfused":
        saved += _score_bytes(job, tokens)
    for inner, per_token, routed in _inner_widths(job, block):
        saved += tokens * width * per_token * inner * _inner_steps(job)
        if routed:
            saved += tokens * width * per_token * 2 * model.hidden
    return saved


def _saved_selectively(job: Job, block: Block, stream: float, tokens: float) -> float:
    """The block's input, and the results of matrix products and attention."""
    model, width = job.model, job.width
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if not job.stack.saves_products:  # norms and activation functions are computed again, all else is kept
        saved = stream * model.hidden * 2 * width + tokens * width * (2 * heads + 2 * kv_heads)
        return saved + sum(
            tokens * width * per_token * inner * (2 if model.gated else 1)
            for inner, per_token, _ in _inner_widths(job, block)
        )
    saved = stream * model.hidden * 3 * width + tokens * (width * (2 * heads + 2 * kv_heads) + 4 * model.num_heads)
    for inner, per_token, routed in _inner_widths(job, block):
        saved += tokens * width * per_token * (inner * (2 if model.gated else 1) + (2 * model.hidden if routed else 0))
    return saved


def _score_bytes(job: Job, tokens: float) -> float:
    """Softmax, its dropout mask and result: 5 bytes per score."""
    span = min(job.sequence, job.model.window or job.sequence)
    return 5 * tokens * span * job.model.num_heads


def _inner_widths(job: Job, block: Block) -> list[tuple[int, float, bool]]:
    """(width, visits per token, whether routed) of every feed-forward layer of a block, shared experts included."""
    found = []
    for matrix in block.matrices:
        if matrix.out == job.model.hidden and not matrix.name.startswith("attention"):
            found.append((matrix.into, job.model.top_k if matrix.experts else 1, bool(matrix.experts)))
    return found


def _inner_steps(job: Job) -> int:
    """Tensors of the feed-forward layer's width that are kept."""
    if not job.model.gated:
        return 2  # before and after the activation function
    return 3 if job.stack.fused else 4  # both projections, the product, and the activated gate where it is eager


def backward_bytes(job: Job, block: Block) -> float:
    """Gradients of activations that live while one block's backward pass runs."""
    widest = max((inner * per_token for inner, per_token, _ in _inner_widths(job, block)), default=0)
    return job.width * (job.tokens / job.tp * 2 * widest + 2 * stream_tokens(job) * job.model.hidden)


def head_bytes(job: Job) -> float:
    """What the loss holds at its peak: logits and their gradient, and the last norm's tensors."""
    model = job.model
    vocab = model.vocab / job.tp
    norm = stream_tokens(job) * model.hidden * 2 * job.width
    if not job.stack.chunked_loss:
        return norm + job.tokens * vocab * job.stack.logit_bytes
    return _chunked_head_bytes(job, ceil(vocab))


def _chunked_head_bytes(job: Job, vocab: int) -> float:
    """Chunks of logits, the head's gradient in fp32, and of the larger: rows widened for the softmax, or rows of the
    product that is added to the gradient (`models/loss.py`). `vocab` rows of the head are here."""
    hidden, width, stack, tokens = job.model.hidden, job.width, job.stack, ceil(job.tokens)
    stride = ceil(vocab / 64) * 64
    most = max(1, int(stack.chunk_bytes // (stride * width)))
    chunk = ceil(tokens / ceil(tokens / most))
    widened = 4 * vocab * min(chunk, max(1, stack.wide_bytes // (4 * vocab)))
    product = min(vocab, max(1, stack.wide_bytes // (4 * hidden))) * hidden * (width + (4 if width < 4 else 0))
    states = width * hidden * (3 * tokens + chunk)  # normed, gathered, their gradient; a chunk of them
    return chunk * stride * width + 4 * vocab * hidden + max(widened, product) + states
