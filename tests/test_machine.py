"""The GPUs that a process here can use, whatever hides them, and each rank's own."""

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright import machine
from meshwright.machine import ASK_TORCH, Gpu, Machine, cores_there, find_gpus, find_machine, find_named
from meshwright.spec.errors import UserError
from meshwright.spec.fit import device_misfits
from meshwright.spec.run import Run
from meshwright.trainer import device as device_module
from meshwright.trainer.device import check_own_gpu, choose_device

H100 = "NVIDIA H100 80GB HBM3"
EIGHT = [f"{number}, GPU-{number}f00-77, {H100}, 81559, Disabled" for number in range(8)]
SEEN = Gpu(H100, 81559 * 2**20)


def answers(smi: list[str] | None, seen: list[tuple[str, int]] | None = None) -> Callable[[list[str]], str | None]:
    """nvidia-smi with these rows (None: missing), and torch that sees these GPUs (None: must not be asked)."""

    def ask(command: list[str]) -> str | None:
        if command[0] == "nvidia-smi":
            return None if smi is None else "\n".join(smi)
        assert command[-1] == ASK_TORCH
        assert seen is not None, "torch was asked"
        return json.dumps(["2.13.0", seen, "cuda"])

    return ask


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("hidden", "count"),
    [(None, 8), ("3", 1), ("0,2", 2), (" 1, 0", 2), ("GPU-5f00", 1), ("0,9,1", 1), ("", 0), ("-1", 0)],
)
def test_devices_that_the_environment_hides_do_not_count(driver: Path, hidden: str | None, count: int) -> None:
    environment = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    assert find_gpus(environment, driver, answers(EIGHT)) == ([SEEN] * count, "")


@pytest.mark.parametrize(
    "rows",
    [
        ["0, GPU-1, NVIDIA GB10, [N/A], [N/A]"],  # memory shared with the host
        ["0, GPU-1, NVIDIA A100-SXM4-40GB, 40960, Enabled"],  # slices
        None,  # no nvidia-smi, as in many containers
    ],
)
def test_torch_is_asked_where_the_list_does_not_tell(driver: Path, rows: list[str] | None) -> None:
    seen = [("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4 * 2**30)]
    assert find_gpus({}, driver, answers(rows, seen)) == ([Gpu(*seen[0])], "")


def test_torch_is_asked_about_slices_named_by_the_environment_and_unequal_gpus(driver: Path) -> None:
    seen = [("slice", 5 * 2**30)]
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "MIG-abc"}, driver, answers(EIGHT, seen))[0] == [Gpu(*seen[0])]
    unequal = [*EIGHT[:1], "1, GPU-9, NVIDIA L4, 23034, Disabled"]
    seen = [("NVIDIA L4", 2)]  # numbers count from the fastest GPU, not along the bus
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "1"}, driver, answers(unequal, seen))[0] == [Gpu(*seen[0])]


def test_a_gpu_that_torch_cannot_use_is_told(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    gpus, note = find_gpus({}, driver, answers(None, []))
    assert (gpus, note) == ([], "a GPU's driver is here, but torch 2.13.0 sees no GPU")
    gpus, note = find_gpus({"CUDA_VISIBLE_DEVICES": "MIG-x"}, driver, answers(EIGHT, []))
    assert note.endswith("sees no GPU (CUDA_VISIBLE_DEVICES='MIG-x' hides others)")
    assert find_gpus({}, tmp_path_factory.mktemp("no driver"), answers(None)) == ([], "")


@pytest.mark.parametrize(
    ("device", "kind", "seen", "expected"),
    [
        ("mps", "mps", [("Apple GPU", 2**34)], [Gpu("Apple GPU", 2**34)]),
        ("xpu", "xpu", [("Intel Arc B580", 2**33)] * 2, [Gpu("Intel Arc B580", 2**33)] * 2),
        ("xpu", "cuda", [(H100, 2**36)], "torch 2.13.0 sees no Intel GPU"),
        ("mps", None, [], "torch 2.13.0 sees no Apple GPU"),
    ],
)
def test_gpus_that_the_recipe_names(device: str, kind: str | None, seen: list, expected: list[Gpu] | str) -> None:
    found, note = find_named(device, lambda command: json.dumps(["2.13.0", seen, kind]))
    assert (found or note) == expected


def test_torch_answers_the_question() -> None:
    """This build's; the question is asked of another process."""
    version, seen, kind = json.loads(machine.run_program([sys.executable, "-P", "-c", ASK_TORCH]) or "")
    assert version == torch.__version__
    assert bool(seen) == (kind is not None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": {"dp_shard": 2}}, "an Apple GPU is one process's"),
        ({"training": {"precision": "fp64"}}, "use fp32, bf16 or fp16"),
        ({"training": {"precision": "fp8"}}, "use fp32, bf16 or fp16"),
        ({"training": {"precision": "bf16"}}, None),
    ],
)
def test_what_an_apple_gpu_cannot_do_is_refused(changes: dict, message: str | None) -> None:
    misfits = device_misfits(Run.model_validate({"model": {"name": "gpt2"}, "device": "mps", **changes}))
    assert (message in misfits[0]) if message else not misfits


def test_cores_are_counted_where_the_system_does_not_tell_this_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS, and in a browser tab."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert cores_there() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores_there() == 1


def test_what_is_found_is_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(gpus: list[Gpu], note: str = "") -> None:
        find_machine.cache_clear()
        monkeypatch.setattr(machine, "find_gpus", lambda: (gpus, note))

    found([SEEN, Gpu("NVIDIA L4", 23 * 2**30)])
    both = find_machine()
    assert (both.devices, both.name, both.memory_bytes) == (2, "NVIDIA L4", 23 * 2**30)
    assert both.note == f"the GPUs differ: {H100}, NVIDIA L4; all are taken for NVIDIA L4"
    found([], "a driver without a GPU")
    assert (find_machine().kind, find_machine().note) == ("cpu", "a driver without a GPU")
    with pytest.raises(UserError, match="device=cuda, but a driver without a GPU; use device=cpu"):
        find_machine("cuda")
    find_machine.cache_clear()


def fake_cuda(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda number: None)


@pytest.mark.parametrize(("count", "local_rank", "expected"), [(8, 3, 3), (1, 0, 0), (1, 3, 0)])
def test_a_process_that_sees_one_gpu_uses_it(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: int, expected: int
) -> None:
    """As under `srun --gpus-per-task=1`."""
    fake_cuda(monkeypatch, count)
    assert choose_device(Machine("gpu", H100, count, 1), local_rank) == torch.device("cuda", expected)


def test_ranks_share_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 2)
    machine = Machine("gpu", H100, 2, 80, shared=True)
    assert [choose_device(machine, rank).index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [machine.memory_per_rank(ranks) for ranks in (1, 2, 3, 5)] == [80, 80, 40, 26]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 2)
    with pytest.raises(UserError, match="local rank 2 has no GPU: torch sees 2 here"):
        choose_device(Machine("gpu", H100, 2, 1), 2)


@pytest.mark.parametrize(("uuids", "shared"), [(["a", "b", "c"], None), (["a", "b", "a"], "ranks 0 and 2")])
def test_ranks_that_share_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, uuids: list[str], shared: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="a"))
    monkeypatch.setattr(device_module, "gather_everywhere", lambda here: [(here[0], uuid) for uuid in uuids])
    if shared is None:
        check_own_gpu(torch.device("cuda", 0))
        return
    with pytest.raises(UserError, match=f"{shared} have the same GPU"):
        check_own_gpu(torch.device("cuda", 0))
