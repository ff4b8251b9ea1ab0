"""Exports as configurations: each imports as the same recipe, and features that a system lacks are refused by name."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshwright.cli.export import WRITTEN_ONLY
from meshwright.cli.main import main
from meshwright.engines.engine import InexpressibleError
from meshwright.engines.handover import run_at
from meshwright.engines.registry import WRITTEN, find_engine
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.folder import RESOLVED
from meshwright.trainer.resolve import resolve_run

CONFIG = """\
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 384, "hidden_size": 64,
 "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
 "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": false}
"""
TRAINING = """\
training:
  steps: 50
  global_batch: 32
  micro_batch: 2
  precision: bf16
  recompute: full
  optimizer: {lr: 2e-4, weight_decay: 0.05, betas: [0.9, 0.98]}
  lr_schedule: {warmup: 5}
checkpoint: {every: 25}
run_dir: runs/mine
device: cpu
"""
TITAN = f"""\
model: llama-3.1-8b
data:
  sources: [{{path: own.jsonl, text_key: body}}]
  tokenizer: ./base
  sequence_length: 256
  separate_documents: true
layout: {{dp_shard: 4, dp_replicate: 2}}
{TRAINING}"""
MEGATRON = f"""\
model: llama-3.1-8b
data: {{sources: [{{path: corpus.bin}}], tokenizer: ./base, sequence_length: 256}}
layout: {{dp_shard: 4, dp_replicate: 2, zero: 1}}
{TRAINING}"""
NANOTRON = f"""\
model: {{family: llama, tied_embeddings: true, hidden: 64, ffn: 96, num_layers: 4, num_heads: 4, num_kv_heads: 2,
  vocab: 384, max_positions: 256}}
data: {{sources: [{{path: "hub:some/text", text_key: body}}], tokenizer: ./base, sequence_length: 256}}
layout: {{dp_replicate: 4, tp: 2}}
{TRAINING}"""
AUTOMODEL = f"""\
model: {{name: ./base, weights: random}}
data: {{sources: [{{path: corpus.bin}}], sequence_length: 256}}
layout: {{dp_shard: 4, dp_replicate: 2}}
{TRAINING}"""
FACTORY = f"""\
model: ./base
data:
  sources: [{{path: own.json, format: alpaca}}, {{path: "hub:some/talks", format: messages, split: test}}]
  sequence_length: 256
  packing: padded
  held_out: 0.1
