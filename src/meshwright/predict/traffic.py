"""Traffic of a rank in a step, in bytes, by kind of collective and mesh axis.

A gather counts its output, a scatter its input, an all-reduce the reduced tensor, a message or an all-to-all the bytes
sent, as in `parallel/traffic.py`; in a ring of n ranks (n - 1) / n of a gather or scatter is on a rank's wire, twice as
much for an all-reduce. A test compares every formula with the counted bytes, exactly.

Letters: M microbatches of a rank, of b sequences of T tokens; L layers of width D; G key and value heads of width K; E
experts, some per token.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import assert_never

from meshwright.families import finetuned_table, low_precision_layers, parameter_table
from meshwright.families.split import is_experts, kept_shape, rows_of_layers, split_dim
from meshwright.spec.actions import Transfer, with_transfers
from meshwright.spec.errors import UserError
from meshwright.spec.fit import context_method
from meshwright.spec.layers import AttentionSpec, GatedDeltaSpec
from meshwright.spec.model import Parameter
from meshwright.spec.precision import DTYPES
from meshwright.spec.quantized import sent_bytes
from meshwright.spec.run import ResolvedRun

ALTERNATING = ("dualpipev", ".csv")
"""Schedules in which passes of a rank's stages may alternate: FSDP2 then prefetches blocks that are not used."""

Traffic = Counter[tuple[str, str]]
"""Bytes by (kind, axis): `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `send` and `receive` over `shard`,
`replicate`, `cp`, `tp`, `pp`, `ep`, `expert shard`, `expert replicate` or `world`."""


def predict_traffic(resolved: ResolvedRun) -> Traffic:
    """Bytes of a step on the first rank, and on ranks that differ from it only in their data.

    Communication after the gradients is not included: the norm for clipping, the experts' loads. If tensor-parallel
    ranks do not divide the vocabulary, the last ones send less. Rows sent to experts all return; the bytes that a rank
    returns for others are the mean over ranks, which depends on routing.

    Raises `UserError` for runs that the formulas do not cover: maxima of scales in low precision (delayed, or over
    tensor-parallel ranks), and those of `traffic_without_maxima`.
    """
    recipe = resolved.run.training.product_recipe
    if recipe == "delayed" or (recipe is not None and resolved.run.layout.tp > 1):
        raise UserError(f"traffic is not predicted for {recipe} scales, whose maxima the ranks exchange")
    return traffic_without_maxima(resolved)


def traffic_without_maxima(resolved: ResolvedRun) -> Traffic:
    """`predict_traffic` without the maxima from which ranks compute scales in low precision.

    Raises `UserError` for steps that overlap (`pipedream-2bw`), ZeRO-3 under `dualpipev` and custom schedules, and
    under tensor parallelism fine-tuning of embeddings, norms, head or experts, and models of transformers; states of
    the gated delta rule that ranks pass on.
    """
    layout = resolved.run.layout
    if layout.asynchronous:
        raise UserError(f"traffic is not predicted for schedule {layout.schedule}, whose steps overlap")
    if resolved.model.foreign is not None and layout.tp * layout.pp * layout.cp > 1:
        raise UserError("traffic is not predicted for models that transformers computes under tp, pp or cp")
    if layout.cp > 1 and any(isinstance(layer.mixer, GatedDeltaSpec) for layer in resolved.model.layers):
        raise UserError("traffic is not predicted for the gated delta rule under context parallelism")
    rank = _Rank(resolved)
    if layout.zero_stage == 3 and layout.schedule.endswith(ALTERNATING):
        raise UserError(f"traffic is not predicted for ZeRO-3 under schedule {layout.schedule}")
    if rank.frozen and layout.tp > 1 and not rank.tunes_blocks_alone:
        raise UserError(
            "traffic is not predicted for fine-tuning of more than blocks' matrices under tensor parallelism"
        )
    parts = (_weights(rank), _tensor(rank), _context(rank), _experts(rank), _stages(rank))
    total = sum(parts, Traffic())
    if layout.world_size > 1:
        total["all-reduce", "world"] += 3 * 8  # the trained tokens and all, int64, and the loss, fp64
    return Traffic({key: count for key, count in total.items() if count})


