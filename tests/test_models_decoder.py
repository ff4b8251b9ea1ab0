"""The module is the table, and computes what it says."""

from pathlib import Path

import pytest
import torch

from meshwright.families import PRESETS, parameter_table, resolve_model
from meshwright.models import build_model, initialize
from meshwright.spec.model import ModelFields

TINY = {"hidden": 32, "num_layers": 2, "num_heads": 4, "vocab": 97, "ffn": 48}


def tiny(family: str, **more):
    return resolve_model(ModelFields(family=family, **{**TINY, **more}), base_dir=Path())


def built(spec, dtype=torch.float64, seed=0):
    model = build_model(spec, device="cpu", dtype=dtype)
    initialize(model, parameter_table(spec), seed)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_table_is_the_module(family, tied):
    spec = tiny(family, tied_embeddings=tied)
    module = [(name, tuple(parameter.shape)) for name, parameter in build_model(spec).named_parameters()]
    assert module == [(parameter.name, parameter.shape) for parameter in parameter_table(spec)]
    assert not list(build_model(spec).buffers())


@pytest.mark.parametrize("name", PRESETS)
def test_table_is_the_module_for_every_preset(name):
    spec = resolve_model(ModelFields(name=name), base_dir=Path())
    module = [(name, tuple(parameter.shape)) for name, parameter in build_model(spec).named_parameters()]
    assert module == [(parameter.name, parameter.shape) for parameter in parameter_table(spec)]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_loss_is_the_cross_entropy_of_the_logits(family):
    model = built(tiny(family))
    tokens = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, labels), expected, rtol=1e-12, atol=0)
