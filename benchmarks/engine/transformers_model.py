"""Shared by the engines over transformers: its GPT-2 of the workload's shape, with our initial weights."""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2LMHeadModel
from workload import Workload

from meshwright.checkpoint.hf import HfForm, export_hf


def build(workload: Workload) -> GPT2LMHeadModel:
    """The model in fp32, no dropout, without a cache."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "gpt2"
        parameters = ((name, tensor.detach()) for name, tensor in workload.model().named_parameters())
        export_hf(parameters, workload.spec, directory, HfForm(dtype=torch.float32), prove=False)
        model = GPT2LMHeadModel.from_pretrained(
            directory,
            attn_implementation="sdpa",
            activation_function="gelu_pytorch_tanh",  # the same function as gelu_new, in one kernel: to its advantage
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    assert next(model.parameters()).dtype == torch.float32
    return model.train()
