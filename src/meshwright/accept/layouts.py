"""Step `layouts`: every strategy over several ranks of this machine, beside one process on the CPU.

Ranks share a GPU, over messages that go through host memory (`comm/staged.py`), so every layout runs on one GPU. Where
a machine has several, layouts with at most one rank for each also run over NCCL.
"""

from collections.abc import Iterator

import torch.distributed as dist

from meshwright.accept.check import Check, Place, tried
from meshwright.accept.runs import beside, device_of, tiny_run
from meshwright.comm.staged import STAGED
from meshwright.devices import CPU, accelerator, backend_of, device_count
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import Outcome, one_step
from meshwright.testing.layouts import EXPERT_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool, preload

ALLOWED = 1e-9
PATIENCE = 60
"""Seconds for one layout's step on all its ranks."""

SHARED = (
    *("ddp", "zero-2", "zero-3", "tp", "zero-3-tp", "cp-ring-tp", "cp-ulysses-tp", "cp-all-gather-tp", "pp"),
    *("pp-zero-3", "pp-zero-bubble-tp", "hybrid-3-tp", "zero-3-ep", "cp-tp-ep"),
)
"""Layouts that run on a shared device; the first ones find most."""


def checks(place: Place) -> Iterator[Check]:
    """Layouts over staged messages, then over the device's own collectives."""
    preload(["meshwright.accept.layouts"])
    alone: dict[str, Outcome] = {}
    pool = RankPool(STAGED, fresh=place.on_gpu)
    for name in SHARED if place.on_gpu else SHARED[:4]:
        yield tried(_compared, f"{name}, shared", pool, name, place, alone)
    pool.close()
    if place.on_gpu:
        pool = RankPool(backend_of([device_of(place).type]), fresh=True)
        for name in (*LAYOUTS, *EXPERT_PARALLEL):
            if _layout(name).world_size <= device_count():
                yield tried(_compared, f"{name}, one GPU for each rank", pool, name, place, alone)
        pool.close()


def one_step_there(run: ResolvedRun, gpus: int) -> Outcome | None:
    """The run's first step on this rank's device, one of the machine's `gpus`, or the CPU."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = accelerator(rank % gpus) if gpus else CPU
    return one_step(run, device=device)


def _layout(name: str) -> LayoutSpec:
    return (LAYOUTS | EXPERT_PARALLEL)[name]


def _compared(title: str, pool: RankPool, name: str, place: Place, alone: dict[str, Outcome]) -> Check:
    family, layout = ("mixtral" if name in EXPERT_PARALLEL else "llama"), _layout(name)
    if family not in alone:
        outcome = one_step(tiny_run(family))
        assert outcome is not None
        alone[family] = outcome
    run = tiny_run(family, layout=layout, micro_batch=1)
    gpus = device_count() if place.on_gpu else 0
    ours, *_ = pool.run(layout.world_size, one_step_there, run, gpus, timeout=PATIENCE)
    return beside(f"{title}: {layout.strategy}", ours, alone[family], ALLOWED)
