"""transformers' models in float64, and their gradients under the names of files."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.minimax_m2 import modeling_minimax_m2
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmo3 import modeling_olmo3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.smollm3 import modeling_smollm3

from losses import summed_loss
from meshwright.families import hf_tensors
from meshwright.models import Decoder

NORMS = (
    modeling_llama.LlamaRMSNorm,
    modeling_deepseek_v3.DeepseekV3RMSNorm,
    modeling_glm4_moe.Glm4MoeRMSNorm,
    modeling_gpt_oss.GptOssRMSNorm,
    modeling_minimax_m2.MiniMaxM2RMSNorm,
    modeling_mistral.MistralRMSNorm,
    modeling_mixtral.MixtralRMSNorm,
    modeling_olmo3.Olmo3RMSNorm,
    modeling_qwen2.Qwen2RMSNorm,
    modeling_qwen3.Qwen3RMSNorm,
    modeling_qwen3_moe.Qwen3MoeRMSNorm,
    modeling_smollm3.SmolLM3RMSNorm,
)


def loaded_fp64(directory: Path) -> Any:
    """transformers' model; experts one by one, because its fast kernel has no fp64."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).double().eval()
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
        interleaved = f"{name}_bias" in gradients  # gpt_oss's files store stacks too
        if interleaved or not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        prefix, kind = name.rsplit(".", 1)
        for e, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            found |= {f"{prefix}.{e}.{module}.weight": part for module, part in parts.items()}
    return found


def make_exact(monkeypatch: pytest.MonkeyPatch) -> None:
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
        total = weights.sum(-1, keepdim=True) if self.norm_topk_prob else 1.0
        return None, self.routed_scaling_factor * weights / total, experts

    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3TopkRouter, "forward", route_in_groups)
    for router in (modeling_mixtral.MixtralTopKRouter, modeling_qwen3_moe.Qwen3MoeTopKRouter):
        monkeypatch.setattr(router, "forward", route)

    def minimax(self, x, e_score_correction_bias):
        scores = torch.nn.functional.linear(x.flatten(0, -2), self.weight).sigmoid()
        experts = (scores + e_score_correction_bias).topk(self.top_k).indices
        weights = scores.gather(-1, experts)
        return None, weights / weights.sum(-1, keepdim=True), experts

    def offset(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    monkeypatch.setattr(modeling_glm4_moe.Glm4MoeTopkRouter, "forward", route_in_groups)
    monkeypatch.setattr(modeling_minimax_m2.MiniMaxM2TopKRouter, "forward", minimax)
    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", offset)
    for norm in NORMS:
        monkeypatch.setattr(norm, "forward", forward)


def assert_gradients_equal(model: Decoder, theirs: Any, batch: torch.Tensor, room: float) -> None:
    """Every gradient of the summed loss, to `room` of the largest gradient overall, because some are zero except for
    rounding (a key's bias moves no attention)."""
    labels = batch.roll(-1, 1)
    summed_loss(model, batch, labels).backward()
    logits = theirs(batch).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    expected = separate({name: p.grad for name, p in theirs.named_parameters()})
    largest = max(grad.abs().max().item() for grad in expected.values())
    places = hf_tensors(model.spec)
    for key, parameter in model.named_parameters():
        place, grad = places[key], parameter.grad
        assert grad is not None, key
        if place.lane is not None:
            own, lanes = place.lane
            whole = expected[place.key]
            part = whole[:, own::lanes, None] if whole.dim() == 2 else whole.mT[:, own::lanes]
        elif place.experts is not None:
            part = torch.stack([expected[in_memory(expert)] for expert in place.keys])
        else:
            whole = expected[in_memory(place.key)]
            whole = whole.t() if place.transposed else whole
            part = whole[place.offset : place.offset + grad.shape[0]]
        torch.testing.assert_close(grad, part, rtol=0, atol=room * largest, msg=lambda text, key=key: f"{key}: {text}")
