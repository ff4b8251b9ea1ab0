"""The least recomputation with which every pipeline rank fits, layer by layer; exact.

Recomputing less only saves time, and a step never takes longer when one of its ranks is faster, so each rank is solved
by itself. In each stage the first layers recompute everything, the next ones selectively (`spec/recompute.py`): more of
either means less memory and more time. So for every number of the first, bisection finds the fewest of the second;
numbers that by themselves take longer than the best so far are skipped.
"""

from bisect import bisect_left
from collections.abc import Callable

from meshwright.plan.memory import MemoryUse, stage_memory
from meshwright.plan.step_time import StepModel
from meshwright.spec.recompute import Counts, Recompute, of_counts

Enough = Callable[[MemoryUse], bool]
"""Whether a rank has enough memory."""


def least_recompute(model: StepModel, enough: Enough, beaten: Callable[[Recompute], bool]) -> Recompute | None:
    """The fastest recomputation of `model`'s job with which all ranks have enough memory, whatever the job recomputes
    itself; None if a part of it is `beaten` already, or where no recomputation suffices."""
    job, counts = model.job, [(0, 0)] * len(model.job.cut)
    for rank in range(job.layout.pp):
        found = _least_of_rank(model, rank, enough)
        if found is None:
            return None
        for stage in job.stages[rank]:
            full = min(found[0], job.cut[stage])
            counts[stage] = full, min(found[1], job.cut[stage] - full)
        if rank == 0 < job.layout.pp - 1 and beaten(of_counts(counts, job.cut)):
            return None
    return of_counts(counts, job.cut)


def _least_of_rank(model: StepModel, rank: int, enough: Enough) -> Counts | None:
    job = model.job
    layers = max(stop - start for start, stop in job.spans[rank])

    def suffices(full: int, selective: int) -> bool:
        return enough(stage_memory(job, rank, job.grouped(rank, full, selective)))

    def seconds(full: int, selective: int) -> float:
        return model.repeated(job.grouped(rank, full, selective))

    if suffices(0, 0):
        return 0, 0
    fewest = bisect_left(range(layers + 1), True, key=lambda full: suffices(full, layers - full))
    best: tuple[float, Counts] | None = None
    for full in range(fewest, layers + 1):
        if best is not None and seconds(full, 0) >= best[0]:
            break
        selective = bisect_left(range(layers - full), True, key=lambda number, full=full: suffices(full, number))
        if best is None or seconds(full, selective) < best[0]:
            best = seconds(full, selective), (full, selective)
    return best and best[1]
