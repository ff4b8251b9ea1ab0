"""Mistral 7B (Jiang et al., 2023): Llama with a sliding window; and Mixtral (Jiang et al., "Mixtral of Experts", 2024):
Mistral with experts in every layer.
"""

from dataclasses import replace

from meshwright.families.family import EXPERT_FIELDS
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, LLAMA, sized
from meshwright.spec.model import ModelFields

MISTRAL_7B = sized(ModelFields(family="mistral", max_positions=32768), 4096, 32, 32, 14336, num_kv_heads=8)

MISTRAL = replace(
    LLAMA,
    name="mistral",
    defaults={"max_positions": 32768, "norm_eps": 1e-5, "rope_theta": 10000.0},
    unavailable=EXPERT_FIELDS,
    presets={
        "mistral-7b": MISTRAL_7B.model_copy(update={"vocab": 32000, "sliding_window": 4096}),
        "mistral-7b-v0.3": MISTRAL_7B.model_copy(update={"vocab": 32768, "rope_theta": 1000000.0}),
    },
    hf_architecture="MistralForCausalLM",
    hf_fields={**HF_FIELDS, "sliding_window": "sliding_window"},
    hf_absent={**HF_ABSENT, "num_key_value_heads": 8, "sliding_window": 4096},
)

BASE = ModelFields(family="mixtral", vocab=32000, num_kv_heads=8, num_experts=8, experts_per_token=2)

MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    switches={**MISTRAL.switches, "router_scores": "softmax", "router_normalised": True},
    defaults={
        "max_positions": 32768,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_experts": 8,
        "experts_per_token": 2,
        "balance_loss": 0.02,
    },
    unavailable=frozenset({"expert_ffn"}),
    presets={
        "mixtral-8x7b": sized(BASE, 4096, 32, 32, 14336),
        "mixtral-8x22b": sized(BASE, 6144, 56, 48, 16384, max_positions=65536, balance_loss=0.001),
    },
    hf_architecture="MixtralForCausalLM",
    hf_fields={
        **HF_FIELDS,
        "expert_ffn": "intermediate_size",
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "balance_loss": "router_aux_loss_coef",
        "sliding_window": "sliding_window",
    },
    hf_absent={
        **MISTRAL.hf_absent,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
    },
    hf_accepts={**MISTRAL.hf_accepts, "router_jitter_noise": (0.0,)},
    hf_modules={
        **{module: stored for module, stored in MISTRAL.hf_modules.items() if ".feed_forward.w" not in module},
        "layers.{i}.feed_forward.router": "model.layers.{i}.block_sparse_moe.gate",
        "layers.{i}.feed_forward.experts.w1": "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
        "layers.{i}.feed_forward.experts.w2": "model.layers.{i}.block_sparse_moe.experts.{e}.w2",
        "layers.{i}.feed_forward.experts.w3": "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    },
)
