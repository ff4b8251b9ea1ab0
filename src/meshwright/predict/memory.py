"""Peak memory of a rank, predicted by kind, in bytes.

State follows the ZeRO paper (Rajbhandari et al., 2020, section 3), tensor by tensor; transient memory is in
`predict/peak.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from meshwright.predict.activations import microbatches_in_flight, pass_activations, saved_activations
from meshwright.predict.held import end_parameters, expert_shards, held_parameters, vectors
from meshwright.predict.job import Groups, Job
from meshwright.predict.peak import StepPeak
from meshwright.spec.quantized import KEPT, bytes_each

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "fragmentation", "context")


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank at the peak of a step."""

    weights: float
    """Weights that the model computes with, gathered copies included."""
    gradients: float
    """Accumulated gradients, and the errors that error feedback keeps of them."""
    optimizer: float
    """Master weights and the optimizer's moments."""
    activations: float
    logits: float
    communication: float
    """Buckets and gathered layers in flight."""
    fragmentation: float
    context: float
    host: float = 0.0
    """State and activations that offloading keeps in host memory; not part of the device's total."""
    disk: float = 0.0
    """State that offloading keeps on disk."""
    stage: int = 0
    """The pipeline stage that needs most."""

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer, as in the ZeRO paper."""
        return self.weights + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """Bytes allocated by the allocator."""
        return self.states + self.activations + self.logits + self.communication

    @property
    def total(self) -> float:
        """Bytes that the device reports as used."""
        return self.allocated + self.fragmentation + self.context

    @property
    def least(self) -> float:
        """The total with an allocator under pressure, which releases its reserve."""
        return self.allocated + self.context

    def kinds(self) -> dict[str, float]:
        """Bytes by kind, in the order of `KINDS`."""
        return {kind: getattr(self, kind) for kind in KINDS}


def predict_memory(job: Job, *, enough: float = inf) -> MemoryUse:
    """The rank that needs most, over all pipeline stages; or the first one found that needs more than `enough` bytes
    even with an allocator under pressure."""
    most = stage_memory(job, 0)
    for stage in _telling_ranks(job):
        if most.least > enough:
            break
        most = max(most, stage_memory(job, stage), key=lambda use: use.total)
    return most


def _telling_ranks(job: Job) -> Sequence[int]:
    """The ranks after the first that may need most: of ranks with equal blocks the first one or the last."""
    if not isinstance(job.recompute, str):
        return range(1, job.layout.pp)
    alike = {job.stage_kinds.index(kinds) for kinds in set(job.stage_kinds)} if len(job.model.kinds) > 1 else set()
    return sorted(({1, job.layout.pp - 1} | alike) & set(range(1, job.layout.pp)))


def least_memory(job: Job) -> float:
    """Bytes that every peak exceeds, whatever is recomputed: a quick lower bound of the total.

    Every point of a step holds the weights, the optimizer and the accumulated gradients of several microbatches; the
    last block's backward pass also holds the input of every block.
    """
    everything = job if job.recompute == "full" else replace(job, recompute="full", recompute_share=1.0)
    return max(_least_of_stage(everything, stage) for stage in (0, *_telling_ranks(everything)))


def _least_of_stage(job: Job, stage: int) -> float:
    kept, stack = _kept_state(job, stage), job.stack
    states = kept.weights + kept.optimizer + (kept.gradients if job.microbatches > 1 else 0.0)
    saved = saved_activations(job, stage, pass_activations(job, job.groups(stage))) - job.stream_bytes
    return states + max(0.0, saved) + stack.context_bytes + job.communicators * stack.communicator_bytes


def stage_memory(job: Job, stage: int) -> MemoryUse:
    """Peak bytes of a rank of pipeline stage `stage`."""
    return RankMemory(job, stage).use(job.groups(stage))


class RankMemory:
    """Peak memory of a rank of a pipeline stage, for any recomputation of its layers."""

    def __init__(self, job: Job, stage: int) -> None:
        self.job, self.stage, self.kept = job, stage, _kept_state(job, stage)
        trainable = 1.0 if job.adapters is None else job.adapters / job.model.num_parameters
        self.errors = kept_errors(job, stage) * trainable
        self.peak = StepPeak(job, stage, self.kept.weights, self.kept.gradients)

    def use(self, groups: Sequence[Groups]) -> MemoryUse:
        """Bytes at the peak; `groups`: the recomputation of the rank's stages."""
        job, stack, kept, peak = self.job, self.job.stack, self.kept, self.peak.of(groups)
        buckets = stack.bucket_bytes if job.layout.data_parallel > 1 and job.layout.zero_stage < 3 else 0.0
        return MemoryUse(
            weights=peak.weights,
            gradients=peak.gradients + self.errors,
            optimizer=kept.optimizer,
            activations=peak.activations,
            logits=peak.logits,
            communication=peak.transit + buckets,
            fragmentation=stack.fragmentation * (peak.activations + peak.logits + peak.transit),
            context=stack.context_bytes + job.communicators * stack.communicator_bytes,
            host=kept.host + _offloaded_activations(job, self.stage, groups),
            disk=kept.disk,
            stage=self.stage,
        )


