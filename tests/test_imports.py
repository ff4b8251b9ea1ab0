"""Configuration files of other systems: no key is dropped silently, and the recipe describes the same training."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.imports.nanogpt import read_assignments
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError
from meshwright.spec.offload import OffloadSpec
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import Run

DEEPSPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 500}},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "steps_per_print": 2000,
    "something_new": 3,
}
ARGUMENTS = """\
output_dir: out
learning_rate: 2e-5
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
max_steps: 1000
lr_scheduler_type: cosine
warmup_ratio: 0.03
bf16: true
gradient_checkpointing: true
optim: adamw_bnb_8bit
save_steps: 100
save_total_limit: 3
report_to: [wandb, mlflow]
logging_steps: 10
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_activation_checkpointing: true
"""
AXOLOTL = """\
base_model: llama-3.2-1b
datasets:
  - path: someone/some-data
    type: alpaca
  - path: ./conversations.jsonl
    type: chat_template
sequence_len: 2048
sample_packing: true
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 3
num_epochs: 2
optimizer: adamw_torch
lr_scheduler: linear
learning_rate: 0.0002
bf16: auto
warmup_steps: 10
val_set_size: 0.1
evals_per_epoch: 4
"""
NANOGPT = """\
# a comment
wandb_log = True
batch_size = 12
block_size = 512
n_layer = 6
n_head = 6
n_embd = 384
gradient_accumulation_steps = 5 * 8
max_iters = 6000
learning_rate = 1e-3
min_lr = 1e-4
dropout = 0.2
"""
MEGATRON = """\
#!/bin/bash
LAYERS=12
GPUS=8
torchrun --nproc_per_node $GPUS --nnodes 2 pretrain_gpt.py \\
    --num-layers ${LAYERS} --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --swiglu \\
    --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --train-iters 5000 --lr 6.0e-5 \\
    --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-fraction .01 --clip-grad 0.7 --bf16 --adam-beta2 0.95 \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer \\
    --data-path 0.3 one_text_document 0.7 other_text_document --split 900,50,50 --tensorboard-dir $LOGS --weird-flag 3
