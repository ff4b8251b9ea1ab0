"""A rehearsed rank holds and sends exactly the same as that rank of a real run."""

import json
from contextlib import closing
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.cli.main import main
from meshwright.cli.output import size_text
from meshwright.models import cpu_kernels
from meshwright.models.moe import Router
from meshwright.parallel.traffic import Traffic
from meshwright.rehearse import rank as rehearse_module
from meshwright.rehearse.rank import rehearse_rank
from meshwright.rehearse.shorten import Observed, continued, enough_microbatches
from meshwright.rehearse.world import fill_world, findings, typical_ranks
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.layouts import EXPERT_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool
from tiny import tiny_run

GIB = 2**30

Sent = dict[tuple[str, str], tuple[int, int]]
"""(kind, axis) -> calls, bytes."""


def real(run: ResolvedRun) -> tuple[dict[str, int], Sent]:
    """The bytes that this rank keeps between steps, and the bytes that it sends in a step."""
    trainer = build_here(run)
    with pytest.MonkeyPatch.context() as patch, loader_for(trainer) as loader:
        patch.setattr(Router, "_choose", evenly)
        trainer.train_step(1, loader.microbatches(0))
        with Traffic(trainer.meshes) as traffic:
            trainer.train_step(2, loader.microbatches(1))
    kept = {"weights": 0, "optimizer": 0}
    for tensor in trainer.parameters.values():
        kept["weights"] += _bytes(tensor)
        kept["optimizer"] += sum(_bytes(state) for state in trainer.optimizers.state_of(tensor).values())
    kept["weights"] += sum(_bytes(p) for p in trainer.model.parameters() if not p.requires_grad)
    return kept, {key: (count.calls, count.bytes) for key, count in traffic.counts.items()}


def _bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().nbytes()


def rehearsed(run: ResolvedRun, rank: int) -> tuple[dict[str, int], Sent]:
    """The same figures from a rehearsed rank."""
    report = rehearse_rank(run, rank, on_gpu=False)
    sent = {(entry["kind"], entry["axis"]): (entry["calls"], entry["bytes"]) for entry in report["traffic"]}
    return {kind: size for kind, size in report["at_rest"].items() if size}, sent


DENSE = "zero-3-uneven cp-ring-tp pp-hybrid-3 pp-zero-bubble-tp"
SPARSE = "zero-1-ep cp-tp-ep pp-zero-3-ep"
"""Every kind of parallelism, and combinations of them."""


def evenly(router: Router, scores_BTE: torch.Tensor) -> torch.Tensor:
    """Experts in rotation, as in a rehearsal."""
    chosen = (*scores_BTE.shape[:2], router.spec.experts_per_token)
    return (torch.arange(prod(chosen)) % scores_BTE.shape[-1]).view(chosen)


LORA = {"method": "lora", "rank": 4}


@pytest.mark.every(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "finetune"), [*((name, None) for name in (DENSE + " " + SPARSE).split()), ("zero-3-tp", LORA)]
)
def test_a_rehearsed_rank_is_as_a_real_one(ranks: RankPool, name: str, finetune: dict[str, Any] | None) -> None:
    layout = (LAYOUTS | EXPERT_PARALLEL)[name]
    family = "qwen3_moe" if name in EXPERT_PARALLEL else "llama"
    accumulation = 4 if layout.data_parallel % 2 else 3  # divides the share of any of 1 to 4 ranks
    accumulation = 12 if name == "cp-ring-tp" else accumulation  # three of these are rehearsed
    run = tiny_run(layout, family=family, precision="bf16", accumulation=accumulation, finetune=finetune)
    outcomes = ranks.run(layout.world_size, real, run)
    last, apart = layout.world_size - 1, RankPool()  # a process can be only one rank
    try:
        (fake,) = apart.run(1, rehearsed, run, last)
    finally:
        apart.close()
    assert fake == outcomes[last]


