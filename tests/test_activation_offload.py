"""Activations in host memory: a step is bit-identical, the device holds none meanwhile, and the planner counts them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.machine import Machine
from meshwright.models.slots import Wrapped
from meshwright.parallel import offload
from meshwright.parallel.offload import HostCopy, Offloaded
from meshwright.predict.blueprint import blueprint
from meshwright.predict.engine import engine_job
from meshwright.predict.hardware import resolve_cluster
from meshwright.predict.job import Job
from meshwright.predict.memory import predict_memory
from meshwright.predict.step_time import predict_step_time
from meshwright.rehearse.rank import rehearse_rank
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import Outcome, build_here, loader_for, one_step
from meshwright.testing.ranks import RankPool
from meshwright.trainer.resolve import resolve_run
from tiny import tiny_run

HOST = {"activations": "host"}


class Counted(HostCopy):
    """A copy that counts itself, and that a test can corrupt."""

    made, asked = 0, 0

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        Counted.made += 1

    def back(self) -> torch.Tensor:
        Counted.asked += 1
        return super().back()


def offloaders(model: nn.Module) -> list[Offloaded]:
    """The wrappers of a model's blocks."""
    blocks = (module for module in model.modules() if isinstance(module, Wrapped))
    return [wrapper for block in blocks for wrapper in block.wrappers if isinstance(wrapper, Offloaded)]


def differing(ours: Outcome | None, other: Outcome | None) -> list[str]:
    """The names of tensors that are not bit-identical."""
    if ours is None or other is None:
        return []
    found = [name for name in other.gradients if not torch.equal(ours.gradients[name], other.gradients[name])]
    found += [name for name in other.weights if not torch.equal(ours.weights[name], other.weights[name])]
    return found + [name for name in ("loss", "gnorm") if getattr(ours, name) != getattr(other, name)]


def differences(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[list[str]]:
    """For every layout and its options, the tensors that activations in host memory change in a step. Collective."""
    offload.SMALLEST = 0
    found = []
    for layout, options in cases:
        plain, moved = (
            one_step(tiny_run(LayoutSpec.model_validate({**layout, "offload": place}), **options))
            for place in ("none", HOST)
        )
        found.append(differing(moved, plain))
    return found


FULL_FIRST = {"full": 1}
ONE_PROCESS: list[dict[str, Any]] = [
    {"precision": "bf16", "accumulation": 2},
    {"precision": "fp32", "recompute": "full"},
    {"recompute": FULL_FIRST},
    {"family": "gpt2"},
    {"family": "deepseek_v3"},
    {"precision": "bf16", "finetune": {"method": "lora", "rank": 3}},
    {"precision": "fp8"},
]


@pytest.mark.parametrize("options", ONE_PROCESS, ids=lambda options: " ".join(map(str, options.values())))
def test_one_process_to_the_bit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 0)
    assert differences([({}, options)]) == [[]]


@pytest.mark.slow
def test_layouts_of_two_ranks_to_the_bit(ranks: RankPool) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"dp_replicate": 2}, {}),
        ({"dp_shard": 2, "zero": 2}, {"recompute": FULL_FIRST}),
        ({"dp_shard": 2, "zero": 3}, {"precision": "bf16"}),
        ({"tp": 2}, {}),
        ({"cp": 2}, {}),
        ({"pp": 2}, {"accumulation": 2}),
        ({"pp": 2, "schedule": "zbv"}, {"num_layers": 4}),
        ({"dp_shard": 2, "ep": 2}, {"family": "mixtral"}),
    ]
    for found in ranks.run(2, differences, cases):
        assert found == [[]] * len(cases)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler asks for it
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_compiled_blocks_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code generation, which would be slow."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    assert differences([({}, {"compile": True})]) == [[]]


def test_with_weights_elsewhere_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 0)
    plain, moved = (
        one_step(
            tiny_run(
                LayoutSpec.model_validate({"offload": {"parameters": "host", "optimizer": "host", **more}}),
                precision="bf16",
            )
        )
        for more in ({}, HOST)
    )
    assert differing(moved, plain) == []


def test_with_state_elsewhere_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 0)
    layout = LayoutSpec.model_validate({"offload": {**HOST, "optimizer": "host"}})
    assert layout.strategy == "single process + optimizer in host memory, activations in host memory"
    plain = one_step(tiny_run(LayoutSpec(), precision="bf16"))
    assert differing(one_step(tiny_run(layout, precision="bf16")), plain) == []


