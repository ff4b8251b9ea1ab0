"""Fine-tuning: table and module agree, every layout computes what one process does, frozen parameters stay."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.families import count_trained, find_adapters, finetuned_table
from meshwright.families.flops import flops_per_token
from meshwright.finetune import apply_finetune
from meshwright.models import Decoder, build_model
from meshwright.models.adapters import Lora
from meshwright.models.batch import to_device
from meshwright.models.dropout import Draws, Dropout
from meshwright.models.linear import Linear
from meshwright.optim.adamw import ShardedAdamW
from meshwright.parallel.traffic import Traffic
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import Parameter
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import build_here, loader_for, one_step
from meshwright.testing.layouts import EXPERT_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.setup import RankContext, build_trainer
from test_equivalence import alone, assert_equal
from tiny import LR, tiny_run

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 3, "alpha": 6.0, "ranks": {"o_proj": 5}, "dropout": 0.3},
    "dora": {"method": "lora", "rank": 4, "dora": True, "rslora": True, "b_lr_ratio": 4.0},
    "lora-ends": {"method": "lora", "rank": 4, "targets": ["o_proj", "tok_embeddings", "output"]},
    "lora-and-head": {
        "method": "lora",
        "rank": 4,
        "targets": ["wo", "layers.0.attention.*"],
        "train": ["output", "norm"],
    },
    "ia3": {"method": "ia3"},
    "head": {"method": "full", "train": ["output"]},
    "last-layer": {"method": "full", "last_layers": 1},
}


def fine_tuned(family: str, finetune: dict[str, Any]) -> tuple[Decoder, tuple[Parameter, ...]]:
    """(the module of a fine-tuned model, with frozen parameters in bf16; its table)."""
    run = tiny_run(LayoutSpec(), family=family, finetune=finetune)
    model = build_model(run.model)
    assert run.run.finetune is not None
    apply_finetune(model, run.run.finetune, torch.bfloat16)
    return model, finetuned_table(run.model, run.run.finetune)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3_moe", "deepseek_v3", "gemma3", "olmo3", "glm4_moe", "gpt_oss", "qwen3_next", "qwen3_5"],
)
def test_module_and_table_say_the_same(family: str, method: str) -> None:
    model, table = fine_tuned(family, METHODS[method])
    assert [(row.name, row.shape, row.trained) for row in table] == [
        (name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in model.named_parameters()
    ]
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def check(ranks: RankPool, layout: LayoutSpec, method: str, **options: Any) -> None:
    options["finetune"] = METHODS[method]
    accumulation = options.pop("accumulation", 1)
    run = tiny_run(layout, accumulation=accumulation, **options)
    outcome = ranks.run(layout.world_size, one_step, run)[0]
    assert_equal(outcome, alone(**options), slope=5 * 0.1)


OF_ALL_KINDS = ("pp-cp-tp", "zero-3-tp-uneven", "hybrid-3-tp")
"""The layouts of eight ranks that combine most axes; layouts of four ranks cover every other pair of axes."""


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name", [name for name, layout in LAYOUTS.items() if 1 < layout.world_size < 8 or name in OF_ALL_KINDS]
)
def test_every_layout(ranks: RankPool, name: str) -> None:
    """Two ranks are tested with every second method, more ranks with one each, in rotation."""
    layout, turn = LAYOUTS[name], list(LAYOUTS).index(name)
    every = 2 if layout.world_size == 2 else len(METHODS)
    for method in list(METHODS)[turn % every :: every]:
        check(ranks, layout, method)


def test_dropout_is_recomputed_after_other_microbatches(ranks: RankPool) -> None:
    check(ranks, LAYOUTS["pp"], "lora", recompute="full", accumulation=3)


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXPERT_PARALLEL)[::3])
def test_every_layout_of_experts(ranks: RankPool, name: str) -> None:
    layout, turn = EXPERT_PARALLEL[name], list(EXPERT_PARALLEL).index(name)
    check(ranks, layout, list(METHODS)[turn % len(METHODS)], family="deepseek_v3")


def test_a_recipe_gives_lists_and_mappings() -> None:
    text = """\
