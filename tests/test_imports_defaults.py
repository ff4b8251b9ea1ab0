"""Defaults of other systems, and settings that stand in two places: imported, or named in the report."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError

ARGUMENTS = {"output_dir": "out", "learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_steps": 5000}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000, "warmup_num_steps": 100, "cos_min_ratio": 0.02}}


def imported(folder: Path, ranks: int = 8, **files: Any) -> tuple[dict[str, Any], Reading]:
    """The recipe of these files (`s_json` is s.json; text is written as it is), and the reading."""
    paths = []
    for name, content in files.items():
        paths.append(folder / name.replace("_", "."))
        text = content if isinstance(content, str) else json.dumps(content)
        paths[-1].write_text(text)
    text, reading = import_files(paths, ranks=ranks, model="gpt2")
    return yaml.safe_load(text), reading


def deepspeed(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "zero_optimization": {"stage": 2}, **keys}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("WarmupLR", {"name": "constant", "warmup": 1000}),
        ("WarmupDecayLR", {"name": "linear", "warmup": 1000, "final": 0.0}),
        ("WarmupCosineLR", {"name": "cosine", "warmup": 1000, "final": 1e-4}),
    ],
)
def test_deepspeeds_schedules_have_deepspeeds_defaults(tmp_path: Path, kind: str, expected: dict[str, Any]) -> None:
    params = {} if kind == "WarmupLR" else {"total_num_steps": 5000}
    scheduler = {"type": kind, "params": {**params, "warmup_max_lr": 1e-3}}
    recipe, reading = imported(tmp_path, s_json=deepspeed(scheduler=scheduler))
    assert recipe["training"]["lr_schedule"] == expected
    assert any("warms up logarithmically" in note for note in reading.notes)
    scheduler["params"]["warmup_type"] = "linear"
    _, reading = imported(tmp_path, s_json=deepspeed(scheduler=scheduler))
    assert not any("logarithmically" in said for said in (*reading.notes, *(f"{pair}" for pair in reading.without)))


def test_a_warm_up_that_another_file_sets_or_no_run_has_is_not_deepspeeds_default(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    recipe, _ = imported(tmp_path, s_json=deepspeed(scheduler=scheduler), args_json=ARGUMENTS | {"warmup_steps": 3})
    assert recipe["training"]["lr_schedule"]["warmup"] == 3
    recipe, _ = imported(tmp_path, s_json=deepspeed(scheduler=scheduler, train_batch_size=16), args_json=ARGUMENTS)
    assert recipe["training"]["lr_schedule"]["warmup"] == 0
    short = {"type": "WarmupDecayLR", "params": {"total_num_steps": 500}}
    recipe, reading = imported(tmp_path, s_json=deepspeed(scheduler=short))
    assert "warmup" not in recipe["training"]["lr_schedule"]
    assert any("a warm-up of 1000 steps" in origin and "exceeds the 500" in why for origin, why in reading.without)


def test_a_file_without_a_schedule_says_so(tmp_path: Path) -> None:
    _, reading = imported(tmp_path, s_json=deepspeed())
    assert any("has no scheduler" in note and "constant" in note for note in reading.notes)
    _, reading = imported(tmp_path, s_json=deepspeed(train_batch_size=16), args_json=ARGUMENTS)  # which have one
    assert not any("has no scheduler" in note for note in reading.notes)


def test_of_two_final_rates_deepspeeds_wins(tmp_path: Path) -> None:
    arguments = ARGUMENTS | {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    zero = deepspeed(scheduler=COSINE, train_batch_size=16)
    recipe, reading = imported(tmp_path, ds_json=zero, args_json=arguments)
    assert recipe["training"]["lr_schedule"]["final"] == 0.02
    assert [why for origin, why in reading.without if "min_lr_rate" in origin] == [
        "ds.json: scheduler.params.cos_min_ratio=0.02 sets training.lr_schedule.final=0.02"
    ]
    recipe, _ = imported(tmp_path, args_json=arguments, ds_json=zero)
    assert recipe["training"]["lr_schedule"]["final"] == 0.02


@pytest.mark.parametrize(("machines", "layout"), [(2, {"dp_shard": 8, "dp_replicate": 2}), (1, {"dp_shard": 16})])
def test_hybrid_sharding_is_within_machines(tmp_path: Path, machines: int, layout: dict[str, int]) -> None:
    recipe, _ = imported(
        tmp_path,
        16,
        a_yaml={
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "num_processes": 16,
            "num_machines": machines,
            "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"},
        },
    )
    assert recipe["layout"] == {**layout, "zero": 3}


def test_hybrid_sharding_over_machines_of_different_sizes_is_named(tmp_path: Path) -> None:
    config = {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}, "distributed_type": "FSDP"}
    accelerate = {"compute_environment": "LOCAL_MACHINE", "num_processes": 16, "num_machines": 3, **config}
    recipe, reading = imported(tmp_path, 16, a_yaml=accelerate)
    assert recipe["layout"] == {"dp_shard": 16, "zero": 3}
    assert any("3 machines do not divide 16 processes" in why for _, why in reading.without)


def test_hybrid_sharding_over_unknown_machines_is_noted(tmp_path: Path) -> None:
    recipe, reading = imported(tmp_path, args_yaml=ARGUMENTS | {"fsdp": "hybrid_shard auto_wrap"})
    assert recipe["layout"] == {"dp_shard": 8, "zero": 3}
    assert any("shards within a machine" in note for note in reading.notes)


@pytest.mark.parametrize("strategy", [{}, {"eval_strategy": "no"}, {"eval_strategy": False}])
def test_the_trainer_evaluates_only_where_it_is_told_to(tmp_path: Path, strategy: dict[str, Any]) -> None:
    recipe, reading = imported(tmp_path, args_yaml=ARGUMENTS | {"eval_steps": 7} | strategy)
    assert "evaluation" not in recipe["training"]
    assert any("eval_steps=7" in origin for origin, _ in reading.without)
    recipe, _ = imported(tmp_path, args_yaml=ARGUMENTS | {"eval_steps": 7, "eval_strategy": "steps"})
    assert recipe["training"]["evaluation"] == {"every": 7}


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
@pytest.mark.parametrize("fsdp", [True, "full_shard auto_wrap"])
def test_the_trainers_fsdp_configuration_counts(tmp_path: Path, fsdp: bool | str, prefix: str) -> None:
    keys = {f"{prefix}reshard_after_forward": False, f"{prefix}activation_checkpointing": True, "fsdp_version": 2}
    recipe, _ = imported(tmp_path, args_json=ARGUMENTS | {"fsdp": fsdp, "fsdp_config": keys})
    assert recipe["layout"] == {"dp_shard": 8, "zero": 2}
    assert recipe["training"]["recompute"] == "full"
    recipe, reading = imported(tmp_path, args_json=ARGUMENTS | {"fsdp_config": keys})
    assert recipe["layout"] == {"dp_replicate": 8}
    assert any("without fsdp" in why for _, why in reading.without)
    recipe, _ = imported(tmp_path, args_json=ARGUMENTS | {"fsdp": True})
    assert recipe["layout"] == {"dp_shard": 8, "zero": 3}
    recipe, _ = imported(tmp_path, args_json=ARGUMENTS | {"fsdp": True, "fsdp_config": {"cpu_offload": True}})
    assert recipe["layout"] == {"dp_shard": 8, "zero": 3, "offload": "cpu"}
    first = {"zero_optimization": {"stage": 1}, "train_batch_size": 16}
    recipe, reading = imported(tmp_path, ds_json=first, args_json=ARGUMENTS | {"fsdp": fsdp, "fsdp_config": keys})
    assert recipe["layout"] == {"dp_shard": 8, "zero": 1}
    assert any("zero=1" in why for _, why in reading.without)


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
steps = 100
[parallelism]
pipeline_parallel_degree = 2
data_parallel_shard_degree = 4
"""


