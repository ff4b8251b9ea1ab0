"""Families whose layers differ from one another: drawn configurations against transformers' own class in float64, their
tokens, documents, exports and layouts."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from config_fuzz import write_model
from exact import assert_gradients_equal, loaded_fp64, make_exact
from losses import logits_of
from meshwright.checkpoint.hf import HfForm, HfWeights, export_hf
from meshwright.families import (
    PRESETS,
    model_from_hf_config,
    model_to_hf_config,
    parameter_table,
    read_hf_directory,
    resolve_model,
    state_table,
)
from meshwright.models import Decoder, build_model, initialize, named_tensors
from meshwright.models.generate import Sampling
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields
from meshwright.testing.layouts import LAYOUTS as LAYOUTS_BY_NAME
from meshwright.testing.ranks import RankPool
from served import generate
from test_equivalence import check
from test_finetune import check as check_adapters

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FAMILIES = ("smollm3", "olmo3", "gemma3", "glm4_moe", "minimax_m2", "gpt_oss")
FAMILIES += ("qwen3_next", "qwen3_5", "qwen3_5_moe")
PRESETS_OF_FAMILIES = [name for name, fields in PRESETS.items() if fields.family in FAMILIES]
MXFP4_SIZES = {"hidden": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn": 32}
MXFP4_SIZES |= {"vocab": 61, "num_experts": 4, "experts_per_token": 2}
PACK = 4
"""Configurations of one test."""
CASES = 8
ROOM = 1e-12
"""Relative to the largest logit or gradient: sums of at most 61 terms along 60 operations in a row, in float64."""
TOKENS_BT = torch.randint(4, 61, (2, 24), generator=torch.Generator().manual_seed(7))
"""None is a padding token, whose embedding transformers does not train."""
WORDS = ("is_causal", "scaling other than", "partial_rotary_factor", "hidden_act", "rope type", "softcapping")
WORDS += (
    "bidirectional",
    "router_top_groups",
    "experts_per_token",
    "scoring_func",
    "router_jitter_noise",
    "is odd",
    "truncate",
    "layer_types",
    "mlp_only_layers",
    "decoder_sparse_step",
)


@torch.no_grad()
def ours(directory: Path) -> Decoder:
    """The directory's model in float64."""
    spec = read_hf_directory(directory)
    model, weights = build_model(spec, device="cpu", dtype=torch.float64), HfWeights(directory, spec)
    for row in parameter_table(spec) + state_table(spec):
        named_tensors(model)[row.name].copy_(weights.read_rows(row.name, 0, row.shape[0]))
    return model.eval()


def draw_model(family: str, first: int, folder: Path) -> Path:
    """A directory of the first drawn configuration that both compute; we refuse others by name."""
    refusals: list[str] = []
    for seed in itertools.count(first):
        directory = folder / str(seed)
        try:
            write_model(family, seed, directory)
            loaded_fp64(directory)(TOKENS_BT)
        except Exception:  # transformers' own errors
            continue
        try:
            read_hf_directory(directory)
        except UserError as error:
            refusals.append(str(error))
            continue
        assert all(any(word in refusal for word in WORDS) for refusal in refusals), refusals
        return directory
    raise AssertionError


