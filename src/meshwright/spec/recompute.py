"""Recomputation settings: the layers that recompute their activations. No torch here."""

from collections.abc import Sequence
from itertools import repeat
from typing import Annotated, Any, Literal, assert_never

from pydantic import Field

from meshwright.spec.base import Spec

Policy = Literal["none", "selective", "full"]
POLICIES: tuple[Policy, ...] = ("none", "selective", "full")
"""From most to fewest kept activations, and so from least to most time."""

Counts = tuple[int, int]
"""Numbers of layers of a pipeline stage that recompute everything, and selectively."""

Number = Annotated[int, Field(ge=0)]


class RecomputeSpec(Spec):
    """Recomputation of some layers: the first layers of every pipeline stage, or of the model without stages. Their
    activations are held longest, and when they are recomputed, activations of later layers have been freed. A number
    applies to every stage; a list has one number per stage, first to last."""

    full: Number | tuple[Number, ...] = 0
    """Number of first layers that keep their input only."""
    selective: Number | tuple[Number, ...] = 0
    """Number of following layers that keep matrix products and attention. Later layers keep everything."""


Recompute = Policy | RecomputeSpec


def recompute_misfit(recompute: Recompute, stage_layers: Sequence[int]) -> str | None:
    """The reason why these pipeline stages cannot recompute so, starting with the setting; None if they can."""
    if not isinstance(recompute, RecomputeSpec):
        return None
    stages = len(stage_layers)
    for name in ("full", "selective"):
        given = getattr(recompute, name)
        if isinstance(given, tuple) and len(given) != stages:
            return (
                f"training.recompute.{name}={list(given)} has {len(given)} numbers, and the layout has "
                f"{stages} pipeline stage{'s' if stages > 1 else ''}; give {stages}, or one number for all"
            )
    for stage, (full, selective, layers) in enumerate(zip(*_given(recompute, stages), stage_layers, strict=True)):
        if full + selective > layers:
            name, number, most = ("full", full, layers) if full > layers else ("selective", selective, layers - full)
            where = f"pipeline stage {stage}" if stages > 1 else "the model"
            besides = f" besides full={full}" if name == "selective" and full else ""
            return f"training.recompute.{name}={number}: {where} has {layers} layers, so the most is {most}{besides}"
    return None


def stage_counts(recompute: Recompute, stage_layers: Sequence[int]) -> tuple[Counts, ...]:
    """The numbers of recomputed layers of every pipeline stage, limited to its layers."""
    match recompute:
        case "none":
            return ((0, 0),) * len(stage_layers)
        case "full":
            return tuple((layers, 0) for layers in stage_layers)
        case "selective":
            return tuple((0, layers) for layers in stage_layers)
        case RecomputeSpec():
            fulls, selectives = _given(recompute, len(stage_layers))
            return tuple(
                (min(full, layers), min(selective, layers - min(full, layers)))
                for full, selective, layers in zip(fulls, selectives, stage_layers, strict=True)
            )
        case _:
            assert_never(recompute)


def layer_policies(recompute: Recompute, stage_layers: Sequence[int]) -> tuple[Policy, ...]:
    """The policy of every layer of the model."""
    policies: list[Policy] = []
    for (full, selective), layers in zip(stage_counts(recompute, stage_layers), stage_layers, strict=True):
        numbers: dict[Policy, int] = {"full": full, "selective": selective, "none": layers - full - selective}
        for policy, count in numbers.items():
            policies.extend(repeat(policy, count))
    return tuple(policies)


def of_counts(counts: Sequence[Counts], stage_layers: Sequence[int]) -> Recompute:
    """The shortest setting that `stage_counts` turns into these counts."""
    for policy in POLICIES:
        if tuple(counts) == stage_counts(policy, stage_layers):
            return policy
    fields = {}
    for name, numbers in zip(("full", "selective"), zip(*counts, strict=True), strict=True):
        if any(numbers):
            fields[name] = numbers if len(set(numbers)) > 1 else numbers[0]
    return RecomputeSpec(**fields)


def describe_recompute(policies: Sequence[Policy]) -> str:
    """The recomputation of a model's layers, for people: a policy, or `full:12/32`, 12 of 32 layers."""
    counts = {policy: policies.count(policy) for policy in reversed(POLICIES)}
    if len(policies) in counts.values():
        return policies[0]
    return ",".join(f"{policy}:{count}" for policy, count in counts.items() if count and policy != "none") + (
        f"/{len(policies)}"
    )


def plain_recompute(recompute: Recompute) -> str | dict[str, Any]:
    """The setting as written in a recipe."""
    return recompute if isinstance(recompute, str) else recompute.model_dump(mode="json", exclude_defaults=True)


def _given(recompute: RecomputeSpec, stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The given (full, selective) of every stage; a list of another length is cut, or extended with zeros."""

    def each(given: int | tuple[int, ...]) -> tuple[int, ...]:
        return (given,) * stages if isinstance(given, int) else (given + (0,) * stages)[:stages]

    return each(recompute.full), each(recompute.selective)