def test_every_tensor_is_copied_once_and_weights_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 0)
    trainer = build_here(tiny_run(LayoutSpec.model_validate({"offload": HOST})))
    weights = {id(p.untyped_storage()) for p in trainer.model.parameters()}
    copied: list[int] = []

    def copy(tensor: torch.Tensor) -> HostCopy:
        assert id(tensor.untyped_storage()) not in weights
        copied.append(tensor.data_ptr())
        return Counted(tensor)

    for offloaded in offloaders(trainer.model):
        offloaded.copy = copy
    Counted.made = Counted.asked = 0
    with loader_for(trainer) as loader:
        trainer.train_step.gradients(loader.microbatches(0))
    assert Counted.made
    assert Counted.asked > Counted.made  # a norm's result is read by three products
    assert "run: activations in host memory" in repr(trainer.model)


def test_a_spoilt_copy_is_seen_in_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass reads the copies, not the original tensors."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    plain = one_step(tiny_run(LayoutSpec()))

    def spoilt(self: HostCopy) -> torch.Tensor:
        return self._host * 2

    monkeypatch.setattr(HostCopy, "back", spoilt)
    assert "layers.0.feed_forward.w2.weight" in differing(
        one_step(tiny_run(LayoutSpec.model_validate({"offload": HOST}))), plain
    )


GPU = Machine("gpu", "NVIDIA H100 80GB HBM3", 8, 80 * 10**9, 10**12)
SIZES = {"family": "llama", "hidden": 512, "num_layers": 8, "num_heads": 8, "ffn": 2048, "vocab": 4000}


def job_of(place: Any, recompute: str = "none", **layout: Any) -> tuple[ResolvedRun, Job]:
    """A model whose activations are most of its memory, on GPUs, and the planner's job."""
    sections = {
        "model": {**SIZES, "max_positions": 2048},
        "data": {"sequence_length": 2048},
        "training": {"micro_batch": 4, "global_batch": 16, "recompute": recompute},
        "layout": {**layout, "offload": place},
    }
    resolved = resolve_run(Run.model_validate(sections), base_dir=Path(), machine=GPU)
    batch, micro = resolved.global_batch, resolved.micro_batch
    return resolved, engine_job(resolved.run, blueprint(resolved.model), global_batch=batch, micro_batch=micro)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_planner_and_a_rehearsal_agree(recompute: str) -> None:
    found = []
    for place in ("none", HOST):
        resolved, job = job_of(place, recompute)
        found.append((rehearse_rank(resolved, 0, on_gpu=True)["peak"], predict_memory(job)))
    (there, plain), (peak, moved) = found
    assert there == pytest.approx(plain.allocated, rel=0.05)
    assert peak == pytest.approx(moved.allocated, rel=0.05)
    if recompute == "none":
        assert peak < 0.6 * there
        assert moved.host == pytest.approx(plain.activations, rel=0.2)


def micro_batch_on(memory: float, host: float, **sections: Any) -> ResolvedRun:
    """A run with automatic microbatch, on two GPUs with this many bytes each and for the host of both."""
    machine = Machine("gpu", "NVIDIA H100 80GB HBM3", 2, int(memory), int(host))
    run = {
        "model": {**SIZES, "max_positions": 2048},
        "data": {"sequence_length": 2048},
        "training": {"micro_batch": "auto", "global_batch": 32, "recompute": "none"},
        "layout": {"dp_replicate": 2, **sections},
    }
    return resolve_run(Run.model_validate(run), base_dir=Path(), machine=machine)


def test_a_microbatch_that_the_hosts_memory_cannot_take_is_not_chosen() -> None:
    ample = micro_batch_on(80e9, 1e12, offload=HOST)
    _, job = job_of(HOST, dp_replicate=2)
    of_one = predict_memory(dataclasses.replace(job, micro_batch=1)).host
    tight = micro_batch_on(80e9, 2 * 2.5 * of_one, offload=HOST)
    assert tight.micro_batch == 2 < ample.micro_batch
    assert "usable GiB of host memory" in tight.reasons["training.micro_batch"]


def test_activations_do_not_move_to_a_host_without_room() -> None:
    plain, moved = (
        predict_memory(dataclasses.replace(job_of(place, dp_replicate=2)[1], micro_batch=1)) for place in ("none", HOST)
    )
    scarce = (plain.total + moved.total) / 2 / 0.8
    assert "layout.offload" in micro_batch_on(scarce, 1e12).reasons
    assert "layout.offload" not in micro_batch_on(scarce, 2 * moved.host).reasons


def test_time_that_computation_does_not_hide_is_counted() -> None:
    cluster = resolve_cluster("1xh100", base_dir=Path())
    plain, moved = (predict_step_time(job_of(place)[1], cluster) for place in ("none", HOST))
    assert moved.data > 0
    assert moved.total == pytest.approx(plain.total + moved.data)
    assert moved.update == plain.update


def test_what_selective_recomputation_keeps_cannot_move() -> None:
    with pytest.raises(ValueError, match="the tensors that selective recomputation keeps cannot be offloaded"):
        parse_spec("model: gpt2\nlayout: {offload: {activations: host}}\ntraining: {recompute: selective}\n", Run)