class _Rank:
    """The first rank's part of the model."""

    def __init__(self, resolved: ResolvedRun) -> None:
        self.resolved, self.model, self.layout = resolved, resolved.model, resolved.run.layout
        self.training, self.rounds = resolved.run.training, resolved.accumulation
        dtypes = self.dtypes = self.training.dtypes
        self.width, self.wide = dtypes.compute.bytes, dtypes.loss.bytes
        self.reduced, self.stored = dtypes.reduce.bytes, dtypes.gradient.bytes
        self.ends, self.program = 1, ()
        layers = range(self.model.num_layers)
        if self.layout.pp > 1:
            schedule = self.layout.pipeline_schedule(microbatches=self.rounds, base_dir=Path(resolved.base_dir))
            here = schedule.stages_of(0)
            cuts = [sum(resolved.stage_layers[:stage]) for stage in range(schedule.num_stages + 1)]
            layers = [layer for stage in here for layer in range(cuts[stage], cuts[stage + 1])]
            self.ends, self.program = len({0, schedule.num_stages - 1} & set(here)), with_transfers(schedule)[0]
        self.layers = layers
        self.first_stage = layers[: resolved.stages[0]]
        self.again = [layer for layer in layers if resolved.recompute[layer] != "none"]
        """The layers that are recomputed, some only selectively."""
        self.whole_again = [layer for layer in layers if resolved.recompute[layer] == "full"]
        self.first, self.last = 0 in layers, self.model.num_layers - 1 in layers
        finetune = resolved.run.finetune
        self.frozen = finetune is not None and finetune.method != "full"
        table = finetuned_table(self.model, finetune) if finetune else parameter_table(self.model)
        self.rows = tuple(rows_of_layers(table, self.model, layers))
        self.tokens = resolved.micro_batch * resolved.run.data.sequence_length // self.layout.cp
        """Tokens of a microbatch; tensor-parallel ranks share them between blocks."""

    def moe(self, layers: Iterable[int]) -> int:
        """How many of some layers are MoE layers."""
        return sum(map(self.model.is_moe, layers))

    @property
    def tunes_blocks_alone(self) -> bool:
        """Whether only adapters of blocks' non-expert matrices train."""
        trained = (row.name for row in self.rows if row.trained)
        return not self.model.num_experts and all(
            re.match(r"layers\.\d+\.(attention|feed_forward)\.", n) for n in trained
        )

    @property
    def tokens_between(self) -> int:
        """This rank's tokens of a microbatch between blocks."""
        return self.tokens // self.layout.tp

    def visits(self, row: Parameter) -> tuple[int, int]:
        """How many of this rank's stages gather a parameter, and how many give it a gradient: embeddings, norm and head
        are gathered together, for the first stage and for the last."""
        if row.name.startswith("layers."):
            return 1, 1
        return self.ends, self.ends if self.model.tied_embeddings and row.name == "tok_embeddings.weight" else 1

    def bytes_of(self, row: Parameter) -> int:
        """Bytes per number of a parameter when gathered."""
        return self.dtypes.store.bytes if row.storage == "float" else DTYPES[row.storage].bytes

    def kept(self, row: Parameter) -> tuple[int, ...]:
        """Shape of this rank's part of a parameter; the ranks that share it by ZeRO have equal parts, padded."""
        return kept_shape(row, self.model, self.layout, tp_rank=0, shard_rank=0)


def _coded_weights(rank: _Rank) -> frozenset[str]:
    """Weights that are gathered in fp8, whose largest values ranks agree on."""
    if rank.layout.quantized_weights != "fp8":
        return frozenset()
    layers = low_precision_layers(parameter_table(rank.model), rank.training)
    return frozenset(f"{layer}.weight" for layer in layers)


