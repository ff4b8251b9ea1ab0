"""Pipeline stages of models of transformers: real ranks equal one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.derive.calls import UnsplitError
from meshwright.derive.cuts import check_cuts, derive_cuts
from meshwright.derive.derive import Blocks
from meshwright.derive.probe import probe_blocks
from meshwright.families import read_hf_directory
from meshwright.families.derived import with_options
from meshwright.families.described import describe_context, describe_cuts
from meshwright.models.foreign import ForeignDecoder
from meshwright.predict.recipe import plan_recipe
from meshwright.spec.data import DataSpec
from meshwright.spec.fit import find_misfits
from meshwright.spec.foreign import ForeignCuts
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import build_here, largest_difference
from meshwright.testing.ranks import RankPool
from meshwright.trainer.setup import check_foreign
from test_derive import CONFIGS, LORA, TIGHT, assert_equals_one_process, directories, foreign_run
from test_finetune_run import trajectory
from test_pipedream import STEPS, late, layout_of, trained

__all__ = ["directories"]

PIPELINES = {
    "pp": LayoutSpec(pp=2),
    "pp-tp": LayoutSpec(pp=2, tp=2),
    "pp-zero-3": LayoutSpec(pp=2, dp_shard=2, zero=3, schedule="afab"),
    "interleaved": LayoutSpec(pp=2, dp_shard=2, zero=3, schedule="interleaved-1f1b"),
    "zero-bubble": LayoutSpec(pp=2, tp=2, schedule="interleaved-zero-bubble"),
    "looped": LayoutSpec(pp=2, schedule="looped-bfs"),
    "zbv": LayoutSpec(pp=2, schedule="zbv"),
    "dualpipev": LayoutSpec(pp=2, dp_shard=2, zero=2, schedule="dualpipev"),
    "pp-4": LayoutSpec(pp=4),
}
STAGED = [
    *((name, "pp", None, "none") for name in CONFIGS),
    *((name, "pp-tp", None, "full") for name in CONFIGS),
    ("bert", "pp-zero-3", None, "none"),
    *(("smollm3", layout, None, "none") for layout in list(PIPELINES)[3:]),
    *((name, "pp-tp", LORA, "selective") for name in ("phi3", "gpt_oss")),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "layout", "finetune", "recompute"), STAGED)
def test_pipeline_stages_equal_one_process(
    ranks: RankPool, directories: Path, name: str, layout: str, finetune: dict[str, Any] | None, recompute: str
) -> None:
    options: dict[str, Any] = {"finetune": finetune, "recompute": recompute, "exact": name in TIGHT}
    assert_equals_one_process(ranks, directories / name, PIPELINES[layout], **options)


def checked(run: ResolvedRun) -> bool:
    trainer = build_here(run)
    assert isinstance(trainer.model, ForeignDecoder)
    check_foreign(trainer.train_step.passes, trainer.model, documents=False, adapters=True)
    return any("lora" in name for name in trainer.parameters)


def test_a_stage_without_adapters_takes_part_in_the_check_of_adapters(ranks: RankPool, directories: Path) -> None:
    """Else the others wait for it."""
    last = LORA | {"targets": ["model.layers.3.self_attn.q_proj"]}
    assert ranks.run(2, checked, foreign_run(directories / "smollm3", LayoutSpec(pp=2), finetune=last)) == [False, True]


def test_stages_and_one_process_read_one_anothers_checkpoints(
    ranks: RankPool, directories: Path, tmp_path: Path
) -> None:
    """Two stages, then one process, then two stages of two tensor-parallel ranks; of a tied model."""
    options: dict[str, Any] = {"recompute": "none", "steps": 4}
    folder, layouts = directories / "smollm3", (LayoutSpec(pp=2), LayoutSpec(), LayoutSpec(pp=2, tp=2))
    several, alone, last = (foreign_run(folder, layout, **options) for layout in layouts)
    seen = ranks.run(2, trajectory, several, tmp_path, 4, False)[0]
    assert ranks.run(2, trajectory, several, tmp_path, 4, True)[0] == seen[2:]
    for layout in (trajectory(alone, tmp_path, 4, True), ranks.run(4, trajectory, last, tmp_path, 4, True)[0]):
        for ours, theirs in zip(layout, seen[2:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.slow
def test_an_asynchronous_pipeline_has_the_gradients_of_the_step_before(ranks: RankPool, directories: Path) -> None:
    """As one process that steps with the previous batch's gradient; of a tied model."""
    run = foreign_run(directories / "smollm3", layout_of(), steps=STEPS, recompute="full")
    losses, weights = ranks.run(2, trained, run)[0]
    expected, expected_weights = late(foreign_run(directories / "smollm3", LayoutSpec(), steps=STEPS))
    for ours, theirs in zip(losses, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert largest_difference(weights, expected_weights)[0] < 1e-11


def test_faults_planted_in_the_cuts_are_refused(directories: Path) -> None:
    """A tied embedding that the last stage misses, a norm in the first stage, an embedding in the last."""
    foreign = read_hf_directory(directories / "smollm3", family="transformers").foreign
    assert foreign is not None
    blocks = probe_blocks(foreign, 1)
    cuts = derive_cuts(blocks)
    check_cuts(blocks, cuts)
    assert cuts.copied == ("model.embed_tokens.weight",)
    for changes in (
        {"copied": ()},
        {"before": (*cuts.before, "model.norm"), "after": ("lm_head",)},
        {"before": (), "after": (*cuts.before, *cuts.after)},
    ):
        with pytest.raises(UnsplitError, match=r"a stage fails|is not the model's|do not compute"):
            check_cuts(blocks, cuts.model_copy(update=changes))


class PassingBlock(torch.nn.Linear):
    """A block that returns the hidden states and, as a router does, a choice."""

    def forward(self, side: torch.Tensor, *, x: torch.Tensor, chosen: torch.Tensor | None) -> Any:  # type: ignore[override]
        y = torch.tanh(super().forward(x)) * side
        return (y if chosen is None else y.roll(1, -1) * chosen), y.argmax(-1, keepdim=True)


class PassingModel(torch.nn.Module):
    """A model whose blocks get more than the hidden states."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.head = kind, torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)
        self.side, self.blocks = torch.nn.Linear(4, 4), torch.nn.ModuleList([PassingBlock(4, 4) for _ in range(3)])
        self.double()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[B, T] to [B, T, 9]."""
        x, chosen = self.embed(input_ids), None
        side = self.side(x)
        x, side = (x, side) if self.kind == "side" else (x * side, torch.ones_like(x).detach())
        for block in self.blocks:
            x = x + self.side(x) if self.kind == "between" else x
            x = block(side, x=x, chosen=None)[0] if self.kind == "twice" else x
            x, chosen = block(side, x=x, chosen=chosen if self.kind == "chosen" else None)
        return self.head(x)


def test_what_blocks_get_beside_the_hidden_states() -> None:
    """What depends on other parameters or blocks is refused: a tensor of them, a choice, a module between blocks."""
    tokens_BT = torch.randint(9, (2, 5), generator=torch.Generator().manual_seed(0))

    def cuts(kind: str) -> ForeignCuts:
        torch.manual_seed(0)
        return derive_cuts(Blocks(PassingModel(kind), "blocks", {0: (0, 1, 2)}, tokens_BT))

    found = cuts("")
    assert (found.problem, found.hidden, found.before, found.after) == ("", "x", ("embed", "side"), ("head",))
    assert cuts("side").problem == "blocks get several arguments that depend on parameters: 0, x"
    assert cuts("chosen").problem == "stages that send hidden states do not compute the model's logits"
    assert cuts("between").problem == "side is used between the blocks"
    assert cuts("twice").problem == "its forward pass does not call the blocks one after another, each once"


def test_a_model_that_cannot_be_cut_is_refused_by_its_reason(directories: Path) -> None:
    model = read_hf_directory(directories / "phi3", family="transformers")
    assert model.foreign is not None
    foreign = model.foreign.model_copy(update={"cuts": ForeignCuts(problem="side is used between the blocks")})
    model = model.model_copy(update={"foreign": foreign})
    assert not find_misfits(LayoutSpec(dp_shard=2), model, 16)
    (reason,) = find_misfits(LayoutSpec(pp=2), model, 16)
    problem = "this model cannot be cut into stages: side is used between the blocks"
    assert reason == f"layout.pp=2: {problem}; the nearest legal layout is pp=1"
    (_, reason) = find_misfits(LayoutSpec(pp=4), model, 16)
    assert reason == "layout.pp=4: 2 layers cannot be split into 4 pipeline stages; use at most 2"


@pytest.mark.slow
def test_a_plan_knows_which_degrees_run(directories: Path, tmp_path: Path) -> None:
    """Of gpt2's 4 heads 2 and 4 ranks can have parts."""
    data = DataSpec(sequence_length=16, cache_dir=str(tmp_path))
    fields = ModelFields(name=str(directories / "gpt2"), weights="pretrained", family="transformers")
    run = Run(model=fields, data=data, training={"steps": 2, "global_batch": 8})  # pyright: ignore[reportArgumentType]
    _, facts = plan_recipe(run, base_dir=tmp_path, cluster="8xh100")
    runs = {name: "refused" not in one["reason"] for name, one in facts["strategies"].items()}
    assert runs["TP"]
    assert runs["PP"]
    assert runs["PP + TP"]
    assert len(list((tmp_path / "splits").iterdir())) == 4, "the cuts, the context, and splits over 2 and 4 ranks"
    model = with_options(read_hf_directory(directories / "gpt2", family="transformers"), run, [2, 4])
    assert not find_misfits(LayoutSpec(tp=4, pp=2), model, 16)
    assert not find_misfits(LayoutSpec(tp=2, cp=2), model, 16)
    (reason,) = find_misfits(LayoutSpec(tp=8), model, 16)
    assert reason == "layout.tp=8: the split over 8 ranks was not derived; set layout.tp in the recipe"
    assert describe_context(model) == ["parts of rows: attention gathers keys and values; documents stay separate"]
    assert describe_cuts(model)[-1] == "  on both, gradients summed: transformer.wte.weight"
