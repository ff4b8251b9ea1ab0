"""Qwen 2, 2.5 (biases on queries, keys and values; Yang et al., 2024) and Qwen 3, dense and with experts (RMSNorm on
queries and keys instead; Yang et al., 2025).
"""

from dataclasses import replace

from meshwright.families.family import EXPERT_FIELDS
from meshwright.families.hf_layers import BY_LAYER, SWITCHED
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, LLAMA, sized
from meshwright.spec.model import ModelFields

QWEN_2 = ModelFields(family="qwen2", vocab=151936, max_positions=131072)
QWEN_2_LARGE = QWEN_2.model_copy(update={"vocab": 152064})
QWEN_3 = ModelFields(family="qwen3", vocab=151936, max_positions=40960, head_dim=128, num_kv_heads=8)

QWEN2 = replace(
    LLAMA,
    name="qwen2",
    switches={**LLAMA.switches, "qkv_bias": True},
    defaults={"max_positions": 32768, "norm_eps": 1e-6, "rope_theta": 1000000.0},
    unavailable=EXPERT_FIELDS,
    presets={
        "qwen2-0.5b": sized(QWEN_2, 896, 24, 14, 4864, num_kv_heads=2, tied_embeddings=True),
        "qwen2-1.5b": sized(QWEN_2, 1536, 28, 12, 8960, num_kv_heads=2, tied_embeddings=True),
        "qwen2-7b": sized(QWEN_2_LARGE, 3584, 28, 28, 18944, num_kv_heads=4),
        "qwen2-72b": sized(QWEN_2_LARGE, 8192, 80, 64, 29568, num_kv_heads=8, norm_eps=1e-5),
        "qwen2.5-0.5b": sized(QWEN_2, 896, 24, 14, 4864, num_kv_heads=2, tied_embeddings=True, max_positions=32768),
        "qwen2.5-1.5b": sized(QWEN_2, 1536, 28, 12, 8960, num_kv_heads=2, tied_embeddings=True),
        "qwen2.5-3b": sized(QWEN_2, 2048, 36, 16, 11008, num_kv_heads=2, tied_embeddings=True, max_positions=32768),
        "qwen2.5-7b": sized(QWEN_2_LARGE, 3584, 28, 28, 18944, num_kv_heads=4),
        "qwen2.5-14b": sized(QWEN_2_LARGE, 5120, 48, 40, 13824, num_kv_heads=8, norm_eps=1e-5),
        "qwen2.5-32b": sized(QWEN_2_LARGE, 5120, 64, 40, 27648, num_kv_heads=8, norm_eps=1e-5),
        "qwen2.5-72b": sized(QWEN_2_LARGE, 8192, 80, 64, 29568, num_kv_heads=8, norm_eps=1e-5),
    },
    hf_architecture="Qwen2ForCausalLM",
    hf_fields={**HF_FIELDS, "sliding_window": "sliding_window"},
    hf_absent={
        **HF_ABSENT,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    hf_layers=BY_LAYER,
)

QWEN3 = replace(
    QWEN2,
    name="qwen3",
    switches={**LLAMA.switches, "qk_norm": "heads"},
    presets={
        "qwen3-0.6b": sized(QWEN_3, 1024, 28, 16, 3072, tied_embeddings=True),
        "qwen3-1.7b": sized(QWEN_3, 2048, 28, 16, 6144, tied_embeddings=True),
        "qwen3-4b": sized(QWEN_3, 2560, 36, 32, 9728, tied_embeddings=True),
        "qwen3-8b": sized(QWEN_3, 4096, 36, 32, 12288),
        "qwen3-14b": sized(QWEN_3, 5120, 40, 40, 17408),
        "qwen3-32b": sized(QWEN_3, 5120, 64, 64, 25600),
    },
    hf_architecture="Qwen3ForCausalLM",
    hf_fields={**QWEN2.hf_fields, "qkv_bias": "attention_bias", "output_bias": "attention_bias"},
    hf_absent={**QWEN2.hf_absent, "head_dim": 128, "attention_bias": False},
)

QWEN_3_MOE = QWEN_3.model_copy(
    update={"family": "qwen3_moe", "num_kv_heads": 4, "num_experts": 128, "experts_per_token": 8}
)

HF_EXPERTS = {
    "layers.{i}.feed_forward.router": "model.layers.{i}.mlp.gate",
    "layers.{i}.feed_forward.experts.w1": "model.layers.{i}.mlp.experts.{e}.gate_proj",
    "layers.{i}.feed_forward.experts.w2": "model.layers.{i}.mlp.experts.{e}.down_proj",
    "layers.{i}.feed_forward.experts.w3": "model.layers.{i}.mlp.experts.{e}.up_proj",
}

QWEN3_MOE = replace(
    QWEN3,
    name="qwen3_moe",
    defaults={
        **QWEN3.defaults,
        "num_experts": 128,
        "experts_per_token": 8,
        "router_normalised": True,
        "balance_loss": 0.001,
    },
    unavailable=frozenset(),
    presets={
        "qwen3-30b-a3b": sized(QWEN_3_MOE, 2048, 48, 32, 6144, expert_ffn=768),
        "qwen3-235b-a22b": sized(QWEN_3_MOE, 4096, 94, 64, 12288, expert_ffn=1536),
    },
    hf_architecture="Qwen3MoeForCausalLM",
    hf_fields={
        **QWEN3.hf_fields,
        "expert_ffn": "moe_intermediate_size",
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "router_normalised": "norm_topk_prob",
        "balance_loss": "router_aux_loss_coef",
    },
    hf_aliases={"num_experts": "num_local_experts"},
    hf_absent={
        **QWEN3.hf_absent,
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    hf_layers=SWITCHED,
    hf_accepts={**QWEN3.hf_accepts, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    hf_modules={**QWEN3.hf_modules, **HF_EXPERTS},
)
