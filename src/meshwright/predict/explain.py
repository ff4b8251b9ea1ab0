"""A plan's reasons: the bottleneck, why other layouts lose, what would help, and the effect of single options."""

from dataclasses import replace

from meshwright.predict.candidate import Candidate, evaluate, strategy_name
from meshwright.predict.changes import CHANGES
from meshwright.predict.job import Job
from meshwright.predict.layouts import SearchLimits, divisors, layouts
from meshwright.predict.search import recomputing_least
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import AXES
from meshwright.spec.precision import BF16, FP16, Precision
from meshwright.spec.recompute import describe_recompute, layer_policies

GB = 1e9
CAUSES = {
    "tensor": "exposed tensor-parallel communication",
    "context": "exposed context-parallel communication",
    "expert": "exposed expert-parallel communication",
    "data": "exposed data-parallel communication",
    "pipeline": "messages between stages",
    "bubble": "waiting for other pipeline stages",
    "update": "the optimizer step",
    "recompute": "recomputation",
}
WORTH_A_WORD = 0.01
"""Fraction of a step below which neither a cause nor a saving is named."""
FINEST = 0.0001
"""Fraction of a time below which a difference is not shown."""
SAME = 0.005
"""Fraction of a step within which two layouts are called equally fast."""


def short(number: float) -> str:
    """A number of gigabytes or seconds to three digits."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def describe(job: Job) -> str:
    """The layout in the recipe's words, without degrees of 1."""
    layout = job.layout
    degrees = [f"{axis}={getattr(layout, axis)}" for axis in (*AXES, "ep") if getattr(layout, axis) > 1]
    if layout.pp > 1 and layout.schedule != "1f1b":
        degrees.append(f"schedule={layout.schedule}")
    if layout.virtual_stages > 1:
        degrees.append(f"stages_per_rank={layout.virtual_stages}")
    if layout.offload != "none":
        degrees.append(f"offload={layout.offload_word}")
    for field in ("quantized_weights", "quantized_gradients"):
        if getattr(layout, field) != "none":
            degrees.append(f"{field}={getattr(layout, field)}")
    if layout.gradient_error_feedback:
        degrees.append("gradient_error_feedback=true")
    rest = f"zero={layout.zero_stage}", f"micro_batch={job.micro_batch}", f"recompute={recomputes(job)}"
    return " ".join((*degrees, *rest))


def describe_candidate(candidate: Candidate) -> str:
    """The layout in the recipe's words, and the training settings that differ from the recipe's."""
    training = candidate.change.training if candidate.change else ()
    return " ".join((describe(candidate.job), *(setting.removeprefix("training.") for setting in training)))


def recomputes(job: Job) -> str:
    """A job's recomputation: a policy, or the number of layers out of all."""
    return describe_recompute(layer_policies(job.recompute, job.cut))


def why_not(candidate: Candidate, chosen: Candidate | None) -> str:
    """Why a strategy's best layout is not the chosen one: the memory it lacks, or the time it loses."""
    memory = candidate.memory
    if candidate.verdict == "does not fit" and memory.total <= candidate.capacity:
        available = (1 - candidate.margin) * candidate.cluster.host_memory_gb
        return f"needs {short(candidate.host_bytes / GB)} GB of host memory per node, {short(available)} available"
    if candidate.verdict == "does not fit":
        kinds = {kind: size for kind, size in memory.kinds().items() if kind != "context"}
        kind = max(kinds, key=lambda name: kinds[name])
        return (
            f"needs {short(memory.total / GB)} GB, {short(candidate.capacity / GB)} available; "
            f"largest term {kind} {short(kinds[kind] / GB)} GB"
        )
    if chosen is None or candidate.job == chosen.job:
        return "chosen" if chosen else "the fastest"
    slower = candidate.time.total / chosen.time.total - 1
    both = _unlike(candidate.time.total, chosen.time.total)
    if candidate.verdict == "tight" and chosen.verdict == "fits":
        speed = f", {-slower:.0%} faster: {both}" if slower < -WORTH_A_WORD else ""
        return f"tight: {short(memory.total / GB)} of {short(candidate.capacity / GB)} GB{speed}"
    if slower < -SAME:
        return f"{-slower:.1%} faster: {both}, within the prediction error"
    if slower < SAME:
        return f"as fast: {both}"
    return f"{slower:.0%} slower: {_largest_loss(candidate, chosen)}"


def _largest_loss(candidate: Candidate, chosen: Candidate) -> str:
    """The cause in which a layout loses most time to the chosen one."""

    def seconds(of: Candidate, cause: str) -> float:
        return of.time.compute - of.time.recompute if cause == "once" else getattr(of.time, cause)

    causes = {"once": "forward and backward passes"} | CAUSES
    cause = max(causes, key=lambda name: seconds(candidate, name) - seconds(chosen, name))
    more, less = seconds(candidate, cause), seconds(chosen, cause)
    return f"{causes[cause]} {_unlike(more, less)}"


