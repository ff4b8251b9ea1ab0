"""Every tensor is where it computes: trainer state on a GPU that need not be there, as tensors without data.

State that moves between tiers is left out: such tensors cannot be given the memory of another device.
"""

from typing import Any

import pytest
import torch

from meshwright.devices import CPU, backend_of, of_kind, on_cpu, with_my_device
from meshwright.models import named_tensors
from meshwright.optim.parameterwise import Parameterwise
from meshwright.rehearse.fake import FakeTensors, UncountedTier
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.state.store import Bucket
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


def build(run: ResolvedRun) -> Trainer:
    """The only process of a run, on a GPU that this machine need not have: its tensors have no data."""
    passes = build_parallel_model(run, None)
    with FakeTensors(), torch.no_grad():
        return give_state(passes, run, RankContext(device=GPU), None, UncountedTier)


def misplaced(trainer: Trainer) -> list[str]:
    """Tensors that are elsewhere while a bucket is stepped, after every parameter's gradient has been computed."""
    found = [f"{name}: in the model" for name, tensor in named_tensors(trainer.model).items() if tensor.device != GPU]
    with FakeTensors(), torch.no_grad():
        return found + misplaced_in_buckets(trainer)


def misplaced_in_buckets(trainer: Trainer) -> list[str]:
    """The same, of what the buckets hold."""
    trained = [tensor for tensor in trainer.model.parameters() if tensor.requires_grad]
    found = []
    for _ in range(2):  # microbatches
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():  # as autograd does
                hook(parameter)
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
    options = PRECISIONS[precision] | {"optimizer": {"name": optimizer}}
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
