"""A run out of memory reports the expected and the held memory, the place, and a change that would fit; it does fit."""

import functools
import gc
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.callbacks import Callback
from meshwright.cli.main import main
from meshwright.launch.status import OUT_OF_MEMORY, STUCK, OutOfMemoryError, TrainingFailed
from meshwright.machine import Machine
from meshwright.models.batch import to_device
from meshwright.pages.memory import memory_page
from meshwright.parallel.ledger import Ledger, Storages
from meshwright.parallel.timeline import BACKWARD, FORWARD, NAMED_EVERY, RecordingLedger
from meshwright.predict.forecast import forecast
from meshwright.rehearse.rank import rehearse_rank
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.recipe import dump_recipe, load_recipe, parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.testing.ranks import RankPool
from meshwright.torch_internals import in_backward_pass
from meshwright.trainer import held as kinds
from meshwright.trainer import out_of_memory
from meshwright.trainer import run as run_module
from meshwright.trainer.held import OUTSIDE, held
from meshwright.trainer.out_of_memory import (
    MOST_RETRIES,
    PAGE,
    Attempts,
    OutOfMemoryState,
    is_out_of_memory,
    moment_of,
    page_of,
    page_of_killed,
    shortage,
)
from meshwright.trainer.remedies import remedies
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.run import train
from meshwright.trainer.setup import Trainer
from tiny import tiny_run

GB = 1e9


class Device(Ledger):
    """A device that refuses tensors made while it is entered: those beyond a number of bytes, or from a given tensor of
    a backward pass on."""

    def __init__(self, limit: float = inf, *, backward: float = inf) -> None:
        super().__init__(dict)
        self.limit, self.backward = limit, backward

    def changed(self, key: int, size: int) -> None:
        self.backward -= size > 0 and in_backward_pass()
        if size and (self.now > self.limit or self.backward < 0):
            self.limit = self.backward = inf  # the explanation needs memory
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / 2**20:.6f} MiB. GPU 0 has")


FP32 = {"precision": "fp32", "width": 48}
STEPS: list[tuple[str, dict[str, Any], Device]] = [
    ("the forward pass", FP32, Device(0.4e6)),
    ("the forward pass", {**FP32, "recompute": "full"}, Device(0.3e6)),
    ("the backward pass", FP32, Device(backward=20)),
    ("the backward pass", {**FP32, "recompute": "full"}, Device(backward=60)),
    ("the backward pass", {**FP32, "recompute": "selective"}, Device(backward=60)),
    ("the backward pass", {"precision": "bf16", "width": 48}, Device(backward=20)),
    ("the backward pass", {**FP32, "finetune": {"method": "lora", "rank": 4}}, Device(backward=20)),
    ("the backward pass", {**FP32, "family": "qwen3_moe"}, Device(backward=20)),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("phase", "settings", "device"), STEPS)
def test_the_moment_names_the_phase_and_nearly_every_byte(phase: str, settings: dict[str, Any], device: Device) -> None:
    """The fake device counts tensors of the step; all held memory must be of a known kind and layer."""
    trainer = build_here(tiny_run(LayoutSpec(), num_layers=3, **settings))
    trainer.step = 1
    moment = None
    with loader_for(trainer) as loader, device:
        try:
            trainer.train_step(1, loader.microbatches(0))
        except torch.OutOfMemoryError as error:
            moment = moment_of(error, 0, trainer)
    assert moment is not None
    assert (moment.phase, moment.step) == (phase, 1)
    found = moment.held.kinds
    named = found[kinds.ACTIVATIONS] + found[kinds.TEMPORARIES] + found[kinds.GRADIENTS] + found[kinds.COMMUNICATION]
    # The refused tensor is already made, and some temporaries of the refused operation are in no variable.
    assert named >= 0.75 * (device.now - moment.request)
    layers = set(moment.held.layers) - {OUTSIDE}
    assert layers <= {"layers.0", "layers.1", "layers.2"}
    assert "layers.0" in layers


