"""The counted operations are those that torch executes."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from losses import summed_loss
from meshwright.families import parameter_table, resolve_model
from meshwright.families.flops import flops_per_token, forward_flops_per_token, matmul_parameters
from meshwright.models import build_model, initialize
from meshwright.spec.model import ModelFields

BATCH, LENGTH = 2, 24


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_equals_torchs_counter(family, tied):
    sizes = {"hidden": 32, "num_layers": 3, "num_heads": 4, "vocab": 61, "ffn": 40, "tied_embeddings": tied}
    kv = {} if family in ("gpt2", "deepseek_v3") else {"num_kv_heads": 2}
    if family == "deepseek_v3":  # values are padded to the keys' width
        sizes |= {"kv_rank": 12, "q_rank": 16, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 10}
        sizes |= {"num_experts": 16, "expert_ffn": 12, "dense_layers": 1}
    spec = resolve_model(ModelFields(family=family, **sizes, **kv), base_dir=Path())
    model = build_model(spec, device="cpu", dtype=torch.float64)
    initialize(model, parameter_table(spec), 0)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    # The math kernel computes all T x T scores by matrix products that the counter counts.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            summed_loss(model, tokens, tokens)
        with FlopCounterMode(display=False) as training:
            summed_loss(model, tokens, tokens).backward()
    assert forward.get_total_flops() == BATCH * LENGTH * forward_flops_per_token(spec, LENGTH)
    assert training.get_total_flops() == BATCH * LENGTH * flops_per_token(spec, LENGTH)


def test_the_published_convention():
    """6 N + 12 L H Q T for Llama 3 8B at 8,192 tokens, with N without the embedding's rows."""
    spec = resolve_model(ModelFields(name="llama-3-8b"), base_dir=Path())
    assert matmul_parameters(spec) == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert flops_per_token(spec, 8192) == 6 * matmul_parameters(spec) + 12 * 32 * 32 * 128 * 8192


def test_a_sliding_window_bounds_attention():
    spec = resolve_model(ModelFields(name="mistral-7b"), base_dir=Path())
    assert flops_per_token(spec, 32768) == flops_per_token(spec, 4096)
    assert flops_per_token(spec, 1024) < flops_per_token(spec, 4096)