finetune: {{method: lora, rank: 4, alpha: 8, targets: [q_proj, v_proj]}}
layout: {{dp_replicate: 2}}
{TRAINING.replace("warmup: 5", "warmup: 5, final: 0")}"""
FOUNDRY = f"""\
model: ./base
data: {{sources: [{{path: own.jsonl, format: messages}}], sequence_length: 256, packing: padded}}
finetune: {{method: lora, rank: 4, alpha: 8, targets: [q_proj, v_proj]}}
layout: {{dp_shard: 4, dp_replicate: 2}}
{TRAINING}"""
RECIPES = {
    "llm_foundry": FOUNDRY,
    "llama_factory": FACTORY,
    "automodel": AUTOMODEL,
    "nanotron": NANOTRON,
    "torchtitan": TITAN,
    "megatron_lm": MEGATRON,
    "megatron_bridge": MEGATRON,
}
MIXED = "data.sources=[{path: a.bin, weight: 0.25}, {path: b/c.bin, weight: 0.75}]"
TINY = "hidden: 64, num_layers: 4, num_heads: 4, vocab: 384, max_positions: 256"
VARIANTS = {
    "torchtitan": [
        [],
        ["layout={tp: 2, pp: 2, dp_replicate: 2}", "training.recompute=none", "data.sources=[{path: own.csv}]"],
        ["layout={pp: 2, schedule: interleaved-1f1b}", "training.lr_schedule={name: wsd, decay: 9, final: 0.2}"],
        ["layout={dp_shard: 2, zero: 2}", "training.clip=null", "training.lr_schedule={name: constant, warmup: 0}"],
        ["layout={cp: 2, zero: 3}", "training.precision=fp32", "training.compile=true", "checkpoint.every=0"],
        ["model=llama-3.2-1b", "data.sources=[{path: 'hub:some/text', subset: en, split: validation}]", "layout={}"],
        ["model=qwen3-0.6b", "trackers=[wandb]", "training.seed=7", "training.deterministic=true", "layout={}"],
        ["training.master_dtype=bf16", "training.lr_schedule.name=linear", "layout={dp_shard: 2, offload: cpu}"],
    ],
    "megatron_lm": [
        [],
        ["layout={tp: 2, pp: 2, dp_replicate: 2}", "training.recompute=none", MIXED, "data.held_out=0"],
        ["layout={pp: 2, schedule: interleaved-1f1b}", "training.lr_schedule={name: wsd, decay: 9, final: 0.2}"],
        ["layout={dp_shard: 2, zero: 2}", "training.clip=null", "training.lr_schedule={name: constant, warmup: 0}"],
        ["layout={dp_shard: 2}", "training.precision=fp32", "checkpoint.every=0", "training.recompute=selective"],
        ["layout={cp: 2, zero: 1}", "model=llama-3.2-1b", "trackers=[wandb]", "data.separate_documents=true"],
        [f"model={{family: gpt2, {TINY}}}", "training.lr_schedule.name=linear", "layout={}", "training.seed=7"],
        [f"model={{family: qwen2, num_kv_heads: 2, {TINY}}}", "training.precision=fp16", "layout={}"],
        ["model=qwen3-0.6b", "training.reduce_dtype=bf16", "training.deterministic=true", "layout={}"],
        [
            f"model={{family: mixtral, num_experts: 4, balance_loss: 0.01, {TINY}}}",
            "layout={dp_shard: 2, zero: 1, ep: 2}",
        ],
    ],
}
VARIANTS["megatron_bridge"] = [
    row for row in VARIANTS["megatron_lm"] if not any("gpt2" in word or "reduce_dtype" in word for word in row)
]
VARIANTS["nanotron"] = [
    [],
    ["layout={dp_shard: 4, zero: 1, pp: 2}", "training.recompute=none", "data.sources=[{path: ./base}]"],
    ["layout={pp: 2, schedule: afab}", "training.lr_schedule={name: wsd, decay: 9, final: 0.2}"],
    ["layout={}", "training.clip=null", "training.lr_schedule={name: constant, warmup: 0}", "checkpoint.every=0"],
    ["training.precision=fp32", "training.lr_schedule={name: linear, warmup: 0}", "training.seed=7"],
    ["model.tied_embeddings=false", "training.optimizer.weight_decay=0", "model.rope_theta=5e5"],
    [
        f"model={{family: qwen2, num_kv_heads: 2, tied_embeddings: true, {TINY}}}",
        "data.sources=[{path: 'hub:a/b', subset: en}]",
    ],
    [
        "training={reduce_dtype: bf16, master_dtype: bf16, optimizer: {state_dtype: bf16, rounding: nearest}}",
    ],
]
CHAT = "data={sources: [{path: own.jsonl, format: messages}], packing: padded, sequence_length: 256}"
VARIANTS["automodel"] = [
    [],
    ["layout={dp_replicate: 2}", MIXED, "data.held_out=0", "training.recompute=selective", "trackers=[wandb]"],
    ["layout={tp: 2, dp_shard: 2, zero: 2}", "training.lr_schedule={name: wsd, decay: 9, final: 0.2}"],
    ["layout={pp: 2}", "training.lr_schedule={name: constant, warmup: 0}", "checkpoint.every=0"],
    ["layout={cp: 2, zero: 3}", "training.precision=fp32", "training.lr_schedule.name=linear", "training.seed=7"],
    ["model.weights=pretrained", "finetune={method: full}", CHAT, "layout={}", "training.recompute=none"],
    [
        *("model.weights=pretrained", "finetune={method: lora, dora: true, dropout: 0.1, rank: 4}", CHAT),
        *("data.packing=best_fit", "data.separate_documents=true", "data.chat.train_on=last"),
    ],
    [
        "training={reduce_dtype: bf16, master_dtype: bf16, optimizer: {state_dtype: bf16, rounding: nearest}}",
        "training.compile=true",
    ],
]
VARIANTS["llama_factory"] = [
    [],
    ["data.packing=best_fit", "data.separate_documents=true", "data.chat.train_on=all", "training.recompute=none"],
    ["finetune={method: lora, base: nf4, rslora: true, b_lr_ratio: 16, dropout: 0.1}", "data.chat.template=chatml"],
    [
        *("model.weights=random", "finetune={method: full}", "data.packing=concatenated", "training.clip=null"),
        *("data.sources=[{path: a.jsonl, format: text, text_key: body}]", "training.optimizer.name=adamw_8bit"),
    ],
    [
        *("data.sources=[{path: pairs.json, format: preference}]", "training.preference={beta: 0.2}"),
        *("data.separate_documents=true", "finetune={method: full, last_layers: 2}", "data.order=given"),
    ],
    [
        *("training.lr_schedule={name: constant, warmup: 0}", "training.precision=fp16", "trackers=[wandb]"),
        *("data.sources=[{path: a.json, format: prompt_completion}, {path: b/a.json, format: sharegpt}]", "layout={}"),
    ],
]
VARIANTS["llm_foundry"] = [
    [],
    ["layout={dp_replicate: 2}", "training.recompute=none", "data.chat.train_on=last", "finetune={method: full}"],
    ["layout={dp_shard: 2, zero: 2}", "training.lr_schedule={name: linear, warmup: 0}", "data.packing=best_fit"],
    ["layout={dp_shard: 2, dp_replicate: 2, zero: 2}", "training.reduce_dtype=bf16", "data.chat.train_on=all"],
    [
        *("training.lr_schedule={name: constant, warmup: 3}", "training.precision=fp32", "training.clip=null"),
        *("data.sources=[{path: 'hub:some/talks', subset: en, split: test}]", "trackers=[wandb]", "data.order=given"),
    ],
    [
        *("finetune={method: lora, dora: true, rslora: true, dropout: 0.1, train: [lm_head]}", "layout={dp_shard: 2}"),
        *("data.sources=[{path: a.parquet, format: prompt_completion}]", "training.compile=true", "training.seed=7"),
    ],
    [
        *("model.weights=random", "finetune=null", "training.precision=fp16", "checkpoint.every=0"),
        *("training.optimizer.weight_decay=0", "layout={}", "training.recompute=none"),
    ],
    ["training={reduce_dtype: bf16, master_dtype: bf16, optimizer: {state_dtype: bf16, rounding: nearest}}"],
]
LAUNCHED = ("megatron_bridge", "llama_factory", "llm_foundry")
"""Systems whose launcher receives the number of ranks; their file does not."""
REFUSED = {
    "llm_foundry": {
        "model.name": "model=llama-3.1-8b",
        "data.sources": "data.sources=[{path: a.json, format: alpaca}]",
        "data.packing": "data.packing=concatenated",
        "data.separate_documents": "data.separate_documents=true",
        "data.chat.template": "data.chat.template=chatml",
        "training.lr_schedule.name": "training.lr_schedule.name=wsd",
        "training.optimizer.name": "training.optimizer.name=muon",
        "training.precision": "training.precision=fp8",
        "training.deterministic": "training.deterministic=true",
        "layout.zero": "layout={dp_shard: 2, zero: 1}",
        "layout.tp": "layout={tp: 2}",
        "layout.offload": "layout={dp_shard: 2, offload: cpu}",
        "finetune.base": "finetune.base=nf4",
    },
    "llama_factory": {
        "model.name": "model=llama-3.1-8b",
        "data.sources": "data.sources=[own.jsonl]",
        "training.lr_schedule.final": "training.lr_schedule.final=0.1",
        "training.optimizer.name": "training.optimizer.name=muon",
        "layout.zero": "layout={dp_shard: 2, zero: 3}",
        "layout.tp": "layout={tp: 2}",
    },
    "automodel": {
        "model.name": "model=llama-3.1-8b",
        "training.clip": "training.clip=null",
        "training.precision": "training.precision=fp8",
        "training.optimizer.name": "training.optimizer.name=muon",
        "data.sources": "data.sources=[own.jsonl]",
        "layout.zero": "layout={tp: 2, dp_replicate: 2}",
        "layout.schedule": "layout={pp: 2, schedule: zbv}",
        "training.preference": "training.preference={}",
        "training.deterministic": "training.deterministic=true",
    },
    "nanotron": {
        "model.weights": "model=./base",
        "model.family": "model=qwen3-0.6b",
        "model.rope_scaling": "model.rope_scaling={factor: 8}",
        "training.optimizer.weight_decay": "model.tied_embeddings=false",
        "training.optimizer.name": "training.optimizer.name=muon",
        "training.precision": "training.precision=fp16",
        "data.sources": "data.sources=[own.jsonl]",
        "data.separate_documents": "data.separate_documents=true",
        "data.packing": "data.packing=best_fit",
        "layout.zero": "layout={dp_shard: 2, zero: 3}",
        "layout.cp": "layout={cp: 2}",
        "layout.schedule": "layout={pp: 2, schedule: zbv}",
        "finetune": "finetune={method: lora}",
    },
    "torchtitan": {
        "model.name": "model=./base",
        "data.separate_documents": "data.separate_documents=false",
        "data.packing": "data.packing=best_fit",
        "data.sources": "data.sources=[a.jsonl, b.jsonl]",
        "training.optimizer.name": "training.optimizer.name=muon",
        "training.precision": "training.precision=fp8",
        "training.reduce_dtype": "training.reduce_dtype=bf16",
        "layout.zero": "layout={dp_shard: 2, zero: 1}",
        "layout.quantized_weights": "layout={dp_shard: 2, quantized_weights: int8}",
        "finetune": "finetune={method: lora}",
    },
    "megatron_lm": {
        "model.weights": "model=./base",
        "model.family": "model=mistral-7b-v0.3",
        "data.packing": "data.packing=best_fit",
        "data.sources": "data.sources=[a.jsonl]",
        "data.order": "data.order=given",
        "training.optimizer.name": "training.optimizer.name=adamw_8bit",
        "training.precision": "training.precision=fp8",
        "training.master_dtype": "training.master_dtype=bf16",
        "layout.schedule": "layout={pp: 2, schedule: zbv}",
        "layout.offload": "layout={dp_shard: 2, offload: cpu}",
    },
    "megatron_bridge": {
        "model.family": f"model={{family: gpt2, {TINY}}}",
        "training.reduce_dtype": "training.reduce_dtype=bf16",
        "model.rope_scaling": "model.rope_scaling={kind: yarn, factor: 4}",
        "data.sources": "data.sources=[a.bin, b.bin]",
    },
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(CONFIG)
    save_file({"none": np.zeros(1, np.float32)}, tmp_path / "base" / "model.safetensors")
    return tmp_path


def resolved(name: str, *overrides: str) -> ResolvedRun:
    return resolve_run(parse_spec(RECIPES[name], Run, overrides), base_dir=Path())


@pytest.mark.every(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_exported_configuration_imports_as_the_same_recipe(folder, name):
    for overrides in VARIANTS[name]:
        run = resolved(name, *overrides)
        translation = WRITTEN[name].translate(run)
        assert not translation.left_out, overrides
        ranks = run.run.layout.world_size if name in LAUNCHED else None
        translation.write(folder / "out")
        text, reading = import_files([folder / "out" / file for file in translation.files], ranks=ranks)
        assert not reading.without, overrides  # every key that is written is also read
        again = resolve_run(parse_spec(text, Run), base_dir=Path())
        assert again.model.model_copy(update={"max_positions": run.model.max_positions}) == run.model, overrides
        assert (again.global_batch, again.micro_batch) == (run.global_batch, run.micro_batch), overrides
        assert again.run.layout.world_size == run.run.layout.world_size, overrides
        assert WRITTEN[name].translate(again).files == translation.files, overrides


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in REFUSED.items() for path in paths])
@pytest.mark.every(1)
def test_what_a_system_does_not_say_is_refused_by_name(folder, name, path):
    with pytest.raises(InexpressibleError, match=re.escape(path)):
        WRITTEN[name].translate(resolved(name, REFUSED[name][path]))


def test_the_verb_writes_the_configuration_and_what_the_system_does_in_its_own_way(folder, capsys):
    (folder / "run.yaml").write_text(TITAN)
    words = ["export", "run.yaml", "guards.spikes=skip", "--engine", "torchtitan", "--program"]
    assert main([*words, "out"]) == 0
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["left-out.md", "run_torchtitan.py"]
    told = (folder / "out" / "left-out.md").read_text()
    assert "guards.spikes=skip" in told
    assert "no text is held out" in told
    assert "torchtitan" in capsys.readouterr().out
    (folder / RESOLVED).touch()
    with pytest.raises(UserError, match=r"is a run, whose settings are fixed; .* to override guards\.spikes=skip"):
        run_at(folder, words[2:3])
    assert main(["export", ".", "guards.spikes=skip", "--hf", "other"]) == 2
    assert "settings are overridden with --program and a recipe only" in capsys.readouterr().err


def test_a_run_that_is_not_fine_tuned_is_full_fine_tuning_elsewhere(folder):
    run = resolved("llama_factory", "finetune=null")
    assert not WRITTEN["llama_factory"].translate(run).left_out
    assert "finetuning_type: full" in WRITTEN["llama_factory"].translate(run).files["llama_factory.yaml"]


def test_the_names_of_engines_that_are_only_written_are_known(folder):
    assert all(name in WRITTEN_ONLY for name in WRITTEN)  # the help of export
    with pytest.raises(UserError, match="can only be exported"):
        find_engine("torchtitan")
    with pytest.raises(UserError, match=r"unknown engine 'torchtitn'; known are .*torchtitan.* 'torchtitan'"):
        find_engine("torchtitn", written=True)
