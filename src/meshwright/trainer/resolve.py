"""Resolution: every `auto` of a recipe becomes a value, with its reason. No torch here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.families import describe_low_precision, parameter_table, resolve_model, starting_weights
from meshwright.families.derived import with_derived
from meshwright.machine import Machine, find_machine
from meshwright.predict.blueprint import blueprint
from meshwright.predict.engine import Processor, engine_job, layout_check
from meshwright.predict.hardware import device_cluster, multiplies_fp8, resolve_cluster
from meshwright.predict.job import Job
from meshwright.predict.layouts import SearchLimits
from meshwright.predict.memory import predict_memory
from meshwright.predict.recipe import choice_reason, plan_recipe, planned_run
from meshwright.predict.search import least_recompute
from meshwright.predict.stages import balanced_stages, layer_costs
from meshwright.predict.step_time import StepModel
from meshwright.spec.actions import ScheduleError
from meshwright.spec.errors import UserError
from meshwright.spec.fit import (
    batch_misfits,
    check_positions,
    context_method,
    device_misfits,
    sample_misfits,
    tensor_notes,
)
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields, ModelSpec
from meshwright.spec.offload import ACTIVATIONS
from meshwright.spec.problems import RecipeError
from meshwright.spec.recompute import Recompute, plain_recompute, recompute_misfit
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.text import quoted
from meshwright.spec.training import MOST_WARMUP, TrainingSpec
from meshwright.trainer.corpus import with_data_defaults
from meshwright.trainer.length import in_steps

MEMORY_SHARE = 0.8
"""Fraction of device memory that a prediction may fill; the rest covers memory that `plan.memory` does not count."""

ENOUGH_TOKENS = {"cpu": 4096, "gpu": 32768}
"""Tokens per microbatch beyond which matrix products do not get faster."""

BUBBLE_ROUNDS = 4
"""Enough microbatches per pipeline rank: with them 1F1B's bubble is below a fifth of a step."""


def resolve_run(run: Run, *, base_dir: Path, machine: Machine | None = None) -> ResolvedRun:
    """Resolve every `auto` of the recipe; its paths are relative to `base_dir`.

    Raises `UserError` with the field and a value that would work if model, sequence or batch cannot be split as
    requested.
    """
    machine = machine or find_machine(run.device)
    suited, reasons = with_data_defaults(run, base_dir)
    if not reasons:
        return _resolved(run, base_dir=base_dir, machine=machine)
    resolved = _resolved(suited, base_dir=base_dir, machine=machine)
    return resolved.model_copy(update={"given": run, "reasons": {**reasons, **resolved.reasons}})


