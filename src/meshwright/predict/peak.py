"""The point of a step at which memory peaks, and the transient tensors held there.

For this repository's engine (FSDP2, `models/loss.py`) four are compared: the beginning, when embedding and head have
been gathered; the loss and its backward pass, with every activation saved; the last blocks' backward passes; the end of
the backward pass, when embedding and head are reduced. For other programs, which hold all logits, there is one: the
last block's backward pass with the logits still live. docs/rehearsal.md compares the prediction with the program
itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from meshwright.predict.activations import (
    block_activations,
    inner_bytes,
    microbatches_in_flight,
    pass_activations,
    passing_activations,
    saved_activations,
)
from meshwright.predict.blueprint import LayerParameters
from meshwright.predict.held import block_parameters, end_parameters, first_weights
from meshwright.predict.job import Groups, Job
from meshwright.spec.quantized import bytes_each
from meshwright.spec.recompute import Policy


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """Bytes at one point of a step, besides the optimizer."""

    weights: float
    """Weights kept from one block to the next."""
    activations: float
    logits: float = 0.0
    transit: float = 0.0
    """Gathered weights, and gradients on the way from a microbatch's backward pass to their accumulators."""
    gradients: float
    """Accumulated gradients."""

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.weights + self.activations + self.logits + self.transit + self.gradients


class StepPeak:
    """The point at which a rank of a stage holds most, for any recomputation; `weights` are its resident weights,
    `gradients` those kept at the end of the backward pass."""

    def __init__(self, job: Job, stage: int, weights: float, gradients: float) -> None:
        self.job, self.stage, self.weights, self.gradients = job, stage, weights, gradients
        self.engine = _Engine(job, stage, weights, gradients) if job.stack.chunked_loss else None

    def of(self, groups: Sequence[Groups]) -> StepPoint:
        """The point for `groups`, the recomputation of the rank's stages."""
        if self.engine is None:
            return _all_logits(self.job, self.stage, self.weights, self.gradients, groups)
        return max(self.engine.moments(groups), key=lambda moment: moment.total)


def _all_logits(job: Job, stage: int, weights: float, gradients: float, groups: Sequence[Groups]) -> StepPoint:
    """The peak of programs whose logits are live when the last block's backward pass starts."""
    saved = saved_activations(job, stage, pass_activations(job, groups)) + max(passing_activations(job, groups))
    transit, layer = 0.0, max(block_parameters(job, block) for block in job.model.kinds)
    if job.frozen_bytes:
        transit = job.stack.weight_bytes * layer
    if job.layout.zero_stage >= 3 and job.shards > 1:
        ends = job.model.embedding * (1 if job.model.tied else 2) / job.layout.tp
        # Two layers' weights, one used and one arriving, and a layer's gradient on its way out.
        transit = 2 * job.stack.weight_bytes * max(layer, ends / 2)
        transit += (job.stack.weight_bytes + job.stack.reduce_bytes) * layer
    # Logits of all tokens and their gradient, and the last norm's tensors.
    logits = 2 * job.stream_bytes + job.tokens * job.model.vocab / job.layout.tp * job.stack.logit_bytes
    logits += job.tokens * job.model.hidden * job.stack.hidden_bytes
    return StepPoint(
        weights=weights,
        activations=saved,
        logits=logits if stage == job.head_rank else 0.0,
        transit=transit,
        gradients=gradients,
    )


def _decoded(job: Job, block: LayerParameters) -> float:
    """Bytes of a block's largest quantized matrix, decoded, in its backward pass, beyond the one tensor that the
    feed-forward layer's backward pass holds only later."""
    largest = max((m.numel / (job.layout.tp if m.split else 1) for m in block.matrices if not m.experts), default=0.0)
    return max(0.0, job.stack.weight_bytes * largest - inner_bytes(job, block)) if job.frozen_bytes else 0.0


@dataclass(frozen=True)
class _Activations:
    """Bytes of activations of a rank under one recomputation."""

    block: float
    """Of the last block."""
    one_pass: float
    """Of one microbatch."""
    saved: float
    """Of all microbatches in flight, and messages."""
    passing: tuple[float, float]
    """Live in the backward pass of the last block, and of the one before."""