@pytest.mark.parametrize(
    ("more", "micro", "zero"),
    [
        ("", 1, 2),
        ("pipeline_parallel_microbatch_size = 4\n", 4, 2),
        ('fsdp_reshard_after_forward = "default"\n', 1, 2),
        ('fsdp_reshard_after_forward = "always"\n', 1, 3),
    ],
)
def test_torchtitans_pipelines_split_batches_and_keep_weights(tmp_path: Path, more: str, micro: int, zero: int) -> None:
    recipe, _ = imported(tmp_path, t_toml=TITAN + more)
    assert recipe["layout"] == {"dp_shard": 4, "pp": 2, "zero": zero}
    assert recipe["training"]["micro_batch"] == micro
    assert recipe["training"]["global_batch"] == 32
    assert recipe["training"]["lr_schedule"]["warmup"] == 100  # torchtitan's 200, but not more than all steps


def test_axolotls_column_of_messages_is_kept(tmp_path: Path) -> None:
    dataset = {"path": "d.jsonl", "type": "chat_template", "field_messages": "dialog"}
    text = yaml.safe_dump({"base_model": "gpt2", "datasets": [dataset], "micro_batch_size": 1, "learning_rate": 1e-4})
    recipe, _ = imported(tmp_path, 1, a_yml=text)
    assert recipe["data"]["sources"] == [{"path": "d.jsonl", "format": "messages", "columns": {"messages": "dialog"}}]


SCRIPT = r"""#!/bin/bash
GPUS_PER_NODE=8
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes 2"   # of every machine
GPT_ARGS="
    --num-layers 24 \
    --hidden-size 1024 --num-attention-heads 16
    --lr 0.00015 --fp16
"
GPT_ARGS="$GPT_ARGS --seq-length 512"
GPT_ARGS+=" --clip-grad 0.5"
DATA_ARGS='--data-path data/text_document --split 9,1,0'
"""


