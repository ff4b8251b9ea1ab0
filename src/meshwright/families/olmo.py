"""OLMo 3 (Ai2, "OLMo 3", 2025): the outputs of attention and feed-forward are normed instead of their inputs, queries
and keys over all heads; three layers with a sliding window, then one with full attention, whose rope alone is scaled.
"""

from dataclasses import replace

from meshwright.families.family import EXPERT_FIELDS
from meshwright.families.hf_layers import TYPED, every
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, LLAMA, sized
from meshwright.spec.layers import RopeScaling
from meshwright.spec.model import ModelFields

YARN = RopeScaling(kind="yarn", factor=8.0, original_max_positions=8192)
BASE = ModelFields(family="olmo3", vocab=100278, max_positions=65536, norm_eps=1e-6, rope_scaling=YARN)

OLMO3 = replace(
    LLAMA,
    name="olmo3",
    switches={
        **LLAMA.switches,
        "norms": "after",
        "qk_norm": "all",
        "window_layers": every(4),
        "window_scaled": False,
    },
    defaults={"max_positions": 8192, "norm_eps": 1e-6, "rope_theta": 500000.0, "sliding_window": 4096},
    unavailable=EXPERT_FIELDS,
    presets={
        "olmo-3-7b": sized(BASE, 4096, 32, 32, 11008),
        "olmo-3-32b": sized(BASE, 5120, 64, 40, 27648, num_kv_heads=8),
    },
    hf_architecture="Olmo3ForCausalLM",
    hf_fields={
        **HF_FIELDS,
        "sliding_window": "sliding_window",
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
    },
    hf_tokens=True,
    hf_absent={
        **HF_ABSENT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_bias": False,
        "sliding_window": 4096,
    },
    hf_layers=TYPED,
    hf_window_theta="rope_theta",
    hf_modules={
        **{module: stored for module, stored in LLAMA.hf_modules.items() if not module.endswith("}.attention_norm")},
        "layers.{i}.attention_post_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.feed_forward_post_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
)
