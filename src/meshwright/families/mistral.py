"""Mistral 7B (Jiang et al., 2023): Llama with a sliding window."""

from meshwright.families.family import Family, gated_ffn
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, HF_MODULES, SWITCHES, sized
from meshwright.spec.model import ModelFields

MISTRAL_7B = sized(ModelFields(family="mistral", max_positions=32768), 4096, 32, 32, 14336, num_kv_heads=8)

MISTRAL = Family(
    name="mistral",
    switches=SWITCHES,
    defaults={"max_positions": 32768, "norm_eps": 1e-5, "rope_theta": 10000.0},
    default_ffn=gated_ffn,
    presets={
        "mistral-7b": MISTRAL_7B.model_copy(update={"vocab": 32000, "sliding_window": 4096}),
        "mistral-7b-v0.3": MISTRAL_7B.model_copy(update={"vocab": 32768, "rope_theta": 1000000.0}),
    },
    hf_architecture="MistralForCausalLM",
    hf_fields={**HF_FIELDS, "sliding_window": "sliding_window"},
    hf_absent={
        **HF_ABSENT,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    hf_accepts={"hidden_act": ("silu", "swish")},
    hf_modules=HF_MODULES,
    hf_prefix="model.",
    hf_ignored=(".rotary_emb.inv_freq",),
)
