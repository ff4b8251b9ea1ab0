"""Draws configurations from the whole transformers schema of each of our families, and compares logits.

    python tests/config_fuzz.py --rounds 100 --seed 0 [--family llama]

A configuration is equal, refused in a sentence (by us), impossible (transformers itself fails on it), or different,
which must not happen. Every round depends only on its family and seed.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from meshwright.checkpoint.hf import HfWeights
from meshwright.families import FAMILIES, parameter_table, read_hf_directory, state_table
from meshwright.models import build_model, named_tensors
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError

LENGTH, VOCAB = 24, 61
TOLERANCE = 2e-4
"""Relative to the largest logit, in fp32."""

Draw = Callable[[random.Random], Any]


def one_of(*values: Any) -> Draw:
    return lambda drawn: drawn.choice(values)


def mostly(*values: Any, rarely: tuple[Any, ...]) -> Draw:
    """Mostly values that we support, sometimes values that we refuse."""
    return lambda drawn: drawn.choice(rarely if drawn.random() < 0.04 else values)


def rope(drawn: random.Random) -> dict[str, Any]:
    kind = mostly("default", "llama3", "yarn", "linear", rarely=("dynamic", "longrope"))(drawn)
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": drawn.choice([100.0, 10000.0, 500000.0])}
    if kind != "default":
        found["factor"] = drawn.choice([1.0, 2.0, 8.0])
    if kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = drawn.choice([8, 16, 32])
    if kind == "llama3":
        found |= {"low_freq_factor": drawn.choice([1.0, 2.0]), "high_freq_factor": drawn.choice([4.0, 8.0])}
    if kind == "yarn":
        optional = {"beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "attention_factor": 1.1}
        found |= {key: value for key, value in optional.items() if drawn.random() < 0.3}
        if drawn.random() < 0.2:
            found["truncate"] = drawn.choice([True, False])
    if drawn.random() < 0.1:
        found["partial_rotary_factor"] = mostly(1.0, rarely=(0.5,))(drawn)
    return found


def partial_rope(drawn: random.Random) -> dict[str, Any]:
    return rope(drawn) | drawn.choice([{}, {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}])


def layer_types(drawn: random.Random) -> list[str] | None:
    """Mostly none, because without a window transformers accepts no sliding layer."""
    if drawn.random() < 0.7:
        return None
    kinds = drawn.choice(
        [None, None, ["full_attention"], ["sliding_attention"], ["full_attention", "sliding_attention"]]
    )
    return kinds and [kinds[layer % len(kinds)] for layer in range(LAYERS)]


def rope_by_type(drawn: random.Random) -> dict[str, Any]:
    """A table for each kind of layer; mostly the window's has no scaling."""
    tables = {kind: rope(drawn) for kind in ("full_attention", "sliding_attention")}
    if drawn.random() < 0.9:
        tables["sliding_attention"] = {"rope_type": "default", "rope_theta": drawn.choice([100.0, 10000.0])}
    return tables


def typed_layers(drawn: random.Random) -> list[str] | None:
    kinds = drawn.choice([None, ["full_attention", "sliding_attention"], ["sliding_attention", "full_attention"]])
    return kinds and [kinds[layer % len(kinds)] for layer in range(LAYERS)]


def flags(drawn: random.Random) -> list[int] | None:
    return drawn.choice([None, [drawn.choice([0, 1]) for _ in range(LAYERS)]])


def linear_layers(drawn: random.Random) -> list[str] | None:
    """Never the gated delta rule alone: transformers cannot generate with such a model."""
    kinds = drawn.choice([None, None, ["linear_attention", "full_attention"], ["full_attention"]])
    return kinds and [kinds[layer % len(kinds)] for layer in range(LAYERS)]


