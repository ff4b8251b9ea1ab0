"""The one place that knows Qwen 2, 2.5 (biases on queries, keys and values; Yang et al., 2024) and the dense
Qwen 3 (RMSNorm on queries and keys instead; Yang et al., 2025)."""

from meshwright.families.family import Family, gated_ffn
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, HF_MODULES, SWITCHES, sized
from meshwright.spec.model import ModelFields

QWEN_2 = ModelFields(family="qwen2", vocab=151936, max_positions=131072)
QWEN_2_LARGE = QWEN_2.model_copy(update={"vocab": 152064})
QWEN_3 = ModelFields(family="qwen3", vocab=151936, max_positions=40960, head_dim=128, num_kv_heads=8)

QWEN_ABSENT = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}

QWEN2 = Family(
    name="qwen2",
    switches={**SWITCHES, "qkv_bias": True},
    defaults={"max_positions": 32768, "norm_eps": 1e-6, "rope_theta": 1000000.0},
    default_ffn=gated_ffn,
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
    hf_absent={**HF_ABSENT, **QWEN_ABSENT},
    hf_accepts={"hidden_act": ("silu", "swish")},
    hf_modules=HF_MODULES,
    hf_prefix="model.",
    hf_ignored=(".rotary_emb.inv_freq",),
)

QWEN3 = Family(
    name="qwen3",
    switches={**SWITCHES, "qk_norm": True},
    defaults={"max_positions": 32768, "norm_eps": 1e-6, "rope_theta": 1000000.0},
    default_ffn=gated_ffn,
    presets={
        "qwen3-0.6b": sized(QWEN_3, 1024, 28, 16, 3072, tied_embeddings=True),
        "qwen3-1.7b": sized(QWEN_3, 2048, 28, 16, 6144, tied_embeddings=True),
        "qwen3-4b": sized(QWEN_3, 2560, 36, 32, 9728, tied_embeddings=True),
        "qwen3-8b": sized(QWEN_3, 4096, 36, 32, 12288),
        "qwen3-14b": sized(QWEN_3, 5120, 40, 40, 17408),
        "qwen3-32b": sized(QWEN_3, 5120, 64, 64, 25600),
    },
    hf_architecture="Qwen3ForCausalLM",
    hf_fields={
        **HF_FIELDS,
        "sliding_window": "sliding_window",
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
    },
    hf_absent={**HF_ABSENT, **QWEN_ABSENT, "head_dim": 128, "attention_bias": False},
    hf_accepts={"hidden_act": ("silu", "swish")},
    hf_modules=HF_MODULES,
    hf_prefix="model.",
    hf_ignored=(".rotary_emb.inv_freq",),
)
