"""Context parallelism of models of transformers: real ranks equal one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright.models.foreign_context as foreign_context
from meshwright.derive.calls import UnsplitError
from meshwright.derive.context import FIRST, check_context, derive_context
from meshwright.derive.derive import Blocks
from meshwright.derive.probe import probe_blocks
from meshwright.families import read_hf_directory
from meshwright.models.batch import TensorBatch
from meshwright.models.foreign_context import ContextShare, context_arguments, row_of
from meshwright.predict.engine import layout_check
from meshwright.spec.fit import context_method, find_misfits
from meshwright.spec.foreign import ForeignContext, ForeignSplit, SplitModule
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields, ModelSpec
from meshwright.spec.run import Run
from meshwright.testing.ranks import RankPool
from test_derive import LORA, TIGHT, assert_equals_one_process, directories, foreign_run
from test_finetune_run import trajectory

__all__ = ["directories"]

LAYOUTS = {
    "cp": LayoutSpec(cp=2),
    "cp-tp": LayoutSpec(cp=2, tp=2),
    "cp-4": LayoutSpec(cp=4),
    "cp-zero-3": LayoutSpec(cp=2, dp_shard=2, zero=3),
    "pp-cp": LayoutSpec(pp=2, cp=2),
    "zbv-cp": LayoutSpec(pp=2, cp=2, schedule="zbv"),
}
CASES = [
    ("olmo3", "cp", None, "none", True),  # alternating sliding windows
    ("gpt_oss", "cp-tp", None, "full", False),  # sinks, computed by the model's own eager function
    ("smollm3", "pp-cp", None, "full", True),
    ("phi3", "cp-zero-3", LORA, "selective", True),
    ("gpt2", "cp-4", None, "none", False),
    *((name, "cp", None, "full", False) for name in ("smollm3", "phi3", "gpt2", "bert", "gpt_oss")),
    *((name, "cp-4", None, "none", True) for name in ("olmo3", "phi3")),
    ("smollm3", "zbv-cp", None, "none", False),
    ("phi3", "cp-tp", LORA | {"dora": True}, "full", True),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "layout", "finetune", "recompute", "documents"), CASES)
def test_context_parallel_ranks_equal_one_process(
    ranks: RankPool,
    directories: Path,
    name: str,
    layout: str,
    finetune: dict[str, Any] | None,
    recompute: str,
    documents: bool,
) -> None:
    options: dict[str, Any] = {"finetune": finetune, "recompute": recompute, "exact": name in TIGHT}
    assert_equals_one_process(ranks, directories / name, LAYOUTS[layout], documents=documents, **options)


def test_parts_of_rows_and_one_process_read_one_anothers_checkpoints(
    ranks: RankPool, directories: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"recompute": "none", "steps": 4}
    several, alone = (foreign_run(directories / "phi3", layout, **options) for layout in (LAYOUTS["cp"], LayoutSpec()))
    seen = ranks.run(2, trajectory, several, tmp_path, 4, False)[0]
    assert ranks.run(2, trajectory, several, tmp_path, 4, True)[0] == seen[2:]
    for ours, theirs in zip(trajectory(alone, tmp_path, 4, True), seen[2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def blocks_of(directory: Path) -> Blocks:
    foreign = read_hf_directory(directory, family="transformers").foreign
    assert foreign is not None
    return probe_blocks(foreign, 1)


def checked(blocks: Blocks, *, documents: bool) -> None:
    """The proof, in rows of one document or of two."""
    length = blocks.tokens.shape[1]
    pieces = blocks.tokens.split((FIRST, length - FIRST), 1) if documents else [blocks.tokens]
    expected = torch.cat([blocks.model(input_ids=piece).logits for piece in pieces], 1)
    documents_BS = (torch.arange(length) >= FIRST).long().expand(len(blocks.tokens), -1)
    check_context(blocks, documents_BS if documents else None, expected)


def order_of_ranks(share: ContextShare, x: torch.Tensor) -> torch.Tensor:
    return share.concatenate(x)


def without_gradients(share: ContextShare, x: torch.Tensor) -> torch.Tensor:
    return GATHER(share, x.detach())


def own_positions(batch: TensorBatch, share: ContextShare) -> dict[str, torch.Tensor]:
    given = context_arguments(batch, share)
    return given | {"position_ids": torch.arange(batch.tokens.shape[1]).expand_as(given["position_ids"])}


def one_document(batch: TensorBatch, share: ContextShare) -> Any:
    return row_of(TensorBatch(batch.tokens), share)


def any_window(name: str, theirs: Any, **options: Any) -> Any:
    """A causal mask in place of the model's mask function."""

    def causal(rows: torch.Tensor, _: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return (keys <= queries) & (rows >= 0)

    changed: dict[str, Any] = options | {"mask_function": causal}
    return MASK(name, theirs, **changed)


GATHER, MASK = ContextShare.gather, foreign_context._mask
FAULTS = [
    ("meshwright.models.foreign_context.ContextShare.gather", order_of_ranks, False),
    ("meshwright.models.foreign_context.ContextShare.gather", without_gradients, False),
    ("meshwright.derive.context.context_arguments", own_positions, False),
    ("meshwright.derive.context.row_of", one_document, True),
    ("meshwright.models.foreign_context._mask", any_window, False),
]


@pytest.mark.parametrize(("place", "fault", "documents"), FAULTS, ids=[fault.__name__ for _, fault, _ in FAULTS])
def test_a_fault_planted_in_the_exchange_is_refused(
    directories: Path, monkeypatch: pytest.MonkeyPatch, place: str, fault: Any, documents: bool
) -> None:
    """In a model with sliding windows."""
    blocks = blocks_of(directories / "olmo3")
    checked(blocks, documents=documents)
    monkeypatch.setattr(place, fault)
    foreign_context._register.cache_clear()  # transformers' registry gets the fault
    try:
        with pytest.raises(UnsplitError, match=r"is not the model's|combines tokens"):
            checked(blocks, documents=documents)
    finally:
        foreign_context._register.cache_clear()


def model_with(directory: Path, context: ForeignContext | None) -> ModelSpec:
    model = read_hf_directory(directory, family="transformers")
    assert model.foreign is not None
    return model.model_copy(update={"foreign": model.foreign.model_copy(update={"context": context})})


def test_what_ranks_cannot_share_is_refused_by_its_reason(directories: Path) -> None:
    context = derive_context(blocks_of(directories / "qwen3_next"))
    mixer = "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)"
    assert context.problem == f"{mixer} combines tokens without transformers' attention functions"
    layout = LayoutSpec(cp=2)
    (reason,) = find_misfits(layout, model_with(directories / "qwen3_next", context), 16)
    cannot = "layout.cp=2: ranks cannot share the rows of this model:"
    assert reason == f"{cannot} {context.problem}; the nearest legal layout is cp=1"
    (reason,) = find_misfits(layout, model_with(directories / "phi3", None), 16)
    assert "was not derived; set layout.cp in the recipe" in reason
    model = model_with(directories / "phi3", ForeignContext())
    assert not find_misfits(layout, model, 16)
    assert context_method(layout, model, 16)[0] == "all_gather"
    (reason,) = find_misfits(LayoutSpec(cp=2, cp_method="ring"), model, 16)
    assert reason == "layout.cp_method=ring: models that transformers computes support all_gather; use auto"
    (reason,) = find_misfits(layout, model, 18)
    assert "does not divide into 4 equal chunks, two for each rank; use data.sequence_length=16, or cp=1" in reason


def test_a_split_that_fails_under_a_mask_is_refused_where_masks_are(directories: Path) -> None:
    """As in DiffLlama, whose ranks hold other numbers of heads of keys than of values."""
    model = model_with(directories / "phi3", ForeignContext())
    assert model.foreign is not None
    split = ForeignSplit(tp=2, masked=False, modules=(SplitModule(name="mlp", layers=(0, 1), parameters=()),))
    model = model.model_copy(update={"foreign": model.foreign.model_copy(update={"split": split})})
    fields = {"name": str(directories / "phi3"), "family": "transformers"}
    run = Run.model_validate({"model": fields, "data": {"sequence_length": 16}})
    assert not layout_check(run, model, "cpu")(LayoutSpec(tp=2))
    (reason,) = layout_check(run, model, "cpu")(LayoutSpec(tp=2, cp=2))
    assert reason.startswith("layout.tp=2 with layout.cp=2: the split of this model fails where its attention")
    run = run.model_copy(update={"data": run.data.model_copy(update={"separate_documents": True})})
    (reason,) = layout_check(run, model, "cpu")(LayoutSpec(tp=2))
    assert reason.startswith("layout.tp=2 with data.separate_documents: ")


def test_documents_that_ranks_cannot_keep_apart_are_refused(directories: Path) -> None:
    """Of a model whose attention ranks can share, but which reads a document by its place in the row."""
    foreign = model_with(directories / "phi3", ForeignContext(documents=False))
    fields = ModelFields(name=str(directories / "phi3"), family="transformers")
    data = {"sequence_length": 16, "separate_documents": True}
    run = Run.model_validate({"model": fields, "data": data, "layout": {"cp": 2}})
    (reason,) = layout_check(run, foreign, "cpu")(run.layout)
    assert "use cp=1, data.separate_documents=false, or data.packing=padded" in reason
    assert not layout_check(run, foreign, "cpu")(LayoutSpec(dp_shard=2))
    mixed = run.model_copy(update={"data": run.data.model_copy(update={"separate_documents": False})})
    assert not layout_check(mixed, foreign, "cpu")(run.layout)
