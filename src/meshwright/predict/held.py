"""Parameters that one rank of a pipeline stage computes with."""

from meshwright.predict.blueprint import LayerParameters
from meshwright.predict.job import Job


def held_parameters(job: Job, stage: int) -> tuple[float, float]:
    """(dense, expert) parameters of one rank of a stage; a tied head counts again if it has a stage of its own."""
    model, dense, experts = job.model, 0.0, 0.0
    # Ranks that divide the experts before ZeRO divides the rest.
    split = job.layout.ep if job.layout.ep > 1 or not job.stack.splits_experts else job.layout.tp
    for kind, count in job.stage_kinds[stage]:
        block = model.kinds[kind]
        dense += count * block.on_rank(job.layout.tp, model.num_kv_heads)
        experts += count * block.experts / split
    return dense + end_parameters(job, stage), experts


def vectors(job: Job, stage: int) -> float:
    """Parameters of norms and biases of a stage, which every rank holds."""
    blocks = sum(count * job.model.kinds[kind].vectors for kind, count in job.stage_kinds[stage])
    return blocks + (job.model.final if stage == job.head_rank else 0)


def expert_shards(job: Job) -> int:
    """Ranks over which ZeRO splits a rank's experts."""
    if job.layout.ep == 1 and job.stack.splits_experts:
        return job.shards
    return max(1, job.layout.dp_shard * job.layout.cp * job.layout.tp // job.layout.ep)


def end_parameters(job: Job, stage: int) -> float:
    """Parameters of embeddings, last norm and head on one rank of a stage."""
    model, first, head = job.model, stage == 0, stage == job.head_rank
    tables = first + (head and not (model.tied and first))
    return first * model.positions * model.hidden + head * model.final + tables * model.embedding / job.layout.tp


def block_parameters(job: Job, block: LayerParameters) -> float:
    """Parameters of one block on one rank, with all experts that the rank computes."""
    return block.on_rank(job.layout.tp, job.model.num_kv_heads) + block.experts / job.layout.ep


def first_weights(job: Job, block: LayerParameters) -> float:
    """Parameters of one block on one rank whose gradients exist while most activations are still held: all experts, or
    the feed-forward layer's last matrix."""
    last = (m.numel for m in block.matrices if m.out == job.model.hidden and not m.name.startswith("attention"))
    return block.experts / job.layout.ep if block.experts else sum(last) / job.layout.tp