def counted_peak(run: ResolvedRun) -> int:
    """The most bytes that a single real process holds at once in its second step, by PyTorch's own allocator; with a
    GPU's operations, because CPU kernels save other tensors."""
    with (
        pytest.MonkeyPatch.context() as patch,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        patch.setattr(cpu_kernels, "_is_plain", lambda tensor: False)
        trainer = build_here(run)
        with loader_for(trainer) as loader:
            trainer.train_step(1, loader.microbatches(0))
            with record_function("second step"):
                trainer.train_step(2, loader.microbatches(1))
    assert profiled.profiler is not None
    recorded: Any = profiled.profiler.kineto_results
    events = sorted(recorded.events(), key=lambda event: event.start_ns())
    began = next(event.start_ns() for event in events if event.name() == "second step")
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = accumulate(size for _, size in changes)
    return max(size for (time, _), size in zip(changes, held, strict=True) if time >= began)


ALONE: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "bf16", "recompute": "full", "tied": True},
    {"precision": "bf16", "recompute": "selective", "num_layers": 4, "accumulation": 2},
    {"precision": "bf16", "family": "deepseek_v3"},
    {"precision": "bf16", "finetune": LORA},
    {"precision": "bf16", "optimizer": {"name": "adamw_8bit"}, "clip": None},
    {"precision": "bf16", "master_dtype": "bf16", "optimizer": {"state_dtype": "bf16", "rounding": "kahan"}},
]


@pytest.mark.exhaustive
def test_the_peak_is_a_real_processs() -> None:
    """Within 2 %: the exact order in which a real backward pass frees tensors is not known."""
    runs = [tiny_run(LayoutSpec(), width=64, **options) for options in ALONE]
    apart = RankPool()
    try:
        (counted,) = apart.run(1, counted_peaks, runs)
        (fake,) = apart.run(1, rehearsed_peaks, runs)
    finally:
        apart.close()
    off = [ours / real - 1 for ours, real in zip(fake, counted, strict=True)]
    assert max(map(abs, off)) < 0.02, off


def counted_peaks(runs: list[ResolvedRun]) -> list[int]:
    """For each run, in order."""
    return [counted_peak(run) for run in runs]


ONCE, TWICE = (Observed(n, n + 5, {("all-reduce", "tp"): (n, 10 * n)}) for n in (1, 2))
"""A rank's counters in two steps, with 1 and 2 microbatches."""


@pytest.mark.exhaustive
def test_of_many_microbatches_few_tell() -> None:
    """Peak, operations and traffic of a step equal those of the whole step, rehearsed."""
    run = tiny_run(LAYOUTS["pp-cp"], accumulation=12)
    assert enough_microbatches(run) == (3, 4)
    assert enough_microbatches(tiny_run(LAYOUTS["single"], accumulation=12)) == (2, 3)
    assert enough_microbatches(tiny_run(LAYOUTS["single"], accumulation=4)) == (4,)
    overlapping = LayoutSpec(pp=2, schedule="pipedream-2bw")
    assert enough_microbatches(tiny_run(overlapping, accumulation=12)) == (12, 12)
    assert continued([ONCE, TWICE], (12, 12), 12) == continued([TWICE], (12,), 12) == TWICE
    assert continued([ONCE, TWICE], (2, 3), 12) == Observed(11, 16, {("all-reduce", "tp"): (11, 110)})
    pools = [RankPool(), RankPool()]
    try:
        few = pools[0].run(1, rehearse_all, run, False)[0]
        whole = pools[1].run(1, rehearse_all, run, True)[0]
    finally:
        for pool in pools:
            pool.close()
    assert few.pop("microbatches") == {"in_a_step": 12, "rehearsed": 7}
    assert whole.pop("microbatches") == {"in_a_step": 12, "rehearsed": 12}
    assert few == whole


