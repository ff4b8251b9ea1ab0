"""Models and conversion agree with transformers, on random weights of every family, in both directions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from losses import logits_of, summed_loss
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


def loaded_fp64(directory: Path):
    """transformers' model; experts one by one, because its fast kernel has no fp64."""
    theirs = AutoModelForCausalLM.from_pretrained(directory).double().eval()
    theirs.set_experts_implementation("eager")
    return theirs


MIXTRAL_NAMES = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""Names in transformers' memory that differ from those in Mixtral's files."""


def in_memory(key: str) -> str:
    for theirs, name in MIXTRAL_NAMES.items():
        key = key.replace(theirs, name)
    return key


def separate(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that transformers fuses in memory, expert by expert as in files."""
    found = {}
    for name, tensor in gradients.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        prefix, kind = name.rsplit(".", 1)
        for e, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            found |= {f"{prefix}.{e}.{module}.weight": part for module, part in parts.items()}
    return found


def exported(spec: ModelSpec, directory: Path, dtype=torch.float32, **options) -> Decoder:
    model = ours(spec)
    export_hf(named_tensors(model).items(), spec, directory, HfForm(dtype=dtype), **options)
    return model


@pytest.fixture
def exact(monkeypatch):
    """transformers' RMSNorm and routers round to fp32 in any dtype; here they stay in fp64, all else unchanged."""

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def route(self, x):
        logits = torch.nn.functional.linear(x.flatten(0, -2), self.weight)
        scores, experts = logits.softmax(-1).topk(self.top_k)
        normalised = getattr(self, "norm_topk_prob", True)
        return logits, scores / scores.sum(-1, keepdim=True) if normalised else scores, experts

    def route_in_groups(self, x):
        scores = torch.nn.functional.linear(x.flatten(0, -2), self.weight).sigmoid()
        groups = (scores + self.e_score_correction_bias).unflatten(-1, (self.num_group, -1))
        best = groups.topk(2).values.sum(-1).topk(self.topk_group).indices
        others = torch.ones(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, False)
        experts = groups.masked_fill(others[..., None], -torch.inf).flatten(-2).topk(self.top_k).indices
        weights = scores.gather(-1, experts)
        return None, self.routed_scaling_factor * weights / weights.sum(-1, keepdim=True), experts

    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3TopkRouter, "forward", route_in_groups)
    for router in (modeling_mixtral.MixtralTopKRouter, modeling_qwen3_moe.Qwen3MoeTopKRouter):
        monkeypatch.setattr(router, "forward", route)

    norms = (
        modeling_llama.LlamaRMSNorm,
        modeling_deepseek_v3.DeepseekV3RMSNorm,
        modeling_mistral.MistralRMSNorm,
        modeling_mixtral.MixtralRMSNorm,
        modeling_qwen2.Qwen2RMSNorm,
        modeling_qwen3.Qwen3RMSNorm,
        modeling_qwen3_moe.Qwen3MoeRMSNorm,
    )
    for norm in norms:
        monkeypatch.setattr(norm, "forward", forward)


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
    theirs = loaded_fp64(tmp_path / "hf")
    batch, labels = tokens(spec), tokens(spec).roll(-1, 1)
    summed_loss(model, batch, labels).backward()
    logits = theirs(batch).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = separate({name: p.grad for name, p in theirs.named_parameters()})
    # Relative to the largest gradient overall, because some are zero except for rounding (a key's bias moves no
    # attention).
    largest = max(grad.abs().max().item() for grad in expected.values())
    places = hf_tensors(spec)
    for key, parameter in model.named_parameters():
        place, grad = places[key], parameter.grad
        if place.experts is not None:
            part = torch.stack([expected[in_memory(expert)] for expert in place.keys])
            torch.testing.assert_close(grad, part, rtol=0, atol=1e-13 * largest)
            continue
        whole = expected[in_memory(place.key)]
        whole = whole.t() if place.transposed else whole
        part = whole[place.offset : place.offset + grad.shape[0]]
        torch.testing.assert_close(grad, part, rtol=0, atol=1e-13 * largest)


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
