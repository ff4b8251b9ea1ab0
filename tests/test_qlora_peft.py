"""QLoRA equals peft and bitsandbytes: the same bits in the base, the same losses and gradients for twenty steps."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from beside_peft import train_beside
from meshwright.families import hf_tensors, parameter_table, read_hf_directory
from meshwright.families.adapters import module_of
from meshwright.models.linear import Linear
from meshwright.models.quantized import Quantized
from meshwright.spec.data import DataSpec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import build_here
from test_blockwise import portable_quantize_blockwise
from tiny import GLOBAL_BATCH, SEQUENCE_LENGTH

peft = pytest.importorskip("peft")
logging.disable(logging.WARNING)  # bitsandbytes warns that it finds no CPU kernel
functional = pytest.importorskip("bitsandbytes.functional")
logging.disable(logging.NOTSET)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # from peft's call of transformers
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

LR, EPS, RANK, ALPHA = 1e-2, 1e-3, 4, 8.0
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 320, "vocab_size": 50, "max_position_embeddings": 16, "initializer_range": 0.1}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def run_on(base: Path, *, double: bool) -> ResolvedRun:
    run = Run(
        model={"name": str(base), "weights": "pretrained"},  # type: ignore[arg-type]
        data=DataSpec(sequence_length=SEQUENCE_LENGTH),
        training={  # type: ignore[arg-type]
            "precision": "fp32",
            "clip": None,
            "optimizer": {"lr": LR, "eps": EPS, "weight_decay": 0.0},
            "lr_schedule": {"name": "constant", "warmup": 0},
        },
        finetune={"method": "qlora", "rank": RANK, "alpha": ALPHA, "double_quantization": double},  # type: ignore[arg-type]
        device="cpu",
    )
    size = {"global_batch": GLOBAL_BATCH, "micro_batch": GLOBAL_BATCH, "accumulation": 1}
    return ResolvedRun(run=run, model=read_hf_directory(base), reasons={}, **size)


def their_model(base: Path, *, double: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """peft on transformers on bitsandbytes, with its CPU kernel for scales replaced by its CUDA kernel's
    computation."""

    def quantize_blockwise(values: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, Any]:
        book = functional.create_dynamic_map()
        codes, scales = portable_quantize_blockwise(values, book, blocksize)
        return codes, functional.QuantState(absmax=scales, code=book, blocksize=blocksize, dtype=torch.float32)

    monkeypatch.setattr(functional, "quantize_blockwise", quantize_blockwise)
    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = LlamaForCausalLM.from_pretrained(base, quantization_config=bits, dtype=torch.float32, device_map="cpu")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    return adapted.train()  # in evaluation, bitsandbytes computes in bf16 on a CPU


@pytest.mark.slow
@pytest.mark.parametrize("double", [True, False])
def test_twenty_steps_are_those_of_peft_and_bitsandbytes(
    base: Path, monkeypatch: pytest.MonkeyPatch, double: bool
) -> None:
    trainer = build_here(run_on(base, double=double))
    theirs = their_model(base, double=double, monkeypatch=monkeypatch)
    modules = {
        module_of(row): theirs.get_submodule(f"base_model.model.{place.key.removesuffix('.weight')}")
        for row in parameter_table(trainer.resolved.model)
        for place in [hf_tensors(trainer.resolved.model)[row.name]]
    }
    linears = {name: module for name, module in trainer.model.named_modules() if isinstance(module, Linear)}
    quantized = {name: linear for name, linear in linears.items() if linear.find(Quantized)}
    assert len(quantized) == 14
    adapters: dict[str, torch.nn.Parameter] = {}
    for name, ours in quantized.items():
        their = modules[name]
        check_bits(ours, their.base_layer.weight, double=double)
        adapters[f"{name}.lora_a"] = their.lora_A["default"].weight
        adapters[f"{name}.lora_b"] = their.lora_B["default"].weight
    assert adapters.keys() == trainer.parameters.keys()
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(trainer.parameters[name])
    train_beside(trainer, theirs, adapters, loss_room=1e-5, gradient_room=1e-4)


def check_bits(layer: Linear, their: Any, *, double: bool) -> None:
    """Our stored form of a matrix is bitsandbytes', and decodes to the same numbers."""
    state, ours = their.quant_state, layer.view.read(layer)
    assert torch.equal(ours["codes"].flatten(), their.data.flatten())
    if double:
        assert torch.equal(ours["scales"].flatten(), state.absmax)
        assert torch.equal(ours["groups"].view(torch.float32), torch.cat([state.state2.absmax, state.offset[None]]))
    else:
        assert torch.equal(ours["scales"].flatten().view(torch.float32), state.absmax)
    assert torch.equal(layer.product.merged(ours)["weight"], functional.dequantize_4bit(their.data, state))
