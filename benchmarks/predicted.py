"""Compares the planner's predictions with training: step time and peak memory of real steps on this machine.

    python benchmarks/predicted.py                      calibrate, train a grid of sizes and layouts, compare
    python benchmarks/predicted.py --write NAME         the same into benchmarks/results/NAME.json and NAME.md
    python benchmarks/predicted.py --only zero3         only configurations whose name contains the word
    python benchmarks/predicted.py --again NAME         today's predictions beside what was measured then

On a machine without GPUs the models are tiny and the ranks are processes on its cores; with GPUs they have from 0.1 to
8 billion parameters, with every layout that its GPUs allow. Every configuration runs in processes of its own.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright.launch.launcher import Worker, threads_per_rank
from meshwright.machine import Machine, find_machine
from meshwright.parallel import Meshes, build_meshes
from meshwright.parallel.ledger import Ledger
from meshwright.predict.blueprint import blueprint
from meshwright.predict.candidate import Candidate, evaluate
from meshwright.predict.engine import Processor, engine_job
from meshwright.predict.hardware import local_cluster
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import loader_for
from meshwright.trainer.calibrate import calibrate
from meshwright.trainer.device import keep_freed_memory
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.setup import RankContext, build_trainer
from meshwright.trainer.state import state_tensors
from meshwright.validate.judge import spearman

RESULTS = Path(__file__).resolve().parent / "results"
WARM, TIMED = 1, 3
"""Warm-up steps, and timed steps, whose median counts."""
SECONDS = 0.3
"""Seconds for each measurement of the calibration."""
PATIENCE = 300
"""Seconds after which a configuration counts as failed."""


@dataclass(frozen=True)
class Case:
    """One configuration."""

    name: str
    model: dict[str, Any]
    layout: dict[str, Any]
    training: dict[str, Any]
    length: int = 256


@dataclass
class Row:
    """Measurement and prediction: seconds a step, bytes of tensors of the rank that holds most."""

    name: str
    ranks: int
    seconds: float
    bytes: int
    resident: int
    """Bytes that a process on a CPU grew by."""
    predicted: dict[str, float] = field(default_factory=dict)
    """Seconds and bytes with the calibrated cluster, seconds without."""

    def off(self, what: str) -> float:
        """Relative error of one prediction."""
        return self.predicted[what] / (self.bytes if what == "bytes" else self.seconds) - 1


NOTHING = {"family": "llama", "hidden": 64, "num_layers": 2, "num_heads": 4, "ffn": 128, "vocab": 256}
"""A model that takes no memory worth mentioning."""
CPU_MODELS = {
    "3M": {"family": "llama", "hidden": 256, "num_layers": 4, "num_heads": 4, "ffn": 768, "vocab": 4096},
    "17M": {"family": "llama", "hidden": 384, "num_layers": 6, "num_heads": 6, "ffn": 1024, "vocab": 8192},
}
GPU_MODELS = {
    "0.1B": {"name": "gpt2"},
    "0.6B": {"name": "qwen3-0.6b"},
    "1.2B": {"name": "llama-3.2-1b"},
    "3.2B": {"name": "llama-3.2-3b"},
}
TWO_RANKS = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "zero2": {"dp_shard": 2, "zero": 2},
    "zero3": {"dp_shard": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "zero3+offload": {"dp_shard": 2, "offload": "cpu"},
}


def cases(machine: Machine) -> Iterator[Case]:
    """The grid for what this machine has."""
    if machine.kind == "cpu":
        yield from _cpu_cases(machine.devices)
        return
    for size, model in GPU_MODELS.items():
        for policy in ("none", "selective", "full"):
            for micro, length in ((1, 2048), (4, 2048), (1, 8192)) if size != "0.1B" else ((4, 1024), (16, 1024)):
                training = {"global_batch": 2 * micro, "micro_batch": micro, "precision": "bf16", "recompute": policy}
                yield Case(f"{size} single {policy} {micro}x{length}", model, {}, training, length)
        training = {"global_batch": 8, "micro_batch": 1, "precision": "bf16", "recompute": "full"}
        yield Case(f"{size} offload full 1x2048", model, {"offload": "cpu"}, training, 1024 if size == "0.1B" else 2048)
    for ranks in (count for count in (2, 4, 8) if count <= machine.devices):
        for name, layout in TWO_RANKS.items():
            wide = {axis: ranks if value == 2 and axis != "zero" else value for axis, value in layout.items()}
            training = {"global_batch": 4 * ranks, "micro_batch": 1, "precision": "bf16", "recompute": "selective"}
            yield Case(f"1.2B {name} x{ranks}", GPU_MODELS["1.2B"], wide, training, 2048)


def _cpu_cases(cores: int) -> Iterator[Case]:
    """Every layout of one and two ranks, both sizes; recomputation, bf16 and smaller microbatches on some of them."""
    layouts = {"single": {}, "offload": {"offload": "cpu"}} | (TWO_RANKS if cores > 1 else {})
    plain: dict[str, Any] = {"global_batch": 4, "micro_batch": 2, "precision": "fp32"}
    for size, model in CPU_MODELS.items():
        for name, layout in layouts.items():
            changed = {"micro_batch": 1} if name == "pp" else {}
            yield Case(f"{size} {name}", model, layout, plain | changed)
    model = CPU_MODELS["17M"]
    for name in ("single", "zero3", "tp"):
        if name in layouts:
            yield Case(f"17M {name} recompute", model, layouts[name], plain | {"recompute": "full"})
            yield Case(f"17M {name} bf16", model, layouts[name], plain | {"precision": "bf16"})
            yield Case(
                f"17M {name} 4 microbatches", model, layouts[name], plain | {"global_batch": 8, "micro_batch": 1}
            )


def resolved_run(case: Case, machine: Machine) -> ResolvedRun:
    """The configuration as a run."""
    run = Run.model_validate(
        {
            "model": case.model,
            "data": {"sequence_length": case.length},
            "training": {"lr_schedule": {"name": "constant", "warmup": 0}} | case.training,
            "layout": case.layout,
            "device": "cpu" if machine.kind == "cpu" else "cuda",
        }
    )
    return resolve_run(run, base_dir=Path(), machine=machine)


def measure(resolved: ResolvedRun, tiny: ResolvedRun, kind: str) -> tuple[float, int, int]:
    """Seconds of a step, tensor bytes of the rank that holds most, and its process's growth in bytes; from separate
    processes that have run `tiny` before.

    Raises `RuntimeError` where they did not answer.
    """
    context, world = multiprocessing.get_context("forkserver"), resolved.run.layout.world_size
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "meshwright.trainer.setup"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            arguments = (
                resolved,
                tiny,
                kind,
                Worker(rank=rank, local_rank=rank, world_size=world, local_world_size=world),
                f"file://{folder}/store",
                there,
            )
            processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        try:
            found = [pipe.recv() for pipe in pipes if pipe.poll(PATIENCE)]
        except EOFError:
            found = []
        finally:
            for process in processes:
                process.kill()
                process.join()
    if len(found) < world:
        raise RuntimeError(f"{resolved.run.layout.strategy}: a rank ended without an answer")
    seconds, allocated, resident = map(max, zip(*found, strict=True))
    return seconds, allocated, resident


def _rank(resolved: ResolvedRun, tiny: ResolvedRun, kind: str, worker: Worker, store: str, pipe: Connection) -> None:
    layout = resolved.run.layout
    device = torch.device("cuda", worker.local_rank) if kind == "gpu" else torch.device("cpu")
    if kind == "gpu":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads_per_rank(worker.local_world_size))
        keep_freed_memory()
    meshes = None
    if layout.world_size > 1 or layout.tiers.parameters == "host":
        backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=store, rank=worker.rank, world_size=worker.world_size)
        meshes = build_meshes(layout, device.type)
    _train(tiny, worker, device, meshes)  # libraries and groups are loaded now, and not counted
    before = _resident()
    took, allocated = _train(resolved, worker, device, meshes)
    resident = 0 if kind == "gpu" else _resident("VmHWM") - before
    pipe.send((statistics.median(took[WARM:]), allocated, resident))
    pipe.recv()  # until the others have answered too


def _train(
    resolved: ResolvedRun, worker: Worker, device: torch.device, meshes: Meshes | None
) -> tuple[list[float], int]:
    """Seconds of every step, and the most bytes of tensors at once; on a CPU one more step tracks them."""
    trainer, took = build_trainer(resolved, RankContext(worker, device, meshes)), []
    with loader_for(trainer) as loader:
        for step in range(1, WARM + TIMED + 1):
            microbatches = loader.microbatches(step)
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            trainer.train_step(step, microbatches)
            if device.type == "cuda":
                torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        if device.type == "cuda":
            return took, torch.cuda.max_memory_allocated()
        ledger, held = (
            Ledger(dict, model=trainer.model),
            [*state_tensors(trainer).values(), *trainer.model.parameters()],
        )
        ledger.watch(tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held)
        with ledger:
            trainer.train_step(WARM + TIMED + 1, loader.microbatches(WARM + TIMED + 1))
    return took, ledger.peak


def _resident(field_name: str = "VmRSS") -> int:
    """Bytes of this process in memory, now or (VmHWM) at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field_name))


