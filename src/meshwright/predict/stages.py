"""Pipeline stages of equal work, cut from a model's layers. Without torch."""

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from meshwright.families.flops import mixer_flops_per_token
from meshwright.families.table import active_numel, parameter_table
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.spec.run import ResolvedRun
from meshwright.spec.stream import steady_bubble
from meshwright.spec.timeline import StageCosts, in_flight, simulate


def layer_costs(spec: ModelSpec, sequence_length: int) -> tuple[float, ...]:
    """Forward operations per token of every layer; the head's are added to the last one's.

    The embedding's look-up does no arithmetic and costs nothing.
    """
    costs = [float(mixer_flops_per_token(layer.mixer, sequence_length)) for layer in spec.layers]
    for row in parameter_table(spec):
        if row.name.startswith("layers.") and len(row.shape) >= 2:
            costs[int(row.name.split(".")[1])] += 2 * active_numel(spec, row)
    costs[-1] += 2 * spec.vocab * spec.hidden
    return tuple(costs)


def balanced_stages(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The number of layers of each stage, at least one, that minimizes the cost of the heaviest stage.

    Ties go to the smallest sum of squares, so that work is spread evenly over the other stages too. Exact, by dynamic
    programming over (stage, layers so far). Raises `UserError` if there are fewer layers than stages.
    """
    if len(costs) < stages:
        raise UserError(f"{len(costs)} layers cannot be split into {stages} pipeline stages; use at most {len(costs)}")
    sums = list(accumulate(costs, initial=0.0))

    @functools.cache
    def lightest(stage: int, stop: int) -> float:
        """The cost of the heaviest of the first `stage` stages in the best cut of the first `stop` layers."""
        if stage == 1:
            return sums[stop]
        return min(max(lightest(stage - 1, cut), sums[stop] - sums[cut]) for cut in range(stage - 1, stop))

    limit = lightest(stages, len(costs)) * (1 + 1e-12)

    @functools.cache
    def evenest(stage: int, stop: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squares, layers of each stage) of the best cut whose stages all stay within the limit."""
        if stage == 0:
            return (0.0 if stop == 0 else float("inf")), ()
        best: tuple[float, tuple[int, ...]] = float("inf"), ()
        for cut in range(stop - 1, stage - 2, -1):
            work = sums[stop] - sums[cut]
            if work > limit:
                break
            before, sizes = evenest(stage - 1, cut)
            if before + work**2 < best[0]:
                best = before + work**2, (*sizes, stop - cut)
        return best

    return evenest(stages, len(costs))[1]


def _stage_costs(resolved: ResolvedRun) -> StageCosts:
    """Operations of every stage. A backward pass has twice as many as a forward pass, half of them for the input's
    gradient."""
    costs = layer_costs(resolved.model, resolved.run.data.sequence_length)
    cuts = pairwise(accumulate(resolved.stage_layers, initial=0))
    stages = tuple(sum(costs[start:stop]) for start, stop in cuts)
    return StageCosts(forward=stages, backward_input=stages, backward_weight=stages)


def describe_pipeline(resolved: ResolvedRun) -> str:
    """Stages, bubble and microbatches in flight of a run with several pipeline ranks, in one line."""
    layout, costs, late = resolved.run.layout, _stage_costs(resolved), ""
    schedule = layout.pipeline_schedule(microbatches=resolved.accumulation, base_dir=Path(resolved.base_dir))
    idle = f"{simulate(schedule, costs).bubble:.0%} bubble"  # transfers take no time
    if layout.asynchronous:
        idle = f"no bubble, {steady_bubble(schedule, costs):.0%} of the time waiting for the slowest stage"
        late = "; gradients are one step late, so results differ from one process"
    layers = " + ".join(map(str, resolved.stage_layers))
    flying = ", ".join(map(str, in_flight(schedule)))
    return (
        f"{layout.schedule}: stages of {layers} layers; with {resolved.accumulation} microbatches "
        f"{idle}, at most {flying} in flight{late}"
    )