def _unlike(more: float, less: float) -> str:
    """Two times, with enough digits to show a difference of `FINEST`."""
    shown = short(more), short(less)
    for decimals in range(1, 9):
        if shown[0] != shown[1] or abs(more - less) < FINEST * more:
            break
        shown = f"{more:.{decimals}f}", f"{less:.{decimals}f}"
    return f"{shown[0]} s instead of {shown[1] if less else 0} s"


def binding(candidate: Candidate) -> str:
    """The two largest costs of the step, and how full the memory is."""
    time, share = candidate.time, candidate.memory.total / candidate.capacity
    names = {"compute": "computation"} | {cause: name for cause, name in CAUSES.items() if cause != "recompute"}
    if candidate.job.layout.tiers.moves_state:
        names["update"] = "the optimizer, with state read and written in host memory or on disk"
    elif candidate.job.layout.offload != "none":
        names["update"] = "the optimizer, with transfers of its state between device and host (offloading)"
    parts = {cause: getattr(time, cause) / time.total for cause in names}
    first, second, *_ = sorted(parts, key=lambda cause: -parts[cause])
    words = f"{names[first]}, {parts[first]:.0%} of the step"
    again = time.recompute / time.total
    if first == "compute" and again >= WORTH_A_WORD:
        words += f" (recomputation {again:.0%})"
    if parts[second] >= WORTH_A_WORD:
        words += f"; then {names[second]}, {parts[second]:.0%}"
    return f"{words}; memory is {share:.0%} full"


def no_layout(base: Job, cluster: ClusterSpec, limits: SearchLimits) -> str:
    """Why a cluster has no legal layout for a job, and what would work, before any look at memory or time."""

    def works(job: Job, devices: int) -> bool:
        where = cluster.model_copy(update={"devices": devices})
        return next(layouts(job, where, limits), None) is not None

    devices = cluster.devices
    each = 1 if limits.micro_batch else base.micro_batch
    if works(replace(base, micro_batch=1), devices) and not limits.micro_batch:
        return (
            f"training.micro_batch={each} does not divide any layout's sequences per rank (global batch "
            f"{base.global_batch}); use 1, or auto"
        )
    fewer = [count for count in divisors(devices)[:-1] if works(base, count)]
    ranks = devices * each
    batch = max(1, round(base.global_batch / ranks)) * ranks
    remedies = [f"{fewer[-1]} devices"] if fewer else []
    remedies += [f"training.global_batch={batch}"] if works(replace(base, global_batch=batch), devices) else []
    return (
        f"training.global_batch={base.global_batch} sequences cannot be split over {devices} data-parallel ranks, "
        "and no degree of pp, tp or cp that divides the layers, heads or sequence leaves a suitable number of "
        f"ranks; what works: {' or '.join(remedies) or 'another batch and number of devices'}"
    )


def relief(job: Job, cluster: ClusterSpec, margin: float, *, offload: bool = True) -> str | None:
    """The change with the least time cost that makes a layout fit, with offloading only if `offload`; None if no usual
    one does."""
    before = evaluate(job, cluster, margin)
    tried = [
        (words, evaluate(changed, where, margin)) for words, changed, where in _reliefs(job, cluster, margin, offload)
    ]
    fitting = [(candidate.time.total, words, candidate) for words, candidate in tried if candidate.verdict == "fits"]
    if not fitting:
        return None
    seconds, words, candidate = min(fitting, key=lambda entry: entry[0])
    change = seconds / before.time.total - 1
    times = _unlike(seconds, before.time.total)
    return f"{words}: {short(candidate.memory.total / GB)} GB, step time {change:+.0%} ({times})"


