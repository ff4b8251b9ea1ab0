"""The one place that puts a plan's reasons into sentences: what binds, why not the others, what would help."""

from collections.abc import Iterable
from dataclasses import replace

from meshwright.plan.job import Job
from meshwright.plan.search import Candidate, Limits, divisors, evaluate, frugal, layouts, strategy_name
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.recompute import describe_recompute, layer_policies

GB = 1e9
CAUSES = {
    "tensor": "exposed tensor-parallel communication",
    "context": "exposed context-parallel communication",
    "expert": "exposed expert-parallel communication",
    "data": "exposed data-parallel communication",
    "pipeline": "messages between stages",
    "bubble": "waiting for other pipeline stages",
    "update": "the optimizer and what a step costs once",
    "recompute": "recomputation",
}
WORTH_A_WORD = 0.01
"""Part of a step below which a cause is not named."""


def short(number: float) -> str:
    """Three digits, for gigabytes and seconds."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def describe(job: Job) -> str:
    """The layout in the recipe's words, degrees of one left out."""
    degrees = [
        f"{axis}={getattr(job, axis)}"
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        if getattr(job, axis) > 1
    ]
    if job.pp > 1 and job.schedule_name != "1f1b":
        degrees.append(f"schedule={job.schedule_name}")
    if job.virtual_stages > 1:
        degrees.append(f"stages_per_rank={job.virtual_stages}")
    if job.offload != "none":
        degrees.append(f"offload={job.offload}")
    return " ".join([*degrees, f"zero={job.zero}", f"micro_batch={job.micro_batch}", f"recompute={recomputes(job)}"])


def recomputes(job: Job) -> str:
    """What a job recomputes: a policy, or numbers of layers of all that there are."""
    return describe_recompute(layer_policies(job.recompute, job.cut))


def why_not(candidate: Candidate, chosen: Candidate | None) -> str:
    """Why a strategy's best layout is not the one chosen: the memory it lacks, or what it loses the time to."""
    memory = candidate.memory
    if candidate.verdict == "does not fit" and memory.total <= candidate.capacity:
        available = (1 - candidate.margin) * candidate.cluster.host_memory_gb
        return f"needs {short(candidate.host_bytes / GB)} GB of a node's own memory, {short(available)} available"
    if candidate.verdict == "does not fit":
        kinds = {kind: size for kind, size in memory.kinds().items() if kind != "context"}
        kind = max(kinds, key=lambda name: kinds[name])
        return (
            f"needs {short(memory.total / GB)} GB, {short(candidate.capacity / GB)} available; "
            f"largest term {kind} {short(kinds[kind] / GB)} GB"
        )
    if chosen is None or candidate.job == chosen.job:
        return "the fastest"
    if candidate.verdict == "tight" and chosen.verdict == "fits":
        return f"tight: {short(memory.total / GB)} of {short(candidate.capacity / GB)} GB"
    slower = candidate.time.total / chosen.time.total - 1
    if slower < 0.005:
        return "as fast"
    return f"{slower:.0%} slower: {_largest_loss(candidate, chosen)}"


def _largest_loss(candidate: Candidate, chosen: Candidate) -> str:
    """The cause in which a layout spends most time more than the chosen one."""
    losses = {cause: getattr(candidate.time, cause) - getattr(chosen.time, cause) for cause in CAUSES}
    plain = (candidate.time.compute - candidate.time.recompute) - (chosen.time.compute - chosen.time.recompute)
    cause = max(losses, key=lambda name: losses[name])
    if plain > losses[cause]:
        return (
            f"computation {short(candidate.time.compute)} s instead of {short(chosen.time.compute)} (smaller products)"
        )
    share = getattr(candidate.time, cause) / candidate.time.total
    return f"{CAUSES[cause]} {short(getattr(candidate.time, cause))} s, {share:.0%} of the step"


def binding(candidate: Candidate) -> str:
    """What takes most of the step, what takes most of the rest, and how full the memory is."""
    time, share = candidate.time, candidate.memory.total / candidate.capacity
    names = {"compute": "computation"} | {cause: name for cause, name in CAUSES.items() if cause != "recompute"}
    if candidate.job.offload != "none":
        names["update"] = "the optimizer and its state's way to the host and back (offloading)"
    parts = {cause: getattr(time, cause) / time.total for cause in names}
    first, second, *_ = sorted(parts, key=lambda cause: -parts[cause])
    words = f"{names[first]}, {parts[first]:.0%} of the step"
    again = time.recompute / time.total
    if first == "compute" and again >= WORTH_A_WORD:
        words += f" (recomputation {again:.0%})"
    if parts[second] >= WORTH_A_WORD:
        words += f"; then {names[second]}, {parts[second]:.0%}"
    return f"{words}; memory is {share:.0%} full"


ALIKE = 0.03
"""Parts of a step in which two layouts may differ and nobody can say which is faster: less than predictions are off."""


