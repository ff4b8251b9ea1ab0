"""Gemma 3, the text model (Gemma Team, "Gemma 3 Technical Report", 2025): norms before and after attention and
feed-forward, queries and keys normed, GeGLU, five layers with a sliding window and a rope of their own, then one with
full attention.
"""

from dataclasses import replace

from meshwright.families.family import EXPERT_FIELDS
from meshwright.families.hf_layers import TYPED, every
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, LLAMA, sized
from meshwright.spec.layers import RopeScaling
from meshwright.spec.model import ModelFields

SMALL = ModelFields(family="gemma3", vocab=262144, max_positions=32768, sliding_window=512, head_dim=256)
LARGE = ModelFields(
    family="gemma3",
    vocab=262208,
    max_positions=131072,
    sliding_window=1024,
    head_dim=256,
    rope_scaling=RopeScaling(kind="linear", factor=8.0),
)

GEMMA3 = replace(
    LLAMA,
    name="gemma3",
    switches={
        **LLAMA.switches,
        "norm": "offset_rmsnorm",
        "norms": "both",
        "activation": "gelu_tanh",
        "qk_norm": "heads",
        "window_layers": every(6),
        "window_scaled": False,
        "embedding_scaled": True,
    },
    defaults={
        "max_positions": 32768,
        "norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "window_theta": 10000.0,
        "sliding_window": 512,
        "query_scalar": None,
        "tied_embeddings": True,
    },
    unavailable=EXPERT_FIELDS,
    presets={
        "gemma-3-270m": sized(SMALL, 640, 18, 4, 2048, num_kv_heads=1),
        "gemma-3-1b": sized(SMALL, 1152, 26, 4, 6912, num_kv_heads=1),
        "gemma-3-4b": sized(LARGE, 2560, 34, 8, 10240, num_kv_heads=4),
        "gemma-3-12b": sized(LARGE, 3840, 48, 16, 15360, num_kv_heads=8),
        "gemma-3-27b": sized(LARGE, 5376, 62, 32, 21504, num_kv_heads=16, head_dim=128, query_scalar=168),
    },
    hf_type="gemma3_text",
    hf_architecture="Gemma3ForCausalLM",
    hf_fields={
        **HF_FIELDS,
        "sliding_window": "sliding_window",
        "query_scalar": "query_pre_attn_scalar",
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
    },
    hf_tokens=True,
    hf_absent={
        **HF_ABSENT,
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "intermediate_size": 9216,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attention_bias": False,
    },
    hf_accepts={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    hf_layers=TYPED,
    hf_window_theta="rope_local_base_freq",
    hf_modules={
        **LLAMA.hf_modules,
        "layers.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.feed_forward_norm": "model.layers.{i}.pre_feedforward_layernorm",
        "layers.{i}.feed_forward_post_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
)