"""
CASES: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "deepspeed": (
        {"ds_config.json": json.dumps(DEEPSPEED)},
        {"ranks": 8, "model": "gpt2"},
        {
            "training.global_batch": 64,
            "training.micro_batch": 4,
            "training.clip": 0.5,
            "training.steps": 500,
            "training.lr_schedule.name": "cosine",
            "training.lr_schedule.warmup": 10,
            "training.optimizer.betas": (0.8, 0.9),
            "training.optimizer.eps": 1e-7,
            "training.optimizer.weight_decay": 3e-7,
            "training.precision": "bf16",
            "layout.dp_shard": 8,
            "layout.zero": 2,
            "layout.offload": OffloadSpec(optimizer="host"),
        },
    ),
    "arguments": (
        {"args.yaml": ARGUMENTS},
        {"ranks": 4, "model": "gpt2"},
        {
            "training.global_batch": 32,
            "training.optimizer.name": "adamw_8bit",
            "training.optimizer.weight_decay": 0.0,
            "training.optimizer.betas": (0.9, 0.999),
            "training.lr_schedule.warmup": 30,
            "training.lr_schedule.final": 0.0,
            "training.recompute": "full",
            "training.seed": 42,
            "checkpoint.keep_last": 3,
            "layout.dp_replicate": 4,
            "trackers": ("wandb",),
        },
    ),
    "accelerate": (
        {"accelerate.yaml": ACCELERATE, "args.yaml": ARGUMENTS},
        {"model": "gpt2"},
        {"layout.dp_shard": 8, "layout.zero": 3, "training.global_batch": 64, "training.recompute": "full"},
    ),
    "axolotl": (
        {"axolotl.yml": AXOLOTL},
        {"ranks": 2},
        {
            "model.name": "llama-3.2-1b",
            "data.packing": "best_fit",
            "data.separate_documents": True,
            "data.held_out": 0.1,
            "finetune.rank": 32,
            "finetune.base": "nf4",
            "training.global_batch": 12,
            "training.lr_schedule.name": "linear",
            "training.precision": "bf16",
        },
    ),
    "nanogpt": (
        {"train.py": NANOGPT},
        {"ranks": 4},
        {
            "model.family": "gpt2",
            "model.hidden": 384,
            "training.global_batch": 480,
            "training.lr_schedule.final": 0.1,
            "training.lr_schedule.warmup": 2000,
            "trackers": ("wandb",),
        },
    ),
    "megatron": (
        {"pretrain.sh": MEGATRON},
        {},
        {
            "model.family": "llama",
            "model.num_layers": 12,
            "layout.tp": 2,
            "layout.pp": 2,
            "layout.dp_shard": 4,
            "layout.zero": 1,
            "training.clip": 0.7,
            "training.lr_schedule.warmup": 50,
            "training.optimizer.betas": (0.9, 0.95),
            "training.optimizer.weight_decay": 0.01,
            "data.held_out": 0.1,
        },
    ),
}


def written(folder: Path, case: str) -> tuple[list[Path], dict[str, Any]]:
    files, words, _ = CASES[case]
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files], words


@pytest.mark.parametrize("case", CASES)
def test_files_become_the_same_training(tmp_path, case):
    paths, words = written(tmp_path, case)
    run = parse_spec(import_files(paths, **words)[0], Run)
    for path, value in CASES[case][2].items():
        found: Any = run
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value, path


@pytest.mark.parametrize("case", CASES)
def test_every_key_is_an_origin_or_has_no_counterpart(tmp_path, case):
    """Read from the text: every enabled key is in the recipe, as the origin of a line or at its top."""
    paths, words = written(tmp_path, case)
    text, _ = import_files(paths, **words)
    off = {"fp16", "loss_scale", "compute_environment", "gradient_accumulation_steps", "distributed_type"}
    for content in CASES[case][0].values():
        keys = re.findall(r"--([\w-]+)|^ *(\w+) ?[:=]|\"(\w+)\":(?! \{)", content, flags=re.MULTILINE)
        for key in ("".join(found) for found in keys):
            nested = key in ("fsdp_config", "type", "path", "enabled", "LAYERS", "GPUS", "num_attention_heads")
            assert nested or key in off or re.search(rf"\b{re.escape(key)}\b", text), key


def test_a_recipe_is_checked_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "deepspeed")
    words = ["import", "ds_config.json", "--ranks", "8", "--model", "gpt2"]
    assert main([*words, "--write", "run.yaml"]) == 0
    assert "no counterpart: ds_config.json: something_new=3" in capsys.readouterr().err
    assert main(["check", "run.yaml"]) == 0
    assert main([*words, "--write", "run.yaml"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["origins"]["layout.zero"].endswith("zero_optimization.stage=2")


BAD = {
    "nothing.yaml": ("a: 1\n", "unknown format; supported are"),
    "broken.json": ("{", "cannot be read"),
    "code.py": ("import os\nos.remove('x')\n", r"code.py:2: only lines 'name = constant' are supported"),
    "args.yaml": (ARGUMENTS, "give --model"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_imported_is_one_sentence(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(BAD[name][0])
    assert main(["import", name]) == 2
    assert re.search(BAD[name][1], capsys.readouterr().err)


def test_ranks_must_fit_and_files_must_agree(tmp_path):
    paths, _ = written(tmp_path, "megatron")
    paths[0].write_text(MEGATRON.replace("--nnodes 2", "").replace("GPUS=8", "GPUS=6"))
    with pytest.raises(UserError, match="tp x pp x cp = 4 does not divide 6 ranks"):
        import_files(paths)
    paths, words = written(tmp_path, "accelerate")
    paths[1].write_text(ARGUMENTS.replace("bf16: true", "fp16: true"))
    text, reading = import_files(paths, **words)
    assert parse_spec(text, Run).training.precision == "bf16"
    assert any("fp16=True" in origin for origin, _ in reading.without)


def test_values_of_several_words_are_kept(tmp_path):
    path = tmp_path / "grows.sh"
    path.write_text(MEGATRON.replace("--bf16", "--bf16 --rampup-batch-size 16 16 5859375"))
    text, reading = import_files([path])
    assert any(origin.endswith("rampup-batch-size=16 16 5859375") for origin, _ in reading.without)
    run = parse_spec(text, Run)
    assert [(source.path, source.weight) for source in run.data.sources] == [
        ("one_text_document.bin", 0.3),
        ("other_text_document.bin", 0.7),
    ]


def test_a_constant_rate_has_no_floor_and_no_warm_up(tmp_path):
    path = tmp_path / "finetune.py"
    path.write_text("learning_rate = 3e-5\ndecay_lr = False\n")
    run = parse_spec(import_files([path], ranks=1)[0], Run)
    assert run.training.lr_schedule.name == "constant"
    assert run.training.lr_schedule.warmup == 0


def test_python_is_read_and_never_run(tmp_path):
    assert read_assignments("a = 2 * 3\nb = a + 1\nc = 'x'\n", "f") == {"a": 6, "b": 7, "c": "x"}
    assert read_assignments("name = 'run' + str(time.time())\n", "f") == {"name": "'run' + str(time.time())"}
    with pytest.raises(UserError, match="no code is run"):
        read_assignments("open('x', 'w')\n", "f")


LISTS = (f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))
DOUBLED = "\n".join(["base_model: x", "a0: &a0 [1, 1]", *LISTS])
"""A hundred lines of YAML that expand to 2^40 values."""

HOSTILE = {
    "aliases.yaml": (DOUBLED, "more than 20000 values"),
    "itself.yaml": ("base_model: x\ndatasets: &a [*a]\n", "more than 20000 values, or is nested too deeply"),
    "tag.yaml": ("base_model: !!int ''\n", "cannot be read"),
    "object.yaml": ("base_model: !!python/object/apply:os.system ['touch ran']\n", "cannot be read"),
    "deep.json": ("[" * 100_000, "nested too deeply"),
    "nan.json": ('{"train_batch_size": NaN}', "NaN is not a number"),
    "huge.json": ('{"train_batch_size": 1e999}', "not finite"),
    "long.yaml": ("base_model: x\n" + "#" * 300_000, "larger than 262144 bytes"),
    "bytes.yaml": (b"base_model: \xff\n", r"not UTF-8 text \(byte 12\)"),
    "words.json": ('{"train_batch_size": 8, "gradient_accumulation_steps": "8"}', "whole number, at least 1"),
    "zero.json": ('{"train_micro_batch_size_per_gpu": 0}', "whole number, at least 1"),
    "stage.json": ('{"zero_optimization": {"stage": 7}}', "a ZeRO stage must be 0, 1, 2 or 3"),
    "list.json": ('{"gradient_clipping": [1]}', r"gradient_clipping=\[1\]: this value is not allowed"),
    "sets.yaml": ("base_model: x\ndatasets: 5\n", "datasets=5: this value is not allowed"),
    "format.yaml": ("distributed_type: NO\nnum_processes: '%s'\n", "whole number, at least 1"),
    "power.py": ("a = 999999999999999\nb = a * a\n", "power.py:2: b cannot be evaluated: the number is too large"),
    "nothing.py": ("a = 1 / 0\n", "nothing.py:1: a cannot be evaluated: division by zero"),
    "minus.py": ("a = " + "-" * 100_000 + "1\n", "cannot be read as Python"),
    "null.py": ("a = 1\0\n", "Python"),
    "quote.sh": ("--num-layers 2 'x\n", "no closing quotation"),
    "grows.sh": ("A=" + "x" * 1000 + "\n" + "$A " * 2000 + "--num-layers 2\n", "longer than 1048576 characters"),
    "split.sh": ("--num-layers 2 --split 0,0\n", "split=0,0: this value is not allowed"),
    "blank.sh": ("\n" * 200_000 + "--num-layers x --hidden-size 8\n", "num_layers"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.every(1)
def test_hostile_files_are_one_sentence_at_once(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    content, expected = HOSTILE[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["import", name, "--model", "gpt2"]) == 2
    said = capsys.readouterr().err
    assert re.search(expected, said), said
    assert len(said) < 1000
    assert not (tmp_path / "ran").exists()


def test_words_of_a_file_cannot_become_settings(tmp_path):
    """A key without a counterpart becomes a one-line comment in the recipe, whatever it contains."""
    lines = "x\\nrun_dir: /etc\\u2028run_dir: /etc\\u0085run_dir: /etc"
    path = tmp_path / "ds\nrun_dir: here\n.json"
    path.write_text(f'{{"train_batch_size": 8, "odd\\nrun_dir: there": "{lines}", "gradient_clipping": "auto"}}')
    text, _ = import_files([path], model="gpt2-124m", ranks=1)
    assert parse_spec(text, Run).run_dir == Run.model_fields["run_dir"].get_default()
    assert all("run_dir" not in line.split("#")[0] for line in text.splitlines())
