"""Configurations of each system, modelled on its published ones: the same training, and no key dropped silently."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import get_scheduler

from meshwright.engines.deepspeed import ds_config
from meshwright.engines.engine import InexpressibleError
from meshwright.engines.layouts import layout_called
from meshwright.engines.registry import ENGINES
from meshwright.imports.recipe import import_files
from meshwright.optim.schedule import lr_factor
from meshwright.spec.errors import UserError
from meshwright.spec.offload import OffloadSpec
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import Run
from meshwright.trainer.resolve import resolve_run

FILES = Path(__file__).parent / "fixtures" / "imports"
LORA = {"finetune.method": "lora"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "factory_lora_sft.yaml": (
        {"ranks": 1},
        {
            **LORA,
            "model.name": "meta-llama/Meta-Llama-3-8B-Instruct",
            "finetune.rank": 8,
            "finetune.alpha": 16,
            "finetune.targets": "all-linear",
            "data.chat.template": "llama3",
            "data.packing": "padded",
            "data.sources": ["data/identity.json", "data/alpaca_en_demo.json"],
            "training.global_batch": 8,
            "training.lr_schedule.name": "cosine",
            "training.optimizer.betas": (0.9, 0.999),
            "training.precision": "bf16",
            "training.seed": 42,
        },
        ["max_samples=1000", "warmup_ratio=0.1"],
    ),
    "factory_lora_dpo.yaml": (
        {"ranks": 2},
        {
            "training.preference.beta": 0.2,
            "data.sources": ["data/dpo_en_demo.json"],
            "finetune.targets": ("q_proj", "v_proj"),
            "training.global_batch": 16,
            "training.lr_schedule.warmup": 30,
            "layout.dp_replicate": 2,
        },
        [],
    ),
    "factory_full_sft.yaml": (
        {"ranks": 8},
        {
            "finetune.method": "full",
            "data.packing": "best_fit",
            "data.separate_documents": True,
            "data.sources": ["corpora/tulu.json"],
            "training.lr_schedule.warmup": 200,
        },
        ["use_galore=True", "template=qwen3"],
    ),
    "factory_qlora_pt.yaml": (
        {"ranks": 1},
        {
            "finetune.base": "nf4",
            "finetune.double_quantization": False,
            "finetune.alpha": 16,
            "finetune.rslora": True,
            "data.packing": "concatenated",
            "data.held_out": 0.1,
            "training.precision": "fp16",
            "training.lr_schedule.name": "linear",
        },
        [],
    ),
    "titan_8b.toml": (
        {"ranks": 8},
        {
            "model.name": "llama-3.1-8b",
            "layout.dp_shard": 8,
            "layout.zero": 3,
            "training.global_batch": 8,
            "training.recompute": "selective",
            "training.precision": "bf16",
            "training.lr_schedule.name": "linear",
            "training.lr_schedule.final": 0.0,
            "training.lr_schedule.warmup": 200,
            "data.sequence_length": 8192,
            "trackers": ("tensorboard",),
            "checkpoint.every": 0,
        },
        ["log_freq=10"],
    ),
    "titan_70b.toml": (
        {},
        {
            "model.name": "llama-3.1-70b",
            "layout.dp_replicate": 2,
            "layout.dp_shard": 8,
            "layout.tp": 8,
            "layout.zero": 2,
            "training.global_batch": 512,
            "training.precision": "fp8",
            "training.reduce_dtype": "bf16",
            "training.optimizer.betas": (0.9, 0.99),
            "training.lr_schedule.name": "wsd",
            "training.lr_schedule.decay": 1600,
            "training.lr_schedule.final": 0.1,
            "training.compile": True,
            "checkpoint.every": 250,
            "checkpoint.keep_last": 3,
        },
        ["enable_fsdp_float8_all_gather=True"],
    ),
    "titan_pipeline.toml": (
        {"model": "llama-3.2-1b"},
        {
            "layout.pp": 4,
            "layout.cp": 2,
            "layout.dp_shard": 2,
            "layout.schedule": "interleaved-1f1b",
            "layout.cp_method": "ring",
            "training.global_batch": 64,
            "training.optimizer.lr": 8e-4,
            "training.lr_schedule.name": "cosine",
        },
        ["flavor=debugmodel", "dataset=c4_test"],
    ),
    "titan_printed.json": (
        {},
        {"model.name": "qwen3-0.6b", "layout.dp_shard": 4, "layout.offload": "cpu", "training.global_batch": 16},
        [],
    ),
    "automodel_chat.yaml": (
        {"ranks": 8, "model": "llama-3.2-1b"},
        {
            **LORA,
            "finetune.rank": 8,
            "finetune.alpha": 32,
            "finetune.targets": ("*_proj",),
            "data.packing": "padded",
            "data.sources": ["data/talks.jsonl"],
            "data.sequence_length": 2048,
            "layout.dp_shard": 4,
            "layout.dp_replicate": 2,
            "training.seed": 42,
            "training.clip": 1.0,
            "training.master_dtype": "bf16",
            "training.optimizer.rounding": "nearest",
            "training.lr_schedule.warmup": 40,
            "training.lr_schedule.final": 0.1,
        },
        ["num_epochs=2", "rng.seed=1111", "init_lr=0.1 lr", "dropout_position=post", "mask_reasoning", "mlflow"],
    ),
    "automodel_pretrain.yaml": (
        {"model": "qwen3-0.6b"},
        {
            "model.weights": "random",
            "data.sources": ["tokens/a_text_document.bin", "tokens/b_text_document.bin"],
            "data.sequence_length": 2048,
            "data.held_out": 0.02,
            "layout.tp": 2,
            "layout.pp": 2,
            "layout.dp_shard": 4,
            "layout.zero": 2,
            "training.micro_batch": 2,
            "training.recompute": "selective",
            "training.master_dtype": "fp32",
            "training.reduce_dtype": "bf16",
            "training.clip": 0.5,
            "training.compile": True,
            "training.lr_schedule.name": "wsd",
            "training.lr_schedule.final": 0.0,
            "checkpoint.every": 0,
            "trackers": ("wandb",),
        },
        ["router"],
    ),
    "nanotron_smol.yaml": (
        {},
        {
            "model.family": "llama",
            "model.vocab": 49152,
            "model.init_std": 0.04,
            "model.rope_theta": 10000.0,
            "data.sources": ["hub:HuggingFaceTB/smollm-corpus"],
            "layout.tp": 3,
            "layout.schedule": "afab",
            "layout.dp_shard": 8,
            "layout.zero": 1,
            "training.recompute": "full",
            "training.global_batch": 64,
            "training.clip": None,
            "training.lr_schedule.name": "wsd",
            "training.lr_schedule.decay": 400,
            "training.lr_schedule.final": 0.0,
        },
        ["annealing", "z_loss_enabled", "rope_interleaved", "profiler_export_path"],
    ),
    "nanotron_bf16.yaml": (
        {},
        {
            "model.family": "qwen2",
            "model.ffn": 11008,
            "model.norm_eps": 1e-6,
            "model.tied_embeddings": False,
            "model.vocab": 50002,
            "data.separate_documents": True,
            "training.seed": 42,
            "training.precision": "bf16",
            "training.reduce_dtype": "bf16",
            "training.master_dtype": "bf16",
            "training.optimizer.rounding": "nearest",
            "training.lr_schedule.name": "constant",
            "training.lr_schedule.warmup": 0,
            "training.evaluation.every": 50,
            "checkpoint.every": 0,
        },
        ["dataset_weights", "scaling_method", "rope_scaling"],
    ),
    "bridge_llama.yaml": (
        {"ranks": 64},
        {
            "model.family": "llama",
            "model.num_kv_heads": 8,
            "model.vocab": 128256,
            "model.tied_embeddings": False,
            "layout.tp": 2,
            "layout.pp": 2,
            "layout.dp_shard": 16,
            "layout.zero": 1,
            "training.global_batch": 512,
            "training.precision": "bf16",
            "training.recompute": "selective",
            "training.lr_schedule.final": 0.1,
            "training.optimizer.eps": 1e-5,
            "data.sources": ["data/a_text_document.bin", "data/b_text_document.bin"],
            "data.held_out": 0.000999,
        },
        ["comm_overlap.tp_comm_overlap=True"],
    ),
    "nemo_gpt.yaml": (
        {},
        {
            "model.family": "gpt2",
            "model.num_layers": 24,
            "layout.tp": 4,
            "layout.dp_shard": 4,
            "layout.zero": 1,
            "training.optimizer.betas": (0.9, 0.98),
            "training.lr_schedule.name": "cosine",
            "training.lr_schedule.warmup": 500,
            "data.sequence_length": 2048,
            "data.held_out": 0.1,
        },
        ["hidden_dropout=0.1", "constant_steps=5000"],
    ),
    "foundry_mpt.yaml": (
        {"ranks": 8},
        {
            "model.family": "gpt2",
            "model.ffn": 3072,
            "model.max_positions": 2048,
            "data.sequence_length": 2048,
            "training.seed": 17,
            "training.steps": 4800,
            "training.optimizer.weight_decay": 0.1,
            "training.reduce_dtype": "bf16",
            "training.lr_schedule.warmup": 100,
            "training.clip": 1.0,
            "layout.dp_shard": 8,
            "layout.zero": 3,
            "trackers": ("wandb",),
        },
        ["no_bias=True", "local=./my-copy-c4", "speed_monitor", "save_folder"],
    ),
    "foundry_finetune.yaml": (
        {"ranks": 8},
        {
            "model.name": "llama-2-7b",
            "data.sources": ["hub:mosaicml/dolly_hhrlhf"],
            "data.packing": "best_fit",
            "training.recompute": "full",
            "training.micro_batch": "auto",
            "training.optimizer.weight_decay": 0.01,
            "training.clip": None,
            "training.seed": 7,
            "checkpoint.every": 100,
            "finetune.method": "full",
            "data.chat.train_on": "last",
            "training.epochs": 2,
        },
        [],
    ),
    "foundry_lora.yaml": (
        {"ranks": 8},
        {
            **LORA,
            "model.name": "./llama",
            "finetune.rank": 8,
            "finetune.targets": ("q_proj", "v_proj"),
            "data.sources": ["talks/train.jsonl"],
            "data.packing": "padded",
            "data.chat.train_on": "assistant",
            "layout.dp_shard": 4,
            "layout.dp_replicate": 2,
            "layout.zero": 3,
            "training.steps": 400,
            "training.lr_schedule.warmup": 40,
            "training.optimizer.lr": 1e-3,
            "training.optimizer.weight_decay": 0.01,
        },
        ["eval_interval=1", "t_max=500ba", "config_overrides.attn_config.attn_impl=flash"],
    ),
    "megatron_llama3.sh": (
        {},
        {
            "model.family": "llama",
            "model.num_kv_heads": 8,
            "model.tied_embeddings": False,
            "layout.cp": 2,
            "layout.dp_shard": 4,
            "layout.zero": 1,
            "training.recompute": "selective",
            "training.lr_schedule.final": 0.0666667,
        },
        [],
    ),
    "axolotl_full.yaml": (
        {"ranks": 2},
        {
            "finetune.method": "full",
            "data.packing": "padded",
            "data.sources": ["hub:mhenrichsen/alpaca_2k_test"],
            "layout.zero": 3,
            "training.global_batch": 16,
            "training.optimizer.name": "adamw_8bit",
            "training.recompute": "full",
        },
        ["plugins="],
    ),
    "deepspeed_z3.json": (
        {"ranks": 4, "model": "llama-3.2-1b"},
        {
            "layout.zero": 3,
            "layout.dp_shard": 4,
            "training.global_batch": 32,
            "training.clip": 1.0,
            "layout.offload": OffloadSpec(optimizer="disk", directory="/local_nvme"),
        },
        [],
    ),
    "nanogpt_gpt2.py": (
        {"ranks": 8},
        {
            "model.num_layers": 12,
            "data.sources": ["data/openwebtext/train.bin"],
            "training.global_batch": 480,
            "training.optimizer.weight_decay": 0.1,
            "training.evaluation.batches": 200,
            "trackers": ("wandb",),
        },
        [],
    ),
}
"""A file -> messages about it, settings of the recipe, and keys without a counterpart."""


DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "axolotl.yaml": (
        "base_model: gpt2\nlearning_rate: 1e-4\nmax_steps: 1000\nfsdp_config: {fsdp_offload_params: true}\n",
        {
            "data.sequence_length": 512,
            "data.held_out": 0.0,
            "data.packing": "padded",
            "layout.zero": 3,
            "layout.offload": "cpu",
            "training.global_batch": 2,
            "training.lr_schedule.warmup": 30,
            "training.lr_schedule.final": 0.0,
            "training.seed": 42,
        },
    ),
    "llama_factory.yaml": (
        "model_name_or_path: gpt2\nstage: pt\nfinetuning_type: full\nmax_steps: 1000\nwarmup_steps: 0.1\n",
        {
            "data.sequence_length": 2048,
            "data.held_out": 0.0,
            "data.packing": "concatenated",
            "training.global_batch": 16,
            "training.lr_schedule.warmup": 100,
            "training.optimizer.lr": 5e-5,
            "training.recompute": "full",
        },
    ),
    "unpacked.yaml": (
        "model_name_or_path: gpt2\nstage: pt\npacking: false\ndisable_gradient_checkpointing: true\nmax_steps: 9\n",
        {"data.packing": "padded", "training.recompute": "none", "finetune.rank": 8},
    ),
    "foundry.yaml": (
        "model: {name: hf_causal_lm}\nglobal_train_batch_size: 8\nmax_duration: 10ba\n",
        {"training.precision": "bf16", "training.seed": 17, "training.clip": None, "training.lr_schedule.final": 0.0},
    ),
    "arguments.yaml": (
        "output_dir: out\nlearning_rate: 1e-4\nper_device_train_batch_size: 4\nmax_steps: 10\n",
        {"training.optimizer.weight_decay": 0.0, "training.lr_schedule.warmup": 0, "training.precision": "fp32"},
    ),
}
"""A minimal file -> the system's training with it, where it differs from a minimal recipe."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_a_file_leaves_to_its_system_is_imported_as_that(tmp_path, name):
    text, expected = DEFAULTS[name]
    (tmp_path / name).write_text(text)
    run = parse_spec(import_files([tmp_path / name], ranks=2, model="gpt2")[0], Run)
    assert {path: setting(run, path) for path in expected} == expected


