"""Derivation of a plan's figures, term by term: `plan --explain`."""

from collections.abc import Iterator

from meshwright.predict.candidate import Candidate
from meshwright.predict.explain import describe_candidate, recomputes, short, why_not
from meshwright.predict.job import Job
from meshwright.predict.recipe import choice_reason
from meshwright.predict.report import Plan
from meshwright.spec.errors import UserError
from meshwright.spec.quantized import KEPT, bytes_each

GB = 1e9


def explain_field(plan: Plan, field: str) -> str:
    """The derivation of one figure: of the recipe's own layout, else of the chosen one; if nothing fits, of the layout
    that needs least memory. Raises `UserError` with the known fields, or if there is no layout."""
    shown, about = plan.best, ""
    if plan.given:
        about = "the recipe's own layout is " if shown else "nothing fits; the recipe's own layout is "
        shown = plan.given
    elif shown is None and plan.searched.strategies:
        shown = min(plan.searched.strategies.values(), key=lambda candidate: candidate.memory.total)
        about = "nothing fits; the layout that needs least memory is "
    if shown is None:
        raise UserError(f"no layout to explain: {plan.problem}")
    explained = {
        "memory": _explain_memory,
        "time": _explain_time,
        "mfu": _explain_mfu,
        "cost": _explain_cost,
        "search": _explain_search,
    }
    if field not in explained:
        raise UserError(f"--explain {field}: choose one of {', '.join(explained)}")
    return "\n".join([f"{about}{shown.strategy}: {describe_candidate(shown)}", *explained[field](plan, shown)])


def _explain_memory(plan: Plan, chosen: Candidate) -> list[str]:
    job, use = chosen.job, chosen.memory
    trained = (
        f"per parameter of adapters ({job.adapters / 1e6:.3g} million)" if job.adapters is not None else "a parameter"
    )
    tiers = job.layout.tiers
    offloaded = "" if tiers.optimizer == "device" else ", in host memory"
    if tiers.moves_state:
        where = "on disk" if tiers.optimizer == "disk" else "in host memory"
        offloaded = f", of which {(use.disk or use.host) / GB:.2f} GB are {where}"
    notes = {
        "weights": _kept_weights(job)
        + (", on disk" if tiers.parameters == "disk" and job.alone else "")
        + (", gathered layer by layer (see communication)" if job.layout.zero_stage == 3 and job.shards > 1 else ""),
        "gradients": f"{job.stack.gradient_bytes:g} bytes {trained}"
        + (f", split over {job.shards} ranks" if job.layout.zero_stage >= 2 else "")
        + (f", and {bytes_each(KEPT):.3g} of errors, not split" if job.layout.gradient_error_feedback else ""),
        "optimizer": f"{job.stack.state_bytes:g} bytes {trained}: master weights and moments"
        + (f", split over {job.shards} ranks" if job.layout.zero_stage >= 1 else "")
        + offloaded,
        "activations": f"recompute={recomputes(job)}, {job.micro_batch} x {job.sequence} tokens per microbatch"
        + (", in host memory except two blocks'" if tiers.activations == "host" else ""),
        "logits": "a chunk of logits, and the loss's gradient" + ("" if job.frozen else ", and the head's in fp32"),
        "communication": _in_transit(job),
        "fragmentation": "reserved by the caching allocator, but unused",
        "context": "driver, libraries and communicators",
    }
    lines = [f"  {kind:<14}{size / GB:>8.2f} GB  {notes[kind]}" for kind, size in use.kinds().items()]
    total = chosen.memory_bytes
    lines.append(
        f"  {'total':<14}{use.total / GB:>8.2f} GB  ({total.low / GB:.1f} to {total.high / GB:.1f}), stage {use.stage}"
    )
    lines.append(f"  {'available':<14}{chosen.capacity / GB:>8.2f} GB  of which {chosen.margin:.0%} must stay free")
    return [*lines, *_memory_verdict(plan, chosen)]


def _memory_verdict(plan: Plan, shown: Candidate) -> Iterator[str]:
    """Whether the layout fits its devices, and what would fit if it does not."""
    words = f"{shown.verdict}: {short(shown.memory.total / GB)} of {short(shown.capacity / GB)} GB"
    if shown.verdict == "does not fit":
        words = f"does not fit: {why_not(shown, None)}"
    elif shown.verdict == "tight":
        words += f", so less than {shown.margin:.0%} stays free"
    yield f"  {'verdict':<14}{words}"
    if shown.verdict == "fits":
        return
    remedies = [plan.relief] if shown is plan.given and plan.relief else []
    if plan.chosen and plan.chosen is not shown and plan.chosen.verdict == "fits":
        chosen = plan.chosen
        figures = f"{short(chosen.memory.total / GB)} GB, {short(chosen.time.total)} s a step"
        remedies.append(f"the layout that plan chooses ({describe_candidate(chosen)}: {figures})")
    for number, remedy in enumerate(remedies or plan.advice or ["nothing that was tried"]):
        yield f"  {'' if number else 'would fit':<14}{remedy}"


