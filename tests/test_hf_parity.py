"""Models and conversion agree with transformers, on random weights of every family, in both directions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from exact import assert_gradients_equal, loaded_fp64, make_exact
from losses import logits_of
from meshwright.checkpoint.hf import HfForm, HfWeights, export_hf
from meshwright.families import (
    hf_tensors,
    model_to_hf_config,
    parameter_table,
    read_hf_directory,
    resolve_model,
    state_table,
)
from meshwright.models import Decoder, build_model, initialize, named_tensors
from meshwright.spec.model import ModelFields, ModelSpec, RopeScaling

LENGTH = 24
SIZES = {"hidden": 32, "num_layers": 3, "num_heads": 4, "vocab": 97, "max_positions": 48, "init_std": 0.2}
GROUPED = {**SIZES, "num_kv_heads": 2, "ffn": 40}
LLAMA_3 = {"rope_theta": 500.0, "rope_scaling": RopeScaling(factor=8.0, original_max_positions=16)}
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=16, beta_fast=8.0)
DEEPSEEK = {
    **SIZES,
    "ffn": 40,
    "expert_ffn": 24,
    "kv_rank": 16,
    "nope_head_dim": 8,
    "rope_head_dim": 4,
    "v_head_dim": 6,
}

CASES = {
    "gpt2": {"family": "gpt2", **SIZES},
    "gpt2-untied": {"family": "gpt2", **SIZES, "tied_embeddings": False, "ffn": 48},
    "llama": {"family": "llama", **GROUPED},
    "llama-multi-head": {"family": "llama", **SIZES, "rope_theta": 1000.0},
    "llama-3.1-scaled-tied": {"family": "llama", **GROUPED, **LLAMA_3, "tied_embeddings": True},
    "llama-wide-heads": {"family": "llama", **GROUPED, "head_dim": 12},
    "mistral-window": {"family": "mistral", **GROUPED, "sliding_window": 7},
    "mistral-no-window": {"family": "mistral", **GROUPED},
    "qwen2": {"family": "qwen2", **GROUPED},
    "qwen2-tied-window": {"family": "qwen2", **GROUPED, "tied_embeddings": True, "sliding_window": 7},
    "qwen3": {"family": "qwen3", **GROUPED, "head_dim": 16},
    "qwen3-tied-scaled": {"family": "qwen3", **GROUPED, **LLAMA_3, "tied_embeddings": True},
    "mixtral": {"family": "mixtral", **GROUPED},
    "mixtral-tied-window": {
        "family": "mixtral",
        **GROUPED,
        "num_experts": 5,
        "experts_per_token": 3,
        "sliding_window": 7,
        "tied_embeddings": True,
    },
    "qwen3-moe": {"family": "qwen3_moe", **GROUPED, "expert_ffn": 24, "num_experts": 8, "experts_per_token": 3},
    "qwen3-moe-one-each": {"family": "qwen3_moe", **GROUPED, "num_experts": 4, "experts_per_token": 1},
    "llama-yarn": {"family": "llama", **GROUPED, "rope_scaling": YARN},
    "deepseek-v3": {
        "family": "deepseek_v3",
        **DEEPSEEK,
        "q_rank": 20,
        "num_experts": 8,
        "experts_per_token": 3,
        "router_groups": 4,
        "router_top_groups": 2,
        "dense_layers": 1,
        "rope_scaling": YARN.model_copy(update={"mscale": 0.7, "mscale_all_dim": 1.3}),
    },
    "deepseek-v3-without-groups": {
        "family": "deepseek_v3",
        **DEEPSEEK,
        "num_experts": 6,
        "experts_per_token": 2,
        "router_groups": 1,
        "router_top_groups": 1,
        "shared_experts": 2,
        "dense_layers": 0,
        "tied_embeddings": True,
    },
    "smollm3": {"family": "smollm3", **GROUPED, "num_layers": 5},
    "smollm3-untied-window": {"family": "smollm3", **GROUPED, "num_layers": 4, "tied_embeddings": False}
    | {"sliding_window": 7},
    "olmo3": {"family": "olmo3", **GROUPED, "num_layers": 5, "sliding_window": 7, "rope_scaling": YARN},
    "olmo3-tied": {"family": "olmo3", **SIZES, "num_layers": 4, "sliding_window": 7, "tied_embeddings": True},
    "gemma3": {"family": "gemma3", **GROUPED, "num_layers": 7, "sliding_window": 7, "head_dim": 12}
    | {"rope_scaling": RopeScaling(kind="linear", factor=4.0), "query_scalar": 10},
    "gemma3-untied": {"family": "gemma3", **GROUPED, "num_layers": 6, "tied_embeddings": False},
    "glm4-moe": {"family": "glm4_moe", **GROUPED, "expert_ffn": 24, "num_experts": 8, "experts_per_token": 3}
    | {"qk_norm": "heads", "router_groups": 4, "router_top_groups": 2, "router_scale": 2.5},
    "glm4-moe-tied": {"family": "glm4_moe", **GROUPED, "expert_ffn": 24, "num_experts": 6, "experts_per_token": 2}
    | {"dense_layers": 0, "shared_experts": 2, "tied_embeddings": True, "head_dim": 12},
    "minimax-m2": {"family": "minimax_m2", **GROUPED, "num_experts": 8, "experts_per_token": 3, "head_dim": 12}
    | {"rope_head_dim": 6},
    "minimax-m2-tied": {"family": "minimax_m2", **GROUPED, "num_experts": 4, "experts_per_token": 1}
    | {"tied_embeddings": True, "rope_scaling": YARN},
}


def case_spec(name: str) -> ModelSpec:
    return resolve_model(ModelFields(**CASES[name]), base_dir=Path())


def ours(spec: ModelSpec, dtype=torch.float32, seed=0) -> Decoder:
    """Random everywhere, also norms, biases and state, which start at one and zero."""
    model = build_model(spec, device="cpu", dtype=dtype)
    initialize(model, parameter_table(spec), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in named_tensors(model).values():
            if tensor.dim() == 1:
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model


def tokens(spec: ModelSpec) -> torch.Tensor:
    return torch.randint(spec.vocab, (2, LENGTH), generator=torch.Generator().manual_seed(7))


def exported(spec: ModelSpec, directory: Path, dtype=torch.float32, **options) -> Decoder:
    model = ours(spec)
    export_hf(named_tensors(model).items(), spec, directory, HfForm(dtype=dtype), **options)
    return model


@pytest.fixture
def exact(monkeypatch):
    make_exact(monkeypatch)


@pytest.mark.every(1)
@pytest.mark.parametrize("name", CASES)
def test_our_export_computes_the_same_in_transformers_fp64(name, tmp_path, exact):
    spec = case_spec(name)
    model = exported(spec, tmp_path / "hf", prove=False).double()
    theirs = loaded_fp64(tmp_path / "hf")
    batch = tokens(spec)
    with torch.no_grad():
        found, expected = logits_of(model, batch), theirs(batch).logits
    # Both compute in fp64 from the same fp32 angles: only the order of sums differs.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(1)
def test_their_model_computes_the_same_here_fp32(name, tmp_path):
    """The reverse direction, with unmodified transformers: a directory that it saved, with its random weights."""
    spec = case_spec(name)
    config = AutoConfig.for_model(**model_to_hf_config(spec))
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(config).float().eval()
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):  # which starts at zero
            buffer.normal_(std=0.3)
    theirs.save_pretrained(tmp_path)
    found = read_hf_directory(tmp_path)
    assert found == spec
    model, weights = build_model(found, device="cpu"), HfWeights(tmp_path, found)
    with torch.no_grad():
        for key, tensor in named_tensors(model).items():
            tensor.copy_(weights.read_rows(key, 0, tensor.shape[0]))
        batch = tokens(spec)
        expected = theirs(batch).logits
        torch.testing.assert_close(logits_of(model, batch), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.every(1)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_transformers(name, tmp_path, exact):
    spec = case_spec(name)
    model = exported(spec, tmp_path / "hf", prove=False).double()
    assert_gradients_equal(model, loaded_fp64(tmp_path / "hf"), tokens(spec), room=1e-13)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_keeps_every_bit(name, dtype, tmp_path):
    """Theirs -> ours -> a directory of several files: every tensor under its name, bit for bit."""
    spec = case_spec(name)
    torch.manual_seed(5)
    config = AutoConfig.for_model(**model_to_hf_config(spec))
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(tmp_path / "theirs")
    weights = HfWeights(tmp_path / "theirs", spec)
    table = parameter_table(spec) + state_table(spec)
    stream = ((row.name, weights.read_rows(row.name, 0, row.shape[0])) for row in table)
    export_hf(stream, spec, tmp_path / "ours", HfForm(dtype=dtype, shard_bytes=10_000), prove=False)
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    after = {key: value for file in files for key, value in load_file(tmp_path / "ours" / file).items()}
    assert after.keys() == before.keys() == index["weight_map"].keys()
    state = {hf_tensors(spec)[row.name].key for row in state_table(spec)}  # few numbers, kept in wide formats
    for key, value in before.items():
        assert after[key].dtype == (torch.float32 if key in state else dtype)
        assert torch.equal(after[key], value.to(after[key].dtype)), key
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert again.dtype == dtype
    assert read_hf_directory(tmp_path / "ours") == spec


@pytest.mark.parametrize("name", CASES)
def test_rows_are_read_alone(name, tmp_path):
    spec = case_spec(name)
    model = exported(spec, tmp_path / "hf", prove=False)
    weights = HfWeights(tmp_path / "hf", spec)
    for key, parameter in model.named_parameters():
        rows = parameter.shape[0]
        for start, stop in ((0, rows), (1, rows // 2), (rows - 1, rows), (rows, rows)):
            assert torch.equal(weights.read_rows(key, start, stop), parameter[start:stop])
