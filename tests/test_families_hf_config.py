"""config.json in both spellings; unsupported ones are refused in one sentence."""

import pytest
from transformers import AutoConfig

from meshwright.families import PRESETS, model_from_hf_config, model_to_hf_config, resolve_model
from meshwright.spec.model import ModelFields

SIZES = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
}
SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
SPELLINGS = {
    "transformers 4": {**SIZES, "torch_dtype": "bfloat16", "rope_theta": 500000.0, "rope_scaling": SCALING},
    "transformers 5": {**SIZES, "dtype": "bfloat16", "rope_parameters": {**SCALING, "rope_theta": 500000.0}},
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
QWEN = {"model_type": "qwen2", **{key: value for key, value in SIZES.items() if key != "model_type"}}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_both_spellings_are_the_published_model(spelling, tmp_path):
    assert model_from_hf_config(SPELLINGS[spelling]) == resolve_model(
        ModelFields(name="llama-3.2-1b"), base_dir=tmp_path
    )


def test_a_config_that_leaves_out_what_follows(tmp_path):
    assert model_from_hf_config(GPT2) == resolve_model(ModelFields(name="gpt2"), base_dir=tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_our_file_and_transformers(name, tmp_path):
    """Written by us, read and written by transformers, read by us: nothing is lost."""
    spec = resolve_model(ModelFields(name=name), base_dir=tmp_path)
    config = model_to_hf_config(spec, dtype="bfloat16", eos_token_id=3)
    assert model_from_hf_config(config) == spec
    theirs = AutoConfig.for_model(**config)
    assert theirs.eos_token_id == 3
    assert model_from_hf_config(theirs.to_dict()) == spec


@pytest.mark.parametrize("unread", [("rope_parameters", "dtype"), ("rope_theta", "rope_scaling", "torch_dtype")])
def test_our_file_says_everything_in_each_spelling(unread, tmp_path):
    spec = resolve_model(ModelFields(name="llama-3.2-1b"), base_dir=tmp_path)
    config = model_to_hf_config(spec, dtype="bfloat16")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert model_from_hf_config({key: value for key, value in config.items() if key not in unread}) == spec


def test_older_files_name_the_rope_type_otherwise():
    old = {key: value for key, value in SCALING.items() if key != "rope_type"} | {"type": "llama3"}
    config = {**SIZES, "rope_theta": 500000.0, "rope_scaling": old}
    assert model_from_hf_config(config) == model_from_hf_config(SPELLINGS["transformers 4"])


MOE = {**SIZES, "model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts_per_tok": 4}


def test_the_number_of_experts_in_both_spellings():
    """transformers 5 renames transformers 4's key."""
    four, five = ({**MOE, key: 16, "mlp_only_layers": []} for key in ("num_experts", "num_local_experts"))
    assert model_from_hf_config(four) == model_from_hf_config(five)
    assert model_from_hf_config(four).num_experts == 16
    assert not model_from_hf_config(four).router_normalised
    assert model_from_hf_config({**four, "norm_topk_prob": True}).router_normalised
    written = model_to_hf_config(model_from_hf_config(four))
    assert written["num_experts"] == written["num_local_experts"] == 16


@pytest.mark.parametrize(
    ("change", "window"),
    [
        ({}, None),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 512}, 512),
        ({"use_sliding_window": True, "max_window_layers": 16, "sliding_window": 512}, None),
        ({"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 512}, None),
        ({"use_sliding_window": True, "sliding_window": 512, "layer_types": ["sliding_attention"] * 16}, 512),
        ({"use_sliding_window": True, "sliding_window": 512, "layer_types": ["full_attention"] * 16}, None),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 512}, 512),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 16, "sliding_window": 512}, 512),
        ({"model_type": "qwen3_moe", "sliding_window": 512}, None),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "use_sliding_window": False}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 512}, 512),
    ],
)
def test_sliding_window(change, window):
    assert model_from_hf_config({**QWEN, **change}).sliding_window == window


WINDOWED = {**QWEN, "use_sliding_window": True, "sliding_window": 512}


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"max_window_layers": 4}, [False] * 4 + [True] * 12),
        ({"layer_types": ["sliding_attention", "full_attention"] * 8}, [True, False] * 8),
    ],
)
def test_a_sliding_window_of_some_layers(change, layers):
    spec = model_from_hf_config({**WINDOWED, **change})
    assert [layer.mixer.window for layer in spec.layers] == [512 if slides else None for slides in layers]
    assert model_from_hf_config(model_to_hf_config(spec)) == spec


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type None is not supported"),
        ({**SIZES, "model_type": "mamba"}, "model_type 'mamba' is not supported, only gpt2, llama"),
        ({"model_type": "llama"}, "'hidden_size' is missing"),
        ({**SIZES, "hidden_size": "big"}, "hidden_size: 'big' is not allowed: must be a whole number"),
        ({**SIZES, "num_attention_heads": 0}, "num_attention_heads: 0 is not allowed: must be at least 1"),
        ({**SIZES, "vocab_size": "many"}, "vocab_size: 'many' is not allowed"),
        ({**SIZES, "num_key_value_heads": 5}, "num_heads=32 is not a multiple of num_kv_heads=5"),
        ({**SIZES, "head_dim": 63}, "head_dim=63 is odd"),
        ({**SIZES, "head_dim": None, "hidden_size": 2047}, "hidden=2047 is not a multiple of num_heads=32"),
        ({**SIZES, "hidden_act": "gelu"}, "hidden_act='gelu' is not supported for llama, only 'silu'"),
        ({**SIZES, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({**SIZES, "rope_scaling": {"type": "linear"}}, "rope type 'linear' needs factor"),
        ({**SIZES, "rope_parameters": YARN}, "rope type 'yarn' needs original_max_position_embeddings"),
        ({**SIZES, "rope_parameters": "yes"}, "the rope parameters are 'yes', not an object"),
        (
            {**SIZES, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "needs original_max_position_embeddings, low_freq_factor, high_freq",
        ),
        ({**SIZES, "rope_scaling": {**SCALING, "factor": -1}}, "rope_scaling.factor: -1 is not allowed"),
        ({**SIZES, "partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({**SIZES, "is_causal": False}, "is_causal=false is not supported: only causal language models"),
        ({**SIZES, "quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        ({**GPT2, "activation_function": "relu"}, "activation_function='relu' is not supported"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ({**MOE, "decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported for qwen3_moe, only 1"),
        ({**MOE, "mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported for qwen3_moe, only []"),
        ({**MOE, "num_experts": 3}, "experts_per_token=4 of 3 experts to choose from: too many"),
        ({**WINDOWED, "layer_types": ["sliding_attention"]}, "layer_types is not a list of the 16 layers' types"),
        ({**WINDOWED, "layer_types": ["chunked_attention"] * 16}, "layer_types 'chunked_attention' is not supported"),
    ],
)
def test_what_cannot_be_built_is_refused(config, message):
    with pytest.raises(ValueError, match=r"^here: ") as error:
        model_from_hf_config(config, where="here")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
