"""GLM-4.5 and later (GLM-4.5 Team, 2025): DeepSeek-V3's experts with grouped attention that rotates half a head."""

from dataclasses import replace

from meshwright.families.deepseek import DEEPSEEK_V3, HF_SHARED
from meshwright.families.hf_layers import HfLayers
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, LLAMA, sized
from meshwright.families.qwen import HF_EXPERTS
from meshwright.spec.model import ModelFields

BASE = ModelFields(family="glm4_moe", vocab=151552, max_positions=131072, num_kv_heads=8, head_dim=128)
LARGE = sized(
    BASE, 5120, 92, 96, 12288, expert_ffn=1536, num_experts=160, dense_layers=3, router_scale=2.5, qk_norm="heads"
)
LATENT = ("q_rank", "kv_rank", "nope_head_dim", "v_head_dim")
ROUTING = ("expert_ffn", "num_experts", "experts_per_token", "shared_experts", "dense_layers", "router_groups")
ROUTING += ("router_top_groups", "router_normalised", "router_scale")

GLM4_MOE = replace(
    DEEPSEEK_V3,
    name="glm4_moe",
    defaults={
        "max_positions": 131072,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "qkv_bias": True,
        "qk_norm": "none",
        "num_experts": 128,
        "experts_per_token": 8,
        "shared_experts": 1,
        "dense_layers": 1,
        "router_normalised": True,
        "balance_loss": 0.0000125,
        "balance_rate": 0.001,
    },
    unavailable=frozenset({"sliding_window", *LATENT}),
    presets={
        "glm-4.5-air": sized(BASE, 4096, 46, 96, 10944, expert_ffn=1408),
        "glm-4.5": LARGE,
        "glm-4.6": LARGE.model_copy(update={"max_positions": 202752}),
    },
    hf_architecture="Glm4MoeForCausalLM",
    hf_fields={
        **HF_FIELDS,
        **{field: DEEPSEEK_V3.hf_fields[field] for field in ROUTING},
        "qkv_bias": "attention_bias",
    },
    hf_absent={
        **HF_ABSENT,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    hf_accepts=LLAMA.hf_accepts,
    hf_layers=HfLayers(
        lambda reader, values: {"qk_norm": "heads" if reader.value("use_qk_norm") else "none"},
        lambda spec: {"use_qk_norm": spec.qk_norm == "heads"},
    ),
    hf_rotated=0.5,
    hf_modules={**LLAMA.hf_modules, **HF_EXPERTS, **HF_SHARED},
)