def rehearse_all(run: ResolvedRun, whole: bool) -> dict[str, Any]:
    """The report of the first rank, without its duration; with every microbatch if `whole`."""
    if whole:
        rehearse_module.enough_microbatches = lambda resolved: (resolved.accumulation,)
    report = rehearse_rank(run, 0, on_gpu=False)
    return {key: value for key, value in report.items() if key not in ("seconds", "peak_by_kind")}


@pytest.mark.exhaustive
def test_memory_falls_with_every_layer_that_recomputes() -> None:
    """On a stage with two microbatches in flight, so that recomputing the last layer saves memory too."""
    falling = [{"selective": n} for n in range(3)] + [{"full": n, "selective": 2 - n} for n in range(1, 3)]
    layout = LayoutSpec(pp=2)
    runs = [tiny_run(layout, num_layers=4, recompute={"full": 0} | some, accumulation=2) for some in falling]
    apart = RankPool()
    try:
        (peaks,) = apart.run(1, rehearsed_peaks, runs)
    finally:
        apart.close()
    assert all(more > less for more, less in pairwise(peaks)), peaks


def rehearsed_peaks(runs: list[ResolvedRun]) -> list[int]:
    """The first rank's peaks."""
    return [rehearse_rank(run, 0, on_gpu=False)["peak"] for run in runs]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_in_every_precision(precision: str) -> None:
    """Widths of whole 16 bytes, for which a real run uses torch's grouped kernel."""
    run = tiny_run(LayoutSpec(), family="mixtral", width=32, precision=precision)
    memory, _ = rehearsed(run, 0)
    assert memory["weights"] > 0


def test_findings() -> None:
    report = {"rank": 3, "peak": 3 * GIB, "host": 0, "peak_by_kind": {"weights": GIB, "activations": 2 * GIB}}
    layout = LayoutSpec(dp_shard=2, tp=16)
    too_much, too_far = findings([report], layout, memory_bytes=2 * GIB, per_node=8)
    assert too_much == "rank 3 needs 3.0 GiB of 2.0 GiB; the largest part is activations, 2.0 GiB"
    assert too_far.startswith("tp=16 crosses nodes of 8 devices")
    assert not findings([report], LayoutSpec(tp=8, dp_shard=4), memory_bytes=3 * GIB, per_node=8)
    assert not findings([report | {"host": GIB}], LayoutSpec(tp=8, dp_shard=4), memory_bytes=2 * GIB, per_node=8)


@pytest.mark.slow
def test_offloaded_weights_and_state_are_in_the_hosts_memory() -> None:
    run = tiny_run(LayoutSpec(dp_shard=2, offload="cpu"), width=64)
    with closing(RankPool()) as apart:
        (report,) = apart.run(1, partial(rehearse_rank, on_gpu=True), run, 0)
    assert report["host"] == report["at_rest"]["weights"] + report["at_rest"]["optimizer"] > report["peak"] / 4


def test_worlds() -> None:
    run = tiny_run(LayoutSpec(dp_shard=2, tp=2)).run
    assert fill_world(run, 1024).layout == LayoutSpec(dp_shard=512, tp=2)
    with pytest.raises(ValueError, match="nearest multiple is 8"):
        fill_world(run, 7)
    assert typical_ranks(LayoutSpec(pp=8, tp=2)) == [0, 2, 12, 14]


@pytest.mark.slow
def test_the_verb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A rank of 16 in its own process, through the command line; insufficient memory is a finding."""
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4, vocab: 64}\nlayout: {tp: 2}\n")
    words = ["rehearse", str(recipe), "--world", "16", "--cluster", "16xh100", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["dp_replicate"] == 8
    assert [report["rank"] for report in found["ranks"]] == [0]
    assert [size_text(size) for size in (24, 3000, 54 * 2**20, GIB // 2, 13 * GIB)] == [
        "24 B", "2.9 KiB", "54.0 MiB", "0.500 GiB", "13.0 GiB"
    ]  # fmt: skip
    assert main([*words[:-1], "--ranks", "16"]) == 2
    assert "is not a rank; ranks are 0 to 15" in capsys.readouterr().err
