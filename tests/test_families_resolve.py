"""The recipe's model section becomes a complete model, or one sentence that says what to change."""

import json

import pytest

from meshwright.families import (
    FAMILIES,
    model_to_hf_config,
    parameter_table,
    pretrained_directory,
    resolve_model,
    starting_weights,
)
from meshwright.families.family import gated_ffn
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelFields, RopeScaling

TINY = {"hidden": 64, "num_layers": 2, "num_heads": 4}


@pytest.fixture
def resolve(tmp_path):
    def resolve(tokenizer=None, **fields):
        return resolve_model(ModelFields(**fields), base_dir=tmp_path, vocab=tokenizer)

    return resolve


@pytest.fixture
def directory(tmp_path, resolve):
    """A Hugging Face directory of a small llama with only a config.json."""
    spec = resolve(family="llama", vocab=100, max_positions=128, **TINY)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(model_to_hf_config(spec)))
    return spec


def test_a_family_with_sizes(resolve):
    spec = resolve(family="llama", **TINY, vocab=300)
    assert (spec.num_kv_heads, spec.head_dim, spec.ffn) == (4, 16, 256)
    assert (spec.norm, spec.activation, spec.gated, spec.positions) == ("rmsnorm", "silu", True, "rope")
    assert resolve(family="gpt2", **TINY, vocab=300).ffn == 256


def test_default_width_of_a_gated_layer():
    assert gated_ffn(4096) == 11008  # the published Llama 2 7B
    assert gated_ffn(5120) == 13824  # and 13B
    assert gated_ffn(96) == 256


def test_the_vocabulary_is_given_or_published_or_the_tokenizers(resolve):
    assert resolve(tokenizer=5000, name="llama-3.2-1b").vocab == 128256
    assert resolve(tokenizer=5000, family="llama", **TINY).vocab == 5000
    assert resolve(tokenizer=5000, family="llama", **TINY, vocab=6000).vocab == 6000
    assert resolve(tokenizer=5000, name="llama-3.2-1b", vocab=6000).vocab == 6000


def test_what_is_given_wins_over_the_preset(resolve):
    scaling = RopeScaling(factor=4.0)
    spec = resolve(name="llama-3.2-1b", num_layers=4, rope_scaling=scaling, tied_embeddings=False)
    assert (spec.num_layers, spec.rope_scaling, spec.tied_embeddings, spec.hidden) == (4, scaling, False, 2048)
    assert resolve(name="gpt2", hidden=384, num_heads=6).ffn == 4 * 384


def test_a_directory(resolve, directory, tmp_path):
    assert resolve(name="small") == resolve(name="./small") == resolve(name=str(tmp_path / "small")) == directory
    assert resolve(name="small", rope_theta=500.0).rope_theta == 500.0
    assert resolve(name="small", weights="pretrained", max_positions=512).max_positions == 512
    assert pretrained_directory(ModelFields(name="small"), base_dir=tmp_path) == tmp_path / "small"
    assert pretrained_directory(ModelFields(name="gpt2"), base_dir=tmp_path) is None


def test_weights_are_pretrained_where_there_are_any(resolve, directory, tmp_path):
    fields = ModelFields(name="small")
    assert starting_weights(fields, base_dir=tmp_path) == "random"
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / "small" / name).touch()
        assert starting_weights(fields, base_dir=tmp_path) == "pretrained"
        (tmp_path / "small" / name).unlink()
    (tmp_path / "small" / "model-00001-of-00002.safetensors").touch()
    assert starting_weights(ModelFields(name="small", weights="random"), base_dir=tmp_path) == "random"
    assert starting_weights(ModelFields(name="gpt2"), base_dir=tmp_path) == "random"
    assert resolve(name="small", weights="random", num_layers=3).num_layers == 3
    with pytest.raises(UserError, match=r"pretrained by default, .*: remove model.num_layers or use weights: random"):
        resolve(name="small", num_layers=3)


