"""The derived split of models of transformers: real ranks equal one process."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meshwright import families
from meshwright.derive.__main__ import answers_to
from meshwright.derive.calls import RecordedCall, UnsplitError, record, rounds_in_float32
from meshwright.derive.derive import derive_split, split_module
from meshwright.derive.probe import derived_split, probe_blocks
from meshwright.derive.slice_test import passes
from meshwright.derive.whole_model import check_whole
from meshwright.families import read_hf_directory, resolve_model
from meshwright.families.derived import derive
from meshwright.models.foreign import ForeignDecoder
from meshwright.prove.tolerance import derive_tolerance
from meshwright.spec.batch import Batch
from meshwright.spec.fit import find_misfits
from meshwright.spec.foreign import ForeignModel, ForeignSplit, SplitModule
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import ModelFields
from meshwright.spec.run import ResolvedRun
from meshwright.testing.derived import derived_here
from meshwright.testing.equivalence import build_here, one_step
from meshwright.testing.ranks import RankPool
from test_equivalence import assert_equal
from test_finetune_run import trajectory
from tiny import tiny_run

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
CONFIGS: dict[str, Any] = {
    "smollm3": transformers.SmolLM3Config(**SIZES | {"num_hidden_layers": 4}),  # as llama, tied
    "phi3": transformers.Phi3Config(**SIZES),  # queries, keys and values in one matrix, gate and up in another
    "gpt2": transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32),  # (in, out)
    "bert": transformers.BertConfig(  # its feed-forward layer is split in the block, its attention in a module inside
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, is_decoder=True
    ),
    "olmo3": transformers.Olmo3Config(**SIZES, sliding_window=4),  # norms over all heads
    "gpt_oss": transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),  # sinks, packed experts
    "qwen3_next": transformers.Qwen3NextConfig(**SIZES, **EXPERTS, **LINEAR, **LAYERS, num_experts=4),  # gated delta
}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory for each architecture, with random weights."""
    return saved_models(tmp_path_factory.mktemp("derive"), CONFIGS)


def saved_models(folder: Path, configs: Mapping[str, Any]) -> Path:
    """A Hugging Face directory in `folder` for each configuration, with random weights."""
    generator = torch.Generator().manual_seed(0)
    for name, config in configs.items():
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2, generator=generator)
        model.save_pretrained(folder / name)
    return folder


def foreign_run(directory: Path, layout: LayoutSpec, **options: Any) -> ResolvedRun:
    model = derived_here(read_hf_directory(directory, family="transformers"), layout)
    resolved = tiny_run(layout, num_layers=model.num_layers, **options)
    assert not find_misfits(layout, model, 16)
    fields = ModelFields(name=str(directory), weights="pretrained", family="transformers")
    return resolved.model_copy(update={"run": resolved.run.model_copy(update={"model": fields}), "model": model})


TIGHT = ("smollm3", "phi3", "gpt2", "bert", "gpt_oss")
"""Architectures that compute in float64 everywhere; the others compute norms, gates or routers in float32."""

LAYOUTS = {
    "tp": LayoutSpec(tp=2),
    "tp-zero-2": LayoutSpec(tp=2, dp_shard=2, zero=2),
    "tp-zero-3": LayoutSpec(tp=2, dp_shard=2, zero=3),
}
LORA = {"method": "lora", "rank": 4}
CASES = [
    *((name, "tp", None, "none") for name in CONFIGS),
    *(("phi3", layout, LORA, "selective") for layout in LAYOUTS),
    *((name, "tp-zero-2", None, "full") for name in CONFIGS),
    *((name, "tp", LORA, "none") for name in ("smollm3", "olmo3", "gpt_oss", "qwen3_next")),
    ("phi3", "tp", LORA | {"dora": True, "dropout": 0.2}, "full"),
    ("gpt_oss", "tp-zero-3", None, "none"),
]
_ALONE: dict[tuple[Path, str, bool], Any] = {}