@pytest.mark.every(CASES)
@pytest.mark.filterwarnings("ignore")  # transformers warns about its own configurations
@pytest.mark.parametrize("first", [1000 * number for number in range(CASES)])
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configurations(family: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, every gradient and the tokens of greedy generation equal transformers'; transformers opens our export."""
    make_exact(monkeypatch)
    for number in range(PACK):
        directory = draw_model(family, first + 100 * number, tmp_path)
        model, theirs = ours(directory), loaded_fp64(directory)
        with torch.no_grad():
            expected = theirs(TOKENS_BT).logits
            found = logits_of(model, TOKENS_BT)
        assert (found - expected).abs().max() <= ROOM * expected.abs().max()
        assert_gradients_equal(model, theirs, TOKENS_BT, ROOM)

        prompt, length = TOKENS_BT[0, :9], 6
        whole = theirs.generate(prompt[None], max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
        greedy = Sampling(temperature=0)
        answer = generate(model, [prompt.tolist()], max_tokens=length, eos_id=-1, sampling=greedy)
        assert answer == whole[:, len(prompt) :].tolist()

        export_hf(named_tensors(model).items(), model.spec, directory / "out", HfForm(dtype=torch.float32), prove=False)
        assert read_hf_directory(directory / "out") == model.spec
        with torch.no_grad():
            again = loaded_fp64(directory / "out")(TOKENS_BT).logits
        assert (again - expected).abs().max() <= ROOM * expected.abs().max()


LAYOUTS = ("tp", "zero-3-tp", "tp-wide", "cp-ring-tp", "pp", "cp-all-gather-tp", "pp-cp-tp", "cp-ulysses-tp")
LAYOUTS += ("zero-3-uneven", "pp-zero-3", "zero-3-cp", "hybrid-3-tp")


@pytest.mark.every(len(LAYOUTS) // 2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts(ranks: RankPool, family: str, layout: str) -> None:
    """Loss, every gradient and every weight after a step equal one process's; packed documents, ties and recomputation
    alternate."""
    turn = LAYOUTS.index(layout) + FAMILIES.index(family)
    recompute = ("none", "selective", "full")[turn % 3]
    accumulation = 3 if turn % 4 < 2 else 1
    check(
        ranks,
        layout,
        family=family,
        tied=turn % 2 == 0,
        documents=turn % 4 in (1, 2),
        recompute=recompute,
        accumulation=accumulation,
    )


@pytest.mark.every(4)
@pytest.mark.parametrize("layout", ["tp", "zero-3", "pp", "tp-wide"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters(ranks: RankPool, family: str, layout: str) -> None:
    """A step of LoRA on ranks equals one process's."""
    check_adapters(ranks, LAYOUTS_BY_NAME[layout], "lora", family=family)


@pytest.mark.parametrize("name", PRESETS_OF_FAMILIES)
def test_presets_survive_config_json_in_both_spellings(name: str) -> None:
    """Of transformers 4, without rope_parameters, and of 5."""
    spec = resolve_model(ModelFields(name=name), base_dir=Path())
    config = model_to_hf_config(spec)
    four = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    five = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling", "rotary_dim")}
    for spelled in (four, five):
        again = model_from_hf_config(spelled)
        assert again.model_copy(update={"balance_loss": spec.balance_loss, "balance_rate": spec.balance_rate}) == spec


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """The codes and scales of a directory like the published ones, multiplied out by transformers' own function."""
    spec = resolve_model(ModelFields(family="gpt_oss", **MXFP4_SIZES), base_dir=Path())
    model = build_model(spec, device="cpu")
    initialize(model, parameter_table(spec), 0)
    export_hf(named_tensors(model).items(), spec, tmp_path / "plain", HfForm(dtype=torch.bfloat16), prove=False)
    tensors = load_file(tmp_path / "plain/model.safetensors")
    generator, expected = torch.Generator().manual_seed(3), {}
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, into, out = tensors.pop(name).shape
        codes = torch.randint(256, (experts, out, into // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 128, (experts, out, into // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(codes, scales)
    directory = tmp_path / "mxfp4"
    directory.mkdir()
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    weights = HfWeights(directory, read_hf_directory(directory))
    for name, whole in expected.items():
        layer = name.split(".")[2]
        lanes = {"w1": whole[..., ::2], "w3": whole[..., 1::2]} if "gate_up" in name else {"w2": whole}
        for part, stack in lanes.items():
            ours_EOI = weights.read_rows(f"layers.{layer}.feed_forward.experts.{part}.weight", 1, 4)
            assert torch.equal(ours_EOI, stack[1:4].mT), name
    (scale,) = [key for key in tensors if key.endswith("layers.0.mlp.experts.down_proj_scales")]
    save_file({k: t for k, t in tensors.items() if k != scale}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="down_proj_blocks has no scales"):
        HfWeights(directory, read_hf_directory(directory))
