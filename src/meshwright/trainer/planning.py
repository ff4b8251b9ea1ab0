"""The one place that plans a recipe: its model and batch looked up, its cluster resolved, its layout searched for."""

from pathlib import Path
from typing import Any

from meshwright.families import resolve_model
from meshwright.plan.blueprint import blueprint
from meshwright.plan.engine import engine_job, engine_layout
from meshwright.plan.explain import describe, recomputes, short, why_not
from meshwright.plan.hardware import resolve_cluster
from meshwright.plan.job import Job
from meshwright.plan.machine import Machine, find_machine
from meshwright.plan.report import Plan, make_plan, plan_facts
from meshwright.plan.search import Candidate, Limits
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import Run
from meshwright.trainer.batch import sequences_per_step

GB = 1e9


def plan_recipe(
    run: Run,
    *,
    base_dir: Path,
    cluster: str | ClusterSpec | None = None,
    machine: Machine | None = None,
    top: int = 8,
    limits: Limits | None = None,
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a recipe on `cluster` (default: the recipe's), and the same as plain data.

    Raises `ValueError` for an unknown model or cluster.
    """
    machine = machine or find_machine(run.device)
    where = resolve_cluster(cluster or run.cluster, base_dir=base_dir, machine=machine)
    spec = resolve_model(run.model, base_dir=base_dir, vocab=run.data.tokenizer_vocab)
    limits = limits or Limits()
    model, batch = blueprint(spec), sequences_per_step(run)
    device = "cpu" if where.device == "cpu" else "cuda"
    size = 1 if run.training.micro_batch == "auto" else run.training.micro_batch
    # Any layout of several ranks: the search replaces it, and one rank alone keeps other copies (plan/engine.py).
    several = LayoutSpec(dp_replicate=2) if where.devices > 1 else LayoutSpec()
    base = engine_job(run, model, global_batch=batch, micro_batch=size, device=device, layout=several)
    given = None
    if not run.layout.choose and (run.layout.world_size > 1 or _chose_for_one(run, where)):
        given = engine_job(run, model, global_batch=batch, micro_batch=size, device=device)
    plan = make_plan(base, run, spec, where, given=given, top=top, limits=limits)
    return plan, plan_facts(plan)


def _chose_for_one(run: Run, where: ClusterSpec) -> bool:
    """Whether a recipe for one device says what a plan would choose."""
    training = run.training
    said = training.micro_batch != "auto" or "recompute" in training.model_fields_set
    return "layout" in run.model_fields_set or (where.devices == 1 and said)


def planned_run(run: Run, plan: Plan) -> Run:
    """The recipe with the chosen layout, microbatch and recomputation in place of its own.

    Raises `ValueError` where nothing was chosen.
    """
    chosen = plan.chosen
    if chosen is None:
        raise ValueError("nothing that this version's engine runs fits this cluster; no recipe is written")
    training = run.training.model_copy(
        update={"micro_batch": chosen.job.micro_batch, "recompute": chosen.job.recompute}
    )
    layout = engine_layout(chosen.job, plan.check)
    return Run.model_validate(run.model_dump(exclude_unset=True) | {"layout": layout, "training": training})


def choice_reason(plan: Plan, chosen: Candidate) -> str:
    """Why the planner chose a layout, for the run's records."""
    others = [candidate for candidate in plan.found.strategies.values() if candidate.strategy != chosen.strategy]
    lost = sum(candidate.verdict == "does not fit" for candidate in others)
    return (
        f"{chosen.strategy} ({describe(chosen.job)}): the fastest of {plan.found.legal} layouts that "
        f"{'fits' if chosen.verdict == 'fits' else 'is tight, for none fits with the margin, on'} "
        f"{plan.cluster.name}, {short(chosen.memory.total / GB)} of {short(chosen.capacity / GB)} GB, "
        f"{short(chosen.time.total)} s a step predicted; {lost} of {len(others)} other strategies do not fit"
    )


def explain_field(plan: Plan, field: str) -> str:
    """Where one figure of the chosen layout comes from; where nothing fits, of the recipe's own, or of the one that
    needs least memory. Raises `ValueError` with the fields that there are, or where there is no layout."""
    shown, about = plan.chosen or (plan.found.ranked[0] if plan.found.ranked else None), ""
    if shown is None and plan.given:
        shown, about = plan.given, "nothing fits; the recipe's own layout is "
    elif shown is None and plan.found.strategies:
        shown = min(plan.found.strategies.values(), key=lambda candidate: candidate.memory.total)
        about = "nothing fits; least memory is needed by "
    if shown is None:
        raise ValueError(f"there is no layout to explain: {plan.problem}")
    explained = {
        "memory": _explain_memory,
        "time": _explain_time,
        "mfu": _explain_mfu,
        "cost": _explain_cost,
        "search": _explain_search,
    }
    if field not in explained:
        raise ValueError(f"--explain {field}: there are {', '.join(explained)}")
    return "\n".join([f"{about}{shown.strategy}: {describe(shown.job)}", *explained[field](plan, shown)])


def _explain_memory(plan: Plan, chosen: Candidate) -> list[str]:
    job, use = chosen.job, chosen.memory
    trained = (
        f"a parameter of adapters ({job.adapters / 1e6:.3g} million)" if job.adapters is not None else "a parameter"
    )
    offloaded = "" if job.offload == "none" else ", in the node's own memory"
    notes = {
        "weights": _kept_weights(job)
        + (", gathered a layer at a time (see communication)" if job.zero == 3 and job.shards > 1 else ""),
        "gradients": f"{job.stack.gradient_bytes:g} bytes {trained}"
        + (f", split over {job.shards} ranks" if job.zero >= 2 else ""),
        "optimizer": f"{job.stack.state_bytes:g} bytes {trained}: master weights and moments"
        + (f", split over {job.shards} ranks" if job.zero >= 1 else "")
        + offloaded,
        "activations": f"recompute={recomputes(job)}, {job.micro_batch} x {job.sequence} tokens a microbatch",
        "logits": "a chunk of logits, and the loss's gradient" + ("" if job.frozen else ", and the head's in fp32"),
        "communication": _in_transit(job),
        "fragmentation": "what a caching allocator holds in reserve",
        "context": "driver, libraries and communicators",
    }
    lines = [f"  {kind:<14}{size / GB:>8.2f} GB  {notes[kind]}" for kind, size in use.kinds().items()]
    total = chosen.memory_bytes
    lines.append(
        f"  {'total':<14}{use.total / GB:>8.2f} GB  ({total.low / GB:.1f} to {total.high / GB:.1f}), stage {use.stage}"
    )
    lines.append(f"  {'available':<14}{chosen.capacity / GB:>8.2f} GB  of which {plan.margin:.0%} are to stay free")
    return lines


def _kept_weights(job: Job) -> str:
    """How the weights that compute are kept."""
    each = f"{job.stack.weight_bytes:g} bytes a parameter"
    if not job.frozen:
        return f"{each} of the copy that computes"
    if job.frozen_bytes:
        return f"{job.frozen_bytes:.3g} bytes a parameter of blocks, scales included, and {each} of embedding and head"
    return f"{each}, frozen"


def _in_transit(job: Job) -> str:
    """What comes and goes while blocks run."""
    parts = ["a matrix decoded from few bits"] if job.frozen_bytes else []
    if not job.alone:
        parts += ["layers gathered and gradients on their way"]
    return "; ".join(parts) or "nothing: one process, nothing gathered"


def _explain_time(plan: Plan, chosen: Candidate) -> list[str]:
    time, job = chosen.time, chosen.job
    parts = [
        ("compute", time.compute, f"{job.microbatches} microbatches on the busiest stage"),
        ("  recompute", time.recompute, "the part of it that is computed again"),
        ("  host", time.host, "the part of it in which the device waits for the host"),
        ("tensor", time.tensor, "exposed: two all-reduces a block and pass"),
        ("context", time.context, "exposed: keys and values of the other parts"),
        ("expert", time.expert, "exposed: tokens to their experts and back"),
        ("data", time.data, "exposed: weights gathered, gradients reduced"),
        ("pipeline", time.pipeline, "messages in and out"),
        ("bubble", time.bubble, f"schedule {job.schedule}, {job.pp} stages"),
        ("update", time.update, "clipping, optimizer, what a step costs once"),
    ]
    lines = [f"  {name:<14}{seconds:>10.4g} s  {note}" for name, seconds, note in parts]
    interval = chosen.seconds
    return [*lines, f"  {'step':<14}{interval.value:>10.4g} s  ({interval.low:.4g} to {interval.high:.4g})"]


def _explain_mfu(plan: Plan, chosen: Candidate) -> list[str]:
    job, cluster = chosen.job, plan.cluster
    peak = cluster.tflops.get(job.precision) or cluster.tflops["bf16"]
    flops = job.flops_per_token
    each = (
        "4 a parameter that multiplies it and is frozen, 6 of adapters"
        if job.frozen
        else "6 a parameter that multiplies it"
    )
    reached = flops * chosen.tokens_per_second / 1e12
    return [
        f"  {flops / 1e9:.3g} GFLOP a token: {each}, and attention in full",
        f"  {chosen.tokens_per_second:.0f} tokens a second and device: {reached:.1f} TFLOP/s",
        f"  {peak:g} TFLOP/s by the datasheet in {job.precision}: {chosen.mfu:.1%}",
    ]


def _explain_cost(plan: Plan, chosen: Candidate) -> list[str]:
    seconds, cost = plan.run_seconds(chosen), plan.cost(chosen)
    lines = [f"  {plan.steps} steps x {chosen.time.total:.4g} s = {seconds.value / 3600:.4g} hours"]
    if cost is None:
        return [*lines, "  no price is known: write price_per_hour into a cluster file"]
    devices, price = plan.cluster.devices, plan.cluster.price_per_hour
    return [
        *lines,
        f"  x {devices} devices x {price:g} an hour = {cost.value:,.0f} ({cost.low:,.0f} to {cost.high:,.0f})",
    ]


def _explain_search(plan: Plan, chosen: Candidate) -> list[str]:
    found = plan.found
    return [
        f"  {found.legal} legal layouts of {plan.cluster.devices} devices; memory and time were predicted for "
        f"{found.looked_at}, the others cannot win",
        f"  {why_not(chosen, None) if chosen.verdict == 'does not fit' else choice_reason(plan, chosen)}",
    ]