def assert_equals_one_process(
    ranks: RankPool, directory: Path, layout: LayoutSpec, *, documents: bool = False, exact: bool, **options: Any
) -> None:
    """A step under a layout; `exact`: to float64's tolerance."""
    key = directory, str(options.get("finetune")), documents
    if key not in _ALONE:
        _ALONE[key] = one_step(foreign_run(directory, LayoutSpec(), finetune=options.get("finetune")), documents)
    result = ranks.run(layout.world_size, one_step, foreign_run(directory, layout, **options), documents)[0]
    assert_equal(result, _ALONE[key], dtype=torch.float64 if exact else torch.float32)


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "layout", "finetune", "recompute"), CASES)
def test_tensor_parallel_ranks_equal_one_process(
    ranks: RankPool, directories: Path, name: str, layout: str, finetune: dict[str, Any] | None, recompute: str
) -> None:
    options: dict[str, Any] = {"finetune": finetune, "recompute": recompute, "exact": name in TIGHT}
    assert_equals_one_process(ranks, directories / name, LAYOUTS[layout], **options)


@pytest.mark.parametrize("name", ["olmo3", "qwen3_next"])
def test_a_proof_computes_in_float64_what_transformers_computes_in_float32(directories: Path, name: str) -> None:
    """Else a proof would allow float32's rounding, in which the whole gradient of a small matrix fits."""
    model = build_here(foreign_run(directories / name, LayoutSpec(), recompute="full")).model
    assert isinstance(model, ForeignDecoder)
    batch = Batch(torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0)))
    assert rounds_in_float32(lambda: model(batch))
    model.widen()
    assert not rounds_in_float32(lambda: model(batch))
    assert derive_tolerance(foreign_run(directories / name, LayoutSpec(tp=2))).relative < 1e-11


def test_degrees_that_divide_the_heads_are_offered(directories: Path) -> None:
    model = read_hf_directory(directories / "phi3", family="transformers")
    assert model.foreign is not None
    splits = tuple(ForeignSplit(tp=tp, problem="no") for tp in (3, 4))
    model = model.model_copy(update={"foreign": model.foreign.model_copy(update={"others": splits})})
    refused = "no module of this model can be split over ranks (no)"
    (reason,) = find_misfits(LayoutSpec(tp=3), model, 16)
    assert reason == f"layout.tp=3: {refused}; tp=2, tp=4 divide its 4 heads"
    (reason,) = find_misfits(LayoutSpec(tp=4), model, 16)
    assert reason == f"layout.tp=4: {refused}; the nearest legal layout is tp=1"


def attention_of(directory: Path, parts: int = 2) -> tuple[torch.nn.Module, RecordedCall, SplitModule]:
    """The first block's attention, a call of it, and its derived split."""
    foreign = read_hf_directory(directory, family="transformers").foreign
    assert foreign is not None
    blocks = probe_blocks(foreign, parts)
    module = blocks.block(0).get_submodule("self_attn")
    call = record(lambda: blocks.model(input_ids=blocks.tokens), {(0, ""): module})[0, ""]
    return module, call, split_module(module, call, parts, (0,))


def test_the_slice_test_refuses_another_order_of_heads(directories: Path) -> None:
    module, call, split = attention_of(directories / "phi3")
    passes(module, call, split, 2)
    (fused,) = (one for one in split.parameters if one.name == "qkv_proj.weight")
    assert fused.segments == (32, 16, 16), "queries, keys and values"
    for segments in ((), (16, 16, 32), (32, 32)):
        others = [one for one in split.parameters if one is not fused]
        planted = (fused.model_copy(update={"segments": segments}), *others)
        with pytest.raises(UnsplitError, match="do not add up"):
            passes(module, call, split.model_copy(update={"parameters": planted}), 2)


def test_the_slice_test_refuses_a_wrong_partial_gradient(directories: Path) -> None:
    module, call, split = attention_of(directories / "olmo3")
    passes(module, call, split, 2)
    assert split.partial == ("k_norm.weight", "q_norm.weight")
    with pytest.raises(UnsplitError, match=r"gradient of q_norm\.weight is partial"):
        passes(module, call, split.model_copy(update={"partial": ("k_norm.weight",)}), 2)
    with pytest.raises(UnsplitError, match="gradient of hidden_states is neither whole nor a sum"):
        passes(module, call, split.model_copy(update={"entered": ()}), 2)
    module, call, split = attention_of(directories / "gpt_oss")
    with pytest.raises(UnsplitError, match="do not add up"):
        passes(module, call, split.model_copy(update={"once": ()}), 2)


