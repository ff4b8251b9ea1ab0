"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019)."""

from meshwright.families.family import EXPERT_FIELDS, Family
from meshwright.spec.model import ModelFields


def _size(hidden: int, num_layers: int, num_heads: int) -> ModelFields:
    return ModelFields(
        family="gpt2",
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab=50257,
        max_positions=1024,
    )


GPT2 = Family(
    name="gpt2",
    switches={
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "gated": False,
        "positions": "learned",
        "qkv_bias": True,
        "output_bias": True,
        "ffn_bias": True,
    },
    defaults={"max_positions": 1024, "norm_eps": 1e-5, "tied_embeddings": True, "init_std": 0.02},
    default_ffn=lambda hidden: 4 * hidden,
    unavailable=EXPERT_FIELDS | {"num_kv_heads", "head_dim", "rope_theta", "rope_scaling", "sliding_window"},
    presets={
        "gpt2": _size(768, 12, 12),
        "gpt2-medium": _size(1024, 24, 16),
        "gpt2-large": _size(1280, 36, 20),
        "gpt2-xl": _size(1600, 48, 25),
    },
    hf_architecture="GPT2LMHeadModel",
    hf_fields={
        "hidden": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "ffn": "n_inner",
        "vocab": "vocab_size",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied_embeddings": "tie_word_embeddings",
        "init_std": "initializer_range",
    },
    hf_absent={
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    },
    hf_accepts={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    hf_modules={
        "tok_embeddings": "transformer.wte",
        "pos_embeddings": "transformer.wpe",
        "layers.{i}.attention_norm": "transformer.h.{i}.ln_1",
        "layers.{i}.attention.wq": "transformer.h.{i}.attn.c_attn",
        "layers.{i}.attention.wk": "transformer.h.{i}.attn.c_attn",
        "layers.{i}.attention.wv": "transformer.h.{i}.attn.c_attn",
        "layers.{i}.attention.wo": "transformer.h.{i}.attn.c_proj",
        "layers.{i}.feed_forward_norm": "transformer.h.{i}.ln_2",
        "layers.{i}.feed_forward.w1": "transformer.h.{i}.mlp.c_fc",
        "layers.{i}.feed_forward.w2": "transformer.h.{i}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "output": "lm_head",
    },
    hf_prefix="transformer.",
    hf_transposed=frozenset({"c_attn", "c_proj", "c_fc"}),
    hf_ignored=(".attn.bias", ".attn.masked_bias"),
)
