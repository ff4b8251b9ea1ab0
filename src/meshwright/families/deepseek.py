"""DeepSeek V3 (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024) and models of its architecture (Moonlight, Kimi K2):
latent attention, and many small experts with a shared one, load balanced by a bias instead of a loss.
"""

from dataclasses import replace

from meshwright.families.llama import HF_ABSENT, HF_FIELDS, LLAMA, sized
from meshwright.families.qwen import HF_EXPERTS
from meshwright.spec.model import ModelFields, RopeScaling

V3 = ModelFields(
    family="deepseek_v3",
    vocab=129280,
    max_positions=163840,
    rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0),
    q_rank=1536,
)
KIMI = sized(
    ModelFields(family="deepseek_v3", vocab=163840, rope_theta=50000.0, q_rank=1536),
    7168,
    61,
    64,
    18432,
    expert_ffn=2048,
    num_experts=384,
    dense_layers=1,
    router_groups=1,
    router_top_groups=1,
    router_scale=2.827,
)
MOONLIGHT = ModelFields(family="deepseek_v3", vocab=163840, max_positions=8192, rope_theta=50000.0, norm_eps=1e-5)


def kimi_yarn(factor: float) -> RopeScaling:
    """The scaling of Kimi K2's generations."""
    return RopeScaling(
        kind="yarn", factor=factor, original_max_positions=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0
    )


ATTENTION = {"wq": "q_proj", "wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj"} | {
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}
SHARED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
HF_SHARED = {
    **{
        f"layers.{{i}}.feed_forward.shared.{ours}": f"model.layers.{{i}}.mlp.shared_experts.{name}"
        for ours, name in SHARED.items()
    },
    "layers.{i}.feed_forward.router.bias": "model.layers.{i}.mlp.gate.e_score_correction_bias",
}

DEEPSEEK_V3 = replace(
    LLAMA,
    name="deepseek_v3",
    switches={**LLAMA.switches, "router_scores": "sigmoid", "router_bias": True},
    defaults={
        "max_positions": 4096,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_experts": 256,
        "experts_per_token": 8,
        "shared_experts": 1,
        "dense_layers": 3,
        "router_groups": 8,
        "router_top_groups": 4,
        "router_normalised": True,
        "router_scale": 2.5,
        # The report's alpha = 0.0001 is for shares of a token's 8 experts that add up to 1; here they add up to 8.
        "balance_loss": 0.0000125,
        "balance_rate": 0.001,
        "kv_rank": 512,
        "nope_head_dim": 128,
        "rope_head_dim": 64,
        "v_head_dim": 128,
    },
    unavailable=frozenset({"num_kv_heads", "head_dim", "sliding_window"}),
    presets={
        "moonlight-16b-a3b": sized(
            MOONLIGHT,
            2048,
            27,
            16,
            11264,
            expert_ffn=1408,
            num_experts=64,
            experts_per_token=6,
            shared_experts=2,
            dense_layers=1,
            router_groups=1,
            router_top_groups=1,
            router_scale=2.446,
        ),
        "deepseek-v3": sized(V3, 7168, 61, 128, 18432, expert_ffn=2048),
        "kimi-k2": KIMI.model_copy(update={"max_positions": 131072, "rope_scaling": kimi_yarn(32.0)}),
        "kimi-k2-0905": KIMI.model_copy(update={"max_positions": 262144, "rope_scaling": kimi_yarn(64.0)}),
    },
    hf_architecture="DeepseekV3ForCausalLM",
    hf_fields={
        **{field: key for field, key in HF_FIELDS.items() if field != "head_dim"},
        "expert_ffn": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok",
        "shared_experts": "n_shared_experts",
        "dense_layers": "first_k_dense_replace",
        "router_groups": "n_group",
        "router_top_groups": "topk_group",
        "router_normalised": "norm_topk_prob",
        "router_scale": "routed_scaling_factor",
        "q_rank": "q_lora_rank",
        "kv_rank": "kv_lora_rank",
        "nope_head_dim": "qk_nope_head_dim",
        "rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    },
    hf_absent={
        **HF_ABSENT,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    hf_accepts={
        **LLAMA.hf_accepts,
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    hf_modules={
        **LLAMA.hf_modules,
        **HF_EXPERTS,
        **{
            f"layers.{{i}}.attention.{ours}": f"model.layers.{{i}}.self_attn.{name}" for ours, name in ATTENTION.items()
        },
        **HF_SHARED,
    },
    hf_more_layers=True,
)
