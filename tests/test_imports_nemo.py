"""Megatron-Bridge's and NeMo's YAML: defaults, precision and steps that follow from several keys."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError

MODEL = (
    "num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 512, position_embedding_type: rope, "
    "add_bias_linear: false"
)
QUIET = "hidden_dropout: 0.0, attention_dropout: 0.0"
GATED = f"{QUIET}, gated_linear_unit: true, activation_func: torch.nn.functional.silu, normalization: RMSNorm"


def bridge(
    folder: Path, more: str = "", *, model: str = GATED, train: str = "train_iters: 100", ranks: int | None = None
) -> tuple[dict[str, Any], Reading]:
    """The recipe of a small Megatron-Bridge configuration with more sections, and the reading."""
    (folder / "bridge.yaml").write_text(
        f"model: {{{MODEL}, {model}}}\n"
        f"train: {{{train}, global_batch_size: 16, micro_batch_size: 1}}\n"
        f"dataset: {{seq_length: 128}}\n{more}\n"
    )
    written, reading = import_files([folder / "bridge.yaml"], ranks=ranks)
    return yaml.safe_load(written), reading


def old(folder: Path, more: str, *, trainer: str = "max_steps: 100") -> tuple[dict[str, Any], Reading]:
    """The recipe of a small NeMo configuration, and the reading."""
    (folder / "nemo.yaml").write_text(
        f"trainer: {{{trainer}}}\n"
        "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, encoder_seq_length: 128, "
        f"micro_batch_size: 1, global_batch_size: 16, {QUIET}, {more}}}\n"
    )
    written, reading = import_files([folder / "nemo.yaml"])
    return yaml.safe_load(written), reading


def told(reading: Reading, key: str) -> str:
    """What the report says about a key without a counterpart; empty if nothing."""
    return "\n".join(why for origin, why in reading.without if key in origin)


@pytest.mark.parametrize(
    ("given", "betas"),
    [
        ("lr: 1e-3", [0.9, 0.999]),
        ("lr: 1e-3, adam_beta1: 0.8", [0.8, 0.999]),
        ("lr: 1e-3, adam_beta2: 0.98", [0.9, 0.98]),
    ],
)
def test_an_omitted_beta_is_megatrons(tmp_path: Path, given: str, betas: list[float]) -> None:
    recipe, _ = bridge(tmp_path, f"optimizer: {{{given}}}")
    assert recipe["training"]["optimizer"]["betas"] == betas


def test_defaults_of_the_model_are_set_or_named(tmp_path: Path) -> None:
    recipe, reading = bridge(tmp_path, model="gated_linear_unit: true, activation_func: silu")
    assert recipe["model"]["tied_embeddings"] is True
    assert recipe["model"]["ffn"] == 4 * 64
    assert recipe["model"]["norm_eps"] == 1e-5
    assert recipe["model"]["rope_theta"] == 10000
    notes = "\n".join(reading.notes)
    assert "has no model.hidden_dropout: Megatron's default is 0.1" in notes
    assert "has no model.normalization, so Megatron has no RMSNorm; llama has it" in notes
    _, reading = bridge(tmp_path)
    assert not [note for note in reading.notes if "dropout" in note or "RMSNorm" in note]


def test_groups_of_heads_need_no_switch(tmp_path: Path) -> None:
    recipe, reading = bridge(tmp_path, model=f"{GATED}, num_query_groups: 2")
    assert recipe["model"]["num_kv_heads"] == 2
    assert not told(reading, "num_query_groups")


@pytest.mark.parametrize(
    ("model", "key", "why"),
    [
        (f"{QUIET}, gated_linear_unit: true", "activation_func", "not GEGLU"),
        (f"{QUIET}, gated_linear_unit: true, activation_func: torch.nn.functional.gelu", "activation_func", "GEGLU"),
        (f"{QUIET}, activation_func: torch.nn.functional.silu", "activation_func", "no SwiGLU"),
        (f"{GATED.replace('RMSNorm', 'LayerNorm')}", "normalization=LayerNorm", "llama has RMSNorm"),
    ],
)
def test_layers_that_no_family_has_are_named(tmp_path: Path, model: str, key: str, why: str) -> None:
    _, reading = bridge(tmp_path, model=model)
    assert why in told(reading, key)


def test_samples_are_steps(tmp_path: Path) -> None:
    scheduler = "scheduler: {lr_decay_style: cosine, lr_warmup_samples: 160, lr_decay_samples: 16000}"
    recipe, reading = bridge(tmp_path, scheduler, train="train_samples: 16000")
    assert recipe["training"]["steps"] == 1000
    assert recipe["training"]["lr_schedule"]["warmup"] == 10
    assert not told(reading, "samples")


@pytest.mark.parametrize(
    ("scheduler", "warmup"),
    [
        ("lr_warmup_fraction: 0.1", 10),
        ("lr_warmup_fraction: 0.1, lr_decay_iters: 500", 50),
        ("lr_warmup_fraction: 0.1, max_steps: 500", 50),
    ],
)
def test_a_share_of_warmup_is_one_of_the_decay(tmp_path: Path, scheduler: str, warmup: int) -> None:
    recipe, reading = bridge(tmp_path, f"scheduler: {{lr_decay_style: cosine, {scheduler}}}")
    assert recipe["training"]["lr_schedule"]["warmup"] == warmup
    assert bool(told(reading, "=500")) is (warmup == 50)


def test_what_wsd_does_by_default_is_named(tmp_path: Path) -> None:
    recipe, reading = bridge(tmp_path, "scheduler: {lr_decay_style: WSD}")
    assert recipe["training"]["lr_schedule"]["name"] == "wsd"
    assert "wsd always decays linearly" in told(reading, "no scheduler.lr_wsd_decay_style: exponential")
    assert told(reading, "no scheduler.lr_wsd_decay_iters")
    settled = "scheduler: {lr_decay_style: WSD, lr_wsd_decay_style: linear, lr_wsd_decay_iters: 20}"
    recipe, reading = bridge(tmp_path, settled)
    assert recipe["training"]["lr_schedule"]["decay"] == 20
    assert not told(reading, "wsd")


@pytest.mark.parametrize(
    ("given", "precision", "low"),
    [
        ("bf16_mixed", "bf16", None),
        ("bf16_with_fp8_delayed_scaling_mixed", "fp8", {"recipe": "delayed", "amax_history": 1024}),
        (
            "bf16-with-fp8-current-scaling-mixed",
            "fp8",
            {"recipe": "tensorwise", "keep": ["layers.0", "layers.-1"]},
        ),
        ("bf16_with_fp8_subchannel_scaling_mixed", "fp8", {"recipe": "blockwise"}),
        ("bf16_with_mxfp8_mixed", "mxfp8", None),
        ("bf16_with_nvfp4_mixed", "nvfp4", None),
        ("{bf16: true, fp8: hybrid}", "fp8", {"recipe": "tensorwise"}),
        ("{bf16: true, fp8: e4m3, fp8_recipe: blockwise}", "fp8", {"recipe": "blockwise"}),
        (
            "{bf16: true, fp8: hybrid, fp8_recipe: delayed, fp8_amax_history_len: 64, fp8_amax_compute_algo: max}",
            "fp8",
            {"recipe": "delayed", "amax_history": 64},
        ),
        (
            "{bf16: true, fp8: hybrid, first_last_layers_bf16: true, num_layers_at_end_in_bf16: 1}",
            "fp8",
            {"recipe": "tensorwise", "keep": ["layers.-1"]},
        ),
    ],
)
def test_a_precision_has_its_recipe(tmp_path: Path, given: str, precision: str, low: dict[str, Any] | None) -> None:
    recipe, _ = bridge(tmp_path, f"mixed_precision: {given}")
    assert recipe["training"]["precision"] == precision
    assert recipe["training"].get("low_precision") == low


def test_the_section_of_the_precision_counts_before_the_others(tmp_path: Path) -> None:
    more = "ddp: {grad_reduce_in_fp32: false}\nmixed_precision: bf16_mixed"
    recipe, reading = bridge(tmp_path, more, model=f"{GATED}, fp8: hybrid")
    assert recipe["training"]["precision"] == "bf16"
    assert recipe["training"].get("reduce_dtype", "fp32") == "fp32"
    assert told(reading, "grad_reduce_in_fp32=False")
    assert "mixed_precision decides" in told(reading, "model.fp8=hybrid")


def test_an_interval_as_long_as_the_run_needs_no_order_of_sections(tmp_path: Path) -> None:
    (tmp_path / "bridge.yaml").write_text(
        f"checkpoint: {{save_interval: 100}}\nmodel: {{{MODEL}, {GATED}}}\n"
        "train: {train_iters: 100, global_batch_size: 16, micro_batch_size: 1}\n"
    )
    written, _ = import_files([tmp_path / "bridge.yaml"])
    assert yaml.safe_load(written)["checkpoint"]["every"] == 0


def test_a_file_that_changes_a_recipe_in_python_says_so(tmp_path: Path) -> None:
    (tmp_path / "override.yaml").write_text(
        "model: {tensor_model_parallel_size: 1}\ntrain: {train_iters: 20, global_batch_size: 8}\n"
    )
    written, reading = import_files([tmp_path / "override.yaml"], model="llama-3.2-1b")
    recipe = yaml.safe_load(written)
    assert any("changes a recipe in Python" in note for note in reading.notes)
    assert "precision" not in recipe["training"]


def test_a_class_of_one_model_has_its_own_defaults(tmp_path: Path) -> None:
    _, reading = bridge(tmp_path, model="_target_: megatron.bridge.models.LlamaModelProvider")
    assert any("defaults of its own" in note for note in reading.notes)
    assert not any("dropout" in note for note in reading.notes)


def test_nemos_own_defaults(tmp_path: Path) -> None:
    recipe, _ = old(tmp_path, "optim: {name: fused_adam, lr: 1e-3}")
    training = recipe["training"]
    assert training["lr_schedule"]["name"] == "constant"
    assert training["clip"] is None
    assert training["optimizer"]["weight_decay"] == 0.0
    assert training["optimizer"]["betas"] == [0.9, 0.999]


def test_nemos_switches_for_fp8(tmp_path: Path) -> None:
    more = "fp8: true, fp8_hybrid: true, fp8_amax_history_len: 1024, fp8_amax_compute_algo: max"
    recipe, reading = old(tmp_path, more, trainer="max_steps: 100, precision: bf16")
    assert recipe["training"]["precision"] == "fp8"
    assert recipe["training"]["low_precision"] == {"recipe": "delayed", "amax_history": 1024}
    _, reading = old(tmp_path, "fp8: true")
    assert told(reading, "model.fp8=True")


def test_a_share_of_an_epoch_is_no_number_of_steps(tmp_path: Path) -> None:
    _, reading = old(tmp_path, "init_method_std: 0.02", trainer="max_steps: 100, val_check_interval: 0.25")
    assert "a share of an epoch" in told(reading, "val_check_interval")


@pytest.mark.parametrize(
    ("more", "train"),
    [
        ("", "train_iters: many"),
        ("optimizer: {adam_beta1: high}", "train_iters: 9"),
        ("scheduler: {lr_warmup_samples: some}", "train_samples: 99"),
        ("mixed_precision: {bf16: true, fp8: hybrid, fp8_recipe: delayed, fp8_margin: wide}", "train_iters: 9"),
        ("mixed_precision: {bf16: true, fp8: [hybrid]}", "train_iters: 9"),
    ],
)
def test_values_of_another_kind_end_in_one_line(tmp_path: Path, more: str, train: str) -> None:
    with pytest.raises(UserError, match=r"bridge\.yaml: "):
        bridge(tmp_path, more, train=train)
