"""Hugging Face directories with matrices in fp8: multiplied out with their scales, whatever rows are read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from losses import logits_of
from meshwright.checkpoint.hf import HfForm, HfWeights, export_hf
from meshwright.cli.main import main
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families import parameter_table, read_hf_directory, resolve_model
from meshwright.models import build_model, named_tensors
from meshwright.models.init import initialize
from meshwright.spec.model import ModelFields

FIELDS = ModelFields(family="llama", hidden=40, num_layers=2, num_heads=4, num_kv_heads=2, ffn=56, vocab=300)
FORMS: dict[str, dict[str, Any]] = {
    "blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 12]},
    "rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    },
    "matrices": {"quant_method": "modelopt", "quant_algo": "FP8"},
}
SUFFIX = {"blocks": "_scale_inv", "rows": "_scale", "matrices": "_scale"}


def quantized(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and the product of both, number by number."""
    height, width = {"blocks": (16, 12), "rows": (1, weight.shape[1]), "matrices": tuple(weight.shape)}[form]
    rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.001
    factors = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            factors[row, column] = scales[row // height, column // width]
    codes = (weight / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales.squeeze() if form == "matrices" else scales, codes.float() * factors


def save_both(folder: Path, form: str) -> dict[str, torch.Tensor]:
    """A directory in fp8, and the tensors that it stands for."""
    spec = resolve_model(FIELDS, base_dir=folder)
    model = build_model(spec, device="cpu", dtype=torch.float32)
    initialize(model, parameter_table(spec), 0)
    export_hf(named_tensors(model).items(), spec, folder / "fp8", HfForm(dtype=torch.float32), prove=False)
    plain, stored = load_file(folder / "fp8/model.safetensors"), {}
    for name, tensor in list(plain.items()):
        if tensor.dim() == 2 and "layers" in name:
            codes, scales, plain[name] = quantized(tensor, form)
            stored |= {name: codes, name + SUFFIX[form]: scales}
            stored |= {name.replace("weight", "input_scale"): torch.ones(1)} if form == "matrices" else {}
        else:
            stored[name] = tensor
    save_file(stored, folder / "fp8/model.safetensors", {"format": "pt"})
    path = folder / "fp8/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": FORMS[form]}))
    return plain


@pytest.mark.parametrize("form", FORMS)
def test_every_piece_is_the_product_of_codes_and_scales(tmp_path: Path, form: str) -> None:
    plain = save_both(tmp_path, form)
    spec = read_hf_directory(tmp_path / "fp8")
    weights, rows = HfWeights(tmp_path / "fp8", spec), {row.name: row for row in parameter_table(spec)}
    name, stored = "layers.1.feed_forward.w1.weight", "model.layers.1.mlp.gate_proj.weight"
    for start, stop in ((0, 56), (3, 5), (15, 17), (16, 32), (40, 56), (55, 56)):
        assert torch.equal(weights.read_rows(name, start, stop), plain[stored][start:stop])
    model = build_model(spec, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for key, row in rows.items():
            named_tensors(model)[key].copy_(weights.read_rows(key, 0, row.shape[0]))
    export_hf(named_tensors(model).items(), spec, tmp_path / "out", HfForm(dtype=torch.float32))
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(written[key], tensor) for key, tensor in plain.items())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    tokens_BT = torch.arange(32).reshape(2, 16)
    assert logits_of(model, tokens_BT).isfinite().all()


def test_check_says_that_matrices_are_dequantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_both(tmp_path, "blocks")
    (tmp_path / "text.txt").write_text("one two three " * 400)
    train_tokenizer(["one two three"], 260).save(tmp_path / "fp8")
    recipe = {
        "model": {"name": "fp8", "weights": "pretrained"},
        "data": {"sources": ["text.txt"], "sequence_length": 16, "cache_dir": "cache"},
        "training": {"steps": 1, "global_batch": 2},
        "run_dir": "run",
        "device": "cpu",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(recipe))
    assert main(["check", str(tmp_path / "run.yaml")]) == 0
    assert "dequantized" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized weights are not supported .gptq., except matrices in fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantized weights are not supported .fp8."),
        ({"quant_method": "fp8", "weight_block_size": [8, 8]}, "scales .* do not fit the matrix of shape"),
        ({"quant_method": "fbgemm_fp8"}, "has no scales model.layers.*_scale"),
        (None, "is F8_E4M3, but config.json has no quantization_config"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    save_both(tmp_path, "blocks")
    path = tmp_path / "fp8/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": change}))

    def opened() -> HfWeights:
        return HfWeights(tmp_path / "fp8", read_hf_directory(tmp_path / "fp8"))

    with pytest.raises(ValueError, match=message):
        opened()


def test_a_model_that_declares_our_class_is_ours(tmp_path: Path) -> None:
    """kimi_k2 declares the class of DeepSeek-V3."""
    save_both(tmp_path, "blocks")
    path = tmp_path / "fp8/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "another"}))
    assert read_hf_directory(tmp_path / "fp8").family == "llama"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("change", [FORMS["blocks"], None])
def test_adapters_are_proved_on_a_base_that_transformers_does_not_open(tmp_path: Path, change: Any) -> None:
    """Its release cannot read the fp8 matrices, or the directory has code of its own, as kimi_k2's has: peft's logits
    come from the same base in fp32."""
    plain = save_both(tmp_path, "blocks")
    path, code = tmp_path / "fp8/config.json", {"AutoModelForCausalLM": "modeling_other.Other"}
    if change is None:
        save_file(plain, tmp_path / "fp8/model.safetensors", {"format": "pt"})
        config = {key: value for key, value in json.loads(path.read_text()).items() if key != "quantization_config"}
        path.write_text(json.dumps(config | {"model_type": "another", "auto_map": code}))
    (tmp_path / "text.txt").write_text("one two three " * 400)
    train_tokenizer(["one two three"], 260).save(tmp_path / "fp8")
    recipe = {
        "model": {"name": str(tmp_path / "fp8"), "weights": "pretrained"},
        "finetune": {"method": "lora", "rank": 4},
        "data": {"sources": [str(tmp_path / "text.txt")], "sequence_length": 16, "cache_dir": str(tmp_path / "cache")},
        "training": {"steps": 1, "global_batch": 2, "precision": "fp32"},
        "run_dir": str(tmp_path / "run"),
        "device": "cpu",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(recipe))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert main(["export", str(tmp_path / "run"), "--adapter", str(tmp_path / "adapter")]) == 0
    receipt = json.loads((tmp_path / "adapter/receipt.json").read_text())
    assert {reading["program"] for reading in receipt["readings"]} == {"meshwright", "peft"}