def test_warm_up_that_is_longer_than_training_is_listed(tmp_path):
    text = "model: {name: hf_causal_lm}\nglobal_train_batch_size: 8\nmax_duration: 50ba\nscheduler: {t_warmup: 100ba}\n"
    (tmp_path / "foundry.yaml").write_text(text)
    recipe, reading = import_files([tmp_path / "foundry.yaml"], ranks=2, model="gpt2")
    assert parse_spec(recipe, Run).training.lr_schedule.warmup == "auto"
    assert [key for key, why in reading.without if "exceeds the 50 steps" in why] == [
        "foundry.yaml: scheduler.t_warmup=100ba"
    ]


def setting(run: Run, path: str) -> Any:
    found: Any = run
    for part in path.split("."):
        found = getattr(found, part)
    return [source.path for source in found] if path == "data.sources" else found


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, name)
    else:
        yield key, value


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_becomes_the_same_training(name):
    words, expected, without = CASES[name]
    text, reading = import_files([FILES / name], **words)
    run = parse_spec(text, Run)
    for path, value in expected.items():
        assert setting(run, path) == value, path
    for key in without:
        assert any(key in origin for origin, _ in [*reading.without, *reading.no_effect]), key


@pytest.mark.parametrize("name", CASES)
def test_no_key_is_lost_in_silence(name):
    """Every key is an origin, or is listed."""
    text, _ = import_files([FILES / name], **CASES[name][0])
    content = (FILES / name).read_text()
    if name.endswith((".sh", ".py")):
        keys = re.findall(r"--([\w-]+)" if name.endswith(".sh") else r"^(\w+) =", content, flags=re.MULTILINE)
        assert not [key for key in keys if not re.search(rf"\b{re.escape(key)}\b", text)]
        return
    read = {".json": json.loads, ".toml": tomllib.loads}.get(Path(name).suffix, yaml.safe_load)
    for key, value in leaves(read(content)):
        assert value is None or re.search(rf"\b{re.escape(key)}\b", text), key