LAYERS = 3
ENDS: dict[str, Draw] = {
    "bos_token_id": one_of(None, 1),
    "eos_token_id": one_of(None, 2, [2, 3]),
    "pad_token_id": one_of(None, 0),
    "tie_word_embeddings": one_of(False, True),
    "use_cache": one_of(True, False),
    "vocab_size": one_of(VOCAB),
    "initializer_range": one_of(0.02, 0.5),
}
WIDTHS: dict[str, Draw] = ENDS | {
    "hidden_size": one_of(32, 48),
    "intermediate_size": one_of(24, 40),
    "num_hidden_layers": one_of(LAYERS),
    "num_attention_heads": one_of(4),
    "num_key_value_heads": one_of(1, 2, 4, None),
    "hidden_act": mostly("silu", "swish", rarely=("gelu", "relu")),
    "max_position_embeddings": one_of(32, 64),
    "rms_norm_eps": one_of(1e-6, 1e-5, 1e-1),
    "rope_parameters": rope,
    "attention_dropout": one_of(0.0, 0.1),
}
GROUPS = {"num_key_value_heads": one_of(1, 2, 4)}
HEAD_DIM = {"head_dim": one_of(None, 8, 12)}
BIAS = {"attention_bias": one_of(False, True)}
WINDOW = {"sliding_window": one_of(None, 3, 7, 4096)}
SWITCH = WINDOW | {"use_sliding_window": one_of(False, True)}
TYPED = {"sliding_window": one_of(3, 7, 4096), "layer_types": typed_layers, "rope_parameters": rope_by_type}
DELTA = {
    "head_dim": one_of(8, 12),
    "rope_parameters": partial_rope,
    "layer_types": linear_layers,
    "linear_conv_kernel_dim": one_of(2, 4),
    "linear_key_head_dim": one_of(4, 6),
    "linear_value_head_dim": one_of(4, 8),
    "linear_num_key_heads": one_of(1, 2),
    "linear_num_value_heads": one_of(2, 4),
}
BY_LAYER = SWITCH | {"max_window_layers": one_of(0, 1, 3, 28), "layer_types": layer_types}
ROUTING = {
    "num_experts_per_tok": one_of(1, 2, 3),
    "output_router_logits": one_of(False, True),
    "router_aux_loss_coef": one_of(0.0, 0.02),
}
SHARED_EXPERT = {
    "moe_intermediate_size": one_of(16, 24),
    "shared_expert_intermediate_size": one_of(12, 16),
    "num_experts": one_of(4, 6),
}
SCHEMA: dict[str, dict[str, Draw]] = {
    "gpt2": ENDS
    | {
        "n_positions": one_of(32, 64),
        "n_embd": one_of(32, 48),
        "n_layer": one_of(LAYERS),
        "n_head": one_of(4, 2),
        "n_inner": one_of(None, 40),
        "activation_function": mostly("gelu_new", "gelu_pytorch_tanh", rarely=("gelu", "relu")),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), one_of(0.0, 0.1)),
        "layer_norm_epsilon": one_of(1e-5, 1e-2),
        "summary_type": one_of("cls_index"),
        "summary_use_proj": one_of(True, False),
        "summary_activation": one_of(None),
        "summary_proj_to_labels": one_of(True),
        "scale_attn_weights": mostly(True, rarely=(False,)),
        "scale_attn_by_inverse_layer_idx": mostly(False, rarely=(True,)),
        "reorder_and_upcast_attn": one_of(False, True),
        "add_cross_attention": mostly(False, rarely=(True,)),
    },
    "llama": WIDTHS | HEAD_DIM | BIAS | {"mlp_bias": one_of(False, True), "pretraining_tp": one_of(1, 2)},
    "mistral": WIDTHS | GROUPS | HEAD_DIM | WINDOW,
    "mixtral": WIDTHS
    | GROUPS
    | HEAD_DIM
    | WINDOW
    | ROUTING
    | {"num_local_experts": one_of(4, 6), "router_jitter_noise": mostly(0.0, rarely=(0.1,))},
    "qwen2": WIDTHS | BY_LAYER,
    "qwen3": WIDTHS | {"head_dim": one_of(8, 12)} | BIAS | BY_LAYER,
    "qwen3_moe": WIDTHS
    | GROUPS
    | BIAS
    | SWITCH
    | ROUTING
    | {
        "decoder_sparse_step": mostly(1, rarely=(2,)),
        "moe_intermediate_size": one_of(16, 24),
        "num_experts": one_of(4, 6),
        "norm_topk_prob": one_of(False, True),
        "mlp_only_layers": mostly(None, [], rarely=([0],)),
    },
    "deepseek_v3": WIDTHS
    | {
        "num_key_value_heads": one_of(4, None),
        "attention_bias": mostly(False, rarely=(True,)),
        "moe_intermediate_size": one_of(16, 24),
        "n_shared_experts": one_of(1, 2),
        "n_routed_experts": one_of(8, 16),
        "output_router_logits": one_of(False, True),
        "routed_scaling_factor": one_of(1.0, 2.5),
        "kv_lora_rank": one_of(16),
        "q_lora_rank": one_of(None, 12),
        "qk_rope_head_dim": one_of(4, 8),
        "qk_nope_head_dim": one_of(6, 8),
        "v_head_dim": one_of(6, 8),
        "n_group": one_of(1, 2, 4),
        "topk_group": one_of(1, 2),
        "num_experts_per_tok": one_of(1, 2, 3),
        "first_k_dense_replace": one_of(0, 1, 3),
        "norm_topk_prob": one_of(True, False),
        "pretraining_tp": one_of(1, 2),
        "rope_interleave": mostly(True, rarely=(False,)),
        "num_mtp_layers": one_of(0, 1),
    },
    "smollm3": WIDTHS
    | BIAS
    | SWITCH
    | {"mlp_bias": one_of(False, True), "no_rope_layers": flags, "no_rope_layer_interval": one_of(1, 2, 4)}
    | {"layer_types": layer_types},
    "olmo3": WIDTHS | BIAS | TYPED,
    "gemma3": {key: draw for key, draw in WIDTHS.items() if key != "hidden_act"}
    | GROUPS
    | {"head_dim": one_of(8, 12)}
    | BIAS
    | TYPED
    | {
        "hidden_activation": mostly("gelu_pytorch_tanh", rarely=("silu", "gelu")),
        "query_pre_attn_scalar": one_of(8, 16, 7),
        "final_logit_softcapping": mostly(None, rarely=(30.0,)),
        "attn_logit_softcapping": mostly(None, rarely=(50.0,)),
        "use_bidirectional_attention": mostly(False, rarely=(True,)),
    },
    "glm4_moe": WIDTHS
    | GROUPS
    | BIAS
    | {
        "rope_parameters": partial_rope,
        "moe_intermediate_size": one_of(24),
        "output_router_logits": one_of(False, True),
        "n_shared_experts": one_of(1, 2),
        "n_routed_experts": one_of(8),
        "routed_scaling_factor": one_of(1.0, 2.5),
        "n_group": one_of(1, 2, 4),
        "topk_group": one_of(1, 2),
        "num_experts_per_tok": one_of(1, 2, 3),
        "first_k_dense_replace": one_of(0, 1, 3),
        "norm_topk_prob": one_of(True, False),
        "use_qk_norm": one_of(True, False),
        "num_mtp_layers": one_of(0, 1),
    },
    "minimax_m2": WIDTHS
    | GROUPS
    | {"head_dim": one_of(8, 12)}
    | ROUTING
    | {
        "rope_parameters": partial_rope,
        "num_local_experts": one_of(4, 8),
        "router_jitter_noise": mostly(0.0, rarely=(0.1,)),
    },
    "qwen3_5": WIDTHS | GROUPS | BIAS | DELTA,
    "qwen3_next": WIDTHS
    | GROUPS
    | BIAS
    | DELTA
    | ROUTING
    | SHARED_EXPERT
    | {
        "decoder_sparse_step": mostly(1, rarely=(2,)),
        "mlp_only_layers": mostly(None, [], rarely=([0],)),
        "norm_topk_prob": one_of(False, True),
    },
    "qwen3_5_moe": {key: draw for key, draw in WIDTHS.items() if key != "intermediate_size"}
    | GROUPS
    | BIAS
    | DELTA
    | ROUTING
    | SHARED_EXPERT,
    "gpt_oss": WIDTHS
    | GROUPS
    | {"head_dim": one_of(8, 12)}
    | {"attention_bias": one_of(True, False), "sliding_window": one_of(3, 7, 4096), "layer_types": typed_layers}
    | ROUTING
    | {
        "num_local_experts": one_of(4, 8),
        "swiglu_alpha": one_of(1.702, 1.0),
        "swiglu_limit": one_of(7.0, 0.5),
    },
}
"""Family -> every field that its transformers configuration adds to the common ones, and the values drawn for it."""