def _resolved(run: Run, *, base_dir: Path, machine: Machine) -> ResolvedRun:
    """The run with every `auto` resolved, after its data."""
    if run.training.epochs is not None or run.training.tokens is not None:
        lasting, reason = in_steps(run, base_dir)
        resolved = _resolved(lasting, base_dir=base_dir, machine=machine)
        return resolved.model_copy(update={"given": run, "reasons": {"training.steps": reason, **resolved.reasons}})
    if run.layout.choose:
        return _with_layout(run, base_dir, machine)
    if run.training.optimizer.lr_base_batch is not None:
        return _with_scaled_rate(run, base_dir, machine)
    model = with_derived(resolve_model(run.model, base_dir=base_dir, vocab=run.data.tokenizer_vocab), run)
    global_batch, ranks = run.sequences_per_step(), run.layout.data_parallel
    _refuse_misfits(run, model, global_batch, machine)
    sizes = _micro_batches(run, global_batch // ranks, base_dir)
    if relieved := _relieved(run, model, global_batch, sizes[0], machine):
        changed, reasons = relieved
        resolved = _resolved(changed, base_dir=base_dir, machine=machine)
        return resolved.model_copy(update={"given": run, "reasons": resolved.reasons | reasons})
    micro_batch, reason = _micro_batch(run, model, global_batch, sizes, machine)
    stage_layers = _stage_layers(run, model, global_batch // ranks // micro_batch, base_dir)
    if misfit := recompute_misfit(run.training.recompute, stage_layers or (model.num_layers,)):
        raise UserError(misfit)
    weights = starting_weights(run.model, base_dir=base_dir)
    reasons = {"training.micro_batch": reason}
    if run.model.weights == "auto" and run.model.name is not None:
        holds = "is a Hugging Face directory with weights" if weights == "pretrained" else "has no weights"
        reasons["model.weights"] = f"{weights}: {run.model.name} {holds}"
    if run.training.lr_schedule.warmup == "auto":
        reasons["training.lr_schedule.warmup"] = _warmup_reason(run.training)
    if stage_layers and run.layout.stage_layers == "auto":
        reasons["layout.stage_layers"] = "this split minimizes the operations of the largest stage, including the head"
    if run.training.product_recipe is not None:
        reasons["training.precision"] = describe_low_precision(parameter_table(model), run.training)
    if model.foreign is None and (notes := tensor_notes(run.layout, model)):
        reasons["layout.tp"] = notes
    if run.layout.cp > 1:
        method, reason = _context_method(run, model)
        reasons["layout.cp_method"] = f"{method}: {reason}"
    resolved = ResolvedRun(
        run=run.model_copy(update={"model": _with_weights(run.model, weights)}),
        base_dir=str(base_dir),
        model=model,
        global_batch=global_batch,
        micro_batch=micro_batch,
        accumulation=global_batch // ranks // micro_batch,
        stage_layers=stage_layers,
        reasons=reasons,
    )
    _refuse_compiled(resolved)
    return resolved


def _refuse_misfits(run: Run, model: ModelSpec, global_batch: int, machine: Machine) -> None:
    """Raise `UserError` if the sequence is too long, or the layout fits neither model nor batch."""
    check_positions(run.data.sequence_length, model)
    misfits = layout_check(run, model, machine.kind)(run.layout) or batch_misfits(run.layout, global_batch)
    misfits = [*misfits, *sample_misfits(run.training, model), *device_misfits(run)]
    if misfits:
        raise RecipeError(misfits)


def _warmup_reason(training: TrainingSpec) -> str:
    share = f"a tenth of all steps, but not more than {MOST_WARMUP}"
    if training.lr_schedule.name == "one_cycle":
        share = "three tenths of all steps"
    return f"{training.lr_schedule.warmup_steps(training.steps)}: {share}"


def _refuse_compiled(resolved: ResolvedRun) -> None:
    """Raise `UserError` if PyTorch cannot compile the recomputation."""
    run = resolved.run
    if run.training.compile and run.layout.tp > 1 and "full" in resolved.recompute:
        raise UserError(
            f"training.compile=true with layout.tp={run.layout.tp} and training.recompute=full: PyTorch cannot "
            "compile full recomputation of a block with split weights; use recompute=selective, or compile=false"
        )


def _context_method(run: Run, model: ModelSpec) -> tuple[str, str]:
    """The context-parallel method and its reason. Raises `UserError` if it cannot use the recipe's attention kernel."""
    method, reason = context_method(run.layout, model, run.data.sequence_length)
    if run.training.attention != "auto" and method != "ulysses":
        raise UserError(
            f"training.attention={run.training.attention} with layout.cp_method={method}, which computes partial "
            "attention with its own kernels; use layout.cp_method=ulysses, or training.attention=auto"
        )
    return method, reason


def _with_weights(fields: ModelFields, weights: str) -> ModelFields:
    """The fields with `weights` resolved; fields set by the recipe stay distinct from defaults."""
    return ModelFields.model_construct(fields.model_fields_set, **dict(fields) | {"weights": weights})


def _with_scaled_rate(run: Run, base_dir: Path, machine: Machine) -> ResolvedRun:
    """Scale the learning rate to the global batch, then resolve the rest."""
    given, batch = run.training.optimizer, run.sequences_per_step()
    optimizer = given.scaled(batch)
    changed = run.model_copy(update={"training": run.training.model_copy(update={"optimizer": optimizer})})
    resolved = _resolved(changed, base_dir=base_dir, machine=machine)
    reason = (
        f"{optimizer.lr:.6g}: {given.lr:g} for {given.lr_base_batch} sequences, scaled ({given.lr_scaling}) to {batch}"
    )
    return resolved.model_copy(update={"given": run, "reasons": {"training.optimizer.lr": reason, **resolved.reasons}})


def _with_layout(run: Run, base_dir: Path, machine: Machine) -> ResolvedRun:
    """Let the planner choose the layout, then resolve the rest; settings of the recipe are kept."""
    given = run.training.model_fields_set
    limits = SearchLimits(recompute="recompute" not in given, micro_batch=run.training.micro_batch == "auto")
    cluster = resolve_cluster(run.cluster, base_dir=base_dir, machine=machine)
    plan, facts = plan_recipe(run, base_dir=base_dir, cluster=cluster, limits=limits)
    if plan.chosen is None:
        if plan.problem:
            raise UserError(f"layout: auto, but {cluster.name} has no suitable layout: {plan.problem}")
        reasons = {name: figures["reason"] for name, figures in facts["strategies"].items()}
        closest = min(plan.searched.strategies, key=lambda name: plan.searched.strategies[name].memory.total)
        advice = "; or ".join(facts.get("advice", ())) or "nothing that was tried"
        raise UserError(
            f"layout: auto, but no layout fits {cluster.name}: of {len(reasons)} strategies (see meshwright plan) "
            f"the closest is {closest}: {reasons[closest]}; what would fit: {advice}"
        )
    resolved = _resolved(planned_run(run, plan), base_dir=base_dir, machine=machine)
    reasons = resolved.reasons | {"layout": choice_reason(plan), "training.micro_batch": "by the planner"}
    return resolved.model_copy(update={"given": run, "plan": facts, "reasons": reasons})


def _micro_batches(run: Run, per_rank: int, base_dir: Path) -> list[int]:
    """The micro batch sizes that give a number of microbatches supported by the pipeline."""
    divisors = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    given, sizes, problem = run.training.micro_batch, [], None
    if given != "auto" and given not in divisors:
        nearest = min(divisors, key=lambda size: abs(size - given))
        raise UserError(
            f"training.micro_batch={given} does not divide the {per_rank} sequences of a rank; the nearest divisor "
            f"is {nearest}"
        )
    for size in divisors:
        try:
            if run.layout.pp > 1:
                run.layout.pipeline_schedule(microbatches=per_rank // size, base_dir=base_dir)
            sizes.append(size)
        except ScheduleError as error:
            problem = error if given in ("auto", size) and problem is None else problem
    if not sizes:
        raise UserError(f"{problem}; set training.global_batch accordingly (a rank has {per_rank} sequences)")
    if given != "auto" and given not in sizes:
        nearest = min(sizes, key=lambda size: abs(size - given))
        raise UserError(f"{problem}; the nearest is training.micro_batch={nearest}")
    if given == "auto" and run.layout.pp > 1:
        return [size for size in sizes if per_rank // size >= BUBBLE_ROUNDS * run.layout.pp] or sizes[:1]
    return sizes


def _stage_layers(run: Run, model: ModelSpec, microbatches: int, base_dir: Path) -> tuple[int, ...]:
    """Layers of each pipeline stage; raises `UserError` if the model cannot be split so."""
    layout = run.layout
    if layout.pp == 1:
        return ()
    schedule = layout.pipeline_schedule(microbatches=microbatches, base_dir=base_dir)
    if schedule.splits_backward and run.training.compile:
        raise UserError(
            f"training.compile=true with layout.schedule={layout.schedule}: computes weight gradients separately "
            "from input gradients, but a compiled block computes both at once; use interleaved-1f1b, or "
            "compile=false"
        )
    if layout.stage_layers == "auto":
        return balanced_stages(layer_costs(model, run.data.sequence_length), schedule.num_stages)
    if sum(layout.stage_layers) != model.num_layers:
        raise UserError(
            f"layout.stage_layers={list(layout.stage_layers)} has {sum(layout.stage_layers)} layers, but the model "
            f"has {model.num_layers}"
        )
    return layout.stage_layers


def _recompute_advice(job: Job, limit: float) -> str:
    """The least recomputation with which a job takes at most `limit` bytes, in words; empty if there is none."""
    least = _least_recompute(job, limit)
    if least in (None, "none"):
        return ""
    override = f"training.recompute={flow(plain_recompute(least))}"
    return f"; this would fit: {quoted(override)}"


def _least_recompute(job: Job, limit: float) -> Recompute | None:
    """The fastest recomputation with which a job takes at most `limit` bytes; None if none suffices."""
    cluster = device_cluster("a100", job.layout.world_size)  # only the policies' savings per second matter here
    model = StepModel(job, cluster)
    return least_recompute(model, lambda use: use.total <= limit, lambda part: False)


def flow(value: Any) -> str:
    """A setting in the command line's syntax: a word, or a section on one line."""
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")


def _relieved(
    run: Run, model: ModelSpec, global_batch: int, size: int, machine: Machine
) -> tuple[Run, dict[str, str]] | None:
    """The recipe with the least recomputation, else with activations in host memory, with which its smallest microbatch
    fits, and the reasons. None if it fits without changes, if the recipe sets all of this itself, or if neither
    suffices."""
    training, layout = run.training, run.layout
    if training.micro_batch != "auto":
        return None
    limit = MEMORY_SHARE * machine.memory_per_rank(layout.world_size)
    room = MEMORY_SHARE * machine.host_per_rank(layout.world_size)
    processor = Processor(machine.kind, multiplies_fp8(machine))
    job = engine_job(run, blueprint(model), global_batch=global_batch, micro_batch=size, processor=processor)
    needs = predict_memory(job).total
    # PyTorch cannot compile full recomputation of a block with split weights.
    recomputes = "recompute" not in training.model_fields_set and not (training.compile and layout.tp > 1)
    moves = machine.is_gpu and "offload" not in layout.model_fields_set
    if needs <= limit or not (recomputes or moves):
        return None
    options: list[tuple[Recompute, LayoutSpec]] = []
    stages = layout.stage_layers == "auto"  # a job's stages are split this way
    if recomputes and stages and (least := _least_recompute(job, limit)) is not None:
        options.append((least, layout))
    moved = layout.model_copy(update={"offload": ACTIVATIONS})
    if moves and moved.problem is None:
        policies: tuple[Recompute, ...] = ("none", "full") if recomputes else (training.recompute,)
        for policy in policies:
            use = predict_memory(replace(job, recompute=policy, layout=moved))
            if use.total <= limit and use.host <= room:
                options.append((policy, moved))
    for recompute, where in options:
        sections = {
            "layout": where,
            "training": training.model_copy(update={"recompute": recompute}) if recomputes else training,
        }
        try:
            changed = Run.model_validate(run.model_dump(exclude_unset=True) | sections)
        except ValueError:  # the given selective recomputation keeps tensors that cannot be moved
            continue
        reason = (
            f"without it, the smallest microbatch would need about {needs / 2**30:.1f} of {limit / 2**30:.1f} "
            "usable GiB; results stay the same"
        )
        reasons = dict[str, str]()
        if recompute != training.recompute:
            reasons["training.recompute"] = f"{flow(plain_recompute(recompute))}: {reason}"
        if where is moved:
            reasons["layout.offload"] = f"{where.offload_word}: {reason}, and recomputation alone is not enough"
        return changed, reasons
    return None


def _micro_batch(run: Run, model: ModelSpec, global_batch: int, sizes: list[int], machine: Machine) -> tuple[int, str]:
    """Sequences per forward pass and why."""
    if run.training.micro_batch != "auto":
        return run.training.micro_batch, "given"
    plan, length = blueprint(model), run.data.sequence_length // run.layout.cp
    limit = MEMORY_SHARE * machine.memory_per_rank(run.layout.world_size)
    room, best = MEMORY_SHARE * machine.host_per_rank(run.layout.world_size), 0
    processor = Processor(machine.kind, multiplies_fp8(machine))
    for size in sizes:
        job = engine_job(run, plan, global_batch=global_batch, micro_batch=size, processor=processor)
        use = predict_memory(job)
        on_host = use.host > room
        if use.total > limit or on_host:
            needed, there, where = (use.host, room, " of host memory") if on_host else (use.total, limit, "")
            needs = f"{size} would need about {needed / 2**30:.1f} of {there / 2**30:.1f} usable GiB{where}"
            advice = "" if on_host else _recompute_advice(job, limit)
            return (best, needs) if best else (size, f"the smallest possible; {needs}{advice}")
        best = size
        if size * length >= ENOUGH_TOKENS[machine.kind]:
            return best, f"{size * length} tokens per microbatch keep this machine's {machine.kind} busy"
    if run.layout.pp > 1:
        return best, f"the largest that leaves {BUBBLE_ROUNDS} microbatches per pipeline rank, or as many as possible"
    return best, "all sequences of a rank"