@pytest.mark.slow
def test_activations_are_of_their_layers_and_names_are_those_of_parameters() -> None:
    run = tiny_run(LayoutSpec(), num_layers=3, **FP32)
    trainer = build_here(run)
    with loader_for(trainer) as loader:
        (batch,) = loader.microbatches(0)
    loss = trainer.train_step.passes.model(to_device(batch, trainer.device), trainer.train_step.passes.loss)
    found = held(trainer)
    layers = {name: size for name, size in found.layers.items() if name != OUTSIDE}
    assert list(layers) == ["layers.0", "layers.1", "layers.2"]
    assert layers["layers.0"] == pytest.approx(layers["layers.1"], rel=0.01)  # rope tables count for the first layer
    weights = sum(p.nbytes for p in trainer.model.parameters())
    assert found.kinds[kinds.OPTIMIZER] == weights
    assert found.kinds[kinds.GRADIENTS] == 0
    names = " ".join(name for _, name, _ in found.largest)
    assert "layers.1.feed_forward.w2, Linear" in names
    assert "tok_embeddings.weight [50 x 48, float32]" in names
    del loss, trainer
    gc.collect()  # the hooks that read the graph
    trainer = build_here(run)
    trainer.train_step.passes.train([to_device(batch, trainer.device)], 1.0)
    after = held(trainer)
    assert after.kinds[kinds.GRADIENTS] == weights
    assert after.kinds[kinds.ACTIVATIONS] == 0


def test_a_step_that_has_no_room_for_moments_says_so() -> None:
    """With weights packed for decoding, which have no storage to inspect."""
    run = tiny_run(LayoutSpec(), **FP32)
    trainer = build_here(run)
    packed = torch.ones(64, 64).to_mkldnn()
    with loader_for(trainer) as loader:
        trainer.train_step.gradients(loader.microbatches(0))
    with Device(0) as device, pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train_step.update(1, 1.0)
    assert device.now
    moment = moment_of(caught.value, 0, trainer)
    assert moment.phase == "the optimizer's step"
    assert moment.held.kinds[kinds.GRADIENTS] == sum(p.nbytes for p in trainer.parameters.values())
    assert packed.layout is not torch.strided


