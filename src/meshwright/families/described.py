"""A parameter table and a derived split as lines of text, with * for the numbers of equal blocks."""

import re
from collections.abc import Iterator

from meshwright.families.adapters import finetuned_table
from meshwright.spec.finetune import FinetuneSpec
from meshwright.spec.foreign import SplitModule
from meshwright.spec.model import ModelSpec, Parameter


def describe_table(model: ModelSpec, finetune: FinetuneSpec | None) -> list[str]:
    """Name, dims and shape of every parameter; parameters of several blocks with the same ones are one line."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in finetuned_table(model, finetune):
        name = re.sub(r"\.\d+(?=\.)", ".*", row.name)
        key = name, _dims(row), " x ".join(map(str, row.shape))
        counts[key] = counts.get(key, 0) + 1
    lines = [(*key, f"{count} times" if count > 1 else "") for key, count in counts.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, (*widths, 0), strict=True)).rstrip() for line in lines
    ]


def describe_split(model: ModelSpec) -> list[str]:
    """What tensor-parallel ranks share in a derived split, what stays whole, and why."""
    split = model.foreign.split if model.foreign is not None else None
    if split is None:
        return []
    lines = [line for module in split.modules for line in _module(module)]
    lines += [f"whole: {name}: {reason}" for name, reason in split.whole]
    return [*lines, *(f"transformers' plan differs: {note}" for note in split.notes)]


def describe_cuts(model: ModelSpec) -> list[str]:
    """Where pipeline stages cut the model, and what the first and the last one have besides blocks."""
    cuts = model.foreign.cuts if model.foreign is not None else None
    if cuts is None:
        return []
    if cuts.problem:
        return [f"pipeline stages: none: {cuts.problem}"]
    lines = [
        "pipeline stages: cut before any block",
        f"  the first also has: {', '.join(cuts.before)}",
        f"  the last also has: {', '.join(cuts.after)}",
    ]
    return [*lines, *([f"  on both, gradients summed: {', '.join(cuts.copied)}"] if cuts.copied else ())]


def describe_context(model: ModelSpec) -> list[str]:
    """Whether context-parallel ranks can share the model's rows."""
    context = model.foreign.context if model.foreign is not None else None
    if context is None:
        return []
    if context.problem:
        return [f"parts of rows: none: {context.problem}"]
    apart = "documents stay separate" if context.documents else "documents of a row are mixed"
    return [f"parts of rows: attention gathers keys and values; {apart}"]


def describe_experts(model: ModelSpec) -> list[str]:
    """The experts that expert-parallel ranks share."""
    experts = model.foreign.experts if model.foreign is not None else None
    if experts is None:
        return []
    if experts.problem:
        return [f"experts over ranks: none: {experts.problem}"]
    return [f"{one.name} (of {_blocks(one.layers)}): ranks share its {one.count} experts" for one in experts.modules]


def _blocks(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers)) if len(layers) < 5 else f"{len(layers)} blocks"


def _dims(row: Parameter) -> str:
    runs = f" in runs of {', '.join(map(str, row.segments))}" if row.segments else ""
    return ", ".join(row.dims) + runs


def _module(module: SplitModule) -> Iterator[str]:
    ends = f"its output summed at {module.summed or 'its end'}"
    yield f"{module.name or 'block'} (of {_blocks(module.layers)}) is shared, {ends}"
    kept = [one.name for one in module.parameters if one.kept]
    parts = {
        "partial gradients, summed": module.partial,
        "added once": module.once,
        "rows that a rank needs": kept,
        "norms over all ranks": module.gathered,
        "divided": [
            f"{path}.{name} x {times}/{by}".removeprefix(".")
            for path, name, times, by in module.attributes
            if not name.endswith(("_features", "_channels")) and name not in ("nf", "nx")
        ],
    }
    yield from (f"  {what}: {', '.join(names)}" for what, names in parts.items() if names)
