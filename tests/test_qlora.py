"""A quantized base: ranks keep parts of the quantization of the whole, and every layout computes what one process
does."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from losses import logits_of
from meshwright import train
from meshwright.cli.main import main
from meshwright.families import finetuned_table, parameter_table, resolve_model
from meshwright.families.adapters import module_of
from meshwright.models.adapters import Lora
from meshwright.models.blockwise import as_bits, encode_int8, encode_nf4, encode_scales
from meshwright.models.generate import Sampling
from meshwright.models.init import draw_rows
from meshwright.models.linear import Linear
from meshwright.models.quantized import Quantized
from meshwright.parallel import data
from meshwright.serve.trained import Settings, continue_texts, open_trained
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here, one_step, whole
from meshwright.testing.layouts import DATA_PARALLEL, LAYOUTS
from meshwright.testing.ranks import RankPool
from meshwright.trainer.resolve import resolve_run
from test_equivalence import alone, assert_equal
from test_finetune import fine_tuned
from test_finetune_run import TEXT, recipe
from tiny import NEEDS_SHARDED_INTEGERS, tiny_run

METHODS: dict[str, dict[str, Any]] = {
    "nf4-double": {"method": "qlora", "rank": 3},
    "nf4": {
        "method": "lora",
        "base": "nf4",
        "double_quantization": False,
        "rank": 3,
        "targets": ["wo", "w2"],
        "train": ["layers.0.feed_forward.w1"],
    },
    "int8-dora": {"method": "lora", "base": "int8", "rank": 3, "dora": True, "targets": ["wo"]},
}

WIDE = 128
"""A width that gives tensor-parallel ranks whole blocks; with the other, 24, blocks span rows."""


def test_qlora_is_lora_on_a_base_in_few_bits() -> None:
    run = tiny_run(LayoutSpec(), finetune={"method": "qlora"}).run
    assert run.finetune == LoraSpec(method="lora", base="nf4")
    with pytest.raises(ValueError, match="set base: nf4 or int8, or method: lora"):
        tiny_run(LayoutSpec(), finetune={"method": "qlora", "base": "plain"})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "deepseek_v3"])
def test_module_and_table_say_the_same(family: str, method: str) -> None:
    model, table = fine_tuned(family, METHODS[method])
    assert [(row.name, row.shape, row.trained, row.storage) for row in table] == [
        (name, tuple(parameter.shape), parameter.requires_grad, storage_of(parameter))
        for name, parameter in model.named_parameters()
    ]
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    quantized = {name for name, linear in linears.items() if linear.find(Quantized)}
    trained = {module_of(row) for row in table if row.trained and not row.adapter}
    adapters = {module_of(row) for row in table if row.adapter}
    assert adapters - {"output"} <= quantized
    assert not quantized & (trained | {"output", "tok_embeddings", "layers.0.feed_forward.router"})


def storage_of(parameter: torch.Tensor) -> str:
    return "float" if parameter.is_floating_point() else str(parameter.dtype).removeprefix("torch.")


def kept_here(run: ResolvedRun) -> dict[str, torch.Tensor]:
    """This rank's part of quantized matrices, combined over all ranks; collective."""
    model = build_here(run).model
    return {name: whole(tensor) for name, tensor in model.named_parameters() if not tensor.is_floating_point()}


