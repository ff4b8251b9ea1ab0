"""MiniMax-M2 (MiniMax, 2025): many small experts chosen with a bias, without groups or shared ones; queries and keys
normed over all heads, and half of each head rotated.
"""

from dataclasses import replace

from meshwright.families.family import DEEPSEEK_FIELDS
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, LLAMA, sized
from meshwright.families.mistral import MIXTRAL
from meshwright.spec.model import ModelFields

BASE = ModelFields(
    family="minimax_m2", vocab=200064, max_positions=196608, num_kv_heads=8, head_dim=128, rope_head_dim=64
)

MINIMAX_M2 = replace(
    MIXTRAL,
    name="minimax_m2",
    switches={
        **LLAMA.switches,
        "qk_norm": "all",
        "router_scores": "sigmoid",
        "router_bias": True,
        "router_normalised": True,
    },
    defaults={
        "max_positions": 196608,
        "norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "num_experts": 256,
        "experts_per_token": 8,
        "balance_loss": 0.0,
        "balance_rate": 0.001,
    },
    unavailable=(DEEPSEEK_FIELDS - {"balance_rate", "rope_head_dim"}) | {"expert_ffn", "sliding_window"},
    presets={"minimax-m2": sized(BASE, 3072, 62, 48, 1536)},
    hf_architecture="MiniMaxM2ForCausalLM",
    hf_fields={
        **HF_FIELDS,
        "expert_ffn": "intermediate_size",
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    hf_tokens=True,
    hf_absent={
        **HF_ABSENT,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5000000.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    hf_accepts={
        **LLAMA.hf_accepts,
        "router_jitter_noise": (0.0,),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "shared_intermediate_size": (0,),
    },
    hf_rotated=1.0,
    hf_rotary_dim=True,
    hf_modules={
        **MIXTRAL.hf_modules,
        "layers.{i}.feed_forward.router.bias": "model.layers.{i}.block_sparse_moe.e_score_correction_bias",
    },
)
