"""Every value of other programs' configuration files, replaced by values that do not belong there: they are read, or
refused in one line that names the file; never a stack trace, and no work that grows with the number."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from meshwright.checkpoint.peft_config import CONFIG, adapter_config, check_adapter_config, lora_of
from meshwright.checkpoint.takeover.convert import convert
from meshwright.families import FAMILIES, parameter_table, read_hf_directory, resolve_model
from meshwright.families.hf_config import model_to_hf_config
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.model import ModelFields

WRONG = (True, -1, math.nan, math.inf, -math.inf, "a", "1", [1], {"a": 1})
"""Values that no size and no rate has."""
ODD = (*WRONG, None, False, 0, 1, 3, 10**9, 10**30, 0.5, 1e308, -1e308, 1e-320, "", [], {})
LONGEST = 600
"""Characters of a message."""
SIZES: dict[str, Any] = {"hidden": 16, "num_layers": 2, "num_heads": 2, "vocab": 300, "max_positions": 32}
LATENT = {"kv_rank": 8, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 8, "router_groups": 2}
MORE: Mapping[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 8, "experts_per_token": 2},
    "qwen3_moe": {"num_experts": 8, "experts_per_token": 2, "expert_ffn": 16},
    "qwen3_5_moe": {"num_experts": 8, "experts_per_token": 2, "expert_ffn": 16, "shared_ffn": 16},
    "deepseek_v3": {"num_experts": 8, "experts_per_token": 2, "expert_ffn": 16, "router_top_groups": 1, **LATENT},
}
SCALINGS = (
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "attention_factor": 1.0},
)


def places(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every value."""
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