def _kept_weights(job: Job) -> str:
    """How the weights of the computation are stored."""
    each = f"{job.stack.weight_bytes:g} bytes per parameter"
    if not job.frozen:
        return f"{each} of the compute copy"
    if job.frozen_bytes:
        return (
            f"{job.frozen_bytes:.3g} bytes per parameter of blocks, including scales, and {each} of embedding and head"
        )
    return f"{each}, frozen"


def _in_transit(job: Job) -> str:
    """Transient memory while blocks run."""
    parts = ["a dequantized matrix"] if job.frozen_bytes else []
    if not job.alone:
        parts += ["gathered layers, and gradients in transit"]
    return "; ".join(parts) or "none: one process"


def _explain_time(plan: Plan, chosen: Candidate) -> list[str]:
    time, job = chosen.time, chosen.job
    moved = ", activations to the host and back" if job.layout.tiers.activations == "host" else ""
    moved += ", weights read from disk" if job.layout.tiers.parameters == "disk" else ""
    parts = [
        ("compute", time.compute, f"{job.microbatches} microbatches on the busiest stage"),
        ("  recompute", time.recompute, "of which recomputation"),
        ("  host", time.host, "of which waiting for the host"),
        ("tensor", time.tensor, "exposed: two all-reduces per block and pass"),
        ("context", time.context, "exposed: exchange of keys and values"),
        ("expert", time.expert, "exposed: all-to-alls of tokens"),
        ("data", time.data, "exposed: weight all-gathers, gradient reductions" + moved),
        ("pipeline", time.pipeline, "sends and receives between stages"),
        ("bubble", time.bubble, f"schedule {job.layout.schedule}, {job.layout.pp} stages"),
        ("update", time.update, "clipping, optimizer, fixed costs per step"),
    ]
    lines = [f"  {name:<14}{seconds:>10.4g} s  {note}" for name, seconds, note in parts]
    interval = chosen.seconds
    return [*lines, f"  {'step':<14}{interval.value:>10.4g} s  ({interval.low:.4g} to {interval.high:.4g})"]


def _explain_mfu(plan: Plan, chosen: Candidate) -> list[str]:
    job, cluster = chosen.job, plan.case.cluster
    peak = cluster.peak(job.precision)
    flops = job.flops_per_token
    each = (
        "4 FLOP per frozen parameter in use, 6 per adapter parameter" if job.frozen else "6 FLOP per parameter in use"
    )
    reached = flops * chosen.tokens_per_second / 1e12
    return [
        f"  {flops / 1e9:.3g} GFLOP per token: {each}, plus full attention",
        f"  {chosen.tokens_per_second:.0f} tokens per second and device: {reached:.1f} TFLOP/s",
        f"  {peak:g} TFLOP/s by the datasheet in {job.precision}: {chosen.mfu:.1%}",
    ]


def _explain_cost(plan: Plan, chosen: Candidate) -> list[str]:
    seconds, cost = plan.run_seconds(chosen), plan.cost(chosen)
    lines = [f"  {plan.case.run.training.steps} steps x {chosen.time.total:.4g} s = {seconds.value / 3600:.4g} hours"]
    if cost is None:
        return [*lines, "  the price is unknown: set price_per_hour in a cluster file"]
    devices, price = plan.case.cluster.devices, plan.case.cluster.price_per_hour
    return [
        *lines,
        f"  x {devices} devices x {price:g} an hour = {cost.value:,.0f} ({cost.low:,.0f} to {cost.high:,.0f})",
    ]


def _explain_search(plan: Plan, shown: Candidate) -> list[str]:
    result = plan.searched
    reason = choice_reason(plan) if plan.chosen else why_not(shown, None)
    return [
        f"  {result.legal} legal layouts of {plan.case.cluster.devices} devices; memory and time predicted for "
        f"{result.looked_at}, the others cannot win",
        f"  {reason}",
        *_considered(plan),
    ]


def _considered(plan: Plan) -> Iterator[str]:
    """The best layout of every change that was compared, with its figures and the reason why it lost."""
    if not plan.considered:
        return
    yield "  tried because no layout fits without them:" if plan.last_resort else "  considered:"
    width = max(len(change.name) for change in plan.considered)
    for change in plan.considered:
        best = plan.searched.strategies.get(f"with {change.name}")
        if best is None:
            yield f"  {change.name:<{width}}  applies to no layout"
            continue
        memory, seconds = best.memory_bytes, best.seconds
        yield (
            f"  {change.name:<{width}}  {memory.value / GB:.1f} GB ({memory.low / GB:.1f} to {memory.high / GB:.1f}), "
            f"{short(seconds.value)} s ({short(seconds.low)} to {short(seconds.high)}), "
            f"{'same' if change.exact else 'other'} arithmetic: {plan.reason(best)}; {describe_candidate(best)}"
        )