def _weights(rank: _Rank) -> Traffic:
    """FSDP2: weights gathered and gradients reduced over `shard`, then over `replicate`; experts' over ranks of their
    own if `ep` or `tp` has several."""
    layout, traffic, apart = rank.layout, Traffic(), rank.layout.ep * rank.layout.tp > 1
    coded = _coded_weights(rank)
    for row in rank.rows:
        prefix, shards, replicas = "", layout.shard, layout.replicate
        if is_experts(row) and apart:
            prefix, shards, replicas = "expert ", layout.expert_shard, layout.expert_replicate
        kept = rank.kept(row)
        numbers = prod(kept) * (layout.expert_shard if is_experts(row) else layout.shard)
        if shards > 1:
            gathering, giving = rank.visits(row)
            gathers = 2 * rank.rounds * gathering if layout.zero_stage == 3 else 1
            scatters = rank.rounds * giving if layout.zero_stage > 1 else 1
            matrix = len(row.dims) > 1
            if row.name in coded:
                scales = 1 if not is_experts(row) else row.shape[0] // layout.ep
                agreed = scales * rank.bytes_of(row) * gathers
                traffic["all-reduce", f"{prefix}shard"] += agreed
                if layout.tp > 1 and not is_experts(row):
                    traffic["all-reduce", "tp"] += agreed
            part, width = numbers // shards, kept[-1]
            weights = layout.quantized_weights
            gradients = layout.gradient_format(row.dims)
            in_codes = row.name in coded if weights == "fp8" else matrix
            gathered = shards * sent_bytes(part, weights, rank.bytes_of(row), matrix=in_codes, row=width)
            reduced = shards * sent_bytes(part, gradients, rank.reduced, matrix=matrix, row=width)
            kind = "reduce-scatter" if gradients == "none" else "all-to-all"
            traffic["all-gather", f"{prefix}shard"] += gathered * gathers
            traffic[kind, f"{prefix}shard"] += reduced * scatters * row.trained
        if replicas > 1 and row.trained:
            traffic["all-reduce", f"{prefix}replicate"] += numbers // shards * rank.reduced
    return traffic


def _tensor(rank: _Rank) -> Traffic:
    """Each half of a block gathers the sequence before and scatters it after, embedding and head once; the backward
    pass does the reverse. Routed experts are no such half, shared experts are."""
    layout, model = rank.layout, rank.model
    if layout.tp == 1:
        return Traffic()
    stream = rank.tokens * model.hidden * rank.width

    def halves(layers: Sequence[int]) -> int:
        return 2 * len(layers) - (0 if model.shared_experts else rank.moe(layers))

    silent, alive = _silent_halves(rank)
    again, whole_again = ([n for n in layers if n not in silent[1::2]] for layers in (rank.again, rank.whole_again))
    # Recomputing a block stops before its last result, so its last scatter is not repeated unless a norm reads it;
    # selective recomputation keeps what scatters have added up.
    normed = [layer for layer in whole_again if model.layer(layer).norms_outputs]
    gathers = 2 * halves(rank.layers) + rank.first + rank.last + halves(again)
    scatters = 2 * halves(rank.layers) + rank.first + rank.last + len(whole_again)
    scatters += halves(normed) - len(normed)
    if rank.frozen:  # nor has the embedding a gradient, nor what comes into the first half that trains
        gathers -= 1 + len(silent)
        scatters -= alive + len(silent)
    kept = (
        row for row in rank.rows if row.trained and split_dim(row, model, layout.tp) is None and not is_experts(row)
    )
    # As often as data parallelism reduces gradients: once, when they have been added up, or after every microbatch.
    summed = rank.reduced * (rank.rounds if layout.zero_stage >= 2 else 1)
    return Traffic(
        {
            ("all-gather", "tp"): rank.rounds * gathers * stream,
            ("reduce-scatter", "tp"): rank.rounds * scatters * stream,
            # For every token the largest logit, the sum of exponentials and the label's logit; and the gradients of
            # parameters that all ranks keep.
            ("all-reduce", "tp"): rank.rounds * rank.last * rank.tokens * 3 * rank.wide
            + sum(row.numel for row in kept) * summed
            + _balance(rank)
            + _row_norms(rank, again)
            + _head_norms(rank, silent),
        }
    )


def _head_norms(rank: _Rank, silent: Sequence[int]) -> int:
    """The sums of squares of queries and of keys, one for each token, where norms span all heads; their gradients."""

    def spread(layers: Iterable[int]) -> int:
        mixers = (rank.model.layer(layer).mixer for layer in layers)
        return sum(isinstance(mixer, AttentionSpec) and mixer.qk_norm == "all" for mixer in mixers)

    passes = 2 * spread(rank.layers) + spread(rank.again) - spread(set(silent))
    return rank.rounds * passes * 2 * rank.tokens * rank.wide


def _silent_halves(rank: _Rank) -> tuple[list[int], bool]:
    """Where adapters train: the halves of the first stage, each by its layer, before the first half with an adapter,
    which have no backward pass; and whether any half has one."""
    silent: list[int] = []
    for layer in rank.first_stage if rank.frozen else ():
        for half in ("attention", "feed_forward"):
            if any(row.trained and row.name.startswith(f"layers.{layer}.{half}.") for row in rank.rows):
                return silent, True
            silent.append(layer)
    return silent, False