class _Engine:
    """Memory over a step of one rank of this repository's engine."""

    def __init__(self, job: Job, stage: int, weights: float, gradients: float) -> None:
        self.job, self.stage, self.weights, self.end_gradients = job, stage, weights, gradients
        stack, self.width = job.stack, job.width
        self.head = stage == job.head_rank
        self.vocab = ceil(job.model.vocab / job.layout.tp)
        self.table = 0 if job.frozen else self.vocab * job.model.hidden
        """Parameters of the head whose gradient is on this rank."""
        self.ends = end_parameters(job, stage)
        blocks = [job.model.kinds[kind] for kind, _ in job.stage_kinds[stage]]
        self.layer = max((block_parameters(job, block) for block in blocks), default=0.0)
        self.first = max((first_weights(job, block) for block in blocks), default=0.0)
        gathers = job.layout.zero_stage >= 3 and not self.job.alone
        self.gathered = stack.weight_bytes if gathers else 0.0
        self.gathered_layer = (job.frozen_bytes or stack.weight_bytes) * self.layer if gathers else 0.0
        self.decoded = max((_decoded(job, block) for block in blocks), default=0.0)
        self.reduced = 0.0 if self.job.alone or job.frozen else stack.reduce_bytes
        # Tensor-parallel ranks' gradients are widened before they are added up (`parallel/data.py`).
        fresh = self.reduced if job.layout.tp > 1 else float(self.width)
        sent = job.layout.gradient_format(())  # codes on their way out and in
        of_ends = job.layout.gradient_format(("vocab",))
        self.fresh = fresh if sent == "none" else fresh + 2 * bytes_each(sent)
        self.fresh_ends = fresh if of_ends == "none" else fresh + 2 * bytes_each(of_ends)
        # The sum of the largest matrix's parts in fp32 and, beside accumulated gradients, the result.
        result = self.reduced * self.ends if job.layout.zero_stage == 3 and job.microbatches > 1 else 0.0
        self.summed = 0.0 if sent == "none" else (result + 4 * self.vocab * job.model.hidden) / job.shards
        # With one microbatch nothing is accumulated before its own backward pass.
        self.kept = 0.0 if job.microbatches == 1 else gradients
        if job.microbatches == 1 and job.shards > 1 and not job.frozen:
            # The last sum, of embedding and head, is allocated when their gradients have been copied and freed.
            self.end_gradients -= stack.gradient_bytes * self.ends / job.shards

    def _recomputing(self, groups: Sequence[Groups]) -> "_Activations":
        job, one_pass = self.job, pass_activations(self.job, groups)
        last = [stage[-1] for stage in groups if stage]
        behind: list[tuple[LayerParameters, Policy]] = [
            (job.model.kinds[kind], policy) for policy, kinds in last for kind, _ in kinds
        ]
        return _Activations(
            block=max((block_activations(job, block, policy) for block, policy in behind), default=0.0),
            one_pass=one_pass,
            saved=saved_activations(job, self.stage, one_pass) + self._messages(),
            passing=passing_activations(job, groups),
        )

    def moments(self, groups: Sequence[Groups]) -> Iterator[StepPoint]:
        """The candidates for the peak."""
        now = self._recomputing(groups)
        # In the first block's forward pass what embedding and head were gathered from is still there, and the block's.
        yield self._moment(0.0, 2 * (self.gathered * self.ends + self.gathered_layer))
        if self.head:
            yield from self._loss(now)
        yield from self._blocks(now)
        yield from self._end(now)

    def _messages(self) -> float:
        """Early messages from other stages, and the message to the previous one."""
        return self.job.stream_bytes * ((self.job.layout.pp > 1) + (self.stage > 0))

    def _loss(self, now: "_Activations") -> Iterator[StepPoint]:
        """At the loss all activations are saved; embedding and head are gathered, and the last block's gathered weights
        are still live."""
        job, hidden = self.job, self.job.model.hidden
        saved = saved_activations(job, self.stage, now.one_pass, at_loss=True) + self._messages()
        transit = self.gathered * self.ends + self.gathered_layer
        # Microbatches after the first find all weights gathered.
        if 0 < job.layout.zero_stage < 3 and job.shards > 1 and job.microbatches == 1:
            transit = job.stack.weight_bytes * self.layer
        tokens, stride = ceil(job.tokens), ceil(self.vocab / 64) * 64
        states = self.width * hidden * tokens  # of which the loss's gradient is kept
        normed = job.stream_bytes + (states if job.layout.tp > 1 else 0.0)
        wide = job.precision.loss.bytes
        rows = max(1, int(job.stack.wide_bytes // (wide * hidden)))  # of the head's gradient, at a time
        most = max(1, int(job.stack.chunk_bytes // (stride * self.width)))
        chunk = ceil(tokens / ceil(tokens / most))
        widened = wide * self.vocab * min(chunk, max(1, int(job.stack.wide_bytes // (wide * self.vocab))))
        product = min(self.vocab, rows) * hidden * (self.width + (wide if wide > self.width else 0))
        logits = chunk * stride * self.width + wide * self.table + max(widened, product if self.table else 0.0)
        logits += normed + states + self.width * hidden * chunk
        yield self._moment(saved, transit, logits)
        # The backward pass gathers embedding and head again: briefly they exist twice.
        kept = wide * self.table + states
        yield self._moment(saved, 2 * self.gathered * self.ends, kept)
        scaled = (wide + self.width) * self.table + wide * min(self.table, rows * hidden) + 2 * states
        yield self._moment(saved, transit, scaled)

    def _blocks(self, now: "_Activations") -> Iterator[StepPoint]:
        """Backward passes of the last block and the one before. The head's gradient waits for the embedding's
        gradient."""
        transit = self.decoded + self.gathered * self.ends + 2 * self.gathered_layer
        at_once = self.job.alone and not self.job.model.tied and self.job.microbatches > 1
        if self.head and not at_once:  # a single process adds it up at once, unless nothing is there yet
            transit += self.width * self.table
        if not (self.job.alone or self.job.frozen):
            transit += self.width * self.first
        saved = now.saved - (self.job.stream_bytes if self.head else 0.0)  # the input of the last norm is freed
        yield self._moment(saved + max(now.passing), transit)
        if self.job.layout.zero_stage < 2 or self.job.alone or self.job.frozen:
            return
        # A block's weights are freed before its gradients are copied for the reduction; that copy lives until the next
        # block's.
        yield self._moment(saved - now.block, transit + (self.fresh + self.reduced - self.gathered) * self.layer)
        yield self._moment(saved + now.passing[1], transit + self.reduced * self.layer)

    def _end(self, now: "_Activations") -> Iterator[StepPoint]:
        """Reduction of embedding and head: under ZeRO-2 and 3 after every microbatch, else after the last, when
        gathered weights have been freed."""
        flying = microbatches_in_flight(self.job, self.stage)
        left = now.saved * (flying - 1 / self.job.layout.virtual_stages) / flying
        ends = 0.0 if self.job.frozen else self.ends
        if self.job.alone:
            yield self._ended(left, self.width * min(ends, self.table), self.weights)
            return
        yield self._moment(left, self.gathered * ends + self.width * ends)
        once = self.job.microbatches == 1
        transit = (self.fresh_ends + self.reduced) * ends + (self.summed if ends else 0.0)
        if self.job.layout.zero_stage >= 2:
            gone = self.job.layout.zero_stage == 2 and once
            yield self._ended(left, transit, 0.0 if gone else self.weights)
            return
        if self.job.layout.zero_stage == 1 and once:
            yield self._ended(0.0, transit, 0.0)
            return
        # Accumulated gradients are copied for the reduction; a single rank copies them twice.
        transit = self.reduced * ends * (2 if self.job.shards == 1 else 1)
        yield self._ended(0.0, transit, 0.0)

    def _ended(self, activations: float, transit: float, weights: float) -> StepPoint:
        return StepPoint(weights=weights, activations=activations, transit=transit, gradients=self.end_gradients)

    def _moment(self, activations: float, transit: float, logits: float = 0.0) -> StepPoint:
        return StepPoint(
            weights=self.weights, activations=activations, logits=logits, transit=transit, gradients=self.kept
        )
