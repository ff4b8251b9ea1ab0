"""Every tensor is where it computes: trainer state on a GPU that need not be there, as tensors without data."""

import contextlib
import gc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from meshwright import devices
from meshwright.checkpoint.writer import CheckpointWriter
from meshwright.devices import (
    ACCELERATORS,
    CPU,
    backend_of,
    capability_of,
    host_bytes,
    host_rooms,
    identity_of,
    name_of,
    of_kind,
    on_cpu,
    peak_reserved_bytes,
    random_state_of,
    release_unused,
    set_random_state,
    with_my_device,
)
from meshwright.models import named_tensors
from meshwright.optim.parameterwise import Parameterwise
from meshwright.rehearse.fake import FakeTensors, UncountedTier
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.offload import OffloadSpec
from meshwright.spec.pieces import PIECES, PieceSizes
from meshwright.spec.run import ResolvedRun
from meshwright.state import TieredStore
from meshwright.state.store import Bucket
from meshwright.state.tiers import Tier
from meshwright.testing.equivalence import build_here, loader_for
from meshwright.torch_internals import DispatchMode
from meshwright.trainer.setup import RankContext, Trainer, build_parallel_model, give_state
from tiny import tiny_run

GPU = torch.device("cuda", 0)
OPTIMIZERS = ("adamw", "adamw_8bit", "muon")
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp32 gradients": {"precision": "bf16", "reduce_dtype": "fp32"},
}
TUNED: dict[str, Any] = {"full": None, "lora": {"method": "lora", "rank": 3}, "qlora": {"method": "qlora", "rank": 4}}


TIERS: dict[str, Any] = {
    "host": {"optimizer": "host"},
    "half on the host": {"optimizer": "host", "optimizer_share": 0.5},
    "disk": {"optimizer": "disk"},
    "parameters on disk": {"optimizer": "disk", "parameters": "disk"},
}


class Moves(TorchFunctionMode):
    """A tensor takes the memory of another device when it is given (`tensor.data = there`), as on a GPU; one without
    data would keep its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            tensor, there = args
            tensor.fake_device = there.device
        return result


@contextlib.contextmanager
def no_data() -> Iterator[None]:
    """Tensors made inside have no data, on whatever device."""
    with FakeTensors(), Moves(), torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for copies are no waits: no GPU does them."""
    monkeypatch.setattr("meshwright.state.tiers.after", lambda device: lambda: None)


def build(run: ResolvedRun) -> Trainer:
    """The only process of a run, on a GPU that this machine need not have: its tensors have no data."""
    passes = build_parallel_model(run, None)
    with no_data():
        return give_state(passes, run, RankContext(device=GPU), None, UncountedTier)


def misplaced(trainer: Trainer) -> list[str]:
    """Tensors that are elsewhere while a bucket is stepped, after every parameter's gradient has been computed."""
    found = []
    if trainer.resolved.run.layout.tiers.parameters == "device":  # else blocks fetch them
        found = [f"{name}: in the model" for name, one in named_tensors(trainer.model).items() if one.device != GPU]
    with no_data():
        return found + misplaced_in_buckets(trainer)


def compute_gradients(trainer: Trainer) -> None:
    """Two microbatches' gradients of every parameter."""
    trained = [tensor for tensor in trainer.model.parameters() if tensor.requires_grad]
    for _ in range(2):
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():  # as autograd does
                hook(parameter)


def misplaced_in_buckets(trainer: Trainer) -> list[str]:
    """The same, of what the buckets hold."""
    compute_gradients(trainer)
    found = []
    for bucket in trainer.store.buckets:
        trainer.store.fetch(bucket)
        for name, parameter in bucket.parameters.items():
            assert parameter.grad is not None, name
            of_it = {"weight": parameter, "gradient": parameter.grad, **bucket.optimizers.state_of(parameter)}
            on_host = {"step"} if counts_on_host(bucket, parameter) else set()
            for key, tensor in of_it.items():
                if tensor.device != (CPU if key in on_host else GPU):
                    found.append(f"{name}: {key} on {tensor.device}")
        trainer.store.put(bucket)
    return found