def test_the_slice_test_refuses_a_missed_attribute(directories: Path) -> None:
    module, call, split = attention_of(directories / "phi3")
    needed = [one for one in split.attributes if one[0] == ""]
    assert needed
    for attribute in needed:
        left = tuple(one for one in split.attributes if one != attribute)
        try:
            passes(module, call, split.model_copy(update={"attributes": left}), 2)
        except UnsplitError:
            break
    else:
        raise AssertionError("every attribute could be missed")


def test_a_norm_over_all_heads_must_be_gathered(directories: Path) -> None:
    module, call, split = attention_of(directories / "olmo3")
    with pytest.raises(UnsplitError):
        passes(module, call, split.model_copy(update={"gathered": ()}), 2)


def test_the_slice_test_of_a_whole_model_refuses_what_no_module_shows(directories: Path) -> None:
    """BERT's blocks are split around split modules; planted: one split applied twice, and a wrong partial gradient."""
    foreign = read_hf_directory(directories / "bert", family="transformers").foreign
    assert foreign is not None
    blocks = probe_blocks(foreign, 2)
    split = derive_split(blocks, 2)
    check_whole(blocks, split, 2)
    inner, outer = sorted(split.modules, key=lambda module: -len(module.name))
    assert outer.name == "", "the whole block"
    for modules in ((inner,), (outer,), (outer, inner)):
        check_whole(blocks, split.model_copy(update={"modules": modules}), 2)
    for modules in ((inner, inner), (inner, outer, outer)):
        with pytest.raises(UnsplitError):
            check_whole(blocks, split.model_copy(update={"modules": modules}), 2)
    wrong = inner.model_copy(update={"partial": (*inner.partial, "output.LayerNorm.weight")})
    with pytest.raises(UnsplitError, match=r"gradient of .*output\.LayerNorm\.weight is not the model's"):
        check_whole(blocks, split.model_copy(update={"modules": (wrong, outer)}), 2)