def predict(resolved: ResolvedRun, cluster: ClusterSpec, kind: str) -> Candidate:
    """The planner's prediction for a configuration."""
    job = engine_job(
        resolved.run,
        blueprint(resolved.model),
        global_batch=resolved.global_batch,
        micro_batch=resolved.micro_batch,
        processor=Processor("gpu" if kind == "gpu" else "cpu"),
    )
    return evaluate(job, cluster)


def compare(wanted: Iterable[Case], machine: Machine) -> tuple[list[Row], dict[str, Any]]:
    """Measure and predict every configuration; one that does not fit or fails is left out with a message. Returns the
    rows, and the calibration for every number of ranks."""
    rows, calibrated = [], {}
    for case in wanted:
        resolved = resolved_run(case, machine)
        ranks = resolved.run.layout.world_size
        if ranks not in calibrated:
            calibrated[ranks] = calibrate(machine, ranks=ranks, seconds=SECONDS)
        try:
            seconds, peak, resident = measure(
                resolved, resolved_run(replace(case, model=NOTHING), machine), machine.kind
            )
        except RuntimeError as error:
            print(f"{case.name}: {error}", flush=True)
            continue
        row = Row(case.name, ranks, seconds, peak, resident)
        row.predicted = predictions(resolved, machine, calibrated[ranks])
        rows.append(row)
        print(
            f"{case.name:<28}{seconds:8.3f} s {row.off('seconds'):+6.0%} "
            f"(uncalibrated {row.off('seconds uncalibrated'):+6.0%}) {peak / 1e6:8.0f} MB {row.off('bytes'):+6.0%}",
            flush=True,
        )
    return rows, {str(ranks): cluster.model_dump(mode="json") for ranks, cluster in calibrated.items()}