def _reliefs(job: Job, cluster: ClusterSpec, margin: float, offload: bool) -> list[tuple[str, Job, ClusterSpec]]:
    """The usual remedies, one at a time."""
    remedies: list[tuple[str, Job, ClusterSpec]] = []
    if job.recompute != "full":
        again = recomputing_least(job, cluster, margin)
        remedies.append((f"recompute={recomputes(again)}", again, cluster))
    if job.micro_batch > 1:
        remedies.append(
            (f"micro_batch={job.micro_batch // 2}", replace(job, micro_batch=job.micro_batch // 2), cluster)
        )
    layout, dp = job.layout, job.layout.data_parallel
    if dp > 1:
        for zero in range(max(1, layout.zero_stage + 1), 4):
            sharded = job.with_layout(zero=zero, dp_shard=dp, dp_replicate=1)
            remedies.append((f"zero={zero}, dp_shard={dp}", sharded, cluster))
            again = recomputing_least(sharded, cluster, margin)
            remedies.append((f"zero={zero} and recompute={recomputes(again)}", again, cluster))
    if offload and layout.offload == "none":
        sharded = {"zero": max(layout.zero_stage, 3 if dp > 1 else 0), "dp_shard": dp, "dp_replicate": 1}
        for name in ("parameters", "disk", "disk_parameters", "activations"):
            change = CHANGES[name]
            if change.moves_activations and job.recompute not in ("none", "full"):
                continue
            moved = job.with_layout(**change.layout, **(sharded if "parameters" in name else {}))
            if name == "disk_parameters" and moved.alone and cluster.device != "cpu":
                continue  # refused
            if cluster.device == "cpu" and "disk" not in name:
                continue  # a CPU's memory is the host's
            remedies.append((f"offload={moved.layout.offload_word}", moved, cluster))
    if layout.zero_stage >= 1 and layout.dp_replicate == 1 and job.global_batch % (dp + cluster.per_node) == 0:
        more = cluster.model_copy(update={"devices": cluster.devices + cluster.per_node})
        shards = layout.dp_shard + cluster.per_node // (layout.tp * layout.cp * layout.pp)
        remedies.append((f"one more node (dp_shard={shards})", job.with_layout(dp_shard=shards), more))
    return remedies


def bandwidth(candidate: Candidate) -> str | None:
    """How much faster the network must be to hide the exchange of weights and gradients; None if it is hidden
    already."""
    job, cluster, time = candidate.job, candidate.cluster, candidate.time
    if cluster.devices <= cluster.domain or time.data < 0.1 * time.total:
        return None
    for factor in (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
        faster = cluster.model_copy(update={"network_gb_s": cluster.network_gb_s * factor})
        if evaluate(job, faster, candidate.margin).time.data < 0.05 * time.total:
            rate = cluster.network_gb_s * cluster.per_node * 8
            cure = "shard only inside the node (hybrid)" if job.layout.dp_replicate == 1 else "larger microbatches"
            return (
                f"{strategy_name(job)} needs {factor:g} times the bandwidth of this network ({short(rate)} Gb/s per "
                f"node) to hide its traffic; or {cure}"
            )
    return f"{strategy_name(job)} cannot hide its traffic on this network at any bandwidth"


def compiled_gain(candidate: Candidate) -> float | None:
    """The fraction of the step that `training.compile` would save; None if it is on, or unavailable."""
    job = candidate.job
    if job.stack.fused or (
        job.layout.pp > 1 and job.layout.schedule in ("interleaved-zero-bubble", "zbv", "dualpipev")
    ):
        return None
    fused = evaluate(replace(job, stack=replace(job.stack, fused=True)), candidate.cluster, candidate.margin)
    return 1 - fused.time.total / candidate.time.total


def in_fp8(candidate: Candidate) -> dict[str, float] | None:
    """Seconds of a step of the same layout with its blocks' matrix products in fp8, and the fraction of the step that
    this saves; None if the device has no fp8, or nothing is saved."""
    job, cluster = candidate.job, candidate.cluster
    if job.precision.products != BF16.name or "fp8" not in cluster.tflops:
        return None
    quantized = replace(job, precision=replace(job.precision, recipe="fp8"))
    seconds = evaluate(quantized, cluster, candidate.margin).time.total
    saved = 1 - seconds / candidate.time.total
    return {"step_time": seconds, "saved": saved} if saved > WORTH_A_WORD else None


def in_fp16(candidate: Candidate) -> dict[str, float] | None:
    """Seconds of a step of the same layout in fp16 on a device that has fast products in fp16 alone, and the fraction
    of the step that this saves; None on other devices."""
    job, tflops = candidate.job, candidate.cluster.tflops
    if job.precision.products != BF16.name or tflops[BF16.name] >= tflops.get(FP16.name, 0.0):
        return None
    seconds = evaluate(replace(job, precision=Precision.of(FP16.name)), candidate.cluster, candidate.margin).time.total
    return {"step_time": seconds, "saved": 1 - seconds / candidate.time.total}


def in_bf16(candidate: Candidate) -> dict[str, float] | None:
    """Seconds of a step of the same layout in bf16 if its low-precision products are emulated, and the fraction of the
    step that this saves; None if they are not."""
    job = candidate.job
    if not job.stack.emulated:
        return None
    stack = replace(job.stack, emulated=False, coded_inputs="none")
    plain = replace(job, precision=replace(job.precision, recipe=None), stack=stack)
    seconds = evaluate(plain, candidate.cluster, candidate.margin).time.total
    return {"step_time": seconds, "saved": 1 - seconds / candidate.time.total}