@pytest.mark.parametrize(
    ("error", "yes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), False),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_what_is_lack_of_memory(error: Exception, yes: bool) -> None:
    assert is_out_of_memory(error) is yes


def test_a_timeline_counts_what_the_ledger_counts_and_knows_phases_kinds_and_layers() -> None:
    run = tiny_run(LayoutSpec(), num_layers=3, **FP32)
    reports = []
    for make in (lambda trainer: Ledger(dict), lambda trainer: RecordingLedger(lambda: names(trainer), trainer.model)):
        trainer = build_here(run)
        with loader_for(trainer) as loader:
            trainer.train_step(1, loader.microbatches(0))
            ledger = make(trainer)
            before = torch.empty(1000)
            ledger.watch([before])  # its time of allocation is unknown
            with ledger:
                trainer.train_step(2, loader.microbatches(1))
        reports.append(ledger)
    plain, timeline = reports
    assert timeline.peak == plain.peak
    report = timeline.report()
    assert report["peak"]["total"] == timeline.peak == max(point["total"] for point in report["points"])
    assert {point["phase"] for point in report["points"]} >= {FORWARD, BACKWARD}
    assert {".".join(place.split(".")[:2]) for place in report["peak"]["places"]} >= {"layers.0", "layers.2"}
    assert report["peak"]["kinds"]["activations"] > 0.5 * timeline.peak
    gradients = max(point["kinds"].get("gradients", 0) for point in report["points"])
    assert gradients == sum(p.nbytes for p in trainer.parameters.values())
    assert [point["seconds"] for point in report["points"]] == sorted(point["seconds"] for point in report["points"])
    page = memory_page("Memory", report)
    assert "layers.1.feed_forward" in page
    assert not re.search(r"<link|src=|href=|url\(|@import", page)  # it loads nothing


class Compared(Ledger):
    """A ledger that also reads the size of every storage after each operation."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(dict, model=model)
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.true_peak = 0

    def counts(self, storage: torch.UntypedStorage) -> bool:
        self.alive[id(storage)] = weakref.ref(storage)
        return True

    def true(self) -> int:
        return sum(storage.nbytes() for ref in self.alive.values() if (storage := ref()) is not None)

    def __torch_dispatch__(self, *arguments: Any, **names: Any) -> Any:
        result = super().__torch_dispatch__(*arguments, **names)
        self.true_peak = max(self.true_peak, self.true())
        return result


def compared(run: ResolvedRun) -> list[tuple[int, int]]:
    """Peak and last size of a first and a second step: as counted, and as read."""
    trainer = build_here(run)
    ledger = Compared(trainer.model)
    with loader_for(trainer) as loader:
        with ledger:
            trainer.train_step(1, loader.microbatches(0))
        first = [(ledger.peak, ledger.true_peak), (ledger.now, ledger.true())]
        ledger.begin()
        ledger.true_peak = 0
        with ledger:
            trainer.train_step(2, loader.microbatches(1))
    return [*first, (ledger.peak, ledger.true_peak), (ledger.now, ledger.true())]


@pytest.mark.parametrize("zero", [2, 3])
def test_a_ledger_counts_gathered_weights_only_until_fsdp_frees_them(ranks: RankPool, zero: int) -> None:
    run = tiny_run(LayoutSpec(dp_shard=3, zero=zero), num_layers=4, accumulation=2, precision="bf16")  # uneven shards
    for pairs in ranks.run(3, compared, run):
        assert all(counted == read for counted, read in pairs), pairs


def names(trainer: Trainer) -> Storages:
    return {id(p.grad.untyped_storage()): "gradients" for p in trainer.parameters.values() if p.grad is not None}


# ---- what would fit, rehearsed --------------------------------------------------------------------------------------

GPU = Machine("gpu", "NVIDIA H100 80GB HBM3", 8, 80 * 10**9, 10**12)
CPU = Machine("cpu", "cpu", 8, 64 * 10**9)

LLAMA = {"family": "llama", "hidden": 1024, "num_layers": 2, "num_heads": 16, "ffn": 4096, "vocab": 32000}
LLAMA |= {"max_positions": 32768}
DEEP = {**LLAMA, "num_layers": 4}
MOE = {**LLAMA, "family": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "expert_ffn": 1024}
NARROW = {**LLAMA, "hidden": 256, "num_heads": 4, "ffn": 1024, "vocab": 1000}
LORA = {"method": "lora", "rank": 16}
SITUATIONS: dict[str, tuple[Machine, float, dict[str, Any], str]] = {
    # name: (machine, the limit relative to the prediction, the recipe, the largest kind of memory)
    "large micro batch": (GPU, 0.6, {"training": {"micro_batch": 16}}, "activations"),
    "long sequence": (GPU, 0.7, {"data": {"sequence_length": 16384}}, "activations"),
    "large vocabulary": (GPU, 0.8, {"model": {**LLAMA, "vocab": 256000}}, "optimizer"),
    "optimizer state": (GPU, 0.8, {"model": DEEP, "data": {"sequence_length": 256}}, "optimizer"),
    "DDP": (GPU, 0.8, {"layout": {"dp_replicate": 8}, "data": {"sequence_length": 256}}, "optimizer"),
    "ZeRO-1": (GPU, 0.8, {"layout": {"dp_shard": 8, "zero": 1}, "model": DEEP}, "activations"),
    "ZeRO-3": (GPU, 0.7, {"layout": {"dp_shard": 4}, "training": {"micro_batch": 8}}, "activations"),
    "hybrid sharding": (
        *(GPU, 0.7),
        {"layout": {"dp_shard": 2, "dp_replicate": 2}, "training": {"micro_batch": 8}},
        "activations",
    ),
    "tensor parallelism": (GPU, 0.7, {"layout": {"tp": 2}, "training": {"micro_batch": 16}}, "activations"),
    "context parallelism": (
        *(GPU, 0.7),
        {"layout": {"cp": 2}, "data": {"sequence_length": 16384}, "training": {"micro_batch": 2}},
        "activations",
    ),
    "pipeline": (GPU, 0.7, {"layout": {"pp": 2}, "model": DEEP, "training": {"micro_batch": 4}}, "activations"),
    "experts": (
        *(GPU, 0.6),
        {"model": MOE, "layout": {"dp_shard": 2, "ep": 2}, "training": {"micro_batch": 8}},
        "activations",
    ),
    "LoRA on long texts": (
        *(GPU, 0.7),
        {"finetune": LORA, "data": {"sequence_length": 8192}, "training": {"micro_batch": 4}},
        "activations",
    ),
    "a CPU": (
        *(CPU, 0.7),
        {"device": "cpu", "model": NARROW, "data": {"sequence_length": 512}, "training": {"micro_batch": 16}},
        "activations",
    ),
}


def resolved_of(recipe: dict[str, Any], machine: Machine, overrides: tuple[str, ...] = ()) -> ResolvedRun:
    sections = {"model": LLAMA, "data": {"sequence_length": 2048}, "training": {"micro_batch": 1}} | recipe
    ranks = LayoutSpec.model_validate(sections.get("layout", {})).data_parallel
    batch = 2 * ranks * sections["training"]["micro_batch"]
    sections["training"] = {"global_batch": batch, **sections["training"]}
    run = parse_spec(dump_recipe(Run.model_validate(sections)), Run, overrides)
    return resolve_run(run, base_dir=Path(), machine=machine)


@pytest.fixture(scope="module")
def apart() -> Iterator[RankPool]:
    """A process that forks."""
    pool = RankPool()
    yield pool
    pool.close()


def rehearsed_apart(runs: list[tuple[ResolvedRun, bool]]) -> list[dict[str, Any]]:
    """The reports of rank 0 of each run, in forks of this process, because a process can be only one rank."""
    reports = []
    for run, on_gpu in runs:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            torch.set_num_threads(1)  # in a fork, threads that rebuild the lost pool at the same time crash (2.15)
            with os.fdopen(writing, "w") as file:
                try:
                    json.dump(rehearse_rank(run, 0, on_gpu=on_gpu), file)
                except Exception:
                    json.dump(traceback.format_exc(), file)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            text = file.read()
        assert os.waitpid(child, 0)[1] == 0
        reports.append(json.loads(text))
        assert isinstance(reports[-1], dict), reports[-1]
    return reports


@pytest.mark.every(7)
@pytest.mark.slow
@pytest.mark.parametrize("name", SITUATIONS)
def test_the_first_remedy_of_each_situation_fits_when_it_is_rehearsed(
    name: str, apart: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, part, recipe, most = SITUATIONS[name]
    before = resolved_of(recipe, machine)
    cost = forecast(before, machine).memory
    limit = part * cost.total
    first = remedies(before, machine, limit)[0]
    after = resolved_of(recipe, machine, first.overrides)
    assert (after.global_batch, after.run.data, after.model) == (before.global_batch, before.run.data, before.model)
    assert after.run.layout.world_size == before.run.layout.world_size
    ((too_much, fits),) = apart.run(1, rehearsed_apart, [(run, machine is GPU) for run in (before, after)])
    assert too_much["peak"] + cost.context > limit
    # A rehearsal has one kind of memory: offloaded state in host memory is counted too.
    assert fits["peak"] - first.candidate.memory.host + cost.context <= limit
    assert max(too_much["peak_by_kind"], key=lambda kind: too_much["peak_by_kind"][kind]) == most
    monkeypatch.setattr(out_of_memory, "find_machine", lambda device: machine)
    page = str(page_of(before, OutOfMemoryState(0, "the forward pass", limit=limit)))
    assert f"of {limit / GB:.3f} GB a rank" in page
    assert f"\n  {first.words} " in page


# ---- starting again --------------------------------------------------------------------------------------------------

RECIPE = """\
model: {family: llama, hidden: 128, num_layers: 2, num_heads: 4, max_positions: 256}
data: {sources: texts/*.txt, tokenizer_vocab: 280, sequence_length: 256}
training:
  {steps: 2, global_batch: 16, micro_batch: 16, precision: fp32, lr_schedule: {warmup: 1}, evaluation: {batches: 0}}
device: cpu
run_dir: runs/a
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / f"texts/{number}.txt").write_text(f"fish number {number} swims in the sea\n" * 300)
    (tmp_path / "run.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "step"]


def test_a_single_process_that_the_kernel_may_kill_has_a_launcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is predicted not to suffice, or after a kill; not with objects that only this process has."""
    started, here = list[int](), list[int]()
    resolved = resolve_run(load_recipe(Path("run.yaml")), base_dir=folder)
    run = resolved.run.model_copy(update={"run_dir": str(folder / "runs/b")})

    def start(given: Run, *_: Any) -> int:
        started.append(given.layout.world_size)
        return STUCK

    def rank(*_: Any, **__: Any) -> int:
        here.append(1)
        raise UserError("trained here")

    monkeypatch.setattr(run_module, "start_workers", start)
    monkeypatch.setattr(run_module, "train_rank", rank)
    assert shortage(resolved) == ""
    with pytest.raises(UserError, match="trained here"):
        train(run, base_dir=folder, dataset=np.zeros((4, 64), dtype=np.int64))  # an array has no truth value
    assert (started, here.pop()) == ([], 1)
    with pytest.raises(UserError, match="trained here"):
        train(run, base_dir=folder)
    (folder / "runs/b").mkdir(parents=True, exist_ok=True)
    page = page_of_killed(resolved, folder / "runs/b", 0, held_bytes=5 * 10**8, there=10**9)
    assert "out of memory: rank 0, killed by the kernel while it held 0.5 GB" in page
    beside = page_of_killed(resolved, folder / "runs/b", 0, held_bytes=5 * 10**8, there=10**10)
    (room,) = re.findall(r"of ([\d.]+) GB a rank", beside)
    assert 5 < float(room) < 9.9, "the launcher's own memory is not subtracted"
    with pytest.raises(TrainingFailed):
        train(run, base_dir=folder)
    assert (started, here) == ([1], [1])
    (folder / "runs/b" / PAGE).unlink()
    monkeypatch.setattr(out_of_memory, "room", lambda *_: 1e6)
    assert re.fullmatch(r"0\.\d\d GB expected of 0\.00 GB a rank", shortage(resolved))
    abroad = resolved.model_copy(update={"run": run.model_copy(update={"cluster": "8xh100"})})
    assert shortage(abroad) == shortage(resolved), "a CPU has no GPU's context and buffers"
    with pytest.raises(TrainingFailed):
        train(run, base_dir=folder)
    with pytest.raises(UserError, match="trained here"):
        train(run, base_dir=folder, callbacks=[Callback()])
    assert (started, here) == ([1, 1], [1, 1])


@pytest.mark.slow
def test_a_run_starts_again_with_the_first_remedy_and_learns_the_same(
    folder: Path, capfd: pytest.CaptureFixture
) -> None:
    assert main(["train", "run.yaml", "run_dir=runs/whole"]) == 0
    capfd.readouterr()
    with Device(60e6):
        assert main(["train", "run.yaml"]) == OUT_OF_MEMORY
    told = capfd.readouterr().err
    assert "error: out of memory: rank 0, step 1, the " in told
    assert "starting again" not in told
    assert "fastest first (--retry-oom, in Python retry_oom=True: restarts with the first):" in told
    remedy = json.loads((folder / "runs/a" / PAGE).read_text())["remedies"][0]
    assert remedy == ["training.micro_batch=8"]
    with Device(60e6):
        assert main(["train", "run.yaml", "--retry-oom"]) == 0
    again = "starting again with training.micro_batch=8 (--retry-oom, in Python retry_oom=True)\n"
    assert again in capfd.readouterr().err
    # The same tokens in the same order; only the order of fp32 sums differs.
    assert losses(folder / "runs/a") == pytest.approx(losses(folder / "runs/whole"), rel=1e-5)
    assert "micro_batch: 8" in (folder / "runs/a/recipe.yaml").read_text()


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch alone has more addresses")
def test_two_ranks_under_a_limit_of_addresses_start_again_and_end(folder: Path) -> None:
    """A real limit: the kernel refuses."""
    limit = 2_600_000
    words = [sys.executable, "-m", "meshwright", "train", "run.yaml", "--retry-oom", "layout={dp_shard: 2, zero: 1}"]
    words += ["training.global_batch=256", "training.micro_batch=128", "training.steps=1"]
    command = f"ulimit -v {limit}; exec {shlex.join(words)}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("error: out of memory: rank ") >= 1
    assert "starting again with training.micro_batch=" in found.stderr
    assert len(losses(folder / "runs/a")) == 1


def test_nothing_is_named_while_a_storage_is_released() -> None:
    """Reading a gradient during its release crashes the process."""
    releases, named_then = False, []

    def name_storages() -> Storages:
        named_then.append(releases)
        return {}

    with RecordingLedger(name_storages, torch.nn.Identity()):
        kept = [torch.zeros(1) for _ in range(2 * NAMED_EVERY)]
        releases = True
        kept.clear()
        releases = False
    assert len(named_then) > 1
    assert not any(named_then)


@pytest.mark.slow
def test_train_draws_a_step_whose_numbers_are_those_without(folder: Path, capfd: pytest.CaptureFixture) -> None:
    words = ["train", "run.yaml", "training.micro_batch=2", "training.global_batch=4"]
    assert main([*words, "run_dir=runs/plain"]) == 0
    assert main([*words, "--memory"]) == 0
    assert "memory of step 2: runs/a/memory/rank-0-step-2.html\n" in capfd.readouterr().out
    assert losses(folder / "runs/a") == losses(folder / "runs/plain")
    page = (folder / "runs/a/memory/rank-0-step-2.html").read_text()
    assert "<h1>Memory of step 2 on rank 0</h1>" in page
    for kind in ("weights", "optimizer", "gradients", "activations"):
        assert f"<td>{kind}</td>" in page
    assert re.search(r"<td>[\w.]+\.weight</td><td>weights</td>", page), "weights have their names"
    assert re.search(r"<td>exp_avg of [\w.]+\.weight</td><td>optimizer</td>", page)


def attempt_all(train: Callable[[Run, str | None], int], run: Run, resume: str | None, *, retry: bool) -> int:
    attempts = Attempts(run, resume, retry=retry)
    for changed, which in attempts:
        attempts.status = train(changed, which)
    return attempts.status


def test_it_never_starts_again_for_ever(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    run = Run.model_validate({"model": "gpt2", "run_dir": str(tmp_path)})
    tried = list[tuple[Any, str | None]]()

    def train(run: Run, resume: str | None, *, same: bool) -> int:
        tried.append((run.training.micro_batch, resume))
        size = 64 if same else 2 ** (9 - len(tried))
        page = {"page": len(tried), "remedies": [[f"training.micro_batch={size}"]]}
        (tmp_path / PAGE).write_text(json.dumps(page))
        return OUT_OF_MEMORY

    assert attempt_all(functools.partial(train, same=False), run, None, retry=True) == OUT_OF_MEMORY
    assert tried == [("auto", None), *((2 ** (8 - number), "auto") for number in range(MOST_RETRIES))]
    assert "no further change to try" in capfd.readouterr().err
    tried.clear()
    assert attempt_all(functools.partial(train, same=True), run, None, retry=True) == OUT_OF_MEMORY
    assert tried == [("auto", None), (64, "auto")]
    tried.clear()
    assert attempt_all(functools.partial(train, same=True), run, "newest", retry=False) == OUT_OF_MEMORY
    assert tried == [("auto", "newest")]
    # A page of an earlier run does not apply to this one.
    assert attempt_all(lambda run, resume: OUT_OF_MEMORY, run, None, retry=True) == OUT_OF_MEMORY


def test_a_checkpoint_that_has_no_room_is_written_without_a_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save needs memory for a copy of the state: the remedy avoids the copy, and so the run fits."""
    run = tiny_run(LayoutSpec(), **FP32)
    page = page_of(run, OutOfMemoryState(0, out_of_memory.SAVING, limit=0.9 * GB), folder)
    assert "  checkpoint.asynchronous=false  " in str(page)
    assert json.loads((folder / PAGE).read_text())["remedies"][0] == ["checkpoint.asynchronous=false"]
    assert isinstance(page, OutOfMemoryError)
    checkpoint = run.run.checkpoint.model_copy(update={"asynchronous": False})
    direct = run.model_copy(update={"run": run.run.model_copy(update={"checkpoint": checkpoint})})
    assert "asynchronous" not in str(page_of(direct, OutOfMemoryState(0, out_of_memory.SAVING, limit=0.9 * GB)))
