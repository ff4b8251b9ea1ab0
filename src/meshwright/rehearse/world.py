"""The rehearsal of a run: chooses ranks, starts a process for each, and reports problems."""

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from meshwright.launch import forkserver
from meshwright.spec.errors import UserError
from meshwright.spec.layout import AXES, LayoutSpec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.storage.scratch import scratch_folder

OFFLOADED = ("weights", "optimizer")
"""Kinds of memory that `layout.offload.parameters: host` keeps in the host's memory."""
SHOWN_STAGES = 4
"""Number of pipeline stages up to which each is rehearsed; with more, only the first two and the last two."""


def fill_world(run: Run, world_size: int) -> Run:
    """`run` on `world_size` ranks: the axis along which its data parallelism shards (or replicates) takes the remaining
    ranks.

    Raises `UserError` if the other degrees do not divide `world_size`.
    """
    layout = run.layout
    grown = "dp_replicate" if layout.zero_stage == 0 else "dp_shard"
    others = layout.world_size // getattr(layout, grown)
    if world_size % others:
        raise UserError(
            f"--world {world_size}: is not divisible by the {others} ranks of the layout's other degrees; the "
            f"nearest multiple is {max(1, round(world_size / others)) * others}"
        )
    filled = LayoutSpec.model_validate(layout.model_dump() | {grown: world_size // others})
    return run.model_copy(update={"layout": filled})


def typical_ranks(layout: LayoutSpec) -> list[int]:
    """The first rank of every pipeline stage (of many: of the first two and last two): the others of a stage do the
    same work with other data."""
    per_stage = layout.world_size // layout.pp
    stages = list(range(layout.pp))
    if layout.pp > SHOWN_STAGES:
        stages = [*stages[:2], *stages[-2:]]
    return [stage * per_stage for stage in stages]


def rehearse(
    resolved: ResolvedRun,
    ranks: Sequence[int],
    *,
    on_gpu: bool,
    fp8: bool = True,
    kind: Literal["memory", "timeline", "record"] = "memory",
) -> list[dict[str, Any]]:
    """The reports of `ranks` (see `rehearse.rank.rehearse_rank`; of kind `record`, `record_rank`), as many at a time as
    this machine has cores.

    Raises `UserError` with the program's output if a rank failed, as the whole run would.
    """
    world_size = resolved.run.layout.world_size
    if outside := [rank for rank in ranks if not 0 <= rank < world_size]:
        raise UserError(f"--ranks: {outside[0]} is not a rank; ranks are 0 to {world_size - 1}")
    options = [("--on-gpu", on_gpu), ("--without-fp8", not fp8), (f"--{kind}", kind != "memory")]
    words = [word for word, given in options if given]
    with scratch_folder("rehearse") as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        path = folder / "resolved.json"
        path.write_text(resolved.model_dump_json())
        return list(pool.map(lambda rank: _rehearse_apart(path, rank, words), ranks))


def _rehearse_apart(resolved: Path, rank: int, words: Sequence[str]) -> dict[str, Any]:
    """One rank in its own process: a process can be only one rank."""
    module = [sys.executable, "-P", "-u", "-m", "meshwright.rehearse.rank"]
    command = [*module, "--resolved", str(resolved), "--rank", str(rank), *words]
    report, errors = (resolved.with_name(f"{rank}.{kind}") for kind in ("json", "err"))
    with report.open("wb") as out, errors.open("wb") as err:
        process = forkserver.start(command, stdout=out.fileno(), stderr=err.fileno())
        try:
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
    if status:
        messages = errors.read_text().strip().splitlines()
        raise UserError(f"rank {rank} would fail: {messages[-1] if messages else f'status {status}'}")
    return json.loads(report.read_text())


def device_peak(report: dict[str, Any]) -> int:
    """The most bytes that a rehearsed rank holds on its device; gradients on their way to the host are included."""
    return report["peak"] - report["host"]


def findings(reports: Sequence[dict[str, Any]], layout: LayoutSpec, *, memory_bytes: int, per_node: int) -> list[str]:
    """Problems of the run: ranks that do not fit, and axes that span nodes although every layer uses them."""
    problems = []
    for report in reports:
        if device_peak(report) > memory_bytes:
            here = [part for part in report["peak_by_kind"].items() if not report["host"] or part[0] not in OFFLOADED]
            kind, size = max(here, key=lambda part: part[1])
            problems.append(
                f"rank {report['rank']} needs {device_peak(report) / 2**30:.1f} GiB of {memory_bytes / 2**30:.1f} "
                f"GiB; the largest part is {kind}, {size / 2**30:.1f} GiB"
            )
    span = 1
    for axis in reversed(AXES):
        degree = getattr(layout, axis)
        span *= degree
        if degree > 1 and span > per_node and axis in ("tp", "cp"):
            problems.append(
                f"{axis}={degree} crosses nodes of {per_node} devices, and every layer waits for its communication; "
                f"at most {axis}={max(1, per_node * degree // span)} stays within a node"
            )
    return problems