def predictions(resolved: ResolvedRun, machine: Machine, calibrated: ClusterSpec) -> dict[str, float]:
    """The planner's predictions, with the machine's measurements and without."""
    guessed = predict(resolved, local_cluster(machine, resolved.run.layout.world_size), machine.kind)
    known = predict(resolved, calibrated, machine.kind)
    return {
        "seconds": known.time.total,
        "bytes": known.memory.allocated + (known.memory.host if machine.kind == "cpu" else 0),  # one memory there
        "seconds uncalibrated": guessed.time.total,
    }


def predict_again(facts: dict[str, Any]) -> None:
    """Replace the predictions of an earlier run by today's planner's, from the same calibration."""
    machine = Machine(**facts["machine"])
    wanted = {case.name: case for case in cases(machine)}
    for row in facts["rows"]:
        cluster = ClusterSpec.model_validate(facts["clusters"][str(row["ranks"])])
        row["predicted"] = predictions(resolved_run(wanted[row["name"]], machine), machine, cluster)


def summary(rows: list[Row]) -> dict[str, float]:
    """Median errors, and the quality of the order."""
    found: dict[str, float] = {"configurations": len(rows)}
    for what in ("seconds", "seconds uncalibrated", "bytes"):
        found[f"median error of {what}"] = statistics.median(abs(row.off(what)) for row in rows)
        measured = [float(row.bytes) if what == "bytes" else row.seconds for row in rows]
        found[f"rank correlation of {what}"] = spearman([row.predicted[what] for row in rows], measured) or 0.0
    return found


def page(facts: dict[str, Any]) -> str:
    """The result as a table."""
    rows = [Row(**row) for row in facts["rows"]]
    lines = [
        f"# Predicted and measured, {facts['date']}",
        "",
        f"- commit: measured at {facts['commit']}, predicted at {commit()}",
        f"- command: `{facts['command']}`",
        f"- machine: {facts['machine']['devices']} x {facts['machine']['name']}; torch {facts['torch']}",
        *(f"- {name}: {value:.3g}" for name, value in summary(rows).items()),
        "",
        f"Seconds of a step (median of {TIMED}). MB of all tensors at the peak of a step, followed one by one, of the",
        "rank that holds most; beside them what its process grew by, more than for a step of a model of nothing: the C",
        "library's heap and gloo's buffers come on top, which the planner does not predict. Predicted with the figures",
        "of `meshwright plan calibrate`, taken before, and (uncalibrated) with those of a machine of this kind.",
        "",
        "| configuration | ranks | step, s | predicted | off | uncalibrated | tensors | predicted | off | process |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row.name,
            str(row.ranks),
            f"{row.seconds:.3f}",
            f"{row.predicted['seconds']:.3f}",
            f"{row.off('seconds'):+.0%}",
            f"{row.off('seconds uncalibrated'):+.0%}",
            f"{row.bytes / 1e6:.0f}",
            f"{row.predicted['bytes'] / 1e6:.0f}",
            f"{row.off('bytes'):+.1%}",
            f"{row.resident / 1e6:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def commit() -> str:
    """The commit of the working tree."""
    words = ["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="NAME", help="file name, without its ending, in benchmarks/results")
    parser.add_argument("--only", default="", metavar="WORD", help="configurations whose name contains it")
    parser.add_argument("--again", metavar="NAME", help="predict anew what that file has measured, and measure nothing")
    arguments = parser.parse_args()
    if arguments.again:
        facts = json.loads((RESULTS / f"{arguments.again}.json").read_text(encoding="utf-8"))
        predict_again(facts)
    else:
        machine = find_machine()
        rows, clusters = compare((case for case in cases(machine) if arguments.only in case.name), machine)
        facts = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": commit(),
            "command": " ".join(["python", "benchmarks/predicted.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "machine": asdict(machine),
            "clusters": clusters,
            "rows": [asdict(row) for row in rows],
        }
    print(json.dumps(summary([Row(**row) for row in facts["rows"]]), indent=2))
    if name := arguments.write or arguments.again:
        (RESULTS / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (RESULTS / f"{name}.md").write_text(page(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
