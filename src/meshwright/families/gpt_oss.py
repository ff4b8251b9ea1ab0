"""gpt-oss (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025): experts with biases and a clamped gate, attention
sinks, and a sliding window in every second layer.
"""

from dataclasses import replace

from meshwright.families.family import DEEPSEEK_FIELDS
from meshwright.families.hf_layers import TYPED, every
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, LLAMA, sized
from meshwright.spec.layers import RopeScaling
from meshwright.spec.model import ModelFields

YARN = RopeScaling(kind="yarn", factor=32.0, original_max_positions=4096, truncate=False)
BASE = ModelFields(family="gpt_oss", vocab=201088, max_positions=131072, num_kv_heads=8, head_dim=64, rope_scaling=YARN)
EXPERTS = "layers.{i}.feed_forward.experts"
HF_EXPERTS = "model.layers.{i}.mlp.experts"

GPT_OSS = replace(
    LLAMA,
    name="gpt_oss",
    switches={
        **LLAMA.switches,
        "activation": "clamped_silu",
        "window_layers": every(2),
        "sinks": True,
        "expert_bias": True,
        "router_normalised": True,
    },
    defaults={
        "max_positions": 131072,
        "norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "qkv_bias": True,
        "output_bias": True,
        "num_experts": 128,
        "experts_per_token": 4,
        "balance_loss": 0.001,
    },
    unavailable=DEEPSEEK_FIELDS | {"expert_ffn"},
    presets={
        "gpt-oss-20b": sized(BASE, 2880, 24, 64, 2880, num_experts=32),
        "gpt-oss-120b": sized(BASE, 2880, 36, 64, 2880),
    },
    hf_architecture="GptOssForCausalLM",
    hf_fields={
        **HF_FIELDS,
        "sliding_window": "sliding_window",
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
        "expert_ffn": "intermediate_size",
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
        "balance_loss": "router_aux_loss_coef",
        "glu_alpha": "swiglu_alpha",
        "glu_limit": "swiglu_limit",
    },
    hf_absent={
        **HF_ABSENT,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    hf_layers=TYPED,
    hf_modules={
        **{module: stored for module, stored in LLAMA.hf_modules.items() if ".feed_forward.w" not in module},
        "layers.{i}.attention.sinks.weight": "model.layers.{i}.self_attn.sinks",
        "layers.{i}.feed_forward.router": "model.layers.{i}.mlp.router",
        "layers.{i}.feed_forward.router.logit_bias": "model.layers.{i}.mlp.router.bias",
        **{f"{EXPERTS}.{part}.weight": f"{HF_EXPERTS}.gate_up_proj" for part in ("w1", "w3")},
        **{f"{EXPERTS}.{part}.bias": f"{HF_EXPERTS}.gate_up_proj_bias" for part in ("w1", "w3")},
        f"{EXPERTS}.w2.weight": f"{HF_EXPERTS}.down_proj",
        f"{EXPERTS}.w2.bias": f"{HF_EXPERTS}.down_proj_bias",
    },
)
