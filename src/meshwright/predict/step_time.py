"""Step time: computation, exposed communication, bubble and update."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import assert_never

from meshwright.predict.activations import pass_activations
from meshwright.predict.blueprint import LayerParameters
from meshwright.predict.comm import CommGroup, Wires, axis_group
from meshwright.predict.constants import FITTED, Constants
from meshwright.predict.held import block_parameters, held_parameters
from meshwright.predict.job import Groups, Job
from meshwright.predict.pipeline import PipelineTime, pipeline_seconds
from meshwright.predict.roofline import Device, PassTime
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.offload import PAGE_CACHE_SHARE
from meshwright.spec.quantized import bytes_each
from meshwright.spec.recompute import POLICIES, Policy

HOST_LINK = 20e9
"""Bytes per second between a device and pinned host memory, one way: the rate of copies over PCIe 4.0 x16."""
DISK_GB_S = 1.6
"""Bytes per second of a device, each way, if all devices of a node use NVMe disks at once (Rajbhandari et al.,
"ZeRO-Infinity", 2021, figure 2b)."""
OFFLOAD_BYTES = 16
"""Bytes of a parameter's gradient, weight and moments that the host reads and writes in a step."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step by cause; they add up to `total`."""

    compute: float
    """Arithmetic and memory traffic of the busiest stage, recomputation included."""
    recompute: float
    """The part of `compute` due to recomputation."""
    tensor: float
    """Exposed communication of the axis tp."""
    context: float
    expert: float
    data: float
    """Exposed gathering of weights and reduction of gradients."""
    pipeline: float
    """Messages between stages."""
    bubble: float
    """Waiting for other stages."""
    update: float
    """Clipping, the optimizer, and the fixed cost of a step."""
    host: float = 0.0
    """The part of `compute` in which the device waits for the host to issue operators."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.compute, self.tensor, self.context, self.expert, self.data, self.pipeline, self.bubble)
        return sum(parts) + self.update

    @property
    def exposed(self) -> float:
        """All exposed communication."""
        return self.tensor + self.context + self.expert + self.data + self.pipeline


@dataclass(frozen=True)
class BlockParts:
    """The costs of one microbatch in a kind of block."""

    compute: PassTime
    """Waiting for the host included."""
    waiting: float
    """Seconds of `compute` in which the device waits for the host."""
    again: dict[Policy, float]
    """Seconds of recomputation, by policy."""
    tensor: PassTime
    context: PassTime
    expert: PassTime
    whole: PassTime
    """All but recomputation."""


@dataclass(frozen=True)
class Parts:
    """The costs of one microbatch in each kind of block and in the head; many layouts share them."""

    blocks: tuple[BlockParts, ...]
    head: PassTime


@dataclass(frozen=True)
class StagePasses:
    """The costs of one microbatch on a pipeline rank."""

    whole: PassTime
    """Everything; recomputation is in the backward pass."""
    exposed: PassTime
    """The part of it in which weights and gradients are gathered, reduced, moved or read."""
    repeated: float
    """The part of it that is recomputation."""


Cache = dict[tuple, Parts]
"""Cache of parts for a search over many layouts of one job."""


class StepModel:
    """The time of one job on one cluster, part by part."""

    def __init__(
        self, job: Job, cluster: ClusterSpec, constants: Constants = FITTED, cache: Cache | None = None
    ) -> None:
        self.job, self.cluster, self.constants = job, cluster, constants
        self.wires = Wires.of(cluster, constants)
        self.device = Device(cluster, job, constants)
        layout, sharers = job.layout, job.layout.tp * job.layout.cp
        self.shard = axis_group(cluster, job.shards, layout.tp if job.stack.group_shards else sharers)
        self.replicate = axis_group(cluster, layout.dp_replicate, sharers * layout.dp_shard)
        casts = job.microbatches if self.device.quantized else 1  # share one quantization of the weights
        products = job.precision, job.stack.emulated
        key = (layout.tp, layout.cp, layout.ep, job.micro_batch, casts, job.recompute_share, *products)
        cached = None if cache is None else cache.get(key)
        self.parts = cached or self._parts()
        if cache is not None:
            cache[key] = self.parts

    def _parts(self) -> Parts:
        return Parts(tuple(self._of_block(block) for block in self.job.model.kinds), self.device.head())

    def _of_block(self, block: LayerParameters) -> BlockParts:
        layout, busy = self.job.layout, self.device.busy(block)
        tensor = self._tensor(block, axis_group(self.cluster, layout.tp, 1))
        context = self._context(block, axis_group(self.cluster, layout.cp, layout.tp))
        expert = self._expert(block, axis_group(self.cluster, layout.ep, 1), busy)
        waiting = self.device.waiting(block, busy + (tensor + expert))
        compute = busy + waiting
        forward = compute.forward + tensor.forward
        again: dict[Policy, float] = {policy: self._recompute(policy, block, forward) for policy in POLICIES}
        return BlockParts(compute, waiting.both, again, tensor, context, expert, compute + tensor + context + expert)

    def microbatch(self) -> float:
        """Seconds of one microbatch through the whole model, both passes, as on one stage and unsharded; where only
        some layers recompute, as without recomputation."""
        parts, policy = self.parts, self.job.recompute
        again = policy if isinstance(policy, str) else "none"
        one = parts.head.both
        for block, count in zip(parts.blocks, self.job.model.kind_counts, strict=True):
            one += count * (block.whole.both + block.again[again])
        return one

    def passes(self, stage: int) -> StagePasses:
        """The costs of one microbatch on a pipeline rank."""
        job, whole = self.job, [block.whole for block in self.parts.blocks]
        kinds, repeated = job.stage_kinds[stage], self.repeated(job.groups(stage))
        f = sum(count * whole[kind].forward for kind, count in kinds)
        b = sum(count * whole[kind].backward for kind, count in kinds) + repeated
        if stage == job.head_rank:
            f, b = f + self.parts.head.forward, b + self.parts.head.backward
        exposed = self._hide_gathering(self._gathered, job.stage_layers[stage], f, b)
        exposed += self._offloading(stage, f, b) + self._reading(stage, f, b)
        return StagePasses(PassTime(f + exposed.forward, b + exposed.backward), exposed, repeated)

    def predict(self) -> StepTime:
        """The whole step."""
        job = self.job
        passes = [self.passes(stage) for stage in range(job.layout.pp)]
        busiest = max(range(job.layout.pp), key=lambda stage: passes[stage].whole.both)
        timeline = pipeline_seconds(
            [one.whole.forward for one in passes],
            [one.whole.backward for one in passes],
            job.microbatches,
            job.layout.virtual_stages,
            self.send(),
            job.layout.schedule,
        )
        return self._account(timeline, busiest, passes[busiest].exposed, passes[busiest].whole.backward)

    def _account(self, timeline: PipelineTime, stage: int, gathering: PassTime, backward: float) -> StepTime:
        """The busiest stage's parts, times the microbatches, and the costs once a step."""
        job, parts, count = self.job, self.parts, self.job.microbatches
        blocks = [(number, parts.blocks[kind]) for kind, number in job.stage_kinds[stage]]
        repeated = self.repeated(job.groups(stage))
        arithmetic = repeated + sum(number * block.compute.both for number, block in blocks)
        if stage == job.head_rank:
            arithmetic += parts.head.both
        return StepTime(
            host=count * sum(number * block.waiting for number, block in blocks),
            compute=count * arithmetic,
            recompute=count * repeated,
            tensor=count * sum(number * block.tensor.both for number, block in blocks),
            expert=count * sum(number * block.expert.both for number, block in blocks),
            context=count * sum(number * block.context.both for number, block in blocks),
            data=count * gathering.both + self.gradients(backward),
            pipeline=timeline.messages,
            bubble=timeline.bubble - timeline.messages,
            update=self.update(stage) + self.constants.step_ms * 1e-3 * job.stack.python,
        )

    def update(self, stage: int) -> float:
        """Seconds in which a rank of a stage clips and steps its trained parameters, with offloaded state moved both
        ways."""
        job = self.job
        trained = 1.0 if job.adapters is None else job.adapters / job.model.num_parameters
        parameters = sum(held_parameters(job, stage)) * trained / (job.shards if job.layout.zero_stage >= 1 else 1)
        tiers = job.layout.tiers
        if tiers.moves_state:
            rate = DISK_GB_S if tiers.optimizer == "disk" else self.constants.offload_gb_s
            moved = parameters * moved_bytes(job, parameters, self.cluster) / (rate * 1e9)
            kept = parameters * OFFLOAD_BYTES / (self.constants.offload_gb_s * 1e9)
            on_host = tiers.parameters != "device" and not job.alone
            return moved + (kept if on_host else self.device.update(parameters))
        if tiers.optimizer != "device":
            return parameters * OFFLOAD_BYTES / (self.constants.offload_gb_s * 1e9)
        return self.device.update(parameters)

    def repeated(self, stages: Sequence[Groups]) -> float:
        """Seconds of a rank's recomputation for one microbatch."""
        blocks = self.parts.blocks
        return sum(n * blocks[kind].again[policy] for groups in stages for policy, kinds in groups for kind, n in kinds)

    def _recompute(self, policy: Policy, block: LayerParameters, forward: float) -> float:
        """Seconds of recomputation in the backward pass, tensor-parallel collectives included."""
        match policy:
            case "none":
                return 0.0
            case "full":
                return self.job.recompute_share * forward
            case "selective":
                return self.job.recompute_share * self.device.cheap_part(block)
            case _:
                assert_never(policy)

    def _tensor(self, block: LayerParameters, group: CommGroup) -> PassTime:
        """Two all-reduces (or their halves, with sequence parallelism) a pass, one for each half of the block."""
        job = self.job
        if job.layout.tp == 1:
            return PassTime(0.0, 0.0)
        payload = job.tokens * job.model.hidden * self.device.width
        visits = 1 if block.num_experts and job.layout.ep > 1 else 2
        both = visits * self.wires.all_reduce(group, payload)
        # With sequence parallelism each is cut in two halves, and the backward pass gathers once more.
        shown = 1 - self.constants.tensor_hidden if job.stack.overlap_tensor else 1.0
        return PassTime(shown * both, shown * both * (1.25 if job.sequence_parallel else 1.0))

    def _context(self, block: LayerParameters, group: CommGroup) -> PassTime:
        """Keys and values travel around the ring, overlapped with attention to the previous part."""
        job, model = self.job, self.job.model
        if job.layout.cp == 1:
            return PassTime(0.0, 0.0)
        pairs = 2 * job.micro_batch * job.sequence * model.num_kv_heads * model.head_dim
        payload = pairs / job.layout.tp * self.device.width
        ring = self.wires.all_gather(group, payload) + (job.layout.cp - 2) * self.wires.link_s
        behind = self.device.attention(block, job.tokens).scaled(self.constants.overlap)
        return PassTime(self._exposed(ring, behind.forward), self._exposed(2 * ring, behind.backward))

    def _exposed(self, wire: float, time: float) -> float:
        """Seconds of `wire` that `time` seconds of computation do not hide, and the slow-down of that computation."""
        hidden = min(wire, time)
        return wire - hidden + self.constants.contention * hidden

    def _expert(self, block: LayerParameters, group: CommGroup, busy: PassTime) -> PassTime:
        """Tokens travel to their experts and back, in both passes."""
        job = self.job
        if not block.num_experts or job.layout.ep == 1:
            return PassTime(0.0, 0.0)
        payload = job.tokens / job.layout.tp * job.model.hidden * self.device.width
        copies = job.model.top_k if job.stack.expert_relay else min(job.model.top_k, job.layout.ep)
        trip = self.wires.all_to_all(group, copies, payload, relay=job.stack.expert_relay)
        both = PassTime(2 * trip, 2 * trip).scaled(self.device.imbalance)
        if not job.stack.overlap_experts:
            return both
        behind = busy.scaled(self.constants.overlap)
        return PassTime(self._exposed(both.forward, behind.forward), self._exposed(both.backward, behind.backward))

    @cached_property
    def _gathered(self) -> tuple[float, float] | None:
        """Seconds per layer of ZeRO-3's weight gathering and of gradient reduction, which ZeRO-2 does too."""
        job = self.job
        if job.layout.zero_stage < 2 or job.shards == 1:
            return None
        model = job.model
        blocks = sum(
            count * block_parameters(job, block) for block, count in zip(model.kinds, model.kind_counts, strict=True)
        )
        numel = (blocks + model.embedding * (1 if model.tied else 2) / job.layout.tp) / model.num_layers
        gather = self.wires.all_gather(self.shard, numel * gathered_bytes(job)) if job.layout.zero_stage == 3 else 0.0
        reduce = 0.0 if job.frozen else self._reduce(numel)
        moved = job.layout.offload == "cpu" and job.stack.offloads_gradients
        if moved and self.cluster.device != "cpu":  # shards come from the host, and gradients go there
            each = numel * job.stack.gradient_bytes / job.shards / HOST_LINK
            gather += each if job.layout.zero_stage == 3 else 0.0
            reduce += 0.0 if job.frozen else each
        return gather, reduce

    def _hide_gathering(self, sharded: tuple[float, float] | None, layers: int, f: float, b: float) -> PassTime:
        """ZeRO-3's exposed traffic beside a stage's computation."""
        if sharded is None:
            return PassTime(0.0, 0.0)
        gather, reduce = sharded
        overlap = self.constants.overlap if self.job.stack.overlap_gradients else 0.0
        return PassTime(
            self._exposed(layers * gather, overlap * f), self._exposed(layers * (gather + reduce), overlap * b)
        )

    def _offloading(self, stage: int, forward: float, backward: float) -> PassTime:
        """The part of activations' way to the host and back that a stage's computation does not hide."""
        if self.job.layout.tiers.activations == "device":
            return PassTime(0.0, 0.0)
        way = pass_activations(self.job, self.job.groups(stage)) / HOST_LINK
        return PassTime(max(0.0, way - forward), max(0.0, way - backward))

    def _reading(self, stage: int, forward: float, backward: float) -> PassTime:
        """The part of reading weights from disk, in each pass, that a stage's computation does not hide."""
        job = self.job
        if job.layout.tiers.parameters != "disk" or not (job.alone or job.layout.zero_stage == 3):
            return PassTime(0.0, 0.0)
        each = job.stack.weight_bytes if job.alone and job.stack.weight_bytes else job.master_bytes
        shards = job.shards if job.layout.zero_stage == 3 else 1
        seconds = sum(held_parameters(job, stage)) * each / shards / (DISK_GB_S * 1e9)
        return PassTime(max(0.0, seconds - forward), max(0.0, seconds - backward))

    def gradients(self, backward: float) -> float:
        """Exposed seconds of the data-parallel exchange once a step."""
        job, held = self.job, sum(held_parameters(self.job, 0))
        if job.frozen:
            return 0.0
        if job.layout.zero_stage >= 3:
            wire = self.wires.all_reduce(self.replicate, held * job.stack.reduce_bytes / job.shards)
        elif job.layout.zero_stage == 0 or job.shards == 1:
            group = CommGroup(
                job.layout.data_parallel * job.layout.cp,
                max(self.shard.local, self.replicate.local * max(1, self.shard.local)),
            )
            wire = self.wires.all_reduce(group, held * job.stack.reduce_bytes)
        else:
            wire = self.wires.all_gather(self.shard, held * gathered_bytes(job))
            if job.layout.zero_stage == 1:
                wire += self._reduce(held)
            wire += self.wires.all_reduce(self.replicate, held * job.stack.reduce_bytes / job.shards)
        if not job.stack.overlap_gradients:
            return wire
        return self._exposed(wire, self.constants.overlap * backward)

    def _reduce(self, numel: float) -> float:
        """Seconds of one reduction of gradients to the ranks that keep them; quantized ones go there directly,
        which takes longer for its bytes than a ring. Encoding and decoding are not counted."""
        job = self.job
        sent = job.layout.quantized_gradients
        if sent == "none":
            return self.wires.all_gather(self.shard, numel * job.stack.reduce_bytes)
        model = job.model
        ends = model.embedding * (1 if model.tied else 2) / model.num_parameters  # the same share on every rank
        each = (1 - ends) * bytes_each(sent) + ends * bytes_each(job.layout.gradient_format(("vocab",)))
        return self.wires.all_gather(self.shard, numel * each) / self.wires.scattered

    def send(self) -> float:
        """Seconds of one message between stages."""
        job = self.job
        if job.layout.pp == 1:
            return 0.0
        # Tensor-parallel ranks send a share each, also where all of them hold the whole (Narayanan et al., 2021).
        payload = job.tokens * job.model.hidden * self.device.width / job.layout.tp
        calls = 1e-6 * self.constants.message_us * job.stack.python
        return calls + self.wires.send(payload, far=job.layout.world_size // job.layout.pp >= self.cluster.domain)


def gathered_bytes(job: Job) -> float:
    """Bytes on the wire of a weight that ZeRO gathers."""
    sent = job.layout.quantized_weights
    return job.stack.weight_bytes if sent == "none" else bytes_each(sent)


def moved_bytes(job: Job, parameters: float, cluster: ClusterSpec) -> float:
    """Bytes per trained parameter that a step reads and writes in the state's home, both ways together, on a rank that
    steps `parameters` of them.

    Gradients on disk are written once and read twice, for their norm and for the step, unless the page cache has room.
    """
    stack, tiers = job.stack, job.layout.tiers
    gradients = 2 * stack.gradient_bytes
    if tiers.optimizer == "disk":
        room = PAGE_CACHE_SHARE * cluster.host_memory_gb * 1e9 / cluster.per_node
        gradients = 0.0 if parameters * stack.gradient_bytes <= room else 3 * stack.gradient_bytes
    if tiers.parameters == "disk":
        return 2 * (stack.state_bytes + (stack.weight_bytes if job.alone else 0.0)) + gradients
    if job.keeps_masters:
        return tiers.optimizer_share * (2 * stack.state_bytes + gradients)
    return tiers.optimizer_share * 2 * (stack.state_bytes - job.master_bytes)


def predict_step_time(job: Job, cluster: ClusterSpec, constants: Constants = FITTED) -> StepTime:
    """Seconds of one optimizer step of `job` on `cluster`, by cause."""
    return StepModel(job, cluster, constants).predict()