def replaced(tree: Mapping[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at one place."""
    first, *rest = place
    return {**tree, first: replaced(tree[first], tuple(rest), value) if rest else value}


def outcomes(
    good: Mapping[str, Any], read: Callable[[dict[str, Any]], object], name: str
) -> dict[tuple[tuple[str, ...], str], str]:
    """The refusal of every value at every place; empty if it is read. Each is one line that names the file."""
    read(dict(good))
    found = {}
    for place in places(good):
        for value in ODD:
            try:
                read(replaced(good, place, value))
                said = ""
            except UserError as error:
                said = str(error)
                assert name in said, (place, value, said)
                assert len(said) < LONGEST, said
                assert "\n" not in said, said
                assert "pydantic" not in said, said
            found[place, repr(value)] = said
    return found


def hf_config(family: str) -> dict[str, Any]:
    ffn = {} if family in ("gpt2", "qwen3_5_moe") else {"ffn": 32}
    return model_to_hf_config(
        resolve_model(ModelFields(family=family, **SIZES, **ffn, **MORE.get(family, {})), base_dir=Path())
    )


@pytest.mark.every(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_a_hugging_face_model(tmp_path: Path, family: str) -> None:
    """A number that cannot be one is refused, not guessed."""
    good, keys = hf_config(family), FAMILIES[family].hf_fields

    def read(config: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        parameter_table(read_hf_directory(tmp_path))

    found = outcomes(good, read, tmp_path.name)
    for key in {key for key in keys.values() if type(good[key]) in (int, float)}:
        for value in WRONG:
            assert found[(key,), repr(value)], f"{key}={value!r} is read"


@pytest.mark.parametrize("scaling", SCALINGS, ids=["llama3", "yarn"])
def test_the_rope_of_a_hugging_face_model(tmp_path: Path, scaling: dict[str, Any]) -> None:
    scaling = {"rope_theta": 10000.0, "original_max_position_embeddings": 16, **scaling}
    base = hf_config("llama")

    def read(config: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(base | config))
        read_hf_directory(tmp_path)

    found = outcomes({"rope_parameters": scaling}, read, "config.json")
    for key in scaling.keys() - {"rope_type", "mscale", "attention_factor"}:
        for value in WRONG:
            assert found[("rope_parameters", key), repr(value)], f"{key}={value!r} is read"


def test_the_config_of_a_foreign_model(tmp_path: Path) -> None:
    good = {
        "model_type": "other",
        "architectures": ["OtherForCausalLM"],
        "tie_word_embeddings": False,
        "vocab_size": 8,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 4,
        "max_position_embeddings": 8,
        "sliding_window": 4,
    }
    names = [f"layers.0.{name}" for name in ("wq", "wk", "wv", "wo", "w1", "w2")]
    tensors = {"embed.weight": torch.zeros(8, 4), **{f"{name}.weight": torch.zeros(4, 4) for name in names}}
    save_file(tensors, tmp_path / "model.safetensors")

    def read(config: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        parameter_table(read_hf_directory(tmp_path))

    found = outcomes(good, read, tmp_path.name)
    assert found[("num_hidden_layers",), repr(10**9)], "before, all these numbers were made"
    message = found[("vocab_size",), repr(10**9)]
    assert "vocab_size: 1000000000 is not allowed" in message, "the field's name in the file"


def test_the_config_of_an_adapter(tmp_path: Path) -> None:
    model = resolve_model(ModelFields(family="llama", ffn=32, **SIZES | {"num_layers": 1}), base_dir=Path())
    recipe = LoraSpec(method="lora", rank=4, alpha=8, targets=("wq", "wv"))
    good = adapter_config(model, recipe, None)
    module = "model.layers.0.self_attn.q_proj"
    good |= {"rank_pattern": {module: 4}, "alpha_pattern": {module: 8}, "exclude_modules": ["k_proj"]}
    good |= {"layers_to_transform": [0], "layers_pattern": "layers"}

    def write(config: dict[str, Any]) -> None:
        (tmp_path / CONFIG).write_text(json.dumps(config))

    def compare(config: dict[str, Any]) -> None:
        write(config)
        check_adapter_config(tmp_path, model, recipe)

    def read(config: dict[str, Any]) -> None:
        write(config)
        lora_of(tmp_path)

    compared, taken = outcomes(good, compare, tmp_path.name), outcomes(good, read, CONFIG)
    for key in ("r", "lora_alpha"):
        for value in WRONG:
            assert compared[(key,), repr(value)], f"{key}={value!r} is read"
            assert taken[(key,), repr(value)], f"{key}={value!r} is read"


def test_a_pattern_of_an_adapter_that_no_program_can_compile_is_refused(tmp_path: Path) -> None:
    model = resolve_model(ModelFields(family="llama", ffn=32, **SIZES), base_dir=Path())
    recipe = LoraSpec(method="lora", rank=4, alpha=8, targets=("wq", "wv"))
    for pattern in ("(", "a{99999999999}", "(" * 10_000):
        config = adapter_config(model, recipe, None) | {"target_modules": pattern}
        (tmp_path / CONFIG).write_text(json.dumps(config))
        with pytest.raises(UserError, match=CONFIG):
            check_adapter_config(tmp_path, model, recipe)


def test_the_sizes_in_a_checkpoint_of_nanogpt(tmp_path: Path) -> None:
    """`n_layer: 10**9` was a stack trace."""
    good = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "vocab_size": 32, "bias": True, "dropout": 0.0}
    file = tmp_path / "ckpt.pt"

    def read(arguments: dict[str, Any]) -> None:
        torch.save({"model_args": arguments, "model": {}}, file)
        convert(file, tmp_path / "out")

    found = outcomes(good, lambda arguments: refused(read, arguments), file.name)
    assert "model_args.n_layer: 1000000000 is not allowed: must be at most 10000" in found[("n_layer",), repr(10**9)]


def test_the_sizes_in_a_checkpoint_of_litgpt(tmp_path: Path) -> None:
    good = {
        "n_layer": 1,
        "n_head": 2,
        "n_query_groups": 2,
        "head_size": 4,
        "n_embd": 8,
        "intermediate_size": 16,
        "block_size": 16,
        "padded_vocab_size": 32,
        "rope_base": 10000,
        "norm_eps": 1e-5,
    }
    torch.save({"model": {"transformer.h.0.attn.qkv.weight": torch.zeros(24, 8)}}, tmp_path / "lit_model.pth")

    def read(config: dict[str, Any]) -> None:
        (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(config))
        convert(tmp_path, tmp_path / "out")

    found = outcomes(good, lambda config: refused(read, config), "")
    assert "model_config.yaml: n_layer: 1000000000 is not allowed" in found[("n_layer",), repr(10**9)]


def refused(read: Callable[[dict[str, Any]], object], values: dict[str, Any]) -> None:
    """Read them; that the weights are missing is no problem of the values."""
    try:
        read(values)
    except UserError as error:
        if "has no tensor" not in str(error):
            raise