STRAY: dict[str, Draw] = {
    "is_causal": one_of(True, False),
    "use_sliding_window": one_of(True, False),
    "max_window_layers": one_of(0, 2),
    "partial_rotary_factor": one_of(1.0, 0.5),
    "chunk_size_feed_forward": one_of(0, 4),
    "head_dim": one_of(8),
    "scoring_func": one_of("sigmoid", "softmax"),
}
"""Keys in files besides the schema: a tenth of the configurations gets each."""


def hf_type(family: str) -> str:
    """transformers' name of the family."""
    return FAMILIES[family].hf_type or family


def schema_of(family: str) -> set[str]:
    """The fields that transformers' configuration of a family adds."""
    shared = {field.name for field in fields(transformers.PreTrainedConfig)}
    return {field.name for field in fields(CONFIG_MAPPING[hf_type(family)]) if field.name not in shared}


def draw_config(family: str, seed: int) -> dict[str, Any]:
    """A config.json: every field drawn or omitted, in the spelling of transformers 4 or 5."""
    drawn = random.Random(f"{family} {seed}")
    config = {key: draw(drawn) for key, draw in SCHEMA[family].items()}
    config |= {key: draw(drawn) for key, draw in STRAY.items() if drawn.random() < 0.03 and key not in config}
    if drawn.random() < 0.5 and "rope_parameters" in config and FAMILIES[family].hf_window_theta is None:
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        config["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    left_out = ["head_dim", "layer_types", "rms_norm_eps", "sliding_window", "tie_word_embeddings"]
    # In other families, omitting this means more heads than a small model has.
    left_out += ["num_key_value_heads"] if family in ("llama", "deepseek_v3") else []
    for key in (key for key in left_out if key in config):
        if drawn.random() < 0.15:
            del config[key]
    if "linear_conv_kernel_dim" in config and not config.get("layer_types"):  # at least one layer with attention
        config["full_attention_interval"] = drawn.choice((1, 2, 3))
    return {"model_type": hf_type(family), "architectures": [FAMILIES[family].hf_architecture], **config}


def write_model(family: str, seed: int, directory: Path) -> None:
    """A directory saved by transformers, with the drawn config.json. Raises transformers' errors."""
    config = draw_config(family, seed)
    parsed = CONFIG_MAPPING[hf_type(family)].from_dict(config)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.normal_(std=0.2)
            offset = FAMILIES[family].switches["norm"] == "offset_rmsnorm" and not name.endswith(
                "linear_attn.norm.weight"
            )
            if name.endswith("norm.weight") and not offset:
                tensor.add_(1)
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))


