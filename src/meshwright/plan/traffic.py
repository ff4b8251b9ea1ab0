"""The one place that says what a rank exchanges in a step, in bytes, by kind of collective and axis of the mesh.

A gather counts what it makes, a scatter what it is given, an all-reduce what is reduced, a message what goes out, as
`parallel/traffic.py` counts them; in a ring of n ranks (n - 1) / n of a gather or scatter is on a rank's wire, twice
that of an all-reduce. Dense models without pipeline stages; a test holds every formula to what is counted, to the byte.

Letters: M microbatches of a rank, of b sequences of T tokens; L layers of width D; G key and value heads of width K.
"""

from collections import Counter
from math import prod

from meshwright.families import parameter_table
from meshwright.families.split import shard_dim, split_dim
from meshwright.spec.fit import context_method
from meshwright.spec.run import ResolvedRun

WIDTH = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

Traffic = Counter[tuple[str, str]]
"""Bytes by (kind, axis): `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `send` and `receive` over
`shard`, `replicate`, `cp`, `tp` or `world`."""


def predict_traffic(resolved: ResolvedRun) -> Traffic:
    """Bytes of the first rank's step, the norm that clipping needs not included; where tensor-parallel ranks do not
    divide the vocabulary, the last ones have less.

    Raises `ValueError` where the formulas do not cover the run: experts, pipeline stages.
    """
    layout = resolved.run.layout
    if resolved.model.num_experts or layout.pp > 1:
        raise ValueError("traffic is predicted for dense models without pipeline stages")
    parts = (_weights(resolved), _tensor(resolved), _context(resolved))
    total = sum(parts, Traffic())
    if layout.world_size > 1:
        total["all-reduce", "world"] += 2 * 8  # the trained tokens, int64, and the loss, fp64
    return Traffic({key: count for key, count in total.items() if count})


def _weights(resolved: ResolvedRun) -> Traffic:
    """FSDP2: weights gathered and gradients reduced over `shard`, then over `replicate`."""
    layout, training, rounds = resolved.run.layout, resolved.run.training, resolved.accumulation
    stage, shards, traffic = layout.zero_stage, layout.shard, Traffic()
    numbers = _stored_by_all(resolved)
    weights, gradients = numbers * WIDTH[training.precision], numbers * _reduced_width(resolved)
    if shards > 1:
        traffic["all-gather", "shard"] = weights * (2 * rounds if stage == 3 else 1)
        traffic["reduce-scatter", "shard"] = gradients * (1 if stage == 1 else rounds)
    if layout.replicate > 1:
        traffic["all-reduce", "replicate"] = gradients // shards
    return traffic


def _stored_by_all(resolved: ResolvedRun) -> int:
    """Numbers of a tensor-parallel rank's parameters, each padded to a multiple of the ranks that share it."""
    layout, model = resolved.run.layout, resolved.model
    numbers = 0
    for row in parameter_table(model):
        shape = list(row.shape)
        split = split_dim(row, model, layout.tp)
        for dim, ranks in ((split, layout.tp), (shard_dim(row, model, layout.tp), layout.shard)):
            if dim is not None:
                shape[dim] = -(-shape[dim] // ranks)
        numbers += prod(shape) * layout.shard
    return numbers


def _reduced_width(resolved: ResolvedRun) -> int:
    training = resolved.run.training
    return WIDTH[training.precision if training.precision in ("fp64", "fp32") else training.reduce_dtype]


def _tensor(resolved: ResolvedRun) -> Traffic:
    """Before each half of a block the sequence is gathered, behind it scattered, and once for embedding and head; the
    backward pass turns each round."""
    layout, training, model, rounds = resolved.run.layout, resolved.run.training, resolved.model, resolved.accumulation
    if layout.tp == 1:
        return Traffic()
    tokens = resolved.micro_batch * resolved.run.data.sequence_length // layout.cp
    stream = tokens * model.hidden * WIDTH[training.precision]
    # Recomputing a block stops before its last result, so its last scatter is not repeated; selective recomputation
    # keeps what scatters have added up.
    ends, halves = 2 * (2 * model.num_layers + 1), 2 * model.num_layers
    gathers = ends + (halves if training.recompute != "none" else 0)
    scatters = ends + (halves // 2 if training.recompute == "full" else 0)
    whole = sum(row.numel for row in parameter_table(model) if split_dim(row, model, layout.tp) is None)
    wide = max(4, WIDTH[training.precision])
    # As often as data parallelism reduces gradients: once, when they have been added up, or after every microbatch.
    summed = _reduced_width(resolved) * (rounds if layout.zero_stage >= 2 else 1)
    return Traffic(
        {
            ("all-gather", "tp"): rounds * gathers * stream,
            ("reduce-scatter", "tp"): rounds * scatters * stream,
            # Of every token the largest logit, the sum of exponentials and the label's logit; and the gradients of
            # parameters that all ranks keep.
            ("all-reduce", "tp"): rounds * tokens * 3 * wide + whole * summed,
        }
    )


def _context(resolved: ResolvedRun) -> Traffic:
    """What attention exchanges in every layer; recomputation exchanges what the forward pass did once more."""
    layout, training, model = resolved.run.layout, resolved.run.training, resolved.model
    if layout.cp == 1:
        return Traffic()
    width, wide = WIDTH[training.precision], max(4, WIDTH[training.precision])
    forward = 2 if training.recompute != "none" else 1
    tokens = resolved.micro_batch * resolved.run.data.sequence_length  # of all cp ranks
    heads, kv_heads = model.num_heads // layout.tp, max(1, model.num_kv_heads // layout.tp)
    pairs = tokens * 2 * kv_heads * model.head_dim  # numbers of all keys and values
    times = resolved.accumulation * model.num_layers
    method, _ = context_method(layout, model, resolved.run.data.sequence_length)
    traffic = Traffic()
    if method == "ulysses":
        copies = next(n for n in range(1, heads + 1) if heads // kv_heads % n == 0 and kv_heads * n % layout.cp == 0)
        exchanged = tokens // layout.cp * 2 * (heads + kv_heads * copies) * model.head_dim
        traffic["all-to-all", "cp"] = times * (forward + 1) * exchanged * width
    elif method == "all_gather":
        traffic["all-gather", "cp"] = times * (forward + 1) * pairs * width
        traffic["reduce-scatter", "cp"] = times * pairs * wide
    else:
        hops = (layout.cp - 1) * (forward + 1) * width + layout.cp * wide
        traffic["send", "cp"] = traffic["receive", "cp"] = times * hops * pairs // layout.cp
    return traffic
