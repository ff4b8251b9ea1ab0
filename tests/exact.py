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
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next
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


OFFSET_NORMS = (
    modeling_gemma3.Gemma3RMSNorm,
    modeling_qwen3_next.Qwen3NextRMSNorm,
    modeling_qwen3_5.Qwen3_5RMSNorm,
    modeling_qwen3_5_moe.Qwen3_5MoeRMSNorm,
)
ROUTERS = (
    modeling_mixtral.MixtralTopKRouter,
    modeling_qwen3_moe.Qwen3MoeTopKRouter,
    modeling_qwen3_next.Qwen3NextTopKRouter,
    modeling_qwen3_5_moe.Qwen3_5MoeTopKRouter,
)
DELTA = (modeling_qwen3_next, modeling_qwen3_5, modeling_qwen3_5_moe)


def token_by_token(query, key, value, g, beta, initial_state=None, output_final_state=False, **kwargs):
    """The gated delta rule as transformers defines it, a token at a time, in the dtype of its inputs; theirs rounds to
    fp32."""
    shares = value.shape[2] // key.shape[2]
    query, key = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(shares, 2) for x in (query, key)
    )
    state = value.new_zeros(*value.shape[::2], key.shape[-1], value.shape[-1])
    state = state if initial_state is None else initial_state
    outputs = []
    for q, k, v, decay, share in zip(*(x.unbind(1) for x in (query, key, value, g, beta)), strict=True):
        state = state * decay.exp()[..., None, None]
        new = (v - torch.einsum("bhk,bhkv->bhv", k, state)) * share[..., None]
        state = state + torch.einsum("bhk,bhv->bhkv", k, new)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q, state) * query.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state if output_final_state else None


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
    for router in ROUTERS:
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

    def gated(self, x, gate):
        return forward(self, x) * torch.nn.functional.silu(gate)

    def unrounded(compute):
        def run(*args, **kwargs):
            with monkeypatch.context() as within:
                within.setattr(torch.Tensor, "float", lambda tensor: tensor)
                return compute(*args, **kwargs)

        return run

    for norm in OFFSET_NORMS:
        monkeypatch.setattr(norm, "forward", offset)
    for module in DELTA:
        name = next(name for name in vars(module) if name.endswith("RMSNormGated"))
        monkeypatch.setattr(vars(module)[name], "forward", gated)
        layer = next(value for name, value in vars(module).items() if name.endswith("GatedDeltaNet"))
        monkeypatch.setattr(layer, "forward", unrounded(layer.forward))
        monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", token_by_token)
        monkeypatch.setattr(module, "torch_recurrent_gated_delta_rule", token_by_token)
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