def large(config: Any) -> ForeignModel:
    """A model of published size, of which nothing is allocated."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return ForeignModel(config=json.dumps(config.to_dict()), blocks="model.layers", tensors=tuple(shapes.items()))


def test_a_large_model_is_split_by_a_small_copy() -> None:
    """Phi-3-medium's queries, keys and values are runs of 5120, 1280 and 1280 rows."""
    sizes = {"hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40, "num_key_value_heads": 10}
    foreign = large(transformers.Phi3Config(**sizes, num_hidden_layers=40, vocab_size=32064))
    split = derived_split(foreign, 2)
    found = {f"{module.name}.{one.name}": one for module in split.modules for one in module.parameters}
    assert all(module.layers == tuple(range(40)) for module in split.modules)
    assert found["self_attn.qkv_proj.weight"].segments == (5120, 1280, 1280)
    assert found["mlp.gate_up_proj.weight"].segments == (17920, 17920)
    assert found["self_attn.o_proj.weight"].dim == found["mlp.down_proj.weight"].dim == 1
    assert not split.whole


def ask_here(bare: dict[str, Any], numbers: Sequence[int]) -> dict[int, dict[str, object]]:
    """What a process of its own answers, without the seconds that it takes to start."""
    return dict(zip(numbers, answers_to(ForeignModel.model_validate(bare), numbers), strict=True))


@pytest.mark.slow
def test_a_damaged_split_in_the_cache_is_derived_again(
    directories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the damage leaves a split that could be read, with other rows on a rank. The first is derived in a
    process of its own; this process then derives the others as that one does."""
    foreign = read_hf_directory(directories / "phi3", family="transformers").foreign
    assert foreign is not None
    split = derive(foreign, [2], tmp_path)[2]
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    monkeypatch.setattr(families.derived, "_ask", ask_here)
    for damaged in (whole.replace(b"16", b"24", 1), whole[:-9], b"", b"\xff" + whole):
        assert damaged != whole
        file.write_bytes(damaged)
        assert derive(foreign, [2], tmp_path)[2] == split
        assert file.read_bytes() == whole


def test_a_checkpoint_of_ranks_is_read_by_any_layout(ranks: RankPool, directories: Path, tmp_path: Path) -> None:
    """Rows that a rank stores in another order (phi3) have the model's order in checkpoints."""
    options: dict[str, Any] = {"recompute": "none", "steps": 4}
    several = foreign_run(directories / "phi3", LayoutSpec(tp=2, dp_shard=2, zero=3), **options)
    seen = ranks.run(4, trajectory, several, tmp_path, 4, False)[0]
    assert ranks.run(4, trajectory, several, tmp_path, 4, True)[0] == seen[2:]
    alone = trajectory(foreign_run(directories / "phi3", LayoutSpec(), **options), tmp_path, 4, True)
    for ours, theirs in zip(alone, seen[2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def test_a_norm_without_weight_is_no_obstacle() -> None:
    """DiffLlama's; reading its weight was a stack trace."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8, elementwise_affine=False)).double()
    module.append(torch.nn.Linear(8, 8, dtype=torch.float64))
    call = RecordedCall((torch.randn(4, 8, dtype=torch.float64),), {}, frozenset(), buried=False)
    with pytest.raises(UnsplitError):
        split_module(module, call, 2, (0,))


def overruled_split(directory: Path, dims: dict[str, str]) -> ForeignSplit:
    foreign = read_hf_directory(directory, family="transformers").foreign
    assert foreign is not None
    return derived_split(foreign.model_copy(update={"dims": tuple(dims.items())}), 2)


def test_dims_of_the_recipe_overrule_derived_ones(directories: Path) -> None:
    """The derived dims said again change nothing; a module may stay whole; what is wrong is refused by the slice test,
    and what cannot be understood or matches nothing by name."""
    fused, up, down = (
        f"model.layers.*.{name}.weight" for name in ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
    )
    derived = overruled_split(directories / "phi3", {})
    again = overruled_split(
        directories / "phi3", {fused: "heads, in in runs of 32, 16, 16", up: "ffn, in in runs of 48, 48"}
    )
    assert {(one.name, tuple(sorted(map(str, one.parameters)))) for one in again.modules} == {
        (one.name, tuple(sorted(map(str, one.parameters)))) for one in derived.modules
    }
    assert [one.name for one in overruled_split(directories / "phi3", {up: "whole"}).modules] == ["self_attn"]
    assert ("model.layers.*.mlp.down_proj.weight", "the recipe says so") in overruled_split(
        directories / "phi3", {up: "whole"}
    ).whole
    with pytest.raises(ValueError, match=r"model\.dims: only models that transformers computes"):
        resolve_model(ModelFields(name="llama-3.2-1b", dims={up: "whole"}), base_dir=directories)
    refusals = {
        (fused, "heads, in"): "the slice test of self_attn refuses it: .*do not add up",
        (fused, "heads, in in runs of 16, 16, 32"): "the slice test of self_attn refuses it: .*do not add up",
        (up, "out, ffn"): "the slice test of mlp refuses it: ",
        (down, "ffn, in"): "the slice test of mlp refuses it: ",
        (fused, "heads, in in runs of 32, 16"): "with runs that add up to its size",
        (fused, "experts, in"): "one of them heads, kv_heads, ffn",
        ("model.layers.*.self_attn.q_proj.weight", "heads, in"): "matches no parameter",
        ("model.norm.weight", "heads"): "cannot be overruled: it is in no split module",
    }
    for (pattern, dims), reason in refusals.items():
        with pytest.raises(ValueError, match=rf"model\.dims: {re.escape(pattern)}: {re.escape(dims)}: .*{reason}"):
            overruled_split(directories / "phi3", {pattern: dims})


def test_dims_of_a_large_model_are_tested_in_the_small_copy() -> None:
    sizes = {"hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40, "num_key_value_heads": 10}
    foreign = large(transformers.Phi3Config(**sizes, num_hidden_layers=4, vocab_size=32064))
    pattern = "model.layers.*.self_attn.qkv_proj.weight"

    def split(runs: str) -> ForeignSplit:
        return derived_split(foreign.model_copy(update={"dims": ((pattern, f"heads, in in runs of {runs}"),)}), 2)

    assert any(
        one.segments == (5120, 1280, 1280) for module in split("5120, 1280, 1280").modules for one in module.parameters
    )
    with pytest.raises(ValueError, match=r"refuses it: .*do not add up"):
        split("1280, 1280, 5120")