def _row_norms(rank: _Rank, again: Sequence[int]) -> int:
    """DoRA's norms of rows of matrices whose columns are split, in fp32, added up in every forward pass."""
    bytes_of = {int(row.name.split(".")[1]): 0 for row in rank.rows if row.name.startswith("layers.")}
    for row in rank.rows:
        module, _, name = row.name.rpartition(".")
        if name == "magnitude" and split_dim(row, rank.model, rank.layout.tp) is None:
            bytes_of[int(module.split(".")[1])] += row.numel * rank.wide
    return rank.rounds * (sum(bytes_of.values()) + sum(bytes_of[layer] for layer in again))


def _context(rank: _Rank) -> Traffic:
    """Attention's exchange in every layer; recomputation repeats the forward pass's exchange."""
    layout, model = rank.layout, rank.model
    if layout.cp == 1:
        return Traffic()
    tokens = rank.tokens * layout.cp  # of all cp ranks
    heads, kv_heads = model.num_heads // layout.tp, max(1, model.num_kv_heads // layout.tp)
    pairs = tokens * 2 * kv_heads * model.head_dim  # numbers of all keys and values
    backward = rank.rounds * len(rank.layers)
    forward = backward + rank.rounds * len(rank.again)
    method, _ = context_method(layout, model, rank.resolved.run.data.sequence_length)
    traffic = Traffic({("all-reduce", "cp"): _balance(rank)})
    match method:
        case "ulysses":
            groups = heads // kv_heads
            copies = next(n for n in range(1, heads + 1) if groups % n == 0 and kv_heads * n % layout.cp == 0)
            exchanged = tokens // layout.cp * 2 * (heads + kv_heads * copies) * model.head_dim
            traffic["all-to-all", "cp"] = (forward + backward) * exchanged * rank.width
        case "all_gather":
            traffic["all-gather", "cp"] = (forward + backward) * pairs * rank.width
            traffic["reduce-scatter", "cp"] = backward * pairs * rank.wide
        case "ring":
            hops = (layout.cp - 1) * (forward + backward) * rank.width + layout.cp * backward * rank.wide
            traffic["send", "cp"] = traffic["receive", "cp"] = hops * pairs // layout.cp
        case _:
            assert_never(method)
    return traffic


def _balance(rank: _Rank) -> int:
    """The router's losses add up each sequence's counts of tokens per expert over the ranks that share the sequence."""
    if not rank.model.balance_loss + rank.model.router_z_loss:
        return 0
    forward = rank.moe(rank.layers) + rank.moe(rank.again)
    return rank.rounds * forward * rank.resolved.micro_batch * rank.model.num_experts * 8


def _experts(rank: _Rank) -> Traffic:
    """Every token's row to each of its experts and back, and their gradients; first the numbers of rows."""
    layout, model = rank.layout, rank.model
    if layout.ep == 1:
        return Traffic()
    rows = rank.tokens_between * model.experts_per_token * model.hidden * rank.width
    exchanges = 4 * rank.moe(rank.layers) + 2 * rank.moe(rank.whole_again)
    counts = rank.moe(rank.layers) + rank.moe(rank.again)
    counted = counts * model.num_experts * 8
    layers = low_precision_layers(parameter_table(model), rank.training) if rank.training.rounds_at_random else ()
    if any(".experts." in name for name in layers):  # the numbers of the rows' tokens, by which they are rounded
        counted += (
            (rank.moe(rank.layers) + rank.moe(rank.whole_again)) * rank.tokens_between * model.experts_per_token * 8
        )
    return Traffic({("all-to-all", "ep"): rank.rounds * (exchanges * rows + counted)})


def _stages(rank: _Rank) -> Traffic:
    """The residual stream and its gradient, and the gradient of a tied embedding that two ranks have."""
    transfers = [item for item in rank.program if isinstance(item, Transfer)]
    stream = rank.tokens_between * rank.model.hidden * rank.width
    traffic = Traffic()
    for transfer in transfers:
        traffic["send" if transfer.source == 0 else "receive", "pp"] += stream
    if rank.program and rank.model.tied_embeddings and rank.first != rank.last:
        (embedding,) = (row for row in rank.rows if row.name == "tok_embeddings.weight")
        copied = prod(rank.kept(embedding)) * rank.stored
        traffic["send", "pp"] += copied
        traffic["receive", "pp"] += copied
    return traffic