RECIPE = """\
model: {family: gpt2, hidden: 64, num_layers: 2, num_heads: 4, max_positions: 64}
data: {sources: [{path: "*.txt", weight: 2}], tokenizer_vocab: 512, sequence_length: 64}
training: {steps: 10, global_batch: 8, micro_batch: 2, precision: fp32, clip: null, optimizer: {lr: 1.0e-4}}
checkpoint: {every: 5}
device: cpu
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("layout", ["single", "ddp", "zero3"])
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "meshwright"])
def test_an_exported_program_is_the_same_recipe_again(tmp_path, engine, layout):
    """Including settings that its program omits."""
    run = parse_spec(RECIPE, Run).model_copy(update={"layout": layout_called(layout)})
    try:
        path = ENGINES[engine].translate(resolve_run(run, base_dir=tmp_path)).write(tmp_path)
    except InexpressibleError:
        pytest.skip(f"{engine} has no {layout}")
    text, reading = import_files([path])
    assert parse_spec(text, Run) == run
    assert not reading.notes
    path.write_text(
        path.read_text().replace("LR, BETAS, EPS, WEIGHT_DECAY = 0.0001", "LR, BETAS, EPS, WEIGHT_DECAY = 0.5")
    )
    text, reading = import_files([path])
    assert parse_spec(text, Run).training.optimizer.lr == 0.5
    assert "LR=0.5: the program was edited; its recipe has 0.0001" in reading.notes[0]


TUNED = {
    "peft": ["finetune={method: lora, rank: 4, targets: [wq, wv], ranks: {wq: 2}}", "data.packing=best_fit"],
    "trl": [
        "finetune={method: ia3}",
        "training.preference={beta: 0.2}",
        "data={packing: padded, sequence_length: 32}",
    ],
}


@pytest.mark.parametrize("engine", TUNED)
def test_an_exported_fine_tuning_is_the_same_recipe_again(tmp_path, engine):
    run = parse_spec(RECIPE, Run, [*TUNED[engine], "data.separate_documents=true", "data.chat.template=plain"])
    path = ENGINES[engine].translate(resolve_run(run, base_dir=tmp_path)).write(tmp_path)
    text, reading = import_files([path])
    assert parse_spec(text, Run) == run
    assert not reading.notes


def test_a_program_whose_recipe_is_gone_is_refused(tmp_path):
    run = parse_spec(RECIPE, Run)
    path = ENGINES["bare"].translate(resolve_run(run, base_dir=tmp_path)).write(tmp_path)
    text = path.read_text()
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("#   ")) + "\n")
    with pytest.raises(UserError, match="contains no recipe"):
        import_files([path])
    path.write_text(
        text.replace("STEPS, GLOBAL_BATCH, MICRO_BATCH, LENGTH = 10", "STEPS, GLOBAL_BATCH, MICRO_BATCH, LENGTH = f()")
    )
    with pytest.raises(UserError, match="STEPS is not a number"):
        import_files([path])


HOSTILE = {
    "circle.yaml": ("global_train_batch_size: ${seed}\nseed: ${global_train_batch_size}\n", "circular"),
    "broken.toml": ("[training\n", "cannot be read"),
    "degree.toml": ("[training]\nsteps = 1\n[parallelism]\ntensor_parallel_degree = 0\n", "at least 1"),
    "word.toml": ('[training]\nsteps = 9\n[lr_scheduler]\ndecay_ratio = "x"\n', "must be a number"),
    "precision.toml": ('[training]\nmixed_precision_param = "int"\n[job]\n', "one of float32"),
    "blend.yaml": ("model: {hidden_size: 8}\ntrain: {}\ndataset: {blend: 5}\n", "this value is not allowed"),
    "decay.yaml": ("device_train_microbatch_size: 1\noptimizer: {weight_decay: [1]}\n", "must be a number"),
    "lora.yaml": ("model_name_or_path: gpt2\nstage: sft\nval_size: x\n", "this value is not allowed"),
}


STRANGE = {
    "automodel_pretrain.yaml": ("dataset", "paths", 3),
    "automodel_chat.yaml": ("step_scheduler", "max_steps", "many"),
    "foundry_finetune.yaml": ("optimizer", "name", ["adamw"]),
    "nanotron_smol.yaml": ("checkpoints", "checkpoint_interval", "often"),
    "titan_printed.json": ("validation", "", 1),
}
"""A section, a key of it (empty: the section itself) and a value of a kind that it never has."""


@pytest.mark.parametrize("name", STRANGE)
def test_a_value_of_another_kind_is_one_sentence(tmp_path, name):
    section, key, value = STRANGE[name]
    values = yaml.safe_load((FILES / name).read_text())
    if key:
        values[section][key] = value
    else:
        values[section] = value
    (tmp_path / name).write_text(json.dumps(values) if name.endswith("json") else yaml.safe_dump(values))
    with pytest.raises(UserError, match=name):
        import_files([tmp_path / name], ranks=8, model="gpt2")


@pytest.mark.parametrize("name", HOSTILE)
def test_malformed_files_are_one_sentence(tmp_path, name):
    (tmp_path / name).write_text(HOSTILE[name][0])
    with pytest.raises(UserError, match=HOSTILE[name][1]) as error:
        import_files([tmp_path / name], model="gpt2", ranks=1)
    assert len(str(error.value)) < 500


NVME = {"device": "nvme", "nvme_path": "/fast"}
OFFLOADED: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "both": (
        {"offload_optimizer": NVME, "offload_param": NVME},
        OffloadSpec(optimizer="disk", parameters="disk", directory="/fast"),
        [],
    ),
    "parameters in memory": (
        {"offload_optimizer": NVME, "offload_param": {"device": "cpu"}},
        OffloadSpec(optimizer="disk", parameters="host", directory="/fast"),
        [],
    ),
    "parameters alone": ({"offload_param": NVME}, "cpu", ["offload_param"]),
    "optimizer in memory": ({"offload_optimizer": {"device": "cpu"}}, OffloadSpec(optimizer="host"), []),
    "a share": (
        {"offload_optimizer": {"device": "cpu", "ratio": 0.3}},
        OffloadSpec(optimizer="host", optimizer_share=0.3),
        [],
    ),
    "a share beside parameters": (
        {"offload_optimizer": {"device": "cpu", "ratio": 0.3}, "offload_param": {"device": "cpu"}},
        "cpu",
        ["ratio"],
    ),
    "switches of old": ({"cpu_offload": True, "cpu_offload_params": True}, "cpu", []),
    "switched off": ({"cpu_offload": False, "offload_optimizer": {"device": "none"}}, "none", []),
}
"""Sections of DeepSpeed's ZeRO -> the recipe's offloading, and keys without a counterpart."""


@pytest.mark.parametrize("what", OFFLOADED)
def test_what_deepspeed_offloads_is_offloaded_in_the_recipe(tmp_path, what):
    zero, expected, without = OFFLOADED[what]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    text, reading = import_files([tmp_path / "ds.json"], ranks=2, model="llama-3.2-1b")
    assert parse_spec(text, Run).layout.offload == expected
    assert len(reading.without) == len(without)
    assert all(any(key in origin for origin, _ in reading.without) for key in without)


ZERO_PLUS_PLUS = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2}
QUANTIZED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "all three": (
        {"stage": 3, **ZERO_PLUS_PLUS},
        {"dp_shard": 2, "dp_replicate": 2, "quantized_weights": "int8", "quantized_gradients": "int4"},
        [],
    ),
    "switched off": (
        {"stage": 3, **dict.fromkeys(ZERO_PLUS_PLUS, False), "zero_hpz_partition_size": 1},
        {"dp_shard": 4, "dp_replicate": 1, "quantized_weights": "none", "quantized_gradients": "none"},
        [],
    ),
    "at stage 1": (
        {"stage": 1, "zero_quantized_weights": True, "zero_quantized_gradients": True},
        {"dp_shard": 4, "quantized_weights": "none", "quantized_gradients": "none"},
        ["zero_quantized_weights", "zero_quantized_gradients"],
    ),
    "LoCo": (
        {"stage": 2, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
        {"dp_shard": 4, "zero": 2, "quantized_gradients": "int4", "gradient_error_feedback": True},
        [],
    ),
    "LoCo without anything to correct": (
        {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}},
        {"dp_shard": 4, "quantized_gradients": "none", "gradient_error_feedback": False},
        ["zeropp_loco_param.err_beta"],
    ),
    "of frozen weights": (
        {"stage": 3, "zero_quantized_nontrainable_weights": True},
        {"dp_shard": 4, "quantized_weights": "none"},
        ["zero_quantized_nontrainable_weights"],
    ),
}
"""ZeRO++ over four ranks -> the layout, and keys without a counterpart."""


@pytest.mark.parametrize("what", QUANTIZED)
def test_zero_plus_plus_is_a_layout(tmp_path, what):
    zero, expected, without = QUANTIZED[what]
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
    text, reading = import_files([tmp_path / "ds.json"], ranks=4, model="llama-3.2-1b")
    layout = parse_spec(text, Run).layout
    assert {field: getattr(layout, field) for field in expected} == expected
    assert len(reading.without) == len(without)
    assert all(any(key in origin for origin, _ in reading.without) for key in without)


@pytest.mark.parametrize(("key", "value"), [("err_beta", "much"), ("reset_T", True), ("reset_T", "soon")])
def test_loco_s_constants_are_numbers(tmp_path, key, value):
    zero = {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {key: value}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
    with pytest.raises(UserError, match=rf"zeropp_loco_param\.{key}={value}: must be a number"):
        import_files([tmp_path / "ds.json"], ranks=4, model="llama-3.2-1b")


AGAIN: dict[str, dict[str, Any]] = {
    "zero-1": {"dp_shard": 4, "zero": 1},
    "zero-3": {"dp_shard": 4},
    "zero++": {"dp_shard": 4, "quantized_weights": "int8", "quantized_gradients": "int4"},
    "hpz": {"dp_shard": 2, "dp_replicate": 2, "quantized_weights": "int8"},
    "host": {"dp_shard": 4, "offload": {"optimizer": "host"}},
    "cpu": {"dp_shard": 4, "offload": "cpu"},
    "disk": {"dp_shard": 4, "offload": {"optimizer": "disk", "directory": "/fast"}},
}


@pytest.mark.parametrize("name", AGAIN)
def test_deepspeed_s_configuration_of_a_layout_is_that_layout(tmp_path, name):
    run = parse_spec(
        f"model: llama-3.2-1b\ndata: {{sources: x, sequence_length: 128}}\nlayout: {json.dumps(AGAIN[name])}\n"
        "training: {steps: 5, global_batch: 8, micro_batch: 2}\n",
        Run,
    )
    (tmp_path / "ds.json").write_text(json.dumps(ds_config(resolve_run(run, base_dir=tmp_path))))
    text, reading = import_files([tmp_path / "ds.json"], ranks=4, model="llama-3.2-1b")
    again = parse_spec(text, Run)
    assert again.layout.model_dump() == run.layout.model_copy(update={"zero": run.layout.zero_stage}).model_dump()
    assert (again.training.global_batch, again.training.micro_batch) == (8, 2)
    assert again.training.precision == run.training.precision
    told = ("steps_per_print", "aio.", "buffer_count", "fast_init", "pipeline_read", "pipeline_write", "sub_group_size")
    told = (*told, "stage3_param_persistence_threshold")
    assert all(any(key in origin for key in told) for origin, _ in reading.without)


RATES: dict[str, tuple[str, dict[str, Any], int]] = {
    "linear": ("linear", {}, 10),
    "linear without warm-up": ("linear", {}, 0),
    "cosine": ("cosine", {}, 10),
    "cosine once": ("cosine_with_restarts", {"num_cycles": 1}, 10),
    "polynomial": ("polynomial", {"lr_end": 2e-5}, 10),
    "polynomial by default": ("polynomial", {}, 5),
    "to a rate": ("cosine_with_min_lr", {"min_lr": 2e-5}, 10),
    "to a share": ("cosine_with_min_lr", {"min_lr_rate": 0.25}, 10),
    "to a share, a step ahead": ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.25}, 10),
    "constant": ("constant", {}, 10),
    "constant after warm-up": ("constant_with_warmup", {}, 10),
    "stable": ("warmup_stable_decay", {"num_decay_steps": 12, "decay_type": "linear"}, 10),
}
"""lr_scheduler_type, lr_scheduler_kwargs and steps of warm-up."""


@pytest.mark.parametrize("case", RATES)
def test_a_schedule_of_transformers_is_the_recipe_s_at_every_step(tmp_path, case):
    """One step later, as transformers counts."""
    name, options, warmup = RATES[case]
    arguments = {"per_device_train_batch_size": 1, "learning_rate": 1e-4, "max_steps": 60, "warmup_steps": warmup}
    arguments |= {"lr_scheduler_type": name} | ({"lr_scheduler_kwargs": options} if options else {})
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    text, reading = import_files([tmp_path / "arguments.json"], ranks=1, model="llama-3.2-1b")
    assert [why for origin, why in reading.without if "warmup" not in origin] == []
    schedule = parse_spec(text, Run).training.lr_schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    theirs = get_scheduler(name, optimizer, warmup, 60, options)
    ahead = name == "cosine_warmup_with_min_lr"
    for step in range(0 if ahead else 1, 60):
        (lambda_of,) = theirs.lr_lambdas
        assert lr_factor(schedule, step + ahead, 60) == pytest.approx(lambda_of(step), abs=1e-6), step


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("warmup_stable_decay", {"num_decay_steps": 12}, ["decay_type=cosine"]),
        ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "linear", "min_lr_ratio": 0.1}, ["min_lr_ratio"]),
        ("cosine_with_restarts", {"num_cycles": 3}, ["num_cycles=3"]),
        ("polynomial", {"power": 2.0}, ["power=2.0"]),
        ("inverse_sqrt", {}, ["lr_scheduler_type=inverse_sqrt"]),
        ("constant", {}, ["warmup_steps=10"]),
    ],
)
def test_what_a_schedule_of_transformers_has_beyond_the_recipe_s_is_told(tmp_path, name, options, told):
    arguments = {"per_device_train_batch_size": 1, "learning_rate": 1e-4, "max_steps": 60, "warmup_steps": 10}
    arguments |= {"lr_scheduler_type": name, "lr_scheduler_kwargs": json.dumps(options)}
    (tmp_path / "arguments.json").write_text(json.dumps(arguments))
    _, reading = import_files([tmp_path / "arguments.json"], ranks=1, model="llama-3.2-1b")
    assert len(reading.without) == len(told)
    assert all(any(words in origin for origin, _ in reading.without) for words in told)
