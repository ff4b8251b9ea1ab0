"""Expert parallelism of models of transformers: real ranks equal one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meshwright.derive.calls import RecordedCall, UnsplitError, record
from meshwright.derive.experts import _part, check_experts, derive_experts
from meshwright.derive.probe import derived_experts, probe_blocks
from meshwright.families import parameter_table, read_hf_directory
from meshwright.families.described import describe_experts
from meshwright.families.split import is_experts
from meshwright.models.expert_faces import ExpertsFace
from meshwright.models.moe import Rows
from meshwright.spec.fit import find_misfits
from meshwright.spec.foreign import ExpertModule, ForeignExperts
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelSpec
from meshwright.testing.ranks import RankPool
from test_derive import LORA, SIZES, assert_equals_one_process, foreign_run, saved_models
from test_finetune_run import trajectory

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen2_moe": transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=16),
    "gpt_oss": transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),  # with biases
    "phi": transformers.PhiConfig(**SIZES),
}
LAYOUTS = {
    "ep-ddp": LayoutSpec(dp_replicate=1, dp_shard=2, zero=1, ep=2),
    "ep-zero-3": LayoutSpec(dp_shard=2, zero=3, ep=2),
    "ep-4-rows": LayoutSpec(dp_shard=4, zero=3, ep=2),
    "ep-cp": LayoutSpec(cp=2, ep=2),
    "ep-cp-dp": LayoutSpec(cp=2, dp_shard=2, zero=2, ep=4),
    "ep-pp": LayoutSpec(pp=2, dp_shard=2, zero=2, ep=2),
}
CASES = [
    ("qwen3_moe", "ep-zero-3", None, "none"),
    ("qwen2_moe", "ep-cp", None, "full"),
    ("qwen2_moe", "ep-pp", None, "full"),
    ("qwen3_moe", "ep-4-rows", None, "selective"),
    ("qwen3_moe", "ep-cp-dp", None, "none"),
    ("qwen2_moe", "ep-ddp", LORA, "none"),
]


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models(tmp_path_factory.mktemp("experts"), CONFIGS)


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "layout", "finetune", "recompute"), CASES)
def test_expert_parallel_ranks_equal_one_process(
    ranks: RankPool, directories: Path, name: str, layout: str, finetune: dict[str, Any] | None, recompute: str
) -> None:
    """Their routers compute in fp32 in any dtype of the model."""
    options: dict[str, Any] = {"finetune": finetune, "recompute": recompute, "exact": False}
    assert_equals_one_process(ranks, directories / name, LAYOUTS[layout], **options)


def test_ranks_that_share_experts_and_one_process_read_one_anothers_checkpoints(
    ranks: RankPool, directories: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"recompute": "none", "steps": 4}
    folder, layouts = directories / "qwen3_moe", (LAYOUTS["ep-zero-3"], LayoutSpec(), LayoutSpec(dp_shard=2, zero=3))
    several, alone, whole = (foreign_run(folder, layout, **options) for layout in layouts)
    seen = ranks.run(2, trajectory, several, tmp_path, 4, False)[0]
    assert ranks.run(2, trajectory, several, tmp_path, 4, True)[0] == seen[2:]
    for steps in (trajectory(alone, tmp_path, 4, True), ranks.run(2, trajectory, whole, tmp_path, 4, True)[0]):
        for ours, theirs in zip(steps, seen[2:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def experts_of(directory: Path) -> tuple[torch.nn.Module, RecordedCall, ExpertModule]:
    """The first block's experts, a call of them, and how they are shared."""
    foreign = read_hf_directory(directory, family="transformers").foreign
    assert foreign is not None
    blocks = probe_blocks(foreign, 1)
    (described,) = derive_experts(blocks).modules
    module = blocks.block(0).get_submodule(described.name)
    call = record(lambda: blocks.model(input_ids=blocks.tokens), {(0, ""): module})[0, ""]
    return module, call, described


def others_experts(face: ExpertsFace, x_PD: torch.Tensor, rows: Rows) -> torch.Tensor:
    return COMPUTE(face, x_PD, Rows(rows.counts.flip(0)))


def detached(face: ExpertsFace, x_PD: torch.Tensor, rows: Rows) -> torch.Tensor:
    return COMPUTE(face, x_PD.detach(), rows)


def twice(face: ExpertsFace, x_PD: torch.Tensor, rows: Rows) -> torch.Tensor:
    return 2 * COMPUTE(face, x_PD, rows)