def counts_on_host(bucket: Bucket, parameter: torch.Tensor) -> bool:
    """Whether the optimizer reads its count of steps."""
    (optimizer,) = (one for one in bucket.optimizers.optimizers if parameter in one.state)
    return isinstance(optimizer, Parameterwise)


@pytest.mark.parametrize("tuned", TUNED)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_where_it_computes(optimizer: str, precision: str, tuned: str) -> None:
    options: dict[str, Any] = PRECISIONS[precision] | {"optimizer": {"name": optimizer}}
    run = tiny_run(LayoutSpec(), finetune=TUNED[tuned], **options)
    assert misplaced(build(run)) == []


def test_a_tensor_elsewhere_is_found() -> None:
    trainer = build(tiny_run(LayoutSpec(), precision="bf16"))
    (bucket,) = trainer.store.buckets
    name, parameter = next(iter(bucket.parameters.items()))
    with FakeTensors():
        bucket.optimizers.state_of(parameter)["exp_avg"] = torch.zeros(parameter.shape)
    assert misplaced(trainer) == [f"{name}: exp_avg on cpu"]


def test_choices_by_device() -> None:
    assert on_cpu(CPU)
    assert on_cpu(torch.zeros(1))
    assert not on_cpu(torch.device("cuda", 0))
    assert of_kind({"cpu": 1, "gpu": 2}, torch.device("cuda", 1)) == 2
    assert backend_of(["cpu"]) == "gloo"
    assert backend_of(["cuda"]) == "cpu:gloo,cuda:nccl"


def test_a_thread_works_on_its_starter_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", seen.append)
    work = with_my_device(seen.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    work(-1)
    assert seen == [3, -1]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.every(4)
def test_state_that_moves_is_where_it_computes(optimizer: str, precision: str, tier: str) -> None:
    trainer = build_in_tier(tier, **(PRECISIONS[precision] | {"optimizer": {"name": optimizer}}))
    assert isinstance(trainer.store, TieredStore)
    assert len(trainer.store.buckets) > 2
    assert misplaced(trainer) == []
    homes = [slot.tensor for moved in trainer.store._moved.values() for slot in moved.kept]
    assert homes
    assert all(map(on_cpu, homes))


def build_in_tier(tier: str, **options: Any) -> Trainer:
    """`build`, with state in a tier and buckets of a few tensors."""
    before = PIECES.set(PieceSizes(bucket=3000))
    try:
        return build(tiny_run(LayoutSpec.model_validate({"offload": TIERS[tier]}), width=64, **options))
    finally:
        PIECES.reset(before)


class Copies(DispatchMode):
    """Counts copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [one for one in (*args, result) if isinstance(one, torch.Tensor)]
        self.count += len({one.device for one in tensors}) > 1
        return result


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_bucket_is_copied_at_once(precision: str, tier: str) -> None:
    """To the device, and back: a GPU waits between small copies."""
    trainer = build_in_tier(tier, precision=precision)
    store = trainer.store
    with no_data():
        compute_gradients(trainer)
        for bucket in store.buckets:
            with Copies() as fetched:
                store.fetch(bucket)
            with Copies() as put:
                store.put(bucket)
            assert (fetched.count, put.count) == (1, 1)


class FakeRuntime:
    """torch's module for a GPU that is not there, and CUDA's calls that register memory of the host."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.check_error = [0].index

    def cudart(self) -> Any:
        return types.SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.registered.pop)

    def register(self, address: int, size: int, flags: int) -> int:
        assert address % 4096 == flags == 0
        self.registered[address] = size
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: fake)
    return fake


def test_pinned_memory_is_not_rounded_up(runtime: FakeRuntime) -> None:
    """torch's own is, to a power of two: 16 MiB and a block of alignment would take 32."""
    size = 16 * 2**20 + 4096
    tier = Tier(OffloadSpec(optimizer="host"), Path(), GPU)
    home, buffer = tier.home("bucket", size), tier.buffer(size)
    assert sum(runtime.registered.values()) == 2 * size
    home.write(buffer.fill_(3))
    like = torch.empty(5, dtype=torch.float32)
    home.tensor(64, like).fill_(2.5)
    home.read(buffer)
    assert buffer[64:84].view(torch.float32).tolist() == [2.5] * 5
    del home, buffer, tier
    gc.collect()
    assert not runtime.registered


