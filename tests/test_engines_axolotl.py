"""The export to axolotl: in axolotl's own names, and the same recipe after importing it."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from meshwright.cli.main import main
from meshwright.engines.engine import InexpressibleError
from meshwright.engines.registry import WRITTEN, find_engine
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: ./base
data:
  sources: [{path: "hub:someone/some-data", format: alpaca}, {path: own.jsonl, format: messages}]
  sequence_length: 128
  packing: best_fit
  separate_documents: true
training:
  steps: 50
  global_batch: 16
  micro_batch: 2
  precision: bf16
  recompute: full
  optimizer: {lr: 2e-4, weight_decay: 0.0}
  lr_schedule: {warmup: 20}
finetune: {method: lora, rank: 8, alpha: 16, targets: [q_proj, v_proj]}
checkpoint: {every: 25}
layout: {dp_shard: 2, zero: 3}
run_dir: runs/tuned
device: cpu
"""
CONFIG = """\
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
 "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "tie_word_embeddings": false}
"""
KNOWN = {
    *("base_model", "datasets", "chat_template", "val_set_size", "sequence_len", "sample_packing", "adapter"),
    *("load_in_4bit", "load_in_8bit", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear"),
    *("lora_target_modules", "lora_modules_to_save", "peft_use_dora", "peft_use_rslora", "micro_batch_size"),
    *("gradient_accumulation_steps", "max_steps", "optimizer", "learning_rate", "weight_decay", "adam_beta1"),
    *("adam_beta2", "adam_epsilon", "max_grad_norm", "cosine_min_lr_ratio", "lr_scheduler", "warmup_steps", "bf16"),
    *("fp16", "gradient_checkpointing", "torch_compile", "seed", "save_steps", "save_total_limit", "eval_steps"),
    *("wandb_project", "fsdp_version", "fsdp_config", "output_dir"),
}
"""For the names in axolotl's utils/schemas of 2026-07."""
VARIANTS = [
    [],
    ["finetune={method: qlora, dropout: 0.1, rslora: true}", "training.precision=bf16"],
    ["finetune={method: full}", "data.packing=padded", "data.separate_documents=false", "layout={dp_replicate: 2}"],
    ["training.lr_schedule={name: constant, warmup: 0}", "training.clip=null", "training.optimizer.name=adamw_8bit"],
    ["training.lr_schedule.final=0", "trackers=[wandb]", "training.seed=7", "training.evaluation.every=10"],
    ["data.sources=[{path: own.jsonl, format: prompt_completion}]"],
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(CONFIG)
    save_file({"none": np.zeros(1, np.float32)}, tmp_path / "base" / "model.safetensors")
    return tmp_path


def resolved(*overrides: str) -> ResolvedRun:
    return resolve_run(parse_spec(RECIPE, Run, overrides), base_dir=Path())


@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_an_exported_configuration_imports_as_the_same_recipe(folder, number):
    run = resolved(*VARIANTS[number])
    translation = WRITTEN["axolotl"].translate(run)
    assert not translation.left_out
    path = translation.write(folder / "out")
    keys = yaml.safe_load(path.read_text())
    assert set(keys) <= KNOWN
    text, reading = import_files([path], ranks=2)
    assert not reading.without
    again = resolve_run(parse_spec(text, Run), base_dir=Path())
    for part in ("data", "finetune", "layout", "checkpoint", "trackers", "run_dir"):
        assert getattr(again.run, part) == getattr(run.run, part), part
    assert again.model == run.model
    assert again.run.training == run.run.training
    assert (again.global_batch, again.micro_batch) == (run.global_batch, run.micro_batch)


@pytest.mark.parametrize(
    ("path", "override"),
    [
        ("training.optimizer.name", "training.optimizer.name=muon"),
        ("finetune.b_lr_ratio", "finetune.b_lr_ratio=16"),
        ("data.order", "data.order=given"),
        ("layout.tp", "layout={tp: 2}"),
        ("model.name", "model=llama-3.2-1b"),
        ("model.weights", "model.weights=random"),
        ("training.preference", "training.preference={}"),
    ],
)
def test_what_axolotl_does_not_say_is_refused_by_name(folder, path, override):
    with pytest.raises(InexpressibleError, match=path):
        WRITTEN["axolotl"].translate(resolved(override))


def test_the_verb_writes_the_configuration_alone(folder, capsys):
    (folder / "run.yaml").write_text(RECIPE)
    assert main(["export", "run.yaml", "--engine", "axolotl", "--program", "out"]) == 0
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["axolotl.yaml", "left-out.md"]
    assert "axolotl.yaml" in capsys.readouterr().out
    with pytest.raises(UserError, match="can only be exported"):
        find_engine("axolotl")