@pytest.mark.parametrize(
    "use", ["$GPT_ARGS $DATA_ARGS", '"$GPT_ARGS" ${DATA_ARGS}', '\\\n  "${GPT_ARGS}" \\\n $DATA_ARGS']
)
def test_flags_in_quoted_variables_are_read(tmp_path: Path, use: str) -> None:
    (tmp_path / "pretrain.sh").write_text(f"{SCRIPT}torchrun $DISTRIBUTED_ARGS pretrain_gpt.py {use}\n")
    text, reading = import_files([tmp_path / "pretrain.sh"])
    recipe = yaml.safe_load(text)
    assert recipe["model"]["num_layers"] == 24
    assert recipe["model"]["hidden"] == 1024
    assert recipe["training"]["precision"] == "fp16"
    assert recipe["training"]["clip"] == 0.5
    assert recipe["data"]["sequence_length"] == 512
    assert recipe["data"]["held_out"] == 0.1
    assert recipe["layout"] == {"dp_replicate": 16}
    assert not reading.without


@pytest.mark.parametrize(
    "command",
    [
        "--bf16 2>&1 | tee log",
        "--bf16 > log",
        "--bf16  # don't use fp16",
        "${ARGS[@]}\nARGS=(\n  --bf16 # half\n  --seed 3\n)\n",
    ],
)
def test_what_follows_a_switch_is_not_its_value(tmp_path: Path, command: str) -> None:
    (tmp_path / "pretrain.sh").write_text(
        f"{SCRIPT.replace(' --fp16', '')}torchrun pretrain_gpt.py $GPT_ARGS {command}\n"
    )
    text, _ = import_files([tmp_path / "pretrain.sh"])
    assert yaml.safe_load(text)["training"]["precision"] == "bf16"


def test_a_variable_that_hides_flags_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pretrain.sh").write_text(f"{SCRIPT}torchrun pretrain_gpt.py $GPT_ARGS $MOE_ARGS\n")
    with pytest.raises(UserError, match=r"pretrain\.sh: \$MOE_ARGS holds flags, but the file does not set it"):
        import_files([tmp_path / "pretrain.sh"])


def test_a_variable_that_grows_without_end_is_refused(tmp_path: Path) -> None:
    doubled = 'A="$A $A $A $A"\n' * 40
    (tmp_path / "pretrain.sh").write_text(f'A="--num-layers 2"\n{doubled}torchrun pretrain_gpt.py $A\n')
    with pytest.raises(UserError, match="is longer than 1048576 characters"):
        import_files([tmp_path / "pretrain.sh"])


@pytest.mark.parametrize(
    "line",
    [
        'ALL_ARGS="$EXTRA --num-layers 3 --hidden-size 64 --num-attention-heads 4"\ntorchrun p.py "$ALL_ARGS"',
        'MODEL="--num-layers 3 --hidden-size 64 --num-attention-heads 4"',  # another script runs with it
        'MODEL="--num-layers 3"\nMODEL="$MODEL --hidden-size 64 --num-attention-heads 4"',
    ],
)
def test_flags_in_strings_are_never_lost(tmp_path: Path, line: str) -> None:
    (tmp_path / "pretrain.sh").write_text(f"#!/bin/bash\n{line}\n")
    text, _ = import_files([tmp_path / "pretrain.sh"])
    model = yaml.safe_load(text)["model"]
    assert (model["num_layers"], model["hidden"], model["num_heads"]) == (3, 64, 4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.toml", TITAN.replace("steps = 100", 'steps = "abc"'), r"t\.toml: training\.steps=abc: must be a whole"),
        ("t.toml", TITAN.replace("steps", 'global_batch_size = "x"\nsteps'), r"t\.toml: training\.global_batch_size=x"),
        ("s.json", json.dumps(deepspeed(scheduler={"type": ["a"]})), None),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path: Path, name: str, content: str, message: str | None) -> None:
    (tmp_path / name).write_text(content)
    if message:
        with pytest.raises(UserError, match=message):
            import_files([tmp_path / name])
    else:
        _, reading = import_files([tmp_path / name], ranks=8, model="gpt2")
        assert any("scheduler.type=['a']" in origin for origin, _ in reading.without)


@pytest.mark.parametrize(("said", "steps"), [("None", None), ("40", 40)])
def test_automodel_reads_none_as_python_does(tmp_path: Path, said: str, steps: int | None) -> None:
    text = (
        "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n"
        "  pretrained_model_name_or_path: gpt2\n"
        f"step_scheduler: {{max_steps: {said}, ckpt_every_steps: 30, global_batch_size: 8, local_batch_size: 1}}\n"
        "optimizer: {_target_: torch.optim.AdamW, lr: 1e-5}\n"
    )
    recipe, _ = imported(tmp_path, a_yaml=text)
    assert recipe["training"].get("steps") == steps
    assert recipe["training"]["optimizer"]["lr"] == 1e-5
    assert recipe["checkpoint"]["every"] == 30
    for wrong in (text.replace(said, "many"), text.replace(": 30", ": often")):
        with pytest.raises(UserError, match=r"a\.yaml: step_scheduler\.\w+=(many|often)"):
            imported(tmp_path, a_yaml=wrong)
