"""SmolLM3 (Hugging Face, 2025): Llama whose every fourth layer does not rotate queries and keys (Yang et al., "RoPE to
NoPE and Back Again", 2025).
"""

from dataclasses import replace

from meshwright.families.family import EXPERT_FIELDS
from meshwright.families.hf_layers import NOPE, every
from meshwright.families.llama import HF_ABSENT, LLAMA, sized
from meshwright.spec.model import ModelFields

BASE = ModelFields(family="smollm3", vocab=128256, max_positions=65536, rope_theta=5000000.0)

SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    switches={**LLAMA.switches, "rope_layers": every(4), "window_layers": (False, False, False, True)},
    defaults={"max_positions": 32768, "norm_eps": 1e-6, "rope_theta": 2000000.0, "tied_embeddings": True},
    unavailable=EXPERT_FIELDS,
    presets={"smollm3-3b": sized(BASE, 2048, 36, 16, 11008, num_kv_heads=4)},
    hf_architecture="SmolLM3ForCausalLM",
    hf_fields={**LLAMA.hf_fields, "sliding_window": "sliding_window"},
    hf_tokens=True,
    hf_absent={
        **HF_ABSENT,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    hf_layers=NOPE,
)