@NEEDS_SHARDED_INTEGERS
@pytest.mark.slow
@pytest.mark.parametrize("width", [24, WIDE])
@pytest.mark.parametrize("method", METHODS)
def test_shards_are_parts_of_the_whole_quantization(ranks: RankPool, method: str, width: int) -> None:
    run = tiny_run(LAYOUTS["zero-3-uneven"], finetune=METHODS[method], width=width)
    kept, finetune = ranks.run(3, kept_here, run)[0], run.run.finetune
    assert isinstance(finetune, LoraSpec)
    weights = {module_of(row): row for row in parameter_table(run.model) if row.name.endswith(".weight")}
    for name in (name for name in kept if name.endswith(".codes")):
        module = name.removesuffix(".codes")
        matrix = draw_rows(weights[module], run.run.training.seed, 0, weights[module].shape[0])
        if finetune.base == "int8":
            codes, scales = encode_int8(matrix)
            expected = {"codes": codes, "scales": as_bits(scales)}
        else:
            blocks = torch.nn.functional.pad(matrix.flatten(), (0, -matrix.numel() % 64))
            codes, scales = encode_nf4(blocks)
            stored = encode_scales(scales, double=finetune.double_quantization)
            expected = {"codes": codes, "scales": stored.scales, "groups": stored.groups}
        for part, tensor in expected.items():
            if tensor is not None:
                assert torch.equal(kept[f"{module}.{part}"].flatten(), tensor.flatten()), (module, part)


def check(ranks: RankPool, name: str, method: str, **options: Any) -> None:
    run = tiny_run(LAYOUTS[name], finetune=METHODS[method], **options)
    outcome = ranks.run(LAYOUTS[name].world_size, one_step, run)[0]
    assert_equal(outcome, alone(finetune=METHODS[method], **options), slope=5 * 0.1)


def refused(run: ResolvedRun) -> str:
    with mock.patch.object(data, "SHARDS_INTEGERS", False), pytest.raises(UserError) as found:
        build_here(run)
    return str(found.value)


def test_where_no_integers_are_sharded_several_processes_are_refused(ranks: RankPool) -> None:
    run = tiny_run(LayoutSpec(dp_shard=2), finetune=METHODS["nf4"])
    assert "a quantized base on several processes needs PyTorch 2.13 or newer" in ranks.run(2, refused, run)[0]


@pytest.mark.every(4)
@NEEDS_SHARDED_INTEGERS
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DATA_PARALLEL if name != "single"])
def test_data_parallel_layouts(ranks: RankPool, name: str) -> None:
    check(ranks, name, "nf4-double")


@pytest.mark.every(3)
@NEEDS_SHARDED_INTEGERS
@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp", "zero-3-tp", "cp-ring-tp", "pp-tp", "zero-3-cp"])
def test_layouts_that_split_the_model(ranks: RankPool, name: str) -> None:
    check(ranks, name, "nf4", width=WIDE)
    check(ranks, name, "int8-dora")


@pytest.mark.parametrize(
    ("method", "width", "sentence"),
    [
        ("nf4-double", WIDE, "set double_quantization=false"),
        ("nf4", 24, "layers.0.attention.wq has blocks that span rows; use base=int8"),
        ("nf4", 64, "1 blocks of 64 in a row of layers.0.attention.wo cannot be split evenly over 2 ranks"),
    ],
)
def test_tensor_parallel_ranks_get_whole_blocks_or_are_refused(method: str, width: int, sentence: str) -> None:
    run = tiny_run(LayoutSpec(), finetune=METHODS[method] | {"train": []}, width=width).run
    with pytest.raises(ValueError, match=sentence):
        resolve_run(run.model_copy(update={"layout": LayoutSpec(tp=2)}), base_dir=Path())


def test_the_base_is_not_touched_by_training() -> None:
    trainer = build_here(tiny_run(LayoutSpec(), finetune=METHODS["nf4-double"]))
    names = {name for name, tensor in trainer.model.named_parameters() if not tensor.requires_grad}
    assert not names & trainer.parameters.keys(), "what is frozen is neither updated nor saved"
    assert any(name.endswith(".groups") for name in names)


@torch.no_grad()
def test_a_layer_with_a_bias_computes_with_it() -> None:
    trainer = build_here(tiny_run(LayoutSpec(), family="gpt2", finetune=METHODS["nf4"]))
    layer = trainer.model.get_submodule("layers.0.attention.wq")  # has no adapter
    assert isinstance(layer, Linear)
    assert layer.find(Quantized)
    layer.bias.normal_()
    x_ND = torch.randn(3, 24, dtype=torch.float64)
    expected_ND = torch.nn.functional.linear(x_ND, layer.merged()["weight"].double(), layer.bias)
    assert (layer(x_ND) - expected_ND).abs().max() < 1e-12


