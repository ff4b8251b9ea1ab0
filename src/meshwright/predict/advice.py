"""What to do where no layout of the devices is enough: adapters, offloading, more devices, shorter sequences."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.predict.candidate import Candidate
from meshwright.predict.changes import CHANGES, LAST_RESORT
from meshwright.predict.engine import Case, make_case, passes
from meshwright.predict.explain import describe_candidate, short
from meshwright.predict.hardware import resized
from meshwright.predict.methods import METHODS, by_method
from meshwright.predict.search import Variant, search
from meshwright.spec.text import quoted

GB = 1e9
MOST_TIMES = 16
"""Largest factor on the number of devices that is tried."""
SHORTEST = 256
"""Tokens of a sequence below which no shorter one is tried."""

Enough = Callable[[Candidate], bool]
"""Whether a layout helps."""


def fitting(candidate: Candidate) -> bool:
    """Whether a layout fits with its margin."""
    return candidate.verdict == "fits"


def advise(case: Case, enough: Enough = fitting) -> list[str]:
    """The changes of a recipe with which a layout is `enough`, in the order in which people try them: adapters,
    offloading unless the recipe forbids it, more devices, shorter sequences."""
    tried = (*_methods(case), *_offloading(case, enough), *_devices(case, enough), *_sequences(case, enough))
    fits = [(words, best) for words, best in tried if best and enough(best)]
    return [
        f"{quoted(words) if '=' in words else words} ({describe_candidate(best)}: {_figures(best)})"
        for words, best in fits
    ]


def _figures(best: Candidate) -> str:
    """What a device, its host and a step take."""
    rest = f", {short(best.memory.host / GB)} GB of host memory" if best.memory.host else ""
    rest += f", {short(best.memory.disk / GB)} GB on disk" if best.memory.disk else ""
    return f"{short(best.memory.total / GB)} GB{rest}, about {short(best.time.total)} s a step"


def _methods(case: Case) -> Iterator[tuple[str, Candidate | None]]:
    """The methods that train less than the recipe's."""
    current = case.run.finetune.method if case.run.finetune else "full"
    for name in {"full": ("lora", "qlora"), "lora": ("qlora",)}.get(current, ()):
        finetune = METHODS[name]
        runs = passes(case.check(case.run.model_copy(update={"finetune": finetune})))
        limits = replace(case.limits, offload=False, runs=runs)
        yield (
            f"finetune.method={name}",
            search(by_method(case.base, finetune), case.cluster, top=1, limits=limits).chosen,
        )


def _offloading(case: Case, enough: Enough) -> Iterator[tuple[str, Candidate | None]]:
    """State, then parameters too, in host memory; on disk where the host has too little."""
    if not case.limits.offload:
        return
    movable = case.limits.recompute or case.base.recompute in ("none", "full")
    host = [change for change in (*LAST_RESORT, CHANGES["parameters"]) if movable or not change.moves_activations]
    tiers = [] if case.cluster.device == "cpu" else [host]  # a CPU's memory is the host's
    limits = replace(case.limits, runs=passes(case.check(case.run)))
    for changes in (*tiers, [CHANGES["disk"]], [CHANGES["disk_parameters"]]):
        first, *rest = (Variant(case.base, replace(limits, change=change)) for change in changes)
        best = search(case.base, case.cluster, top=1, limits=first.limits, beside=rest).chosen
        if best is not None and enough(best):
            yield f"layout.offload={best.job.layout.offload_word}", best
            return


def _devices(case: Case, enough: Enough) -> Iterator[tuple[str, Candidate | None]]:
    """The fewest devices of the same kind, in powers of two times today's, without offloading."""
    times = 2
    while times <= MOST_TIMES and case.cluster.device != "cpu":
        cluster = resized(case.cluster, times * case.cluster.devices)
        limits = replace(case.limits, offload=False, runs=passes(case.check(case.run)))
        larger = make_case(case.run, case.spec, cluster, limits, case.base.model)
        best = search(larger.base, cluster, top=1, limits=limits).chosen
        if best is not None and enough(best):
            yield f"{cluster.devices} devices", best
            return
        times *= 2


def _sequences(case: Case, enough: Enough) -> Iterator[tuple[str, Candidate | None]]:
    """The longest sequence, halved once or several times."""
    length = case.base.sequence // 2
    while length >= SHORTEST:
        data = case.run.data.model_copy(update={"sequence_length": length})
        runs = passes(case.check(case.run.model_copy(update={"data": data})))
        limits = replace(case.limits, runs=runs)
        best = search(replace(case.base, sequence=length), case.cluster, top=1, limits=limits).chosen
        if best is not None and enough(best):
            yield f"data.sequence_length={length}", best
            return
        length //= 2
