"""What a run states: the value of each setting for a file that is written, automatic ones worked out."""

from pathlib import Path
from typing import Any

from meshwright.families.resolve import SIZES, pretrained_directory
from meshwright.imports.claims import value_at
from meshwright.spec.run import ResolvedRun


def setting(resolved: ResolvedRun, path: str) -> Any:
    """The value of a setting: of a model its size, of batch, warm-up, decay and recomputation what `auto` became."""
    training, section, name = resolved.run.training, *path.split(".", 1)
    schedule = training.lr_schedule
    match path:
        case "training.micro_batch":
            return resolved.micro_batch
        case "training.global_batch":
            return resolved.global_batch
        case "training.lr_schedule.warmup":
            return schedule.warmup_steps(training.steps)
        case "training.lr_schedule.decay":
            return schedule.decay_steps(training.steps)
        case "training.recompute":
            return recomputation(resolved)
        case "layout.stages_per_rank":
            return resolved.run.layout.virtual_stages
        case "data.tokenizer":
            return tokenizer_of(resolved)
        case _ if section == "model" and name in (*SIZES, "family"):
            return value_at(resolved.model, name)
        case _:
            return value_at(resolved.run, path)


def recomputation(resolved: ResolvedRun) -> str:
    """What every layer recomputes; none where layers differ."""
    kinds = set(resolved.recompute)
    return kinds.pop() if len(kinds) == 1 else "none"


def tokenizer_of(resolved: ResolvedRun) -> str | None:
    """The tokenizer that the recipe names, or its model's directory; None where one would be trained."""
    run = resolved.run
    if run.data.tokenizer != "auto":
        return run.data.tokenizer
    named = run.model.name and pretrained_directory(run.model, base_dir=Path(resolved.base_dir))
    return run.model.name if named else None


def interval(resolved: ResolvedRun, path: str) -> int:
    """An interval in steps; that of the whole run where something happens after its last step only."""
    return setting(resolved, path) or resolved.run.training.steps


def final_rate(resolved: ResolvedRun) -> float:
    """The rate of the last step as a factor of the peak."""
    schedule = resolved.run.training.lr_schedule
    return 1.0 if schedule.name == "constant" else schedule.final


def pipelined(resolved: ResolvedRun) -> bool:
    """Whether layers are split over ranks."""
    return resolved.run.layout.pp > 1


def wsd(resolved: ResolvedRun) -> bool:
    """Whether the rate is constant before it decays."""
    return resolved.run.training.lr_schedule.name == "wsd"


def lora(resolved: ResolvedRun) -> bool:
    """Whether adapters train."""
    return value_at(resolved.run, "finetune.rank") is not None