def test_nothing_decoded_waits_for_the_backward_pass() -> None:
    """A layer saves only tensors that it keeps anyway."""
    run = tiny_run(LayoutSpec(), finetune=METHODS["nf4"] | {"train": [], "targets": ["wk"]}, width=WIDE)
    model = build_here(run).model
    layer = model.get_submodule("layers.0.attention.wq")
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(5, WIDE, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x).sum().backward()
    assert {tensor.data_ptr() for tensor in saved} == {tensor.data_ptr() for tensor in layer.parameters()}
    assert isinstance(layer, Linear)
    dense = layer.merged()["weight"].double().sum(0).expand(5, -1)
    assert torch.allclose(x.grad, dense, rtol=1e-6)  # type: ignore[arg-type]


PAGE = Path(__file__).resolve().parents[1] / "docs" / "qlora.md"

BASES: dict[str, dict[str, Any]] = {
    "plain (bf16)": {},
    "int8": {"base": "int8"},
    "nf4, `double_quantization: false`": {"base": "nf4", "double_quantization": False},
    "nf4": {"base": "nf4"},
}
"""The page's rows."""


@pytest.mark.parametrize("name", BASES)
def test_the_page_says_how_many_bytes_are_kept(name: str) -> None:
    finetune = {"method": "lora", "targets": ["wq"], **BASES[name]}
    trainer = build_here(tiny_run(LayoutSpec(), width=512, num_layers=1, precision="bf16", finetune=finetune))
    layers = [trainer.model.get_submodule(f"layers.0.feed_forward.{matrix}") for matrix in ("w1", "w2", "w3")]
    kept = sum(tensor.nbytes for layer in layers for tensor in layer.parameters())
    sizes = {"float": 2, "int8": 1, "uint8": 1, "int32": 4}
    model = resolve_model(ModelFields(name="llama-3.1-8b"), base_dir=Path())
    rows = [row for row in finetuned_table(model, LoraSpec.model_validate(finetune)) if not row.adapter]
    gib = sum(row.numel * sizes[row.storage] for row in rows) / 2**30
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert line.split("|")[3:5] == [f" {kept / (3 * 512 * 512):.4f} ", f" {gib:.2f} "]


@pytest.mark.slow
def test_a_run_is_used_and_merged(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    train(recipe(tmp_path, "base"))
    base = {"start_from": str(tmp_path / "base")}
    train(recipe(tmp_path, "qlora", finetune={"method": "qlora", "rank": 4}, checkpoint=base))
    adapted = open_trained(tmp_path / "qlora", device="cpu")
    assert continue_texts(adapted, ["def add"], Settings(max_tokens=4, sampling=Sampling(temperature=0)))
    assert main(["export", str(tmp_path / "qlora"), "--hf", str(tmp_path / "merged"), "--merge"]) == 0
    merged = open_trained(tmp_path / "merged", device="cpu", dtype="fp32").model
    tokens_BT = torch.randint(adapted.spec.vocab, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (logits_of(merged, tokens_BT) - logits_of(adapted.model, tokens_BT)).abs().max() < 1e-4
    layer, plain = adapted.model.get_submodule("layers.0.attention.wq"), merged.get_submodule("layers.0.attention.wq")
    assert isinstance(layer, Linear)
    adapter, kept = layer.find(Lora), layer.view.read(layer)
    assert adapter
    decoded = plain.weight - adapter.scale * layer.lora_b @ layer.lora_a  # type: ignore[operator]
    assert torch.allclose(decoded, layer.product.merged(kept)["weight"], atol=1e-6)