model: gpt2
finetune: {method: lora, targets: [c_fc, "h.0.*"], ranks: {c_fc: 2}, alphas: {c_fc: 8}, train: [lm_head, ln_f]}
"""
    run = parse_spec(text, Run)
    assert parse_spec(dump_recipe(run), Run) == run
    assert isinstance(run.finetune, LoraSpec)
    assert run.finetune.train == ("lm_head", "ln_f")
    with pytest.raises(ValueError, match="unknown key; did you mean 'targets'"):
        parse_spec(text.replace("targets", "target"), Run)


def reduced_bytes(run: ResolvedRun) -> int:
    """Bytes of all gradients given to a step's reduce-scatters."""
    trainer = build_here(run)
    with loader_for(trainer) as loader, Traffic(trainer.meshes) as traffic:
        trainer.train_step.gradients(loader.microbatches(0))
    return sum(count.bytes for (kind, _), count in traffic.counts.items() if kind == "reduce-scatter")


@pytest.mark.slow
def test_gradients_of_frozen_parameters_are_not_sent(ranks: RankPool) -> None:
    """Frozen and trained parameters share FSDP2's groups. Only the trained ones' rows are sent, padded to equal numbers
    per rank: at most one row per matrix."""
    layout = LAYOUTS["zero-3"]
    run = tiny_run(layout, finetune=METHODS["lora"])
    sent = ranks.run(layout.world_size, reduced_bytes, run)[0]
    rows = [row for row in finetuned_table(run.model, run.run.finetune) if row.trained]
    padded = sum(-(-row.shape[0] // 4) * 4 * (row.numel // row.shape[0]) for row in rows)
    assert sent == 8 * padded
    assert sent < ranks.run(layout.world_size, reduced_bytes, tiny_run(layout))[0] / 2


def test_a_rank_that_cannot_be_split_is_refused() -> None:
    layout, finetune = LAYOUTS["zero-3-tp-wide"], {"method": "lora", "rank": 3, "targets": ["output"]}
    with pytest.raises(ValueError, match=r"nearest legal finetune\.rank is 4"):
        resolve_run(tiny_run(layout, finetune=finetune).run, base_dir=Path())


def test_frozen_matrices_cost_no_gradient_of_their_own() -> None:
    """6 N operations per token if all parameters train; with N frozen, 4 N, and 6 for every number of the adapters."""
    run = tiny_run(LayoutSpec(), finetune=METHODS["lora"])
    rows = [row for row in finetuned_table(run.model, run.run.finetune) if len(row.shape) == 2]
    frozen = sum(row.numel for row in rows if not row.adapter and row.name != "tok_embeddings.weight")
    adapters = sum(row.numel for row in rows if row.adapter)
    difference = flops_per_token(run.model, 16) - flops_per_token(run.model, 16, run.run.finetune)
    assert difference == 2 * frozen - 6 * adapters


def test_b_learns_faster() -> None:
    trainer = build_here(tiny_run(LayoutSpec(), finetune=METHODS["dora"]))
    trainer.optimizers.set_lr(0.5)
    rates = {
        id(p): group["lr"] for o in trainer.optimizers.optimizers for group in o.param_groups for p in group["params"]
    }
    for name, parameter in trainer.parameters.items():
        assert rates[id(parameter)] == pytest.approx(0.5 * LR * (4 if name.endswith("lora_b") else 1))


def test_patterns_and_rslora_decide_the_scale() -> None:
    finetune = {"method": "lora", "rank": 4, "alpha": 4.0, "alphas": {"wo": 3.0}}
    finetune["ranks"] = {"layers.1.attention.wo": 25, "wo": 9}  # the first match counts
    wq, wo, last_wo = (f"layers.{name}" for name in ("0.attention.wq", "0.attention.wo", "1.attention.wo"))
    expected = {False: {wq: 4 / 4, wo: 3 / 9, last_wo: 3 / 25}, True: {wq: 4 / 2, wo: 3 / 3, last_wo: 3 / 5}}
    for rslora, scales in expected.items():
        spec = LoraSpec.model_validate({**finetune, "rslora": rslora})
        found = {adapter.module: adapter.scale for adapter in find_adapters(tiny_run(LayoutSpec()).model, spec)}
        assert {module: found[module] for module in scales} == scales


def test_adapters_add_nothing_at_first() -> None:
    """Except magnitudes, which are the norms of drawn weights in fp32, like these weights."""

    def first_loss(finetune: dict[str, Any] | None) -> float:
        trainer = build_trainer(tiny_run(LayoutSpec(), finetune=finetune), RankContext())
        with loader_for(trainer) as loader:
            return trainer.train_step.gradients(loader.microbatches(0))[0]

    losses = {method: first_loss(METHODS[method]) for method in ("lora", "dora", "lora-ends", "ia3")}
    assert losses == pytest.approx(dict.fromkeys(losses, first_loss(None)), rel=2**-23)


def test_muon_leaves_adapters_to_adamw() -> None:
    trainer = build_here(tiny_run(LayoutSpec(), finetune=METHODS["lora"], optimizer={"name": "muon"}))
    assert [type(optimizer) for optimizer in trainer.optimizers.optimizers] == [ShardedAdamW]


def test_a_begins_uniform_and_dropout_is_its_alone_and_of_training_alone() -> None:
    trainer = build_here(tiny_run(LayoutSpec(), finetune={"method": "lora", "rank": 4, "dropout": 0.5}))
    layer = trainer.model.get_submodule("layers.0.attention.wq")
    assert isinstance(layer, Linear)
    adapter, lora_a, lora_b = layer.find(Lora), layer.get_parameter("lora_a"), layer.get_parameter("lora_b")
    assert adapter
    assert 0.9 < lora_a.abs().max() * 24**0.5 <= 1
    counts = [
        sum(tensor.numel() for tensor in tensors)
        for tensors in (trainer.parameters.values(), trainer.model.parameters())
    ]
    assert count_trained(trainer.resolved.model, trainer.resolved.run.finetune) == tuple(counts)
    with loader_for(trainer) as loader:
        batch = to_device(loader.microbatches(0)[0], torch.device("cpu"))
    trainer.model.tell_draws(batch)
    x_BTD = torch.randn(*batch.tokens.shape, 24, dtype=torch.float64)
    found_BTD = layer(x_BTD)
    assert adapter.dropout
    dropped_BTD = adapter.dropout(x_BTD)
    assert 0.45 < (dropped_BTD == 0).double().mean() < 0.55
    assert ((dropped_BTD == 0) | (dropped_BTD == 2 * x_BTD)).all()
    expected_BTD = x_BTD @ layer.weight.T + adapter.scale * dropped_BTD @ lora_a.T @ lora_b.T
    assert (found_BTD - expected_BTD).abs().max() < 1e-12
    with loader_for(trainer) as loader:
        batches = [to_device(batch, torch.device("cpu")) for batch in loader.microbatches(0)]
    losses = [trainer.train_step.passes.evaluate(batches).loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert layer.training


def test_dropout_draws_by_seed_layer_token_and_feature() -> None:
    """Half of 3 x 10^5 draws, within five standard deviations; none equal to another layer's, seed's or step's."""
    numbers_N = torch.arange(3000)
    dropouts = [Dropout(0.5, Draws(), seed, name) for seed, name in ((0, "wq"), (0, "wk"), (1, "wq"))]
    drawn = [*(dropout.dropped(numbers_N, 100) for dropout in dropouts), dropouts[0].dropped(numbers_N + 3000, 100)]
    for first, draws_ND in enumerate(drawn):
        assert abs(draws_ND.double().mean() - 0.5) < 5 * 0.5 / 300_000**0.5
        assert (draws_ND.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / 3000**0.5
        for other_ND in drawn[:first]:
            assert abs((draws_ND == other_ND).double().mean() - 0.5) < 5 * 0.5 / 300_000**0.5


def test_a_part_of_the_features_draws_as_it_does_in_the_whole() -> None:
    whole, part = (Dropout(0.3, Draws(), 0, "wo") for _ in range(2))
    part.part = 1
    numbers_N = torch.tensor([5, 2**40, 7])
    assert torch.equal(part.dropped(numbers_N, 12), whole.dropped(numbers_N, 24)[:, 12:])
