"""Llama 2, 3, 3.1, 3.2 (Touvron et al., 2023; Dubey et al., "The Llama 3 Herd of Models", 2024), the
base of similar families.
"""

from meshwright.families.family import EXPERT_FIELDS, Family, gated_ffn
from meshwright.spec.model import ModelFields, RopeScaling

HF_FIELDS = {
    "hidden": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}

HF_ABSENT = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}

LLAMA_2 = ModelFields(family="llama", vocab=32000, max_positions=4096, rope_theta=10000.0)
LLAMA_3 = ModelFields(family="llama", vocab=128256, max_positions=8192, rope_theta=500000.0, num_kv_heads=8)
LLAMA_3_1 = LLAMA_3.model_copy(update={"max_positions": 131072, "rope_scaling": RopeScaling(factor=8.0)})
LLAMA_3_2 = LLAMA_3.model_copy(
    update={"max_positions": 131072, "rope_scaling": RopeScaling(factor=32.0), "tied_embeddings": True}
)


def sized(base: ModelFields, hidden: int, num_layers: int, num_heads: int, ffn: int, **more) -> ModelFields:
    """A published size: the values of its generation, and its own."""
    sizes = {"hidden": hidden, "num_layers": num_layers, "num_heads": num_heads, "ffn": ffn, **more}
    return base.model_copy(update=sizes)


LLAMA = Family(
    name="llama",
    switches={"norm": "rmsnorm", "activation": "silu", "gated": True, "positions": "rope"},
    defaults={"max_positions": 8192, "norm_eps": 1e-5, "rope_theta": 10000.0},
    default_ffn=gated_ffn,
    unavailable=EXPERT_FIELDS | {"sliding_window"},
    presets={
        "llama-2-7b": sized(LLAMA_2, 4096, 32, 32, 11008),
        "llama-2-13b": sized(LLAMA_2, 5120, 40, 40, 13824),
        "llama-2-70b": sized(LLAMA_2, 8192, 80, 64, 28672, num_kv_heads=8),
        "llama-3-8b": sized(LLAMA_3, 4096, 32, 32, 14336),
        "llama-3-70b": sized(LLAMA_3, 8192, 80, 64, 28672),
        "llama-3.1-8b": sized(LLAMA_3_1, 4096, 32, 32, 14336),
        "llama-3.1-70b": sized(LLAMA_3_1, 8192, 80, 64, 28672),
        "llama-3.1-405b": sized(LLAMA_3_1, 16384, 126, 128, 53248),
        "llama-3.2-1b": sized(LLAMA_3_2, 2048, 16, 32, 8192),
        "llama-3.2-3b": sized(LLAMA_3_2, 3072, 28, 24, 8192),
    },
    hf_architecture="LlamaForCausalLM",
    hf_fields={
        **HF_FIELDS,
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
        "ffn_bias": "mlp_bias",
    },
    hf_absent={**HF_ABSENT, "attention_bias": False, "mlp_bias": False},
    hf_accepts={"hidden_act": ("silu", "swish")},
    hf_modules={
        "tok_embeddings": "model.embed_tokens",
        "layers.{i}.attention_norm": "model.layers.{i}.input_layernorm",
        "layers.{i}.attention.wq": "model.layers.{i}.self_attn.q_proj",
        "layers.{i}.attention.wk": "model.layers.{i}.self_attn.k_proj",
        "layers.{i}.attention.wv": "model.layers.{i}.self_attn.v_proj",
        "layers.{i}.attention.wo": "model.layers.{i}.self_attn.o_proj",
        "layers.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
        "layers.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
        "layers.{i}.feed_forward_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.feed_forward.w1": "model.layers.{i}.mlp.gate_proj",
        "layers.{i}.feed_forward.w2": "model.layers.{i}.mlp.down_proj",
        "layers.{i}.feed_forward.w3": "model.layers.{i}.mlp.up_proj",
        "norm": "model.norm",
        "output": "lm_head",
    },
    hf_prefix="model.",
    hf_ignored=(".rotary_emb.inv_freq",),
)
