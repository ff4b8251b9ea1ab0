"""The one place that puts a step's time together: computation, what communication does not hide, bubble, update."""

from dataclasses import dataclass

from meshwright.plan.blueprint import Block
from meshwright.plan.comm import Group, Wires, axis_group
from meshwright.plan.constants import FITTED, Constants
from meshwright.plan.job import Job
from meshwright.plan.memory import held_parameters
from meshwright.plan.pipeline import pipeline_seconds
from meshwright.plan.roofline import Device, Pass
from meshwright.spec.cluster import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step by cause; they add up to `total`."""

    compute: float
    """Arithmetic and memory traffic of the busiest stage, recomputation included."""
    recompute: float
    """The part of `compute` that recomputation is."""
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
    """Clipping, the optimizer, and what a step costs apart from its parts."""
    wire_seconds: float
    """What data-parallel ranks exchange once a step, hidden or not."""
    host: float = 0.0
    """The part of `compute` in which the device waits for the host to issue operators."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        parts = (self.compute, self.tensor, self.context, self.expert, self.data, self.pipeline, self.bubble)
        return sum(parts) + self.update

    @property
    def exposed(self) -> float:
        """All communication that nothing hides."""
        return self.tensor + self.context + self.expert + self.data + self.pipeline


class StepModel:
    """The time of one job on one cluster, part by part."""

    def __init__(self, job: Job, cluster: ClusterSpec, constants: Constants = FITTED) -> None:
        self.job, self.cluster, self.constants = job, cluster, constants
        self.wires = Wires.of(cluster, constants)
        self.device = Device(cluster, job, constants)
        self.tp = axis_group(cluster, job.tp, 1)
        self.cp = axis_group(cluster, job.cp, job.tp)
        self.shard = axis_group(cluster, job.shards, job.tp if job.stack.group_shards else job.tp * job.cp)
        self.replicate = axis_group(cluster, job.dp_replicate, job.tp * job.cp * job.dp_shard)
        self.ep = axis_group(cluster, job.ep, 1)

    def predict(self) -> StepTime:
        """The whole step."""
        job = self.job
        compute = [self._block_compute(block) for block in job.model.kinds]
        again = [self._recompute(block, time) for block, time in zip(job.model.kinds, compute, strict=True)]
        tensor = [self._tensor(block) for block in job.model.kinds]
        context, expert = self._context(compute[0]), [self._expert(block) for block in job.model.kinds]
        sharded = self._gathered_per_microbatch()
        head = self.device.head()
        forward, backward, weights = [], [], []
        layer = 0
        for stage, count in enumerate(job.stage_layers):
            kinds = job.model.pattern[layer : layer + count]
            layer += count
            f = sum(compute[k].forward + tensor[k].forward + context.forward + expert[k].forward for k in kinds)
            b = sum(
                compute[k].backward + again[k] + tensor[k].backward + context.backward + expert[k].backward
                for k in kinds
            )
            if stage == job.pp - 1:
                f, b = f + head.forward, b + head.backward
            exposed = self._hide_gathering(sharded, count, f, b)
            forward.append(f + exposed.forward)
            backward.append(b + exposed.backward)
            weights.append((kinds, exposed, stage))
        busiest = max(range(job.pp), key=lambda stage: forward[stage] + backward[stage])
        timeline = pipeline_seconds(forward, backward, job.microbatches, job.virtual_stages, self._send())
        return self._account(timeline, weights[busiest], compute, again, tensor, context, expert, head, backward)

    def _account(self, timeline, busiest, compute, again, tensor, context, expert, head, backward) -> StepTime:
        """The busiest stage's parts, times the microbatches, and what a step pays once."""
        job = self.job
        kinds, gathering, stage = busiest
        count = job.microbatches
        arithmetic = sum(compute[k].forward + compute[k].backward for k in kinds)
        if stage == job.pp - 1:
            arithmetic += head.forward + head.backward
        repeated = sum(again[k] for k in kinds)
        once, wire = self._gradients(backward[stage])
        messages = 0.0 if job.pp == 1 else 2 * (job.pp - 1) * self._send()
        held = sum(held_parameters(job, stage))
        update = self.device.update(held / (job.shards if job.zero >= 1 else 1))
        if job.offload != "none":
            update = held / job.shards * 16 / (self.constants.offload_gb_s * 1e9)
        both = [t[k].forward + t[k].backward for t in (tensor, expert) for k in kinds]
        idle = [self.device.waiting(job.model.kinds[k]) for k in kinds]
        return StepTime(
            host=count * sum(idle),
            compute=count * (arithmetic + repeated),
            recompute=count * repeated,
            tensor=count * sum(both[: len(kinds)]),
            expert=count * sum(both[len(kinds) :]),
            context=count * len(kinds) * (context.forward + context.backward),
            data=count * (gathering.forward + gathering.backward) + once,
            pipeline=messages,
            bubble=timeline.bubble - messages,
            update=update + self.constants.step_ms * 1e-3 * job.stack.python,
            wire_seconds=wire,
        )

    def _block_compute(self, block: Block) -> Pass:
        return self.device.block(block)

    def _recompute(self, block: Block, time: Pass) -> float:
        """Seconds of computing again in the backward pass, tensor-parallel collectives included."""
        if self.job.recompute == "none":
            return 0.0
        share = self.job.recompute_share
        if self.job.recompute == "full":
            return share * (time.forward + self._tensor(block).forward)
        return share * self.device.cheap_part(block)

    def _tensor(self, block: Block) -> Pass:
        """Two all-reduces (or their halves, with sequence parallelism) a pass, one for each half of the block."""
        job = self.job
        if job.tp == 1:
            return Pass(0.0, 0.0)
        payload = job.tokens * job.model.hidden * self.device.width
        visits = 1 if block.num_experts and job.ep > 1 else 2
        both = visits * self.wires.all_reduce(self.tp, payload)
        # With sequence parallelism each is cut in two halves, and the backward pass gathers once more.
        shown = 1 - self.constants.tensor_hidden if job.stack.overlap_tensor else 1.0
        return Pass(shown * both, shown * both * (1.25 if job.sequence_parallel else 1.0))

    def _context(self, time: Pass) -> Pass:
        """Keys and values travel around the ring behind the attention of the part before."""
        job, model = self.job, self.job.model
        if job.cp == 1:
            return Pass(0.0, 0.0)
        payload = 2 * job.micro_batch * job.sequence * model.num_kv_heads * model.head_dim / job.tp * self.device.width
        ring = self.wires.all_gather(self.cp, payload)
        hidden = self.constants.overlap * self.device._attention(job.tokens).forward
        return Pass(max(0.0, ring - hidden), max(0.0, 2 * ring - 2.5 * hidden))

    def _expert(self, block: Block) -> Pass:
        """Tokens travel to their experts and back, in both passes."""
        job = self.job
        if not block.num_experts or job.ep == 1:
            return Pass(0.0, 0.0)
        token_bytes = job.tokens / job.tp * job.model.hidden * self.device.width
        far = None
        if job.stack.expert_relay:
            domains = self.ep.domains
            far = token_bytes * (domains - 1) * (1 - (1 - 1 / domains) ** job.model.top_k)
        trip = self.wires.all_to_all(self.ep, token_bytes * min(job.model.top_k, job.ep), far)
        return Pass(2 * trip * self.constants.imbalance, 2 * trip * self.constants.imbalance)

    def _gathered_per_microbatch(self) -> tuple[float, float] | None:
        """ZeRO-3's seconds a layer: gathering weights, and reducing gradients."""
        job = self.job
        if job.zero < 3 or job.shards == 1:
            return None
        numel = self._layer_share()
        gather = self.wires.all_gather(self.shard, numel * job.stack.weight_bytes)
        reduce = 0.0 if job.lora else self.wires.all_gather(self.shard, numel * job.stack.reduce_bytes)
        return gather, reduce

    def _layer_share(self) -> float:
        model, job = self.job.model, self.job
        total = sum(block.dense / job.tp + block.whole + block.experts / job.ep for block in model.blocks)
        ends = model.embedding * (1 if model.tied else 2) / job.tp
        return (total + ends) / model.num_layers

    def _hide_gathering(self, sharded: tuple[float, float] | None, layers: int, f: float, b: float) -> Pass:
        """What of ZeRO-3's traffic a stage's computation does not hide, and how much it slows that down."""
        if sharded is None:
            return Pass(0.0, 0.0)
        gather, reduce = sharded
        again = gather if self.job.recompute != "none" or self.job.zero == 3 else 0.0
        constants = self.constants
        shown = []
        for time, wire in ((f, layers * gather), (b, layers * (again + reduce))):
            hidden = min(wire, constants.overlap * time)
            shown.append(wire - hidden + constants.contention * hidden)
        return Pass(*shown)

    def _gradients(self, backward: float) -> tuple[float, float]:
        """Seconds, exposed and in all, of what data-parallel ranks exchange once a step."""
        job, constants = self.job, self.constants
        held = sum(held_parameters(job, 0))
        if job.lora:
            return 0.0, 0.0
        if job.zero >= 3:
            wire = self.wires.all_reduce(self.replicate, held * job.stack.reduce_bytes / job.shards)
        elif job.zero == 0 or job.shards == 1:
            group = Group(job.dp * job.cp, max(self.shard.local, self.replicate.local * max(1, self.shard.local)))
            wire = self.wires.all_reduce(group, held * job.stack.reduce_bytes)
        else:
            wire = self.wires.all_gather(self.shard, held * job.stack.reduce_bytes)
            wire += self.wires.all_gather(self.shard, held * job.stack.weight_bytes)
            wire += self.wires.all_reduce(self.replicate, held * job.stack.reduce_bytes / job.shards)
        if not job.stack.overlap_gradients:
            return wire, wire
        hidden = min(wire, constants.overlap * backward)
        return wire - hidden + constants.contention * hidden, wire

    def _send(self) -> float:
        """Seconds of one message between stages."""
        job = self.job
        if job.pp == 1:
            return 0.0
        payload = job.tokens * job.model.hidden * self.device.width / (job.tp if job.sequence_parallel else 1)
        return self.wires.send(payload, far=job.world // job.pp >= self.cluster.domain)


def predict_step_time(job: Job, cluster: ClusterSpec, constants: Constants = FITTED) -> StepTime:
    """Seconds of one optimizer step of `job` on `cluster`, by cause."""
    return StepModel(job, cluster, constants).predict()