def test_a_preset_wins_over_a_directory_of_its_name(resolve, directory, tmp_path):
    (tmp_path / "small").rename(tmp_path / "gpt2")
    assert resolve(name="gpt2").hidden == 768
    assert resolve(name="./gpt2") == directory


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model needs a name (such as llama-3.2-1b) or a family (gpt2, llama"),
        ({"name": "lama-3-8b"}, "did you mean 'llama-3-8b'?"),
        ({"name": "Llama-3-8B"}, "did you mean 'llama-3-8b'?"),
        ({"name": "no/such/folder"}, "is neither a published model nor a directory"),
        ({"family": "lama"}, "model.family 'lama' is unknown; did you mean 'llama'?"),
        ({"family": "xyz"}, "model.family 'xyz' is unknown; there are gpt2, llama, mistral, qwen2, qwen3"),
        ({"name": "gpt2", "family": "llama"}, "model.name 'gpt2' has family gpt2, not 'llama'"),
        ({"family": "llama"}, "needs model.hidden, model.num_layers, model.num_heads, model.vocab"),
        ({"family": "llama", **TINY}, "needs model.vocab"),
        ({"family": "llama", **TINY, "vocab": 9, "num_heads": 5}, "hidden=64 is not a multiple of num_heads=5"),
        ({"family": "llama", **TINY, "vocab": 9, "num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"family": "llama", **TINY, "vocab": 9, "head_dim": 5}, "head_dim=5 is odd"),
        ({"name": "gpt2", "rope_theta": 10.0}, "model.rope_theta does not exist in the family gpt2"),
        ({"name": "llama-3-8b", "sliding_window": 8}, "model.sliding_window does not exist in the family llama"),
        ({"name": "gpt2", "weights": "pretrained"}, "model.name 'gpt2' is not a Hugging Face directory"),
        (
            {"name": "small", "weights": "pretrained", "num_layers": 3, "vocab": 7},
            "remove model.num_layers, model.vocab",
        ),
        ({"name": "small", "family": "gpt2"}, "model.name 'small' has family llama, not 'gpt2'"),
    ],
)
def test_one_sentence_for_what_does_not_fit(resolve, directory, fields, message):
    with pytest.raises(ValueError, match="model") as error:
        resolve(**fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it has no config.json"),
        ("{not json", "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ('{"model_type": "bert"}', "model_type 'bert' is not supported"),
    ],
)
def test_directories_that_hold_no_model(resolve, tmp_path, content, message):
    (tmp_path / "broken").mkdir()
    if content is not None:
        (tmp_path / "broken" / "config.json").write_text(content)
    with pytest.raises(ValueError, match="broken") as error:
        resolve(name="broken")
    assert message in str(error.value)


def test_named_dims_say_every_shape(resolve):
    """The name of a dim means one size everywhere, so every split of a name splits it in the same way everywhere."""
    for family in FAMILIES:
        sizes = {"num_kv_heads": 2, "head_dim": 24} if family not in ("gpt2", "deepseek_v3") else {}
        sizes |= {"num_layers": 4} if family in ("qwen3_next", "qwen3_5", "qwen3_5_moe") else {}  # one with attention
        sizes |= {} if family == "qwen3_5_moe" else {"ffn": 100}
        spec = resolve(**{"family": family, **TINY, "vocab": 90, **sizes})
        seen = {}
        for row in parameter_table(spec):
            assert len(row.dims) == len(row.shape)
            for dim, size in zip(row.dims, row.shape, strict=True):
                assert seen.setdefault(dim, size) == size, row.name
        assert seen["heads"] == spec.num_heads * spec.head_dim
        if spec.kv_rank is None:
            assert seen["kv_heads"] == spec.num_kv_heads * spec.head_dim


def test_matrices_that_write_to_the_residual_stream_start_smaller(resolve):
    spec = resolve(family="llama", **TINY, vocab=90)
    spreads = {row.name.split(".", 2)[-1]: row.init_std for row in parameter_table(spec) if row.init == "normal"}
    smaller = spec.init_std / (2 * spec.num_layers) ** 0.5
    assert spreads["attention.wo.weight"] == spreads["feed_forward.w2.weight"] == smaller
    assert spreads["attention.wq.weight"] == spreads["feed_forward.w1.weight"] == spec.init_std