def simpler(chosen: Candidate, others: Iterable[Candidate]) -> Candidate | None:
    """The layout with fewest things in it that is about as fast as the chosen one; None where that has no more."""

    def weight(candidate: Candidate) -> tuple[int, float]:
        job = candidate.job
        axes = sum(degree > 1 for degree in (job.pp, job.tp, job.cp, job.ep, job.virtual_stages, job.dp_replicate))
        return axes + (job.pp > 1 and job.schedule_name != "1f1b") + (job.offload != "none"), candidate.time.total

    alike = [
        other
        for other in others
        if other.verdict == chosen.verdict and other.time.total <= (1 + ALIKE) * chosen.time.total
    ]
    least = min(alike, key=weight, default=chosen)
    return least if weight(least)[0] < weight(chosen)[0] else None


def no_layout(base: Job, cluster: ClusterSpec, limits: Limits) -> str:
    """Why a cluster has no layout for a job at all, and what would work; nobody has looked at memory or time then."""

    def works(job: Job, devices: int) -> bool:
        where = cluster.model_copy(update={"devices": devices})
        return next(layouts(job, where, limits), None) is not None

    devices = cluster.devices
    each = 1 if limits.micro_batch else base.micro_batch
    if works(replace(base, micro_batch=1), devices) and not limits.micro_batch:
        return f"training.micro_batch={each} divides no rank's share of {base.global_batch} sequences; use 1, or auto"
    fewer = [count for count in divisors(devices)[:-1] if works(base, count)]
    ranks = devices * each
    batch = max(1, round(base.global_batch / ranks)) * ranks
    remedies = [f"{fewer[-1]} devices"] if fewer else []
    remedies += [f"training.global_batch={batch}"] if works(replace(base, global_batch=batch), devices) else []
    return (
        f"training.global_batch={base.global_batch} sequences cannot be split over {devices} data-parallel ranks, and "
        f"pp, tp and cp leave no fewer ranks that could share them: heads, layers or the sequence do not divide so; "
        f"what works: {' or '.join(remedies) or 'another batch and number of devices'}"
    )


def relief(job: Job, cluster: ClusterSpec, margin: float) -> str | None:
    """The change that costs least time and makes a layout fit; None where none of the usual ones does."""
    before = evaluate(job, cluster, margin)
    tried = [(words, evaluate(changed, where, margin)) for words, changed, where in _reliefs(job, cluster, margin)]
    fitting = [(found.time.total, words, found) for words, found in tried if found.verdict == "fits"]
    if not fitting:
        return None
    seconds, words, found = min(fitting, key=lambda entry: entry[0])
    change = seconds / before.time.total - 1
    return f"{words}: {short(found.memory.total / GB)} GB, step time {change:+.0%}"


def _reliefs(job: Job, cluster: ClusterSpec, margin: float) -> list[tuple[str, Job, ClusterSpec]]:
    """The usual remedies, each alone."""
    found: list[tuple[str, Job, ClusterSpec]] = []
    if job.recompute != "full":
        again = frugal(job, cluster, margin)
        found.append((f"recompute={recomputes(again)}", again, cluster))
    if job.micro_batch > 1:
        found.append((f"micro_batch={job.micro_batch // 2}", replace(job, micro_batch=job.micro_batch // 2), cluster))
    if job.dp > 1:
        for zero in range(max(1, job.zero + 1), 4):
            sharded = replace(job, zero=zero, dp_shard=job.dp, dp_replicate=1)
            found.append((f"zero={zero}, dp_shard={job.dp}", sharded, cluster))
            again = frugal(sharded, cluster, margin)
            found.append((f"zero={zero} and recompute={recomputes(again)}", again, cluster))
    if job.offload == "none":
        offloaded = replace(
            job, offload="cpu", zero=max(job.zero, 3 if job.dp > 1 else 0), dp_shard=job.dp, dp_replicate=1
        )
        found.append(("offload=cpu", offloaded, cluster))
    if job.zero >= 1 and job.dp_replicate == 1 and job.global_batch % (job.dp + cluster.per_node) == 0:
        more = cluster.model_copy(update={"devices": cluster.devices + cluster.per_node})
        shards = job.dp_shard + cluster.per_node // (job.tp * job.cp * job.pp)
        found.append((f"one node more (dp_shard={shards})", replace(job, dp_shard=shards), more))
    return found


def bandwidth(candidate: Candidate) -> str | None:
    """How much faster the network must be to hide the exchange of weights and gradients; None where it is."""
    job, cluster, time = candidate.job, candidate.cluster, candidate.time
    if cluster.devices <= cluster.domain or time.data < 0.1 * time.total:
        return None
    for factor in (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
        faster = cluster.model_copy(update={"network_gb_s": cluster.network_gb_s * factor})
        if evaluate(job, faster, candidate.margin).time.data < 0.05 * time.total:
            rate = cluster.network_gb_s * cluster.per_node * 8
            cure = "shard inside the node alone (hybrid)" if job.dp_replicate == 1 else "larger microbatches"
            return (
                f"{strategy_name(job)} over this network ({short(rate)} Gb/s a node) needs {factor:g} times what you "
                f"have to hide its traffic; or {cure}"
            )
    return f"{strategy_name(job)} over this network cannot hide its traffic, whatever the rate"
