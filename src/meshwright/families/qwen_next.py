"""Qwen3-Next (Qwen Team, 2025) and Qwen3.5 (2026), dense and with experts: three layers with the gated delta rule, then
one with gated attention that rotates a quarter of each head.
"""

from dataclasses import replace

from meshwright.families.family import DEEPSEEK_FIELDS, EXPERT_FIELDS
from meshwright.families.hf_layers import DELTA, every
from meshwright.families.llama import HF_ABSENT, HF_FIELDS, LLAMA, sized
from meshwright.families.qwen import HF_EXPERTS
from meshwright.spec.model import ModelFields

SMALL = ModelFields(family="qwen3_5", vocab=248320, head_dim=256, num_kv_heads=2, delta_heads=16, tied_embeddings=True)
LARGE = ModelFields(family="qwen3_5", vocab=248320, head_dim=256, num_kv_heads=4)
NEXT = ModelFields(family="qwen3_next", vocab=151936, head_dim=256, num_kv_heads=2)
EXPERTS = ModelFields(family="qwen3_5_moe", vocab=248320, head_dim=256, num_kv_heads=2)


def of_experts(hidden: int, num_layers: int, num_heads: int, **more) -> ModelFields:
    """A published size of Qwen3.5 with experts."""
    return EXPERTS.model_copy(update={"hidden": hidden, "num_layers": num_layers, "num_heads": num_heads, **more})


OURS, THEIRS = "layers.{i}.attention", "model.layers.{i}.linear_attn"
SHARED = "layers.{i}.feed_forward.shared"
HF_DELTA = {
    f"{OURS}.convolution": f"{THEIRS}.conv1d",
    f"{OURS}.decay.log_rate": f"{THEIRS}.A_log",
    f"{OURS}.decay.bias": f"{THEIRS}.dt_bias",
    f"{OURS}.norm": f"{THEIRS}.norm",
    f"{OURS}.w_out": f"{THEIRS}.out_proj",
}
HF_SHARED = {
    **{
        f"{SHARED}.{ours}": f"model.layers.{{i}}.mlp.shared_expert.{theirs}_proj"
        for ours, theirs in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
    f"{SHARED}_gate": "model.layers.{i}.mlp.shared_expert_gate",
}
HF_ROUTING = {
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "shared_expert_intermediate_size",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "balance_loss": "router_aux_loss_coef",
}
SIZES = {"delta_heads": 32, "delta_key_heads": 16, "delta_key_dim": 128, "delta_value_dim": 128}

QWEN3_5 = replace(
    LLAMA,
    name="qwen3_5",
    switches={
        **LLAMA.switches,
        "norm": "offset_rmsnorm",
        "qk_norm": "heads",
        "attention_gate": True,
    },
    defaults={
        "max_positions": 262144,
        "norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "delta_layers": every(4),
        "delta_kernel": 4,
        **SIZES,
    },
    unavailable=(EXPERT_FIELDS | {"sliding_window"}) - {"rope_head_dim"},
    presets={
        "qwen3.5-0.8b": sized(SMALL, 1024, 24, 8, 3584),
        "qwen3.5-2b": sized(SMALL, 2048, 24, 8, 6144),
        "qwen3.5-4b": sized(LARGE, 2560, 32, 16, 9216, tied_embeddings=True),
        "qwen3.5-9b": sized(LARGE, 4096, 32, 16, 12288),
        "qwen3.5-27b": sized(LARGE, 5120, 64, 24, 17408, delta_heads=48),
    },
    hf_type="qwen3_5_text",
    hf_architecture="Qwen3_5ForCausalLM",
    hf_fields={
        **HF_FIELDS,
        "qkv_bias": "attention_bias",
        "output_bias": "attention_bias",
        "delta_heads": "linear_num_value_heads",
        "delta_key_heads": "linear_num_key_heads",
        "delta_key_dim": "linear_key_head_dim",
        "delta_value_dim": "linear_value_head_dim",
        "delta_kernel": "linear_conv_kernel_dim",
    },
    hf_absent={
        **HF_ABSENT,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    hf_layers=DELTA,
    hf_rotated=0.25,
    hf_modules={
        **LLAMA.hf_modules,
        **HF_DELTA,
        f"{OURS}.w_qkv": f"{THEIRS}.in_proj_qkv",
        f"{OURS}.w_z": f"{THEIRS}.in_proj_z",
        f"{OURS}.w_b": f"{THEIRS}.in_proj_b",
        f"{OURS}.w_a": f"{THEIRS}.in_proj_a",
    },
    hf_left_out=("mtp.",),
)

EXPERT_DEFAULTS = {"expert_ffn": 512, "shared_ffn": 512, "balance_loss": 0.001}
HF_EXPERTS_ABSENT = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}
OF_EXPERTS_SWITCHES = {**QWEN3_5.switches, "shared_gate": True}

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    switches={**OF_EXPERTS_SWITCHES, "router_normalised": True},
    defaults={**QWEN3_5.defaults, **EXPERT_DEFAULTS, "num_experts": 256, "experts_per_token": 8},
    unavailable=(DEEPSEEK_FIELDS | {"sliding_window", "ffn"}) - {"rope_head_dim"},
    presets={
        "qwen3.5-35b-a3b": of_experts(2048, 40, 16),
        "qwen3.5-122b-a10b": of_experts(3072, 48, 32, expert_ffn=1024, shared_ffn=1024, delta_heads=64),
        "qwen3.5-397b-a17b": of_experts(
            4096, 60, 32, expert_ffn=1024, shared_ffn=1024, delta_heads=64, num_experts=512, experts_per_token=10
        ),
    },
    hf_type="qwen3_5_moe_text",
    hf_architecture="Qwen3_5MoeForCausalLM",
    hf_fields={**{field: key for field, key in QWEN3_5.hf_fields.items() if field != "ffn"}, **HF_ROUTING},
    hf_absent={**QWEN3_5.hf_absent, **HF_EXPERTS_ABSENT, "num_experts": 256, "num_experts_per_tok": 8},
    hf_modules={**QWEN3_5.hf_modules, **HF_EXPERTS, **HF_SHARED},
)

QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    name="qwen3_next",
    switches={**OF_EXPERTS_SWITCHES, "delta_by_key_head": True},
    defaults={
        **QWEN3_5.defaults,
        **EXPERT_DEFAULTS,
        "num_experts": 512,
        "experts_per_token": 10,
        "router_normalised": True,
    },
    unavailable=QWEN3_5_MOE.unavailable - {"ffn"},
    presets={"qwen3-next-80b-a3b": sized(NEXT, 2048, 48, 16, 5120)},
    hf_type=None,
    hf_architecture="Qwen3NextForCausalLM",
    hf_fields={**QWEN3_5.hf_fields, **HF_ROUTING, "router_normalised": "norm_topk_prob"},
    hf_absent={
        **QWEN3_5.hf_absent,
        **HF_EXPERTS_ABSENT,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    hf_accepts={**LLAMA.hf_accepts, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    hf_modules={
        **QWEN3_5.hf_modules,
        **HF_EXPERTS,
        **HF_SHARED,
        f"{OURS}.w_qkvz": f"{THEIRS}.in_proj_qkvz",
        f"{OURS}.w_ba": f"{THEIRS}.in_proj_ba",
    },
)