TOKENS_BT = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def their_logits(directory: Path) -> torch.Tensor:
    """transformers' [B, T, V]. Raises transformers' errors."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return theirs(TOKENS_BT, use_cache=False).logits


@torch.no_grad()
def compare(directory: Path, expected_BTV: torch.Tensor) -> float:
    """The largest difference of two logits, relative to the largest logit. Raises `UserError` if we refuse the
    model."""
    spec = read_hf_directory(directory)
    weights = HfWeights(directory, spec)
    ours = build_model(spec, device="cpu")
    for row in parameter_table(spec) + state_table(spec):
        named_tensors(ours)[row.name].copy_(weights.read_rows(row.name, 0, row.shape[0]))
    return ((ours.logits(Batch(TOKENS_BT)) - expected_BTV).abs().max() / expected_BTV.abs().max()).item()


def one_round(family: str, seed: int) -> tuple[str, str]:
    """(equal, refused, impossible or different; the message)."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        try:
            write_model(family, seed, directory)
            expected_BTV = their_logits(directory)
        except Exception as error:  # any error of transformers in its own configuration
            return "impossible", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        try:
            difference = compare(directory, expected_BTV)
        except UserError as error:
            return "refused", str(error).replace(folder, "")
    return ("equal" if difference <= TOLERANCE else "different"), f"{difference:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="of each family")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--family", choices=sorted(SCHEMA), action="append")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failed = False
    for family in arguments.family or SCHEMA:
        found: Counter[str] = Counter()
        said: Counter[str] = Counter()
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            outcome, message = one_round(family, seed)
            found[outcome] += 1
            if outcome == "different":
                failed = True
                print(f"DIFFERENT  {family} seed {seed}: {message}\n  {json.dumps(draw_config(family, seed))}")
            elif outcome != "equal":
                said[f"{outcome}: {message.split('; transformers computes')[0]}"] += 1
        print(f"{family:12} " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items())))
        for message, count in said.most_common():
            print(f"  {count:4} {message[:150]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
