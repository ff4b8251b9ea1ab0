"""The plan of a recipe: look up model and batch, resolve the cluster, search for the layout and write it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.families import resolve_model
from meshwright.families.derived import with_options
from meshwright.machine import find_machine
from meshwright.predict.candidate import TIGHT, Candidate
from meshwright.predict.changes import Change
from meshwright.predict.engine import Processor, engine_job, make_case
from meshwright.predict.explain import describe_candidate, short
from meshwright.predict.hardware import resolve_cluster
from meshwright.predict.layouts import MOST_TENSOR, SearchLimits
from meshwright.predict.report import Plan, make_plan, plan_facts
from meshwright.predict.search import ALIKE
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import UserError
from meshwright.spec.fit import check_positions
from meshwright.spec.run import Run

GB = 1e9


def plan_recipe(
    run: Run,
    *,
    base_dir: Path,
    cluster: str | ClusterSpec | None = None,
    top: int = 8,
    limits: SearchLimits | None = None,
    consider: Sequence[Change] = (),
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a recipe on `cluster` (default: the recipe's), and the same as plain data; `consider`: changes of
    the recipe that compete with it.

    Raises `UserError` for an unknown model or cluster, a sequence that is longer than the model's positions, or a
    change that says nothing here.
    """
    where = run.cluster if cluster is None else cluster
    if not isinstance(where, ClusterSpec):
        machine = find_machine(run.device) if where == "local" else None  # another cluster does not need this machine
        where = resolve_cluster(where, base_dir=base_dir, machine=machine)
    if run.training.tokens is not None:
        run = run.lasting(run.known_steps() or 1)
    spec = resolve_model(run.model, base_dir=base_dir, vocab=run.data.tokenizer_vocab)
    degrees = range(2, min(MOST_TENSOR, where.domain) + 1)
    spec = with_options(spec, run, [tp for tp in degrees if where.devices % tp == 0 and spec.num_heads % tp == 0])
    check_positions(run.data.sequence_length, spec)
    case = make_case(run, spec, where, limits or SearchLimits())
    given = None
    if not run.layout.choose and (run.layout.world_size > 1 or _chose_for_one(run, where)):
        base = case.base
        given = engine_job(
            run,
            base.model,
            global_batch=base.global_batch,
            micro_batch=base.micro_batch,
            processor=Processor.of(where),
        )
    plan = make_plan(case, given, top=top, consider=consider)
    return plan, plan_facts(plan)


def _chose_for_one(run: Run, where: ClusterSpec) -> bool:
    """Whether a recipe for one device already sets what a plan would choose."""
    training = run.training
    given = training.micro_batch != "auto" or "recompute" in training.model_fields_set
    return "layout" in run.model_fields_set or (where.devices == 1 and given)


def planned_run(run: Run, plan: Plan, cluster: str | None = None, *, chosen: Candidate | None = None) -> Run:
    """The recipe with the chosen layout, microbatch, recomputation and considered change in place of its own, and the
    cluster that it was planned for; `chosen`: another candidate of the plan.

    Raises `UserError` if nothing was chosen.
    """
    chosen = chosen or plan.chosen
    if chosen is None:
        raise UserError("no layout that this version supports fits this cluster, so no recipe is written")
    run = chosen.change.of(run) if chosen.change else run
    training = run.training.model_copy(
        update={"micro_batch": chosen.job.micro_batch, "recompute": chosen.job.recompute}
    )
    sections = {"layout": chosen.job.layout, "training": training} | ({"cluster": cluster} if cluster else {})
    return Run.model_validate(run.model_dump(exclude_unset=True) | sections)


def choice_reason(plan: Plan) -> str:
    """Why the planner chose its layout, for the run's records. Raises `UserError` if nothing was chosen."""
    chosen, fastest = plan.chosen, plan.searched.fastest
    if chosen is None or fastest is None:
        raise UserError("nothing was chosen")
    others = [candidate for candidate in plan.searched.strategies.values() if candidate.strategy != chosen.strategy]
    lost = sum(candidate.verdict == "does not fit" for candidate in others)
    which = "the fastest" if chosen is fastest else f"the simplest within {ALIKE:.0%} of the fastest"
    fit = "that fits"
    if chosen.verdict == "tight":
        fit = f"that is tight (each one that fits takes at least {TIGHT:g} times as long) on"
    unless = "; no layout fits without it; the arithmetic stays the same" if plan.last_resort and chosen.change else ""
    return (
        f"{chosen.strategy} ({describe_candidate(chosen)}): {which} of {plan.searched.legal} layouts {fit} "
        f"{plan.case.cluster.name}, {short(chosen.memory.total / GB)} of {short(chosen.capacity / GB)} GB, "
        f"{short(chosen.time.total)} s per step predicted; {lost} of {len(others)} other strategies do not "
        f"fit{unless}"
    )