@dataclass(frozen=True)
class _KeptState:
    """Bytes of a rank from one step to the next, on the device, in host memory and on disk."""

    weights: float
    gradients: float
    optimizer: float
    host: float
    disk: float


def _kept_state(job: Job, stage: int) -> _KeptState:
    stack, shards, zero = job.stack, job.shards, job.layout.zero_stage
    held, experts = held_parameters(job, stage)

    def sharded(from_stage: int, bytes_each: float) -> float:
        if zero >= from_stage:
            return bytes_each * (held / shards + experts / expert_shards(job))
        return bytes_each * (held + experts)

    trainable = 1.0 if job.adapters is None else job.adapters / job.model.num_parameters
    weights = _kept_weights(job, stage, trainable, sharded)
    optimizer = sharded(1, stack.state_bytes) * trainable
    # Gradients of one microbatch are reduced as they come; those of several are accumulated whole until the last.
    whole_from = 1 if stack.chunked_loss and job.microbatches == 1 else 2
    gradients = sharded(whole_from, stack.gradient_bytes) * trainable
    if job.layout.asynchronous:  # the weights and the gradient of two batches
        weights, gradients = 2 * weights, 2 * gradients
    host = disk = 0.0
    tiers = job.layout.tiers
    if tiers.parameters == "host":
        host, optimizer = optimizer, 0.0
    if tiers.moves_state:
        masters = 0.0 if job.keeps_masters else sharded(1, job.master_bytes) * trainable
        moved = tiers.optimizer_share * ((host or optimizer) - masters)
        if tiers.parameters == "host":
            host -= moved
        else:
            optimizer -= moved
        if job.keeps_masters:
            moved += tiers.optimizer_share * gradients
            gradients -= tiers.optimizer_share * gradients
        host, disk = (host, moved) if tiers.optimizer == "disk" else (host + moved, 0.0)
    if tiers.parameters == "disk":
        disk, optimizer = disk + optimizer, 0.0
        if job.alone:
            disk, weights = disk + weights, 0.0
        if whole_from == 1 or zero >= 2 or job.alone:
            disk, gradients = disk + gradients, 0.0
        else:  # they are added up whole in memory before they are reduced
            disk += sharded(1, stack.gradient_bytes) * trainable
    if tiers.parameters == "host" and stack.offloads_gradients:
        host += sharded(1, stack.gradient_bytes) * trainable
        if whole_from == 1 or zero >= 2:  # else they are added up whole on the device before they are reduced
            gradients = 0.0
    return _KeptState(weights, gradients, optimizer, host, disk)


def kept_errors(job: Job, stage: int) -> float:
    """Bytes of the errors that a rank of a stage keeps if every matrix trains: of all matrices that it computes with,
    because it sends their whole gradients."""
    if not job.layout.gradient_error_feedback:
        return 0.0
    held, experts = held_parameters(job, stage)
    return bytes_each(KEPT) * (held + experts - vectors(job, stage))


def _offloaded_activations(job: Job, stage: int, groups: Sequence[Groups]) -> float:
    """Bytes of activations that a rank keeps in host memory."""
    if job.layout.tiers.activations == "device":
        return 0.0
    return microbatches_in_flight(job, stage) * pass_activations(job, groups)


def _kept_weights(job: Job, stage: int, trainable: float, sharded: Callable[[int, float], float]) -> float:
    """Bytes of the weights that a rank of a stage keeps to compute with, besides what the optimizer updates."""
    stack, zero = job.stack, job.layout.zero_stage
    if not job.frozen:
        return 0.0 if zero >= 3 and stack.casts_when_gathering else sharded(3, stack.weight_bytes)
    # In the precision of computation; matrices of blocks perhaps in fewer bits.
    held, experts = held_parameters(job, stage)
    saved = stack.weight_bytes - (job.frozen_bytes or stack.weight_bytes)
    packed = held - end_parameters(job, stage)
    weights = sharded(3, stack.weight_bytes) - saved * packed / (job.shards if zero >= 3 else 1)
    if stack.casts_when_gathering and not job.alone and zero < 3:  # gathered weights exist beside the shards
        weights += sharded(1, stack.weight_bytes) - saved * packed / (job.shards if zero >= 1 else 1)
        weights += stack.weight_bytes * (held + experts) * trainable  # the copy of adapters that computes
    return weights