COMPUTE = ExpertsFace.compute_rows


@pytest.mark.parametrize("fault", [others_experts, detached, twice], ids=lambda fault: fault.__name__)
def test_a_fault_planted_in_the_experts_is_refused(
    directories: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    module, call, described = experts_of(directories / "qwen3_moe")
    check_experts(module, call, described)
    monkeypatch.setattr(ExpertsFace, "compute_rows", fault)
    with pytest.raises(UnsplitError, match=r"do not compute|is not the module's"):
        check_experts(module, call, described)


def test_arguments_in_another_order_are_refused(directories: Path) -> None:
    module, call, described = experts_of(directories / "qwen2_moe")
    wrong = described.model_copy(update={"arguments": tuple(reversed(described.arguments))})
    with pytest.raises(UnsplitError, match="a part of it fails"):
        check_experts(module, call, wrong)


def test_rows_without_any_give_the_weights_a_gradient_of_zeros(directories: Path) -> None:
    """FSDP2 reduces a gradient on every rank, or on none."""
    module, _, described = experts_of(directories / "qwen3_moe")
    part = _part(module, described, range(4))
    y_PD = part.compute_rows(torch.zeros(0, 32, dtype=torch.float64), Rows(torch.zeros(4, 1, dtype=torch.int64)))
    assert y_PD.shape == (0, 32)
    y_PD.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in module.parameters())


def model_with(directory: Path, experts: ForeignExperts | None) -> ModelSpec:
    model = read_hf_directory(directory, family="transformers")
    assert model.foreign is not None
    return model.model_copy(update={"foreign": model.foreign.model_copy(update={"experts": experts})})


def test_what_ranks_cannot_share_is_refused_by_its_reason(directories: Path) -> None:
    layout = LAYOUTS["ep-zero-3"]
    model = model_with(directories / "gpt_oss", None)
    assert model.foreign is not None
    (reason,) = find_misfits(layout, model, 16)
    assert "was not derived; set layout.ep in the recipe" in reason
    experts = derived_experts(model.foreign)
    stacks = "model.layers.0.mlp.experts (GptOssExperts): has other parameters than stacks of matrices"
    assert experts.problem == stacks
    (reason,) = find_misfits(layout, model_with(directories / "gpt_oss", experts), 16)
    cannot = "layout.ep=2: ranks cannot share the experts of this model:"
    assert reason == f"{cannot} {stacks}; the nearest legal layout is ep=1"
    dense = model_with(directories / "phi", None).foreign
    assert dense is not None
    assert derived_experts(dense).problem == "it has no experts in stacked matrices"


def test_degrees_that_do_not_divide_the_experts_are_refused(directories: Path) -> None:
    foreign = read_hf_directory(directories / "qwen3_moe", family="transformers").foreign
    assert foreign is not None
    model = model_with(directories / "qwen3_moe", derived_experts(foreign))
    assert not find_misfits(LAYOUTS["ep-zero-3"], model, 16)
    (reason,) = find_misfits(LayoutSpec(dp_shard=3, zero=3, ep=3), model, 16)
    assert reason == "layout.ep=3: 8 experts cannot be split evenly over 3 ranks; the nearest legal layout is ep=1"
    (reason,) = find_misfits(LayoutSpec(dp_shard=6, zero=3, ep=6), model, 16)
    assert reason == "layout.ep=6: 8 experts cannot be split evenly over 6 ranks; the nearest legal layout is ep=2"
    (reason, _) = find_misfits(LayoutSpec(tp=2, dp_shard=2, zero=3, ep=2), model, 16)
    assert reason.startswith("layout.ep=2 with layout.tp=2: transformers' experts are shared only without tp")
    (reason,) = find_misfits(LayoutSpec(dp_shard=6, zero=3, ep=2), model, 16)
    assert reason.endswith("neither the rows nor the columns of their matrices; use another dp_shard, or zero=0")


def test_the_table_names_what_ranks_share(directories: Path) -> None:
    foreign = read_hf_directory(directories / "qwen3_moe", family="transformers").foreign
    assert foreign is not None
    model = model_with(directories / "qwen3_moe", derived_experts(foreign))
    shared = [row.name.rpartition(".")[2] for row in parameter_table(model) if is_experts(row)]
    assert sorted(shared) == ["down_proj"] * 2 + ["gate_up_proj"] * 2
    assert describe_experts(model) == ["mlp.experts (of 0, 1): ranks share its 8 experts"]