def test_a_checkpoint_s_copies_are_one_block(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    monkeypatch.setattr("meshwright.devices.on_cpu", lambda device: False)
    monkeypatch.setattr("meshwright.devices.has_streams", lambda device: True)
    monkeypatch.setattr("meshwright.checkpoint.writer.synchronize_all", lambda tensors: None)
    writer = CheckpointWriter(Path(), CheckpointSpec())
    parts = {"a": torch.arange(1025.0), "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3), "c": torch.tensor(7)}
    for _ in range(2):
        copies = writer._copy(parts)
        assert all(torch.equal(copies[name], part) for name, part in parts.items())
        assert list(runtime.registered.values()) == [4160 + 64 + 64]
        parts["a"] += 1


def test_rooms_for_activations_are_used_again(runtime: FakeRuntime) -> None:
    rooms, x = host_rooms.__wrapped__(GPU), torch.arange(24.0).view(4, 6).t()
    for _ in range(3):
        taken = [rooms.like(x), rooms.like(x)]
        assert taken[0].stride() == x.stride()
        for room in taken:
            assert torch.equal(room.copy_(x), x)
            rooms.give_back(room)
    assert list(runtime.registered.values()) == [96, 96]


class FakeMps:
    """torch's module for Apple's GPUs: it has no properties, names, streams or peaks."""

    def __init__(self) -> None:
        real = torch.mps
        for name in ("driver_allocated_memory", "get_rng_state", "set_rng_state", "empty_cache"):
            assert callable(getattr(real, name))
        for name in ("get_device_properties", "get_device_name", "get_device_capability", "is_initialized", "cudart"):
            assert not hasattr(real, name)
        self.state = torch.zeros(4, dtype=torch.uint8)

    def driver_allocated_memory(self) -> int:
        return 17

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.state = state


def test_an_apple_gpu_needs_nothing_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    mps, fake = torch.device("mps", 0), FakeMps()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: fake)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: 0)
    emptied: list[bool] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(True))
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    assert (name_of(mps), identity_of(mps), capability_of(mps)) == ("mps", "mps:0", (0, 0))
    assert peak_reserved_bytes(mps) == 17
    devices.reset_peak(mps)
    release_unused()
    assert emptied
    set_random_state(mps, torch.ones(4, dtype=torch.uint8))
    assert random_state_of(mps).tolist() == [1, 1, 1, 1]
    devices.after(mps)()
    assert waited == [mps]
    assert not host_bytes(5, mps).is_pinned()
    assert backend_of(["mps"]) == "gloo"


def test_an_intel_gpu_has_all_that_is_used_of_it() -> None:
    for name in ("get_device_properties", "get_device_name", "is_initialized", "get_rng_state", "set_rng_state"):
        assert callable(getattr(torch.xpu, name))
    assert backend_of(["xpu"]) == "cpu:gloo,xpu:xccl"
    assert capability_of(torch.device("xpu", 0)) == (0, 0)  # its own is a dict


class Wide(DispatchMode):
    """Operations that make a tensor in fp64, except of the loader's numbers on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64 and function.name() != "aten::lift_fresh":
            self.made.append(function.name())
        return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": {"name": "muon", "eps": 0.1}},
        {"family": "mixtral"},
        {"family": "gpt2", "precision": "bf16"},
        {"preference": {"beta": 0.5}},
    ],
    ids=str,
)
def test_a_step_needs_no_fp64_where_there_is_none(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """As on Apple's GPUs."""
    monkeypatch.setitem(ACCELERATORS, "cpu", ACCELERATORS["mps"])
    trainer = build_here(tiny_run(LayoutSpec(), **{"precision": "fp32", "accumulation": 2, **options}))
    with loader_for(trainer) as loader:
        trainer.train_step(1, loader.microbatches(0))
        microbatches = loader.microbatches(1)
        with Wide() as wide:
            trainer.train_step(2, microbatches)
    assert wide.made == []
