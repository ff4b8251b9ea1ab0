"""Files of DeepSpeed, transformers, Accelerate and LLaMA-Factory: the recipe trains as they do, or the report says why
not."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.imports.claims import NoEffect
from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError

ARGUMENTS = {"output_dir": "out", "learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_steps": 5000}


def imported(folder: Path, ranks: int | None = 8, **files: Any) -> tuple[dict[str, Any], Reading]:
    """The recipe of these files (`ds_json` is ds.json), and the reading."""
    paths = []
    for name, content in files.items():
        paths.append(folder / name.replace("_", "."))
        paths[-1].write_text(content if isinstance(content, str) else json.dumps(content))
    text, reading = import_files(paths, ranks=ranks, model="gpt2")
    return yaml.safe_load(text), reading


def told(reading: Reading, key: str) -> list[str]:
    """The reasons why keys with this text have no counterpart."""
    return [why for origin, why in reading.without if key in origin]


def deepspeed(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 16, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, **keys}


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": {"warmup_type": "linear", "warmup_num_steps": 50, **params}}


def test_without_a_scheduler_deepspeed_keeps_the_rate(tmp_path: Path) -> None:
    adam = {"type": "AdamW", "params": {"lr": 2e-4}}
    recipe, reading = imported(tmp_path, ds_json=deepspeed(optimizer=adam))
    assert recipe["training"]["lr_schedule"] == {"name": "constant", "warmup": 0}
    assert reading.settings["training.lr_schedule.name"][1] == "ds.json (DeepSpeed's default: no scheduler)"
    assert not any("has no optimizer" in note for note in reading.notes)
    for arguments in (ARGUMENTS, ARGUMENTS | {"lr_scheduler_type": "linear"}):
        recipe, _ = imported(tmp_path, ds_json=deepspeed(optimizer=adam), args_json=arguments)
        assert recipe["training"]["lr_schedule"] == {"name": "linear", "warmup": 0, "final": 0.0}


def test_without_an_optimizer_a_note_says_that_the_program_has_one(tmp_path: Path) -> None:
    recipe, reading = imported(tmp_path, ds_json=deepspeed())
    assert "optimizer" not in recipe["training"]
    assert any("ds.json has no optimizer" in note for note in reading.notes)
    _, reading = imported(tmp_path, ds_json=deepspeed(), args_json=ARGUMENTS)
    assert not any("has no optimizer" in note for note in reading.notes)


@pytest.mark.parametrize("order", [("ds_json", "args_json"), ("args_json", "ds_json")])
def test_what_deepspeeds_scheduler_omits_is_deepspeeds_default(tmp_path: Path, order: tuple[str, str]) -> None:
    files = {
        "ds_json": deepspeed(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}}),
        "args_json": ARGUMENTS | {"learning_rate": 2e-4, "warmup_steps": 10, "lr_scheduler_type": "cosine"},
    }
    recipe, reading = imported(tmp_path, **{name: files[name] for name in order})
    assert recipe["training"]["lr_schedule"] == {"name": "linear", "warmup": 1000, "final": 0.0}
    assert recipe["training"]["optimizer"]["lr"] == 0.001
    assert told(reading, "learning_rate=0.0002") == ["ds.json (DeepSpeed's default) sets training.optimizer.lr=0.001"]
    assert told(reading, "warmup_steps=10") == ["ds.json (DeepSpeed's default) sets training.lr_schedule.warmup=1000"]
    assert told(reading, "lr_scheduler_type=cosine") == [
        "DeepSpeed's schedule is used: ds.json: scheduler.type=WarmupDecayLR"
    ]


def test_what_deepspeeds_optimizer_omits_is_deepspeeds_default(tmp_path: Path) -> None:
    arguments = ARGUMENTS | {"weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    recipe, reading = imported(
        tmp_path, args_json=arguments, ds_json=deepspeed(optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    )
    assert recipe["training"]["optimizer"] == {
        "name": "adamw",
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "lr": 1e-3,
    }
    assert all(told(reading, key) for key in ("weight_decay=0.1", "adam_beta2=0.95", "adam_epsilon=1e-06"))


@pytest.mark.parametrize(
    ("params", "decay", "lr"),
    [
        ({}, 0.0, 1e-3),
        ({"torch_adam": True, "lr": 3e-4}, 0.01, 3e-4),
        ({"torch_adam": True, "weight_decay": 0}, 0, 1e-3),
    ],
)
def test_deepspeeds_adam_has_its_own_decay_and_rate(
    tmp_path: Path, params: dict[str, Any], decay: float, lr: float
) -> None:
    recipe, reading = imported(tmp_path, ds_json=deepspeed(optimizer={"type": "AdamW", "params": params}))
    assert recipe["training"]["optimizer"]["weight_decay"] == decay
    assert recipe["training"]["optimizer"]["lr"] == lr
    assert not reading.without


@pytest.mark.parametrize(
    ("kind", "params", "lr", "final"),
    [
        ("WarmupDecayLR", {"total_num_steps": 900}, 0.001, 0.0),
        ("WarmupDecayLR", {"total_num_steps": 900, "warmup_max_lr": 4e-4}, 4e-4, 0.0),
        ("WarmupDecayLR", {"total_num_steps": 900, "warmup_max_lr": 4e-4, "warmup_min_lr": 1e-4}, 4e-4, 0.25),
        ("WarmupDecayLR", {"total_num_steps": 900, "warmup_max_lr": 4e-4, "warmup_min_lr": "auto"}, 4e-4, 0.0),
        ("WarmupLR", {"warmup_max_lr": 4e-4, "warmup_min_lr": 1e-4}, 4e-4, None),
        ("WarmupLR", {}, 2e-5, None),
        ("WarmupCosineLR", {"total_num_steps": 900}, 2e-5, 1e-4),
    ],
)
def test_deepspeeds_schedule_sets_the_peak(
    tmp_path: Path, kind: str, params: dict[str, Any], lr: float, final: float | None
) -> None:
    adam = {"type": "AdamW", "params": {"lr": 2e-5}}
    recipe, reading = imported(tmp_path, ds_json=deepspeed(optimizer=adam, scheduler=scheduler(kind, **params)))
    assert recipe["training"]["optimizer"]["lr"] == lr
    assert recipe["training"]["lr_schedule"].get("final") == final
    assert bool(told(reading, "optimizer.params.lr=2e-05")) == (lr != 2e-5)
    assert any("warm-up starts at 0" in note for note in reading.notes) == (params.get("warmup_min_lr") == 1e-4)


def test_a_final_rate_without_a_peak_is_named(tmp_path: Path) -> None:
    params = {"total_num_steps": 900, "warmup_max_lr": "auto", "warmup_min_lr": 1e-4}
    _, reading = imported(tmp_path, ds_json=deepspeed(scheduler=scheduler("WarmupDecayLR", **params)))
    assert told(reading, "warmup_min_lr") == ["the peak rate is unknown; set training.lr_schedule.final"]
    arguments = {"per_device_train_batch_size": 2, "max_steps": 900}  # whose rate is 5e-5
    options = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}
    recipe, _ = imported(tmp_path, args_json=arguments | options)
    assert recipe["training"]["lr_schedule"]["final"] == 0.2


def test_empty_sections_are_settings_that_are_off(tmp_path: Path) -> None:
    config = deepspeed(
        scheduler={"type": "WarmupLR", "params": {}},
        optimizer={"type": "Adam", "params": {}},
        activation_checkpointing={},
    )
    _, reading = imported(tmp_path, ds_json=config)
    assert not reading.without


def test_deepspeeds_own_auto_is_not_another_files(tmp_path: Path) -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    _, reading = imported(tmp_path, ds_json=deepspeed(zero_optimization=zero))
    listed = [reason for origin, reason in reading.no_effect if "reduce_bucket_size=auto" in origin]
    assert listed == [NoEffect.OVERLAP]
    assert not any("bucket_size" in note for note in reading.notes)


def test_gradients_are_clipped_as_deepspeed_does(tmp_path: Path) -> None:
    config = deepspeed()
    del config["gradient_clipping"]
    recipe, reading = imported(tmp_path, args_json=ARGUMENTS | {"max_grad_norm": 0.5}, ds_json=config)
    assert recipe["training"]["clip"] == 1.0
    assert told(reading, "max_grad_norm=0.5")


@pytest.mark.parametrize("key", ["warmup_max_lr", "warmup_min_lr"])
def test_a_rate_that_is_no_number_is_one_sentence(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match=f"ds.json: scheduler.params.{key}=fast: must be a number"):
        imported(tmp_path, ds_json=deepspeed(scheduler=scheduler("WarmupDecayLR", **{key: "fast"})))
    with pytest.raises(UserError, match="a learning rate must be above 0"):
        imported(
            tmp_path, ds_json=deepspeed(scheduler=scheduler("WarmupDecayLR", warmup_min_lr=1e-5, warmup_max_lr=0.0))
        )


@pytest.mark.parametrize(
    ("name", "note"),
    [("configs/ds.json", None), ("other.json", "ds.json was taken for it")],
)
def test_a_named_deepspeed_file_is_asked_for_only_if_it_is_missing(tmp_path: Path, name: str, note: str | None) -> None:
    arguments = ARGUMENTS | {"deepspeed": name}
    _, reading = imported(tmp_path, args_json=arguments, ds_json=deepspeed())
    assert [said for said in reading.notes if name in said] == (
        [f"args.json: deepspeed={name}: {note}"] if note else []
    )
    _, reading = imported(tmp_path, args_json=arguments)
    assert f"args.json: deepspeed={name}: pass that file too" in reading.notes


def test_deepspeeds_configuration_within_the_arguments_is_read(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 3, "new_key": 1}, "gradient_clipping": 0.5}
    recipe, reading = imported(tmp_path, args_json=ARGUMENTS | {"deepspeed": zero, "max_grad_norm": 2.0})
    assert recipe["layout"] == {"dp_shard": 8, "zero": 3}
    assert recipe["training"]["clip"] == 0.5
    assert reading.settings["layout.zero"][1].endswith("args.json: deepspeed: zero_optimization.stage=3")
    assert told(reading, "args.json: deepspeed: zero_optimization.new_key=1")
    assert told(reading, "max_grad_norm=2.0")


def test_the_trainers_batch_and_epochs_are_its_defaults(tmp_path: Path) -> None:
    recipe, reading = imported(tmp_path, args_json={"output_dir": "out", "learning_rate": 1e-4})
    assert recipe["training"]["micro_batch"] == 8
    assert recipe["training"]["global_batch"] == 64
    assert recipe["training"]["epochs"] == 3
    assert reading.settings["training.epochs"][1].endswith("(the Trainer's default): num_train_epochs=3")
    _, reading = imported(tmp_path, args_json=ARGUMENTS)
    assert not told(reading, "epochs")


def test_accumulation_without_a_micro_batch_is_used_or_named(tmp_path: Path) -> None:
    config = {"train_batch_size": 64, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    recipe, reading = imported(tmp_path, ds_json=config)
    assert recipe["training"]["micro_batch"] == 4
    del config["train_batch_size"]
    _, reading = imported(tmp_path, ds_json=config)
    assert told(reading, "gradient_accumulation_steps=2") == [
        "the micro batch is unknown; set training.micro_batch and training.global_batch"
    ]


def test_shards_must_divide_the_ranks(tmp_path: Path) -> None:
    zero = {"stage": 3, "mics_shard_size": 3}
    with pytest.raises(UserError, match=r"mics_shard_size=3: 3 does not divide 8 data-parallel ranks"):
        imported(tmp_path, ds_json=deepspeed(zero_optimization=zero))


def accelerate(**keys: Any) -> dict[str, Any]:
    return {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8, **keys}


def parallel(**sizes: Any) -> dict[str, Any]:
    return {f"parallelism_config_{name}": size for name, size in sizes.items()}


FSDP2 = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
AXES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hybrid": ({"dp_replicate_size": 2, "dp_shard_size": 4}, {"dp_shard": 4, "dp_replicate": 2, "zero": 3}),
    "tensor": ({"dp_shard_size": 4, "tp_size": 2, "cp_size": 1}, {"tp": 2, "dp_shard": 4, "zero": 3}),
    "context": (
        {"dp_shard_size": 4, "cp_size": 2, "sp_size": 1, "cp_comm_strategy": "allgather"},
        {"cp": 2, "cp_method": "all_gather", "dp_shard": 4, "zero": 3},
    ),
    "context alone": (
        {"cp_size": 8, "cp_comm_strategy": "alltoall"},
        {"cp": 8, "cp_method": "ring", "zero": 3},
    ),
    "over heads": ({"sp_size": 2, "cp_size": 1}, {"cp": 2, "cp_method": "ulysses", "dp_shard": 4, "zero": 3}),
    "nothing": ({"dp_shard_size": 1, "tp_size": 1}, {"dp_shard": 8, "zero": 3}),
}


@pytest.mark.parametrize("name", AXES)
def test_accelerates_axes_are_the_layouts(tmp_path: Path, name: str) -> None:
    sizes, layout = AXES[name]
    config = accelerate(fsdp_config=FSDP2, parallelism_config=parallel(**sizes))
    recipe, reading = imported(tmp_path, None, a_yaml=config, args_json=ARGUMENTS)
    assert recipe["layout"] == layout
    assert not told(reading, "parallelism_config")


def test_axes_that_accelerate_refuses_are_refused(tmp_path: Path) -> None:
    config = accelerate(fsdp_config=FSDP2, parallelism_config=parallel(dp_shard_size=2, tp_size=2))
    with pytest.raises(UserError, match="dp_shard_size=2 x tp_size=2 is not num_processes=8; make them equal"):
        imported(tmp_path, None, a_yaml=config)
    config = accelerate(fsdp_config=FSDP2, parallelism_config=parallel(dp_shard_size="x"))
    with pytest.raises(UserError, match="dp_shard_size=x: must be a whole number"):
        imported(tmp_path, None, a_yaml=config)


@pytest.mark.parametrize("prefix", ["dynamo_", ""])
def test_dynamo_compiles(tmp_path: Path, prefix: str) -> None:
    section = {f"{prefix}backend": "INDUCTOR", f"{prefix}mode": "max-autotune-no-cudagraphs"}
    recipe, _ = imported(tmp_path, None, a_yaml=accelerate(dynamo_config=section))
    assert recipe["training"]["compile"] is True
    assert recipe["training"]["compile_mode"] == "max-autotune-no-cudagraphs"
    section = {f"{prefix}backend": "EAGER", f"{prefix}mode": "reduce-overhead", f"{prefix}use_dynamic": True}
    recipe, reading = imported(tmp_path, None, a_yaml=accelerate(dynamo_config=section))
    assert "compile" not in recipe["training"]
    assert all(told(reading, key) for key in ("backend=EAGER", "mode=reduce-overhead"))
    assert any("use_dynamic=True" in origin for origin, _ in reading.no_effect)
    recipe, reading = imported(tmp_path, None, a_yaml=accelerate(dynamo_backend="NO"))
    assert "compile" not in recipe["training"]
    assert not told(reading, "dynamo")


@pytest.mark.parametrize(
    ("section", "offload", "without"),
    [
        ({"offload_optimizer_device": "cpu", "offload_param_device": "none"}, {"optimizer": "host"}, []),
        ({"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}, "cpu", []),
        (
            {
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": "/fast",
                "offload_param_device": "none",
            },
            {"optimizer": "disk", "directory": "/fast"},
            [],
        ),
        ({"offload_param_device": "nvme", "offload_param_nvme_path": "/fast"}, "cpu", ["offload_param_device"]),
    ],
)
def test_accelerates_offloading_is_deepspeeds(
    tmp_path: Path, section: dict[str, Any], offload: Any, without: list[str]
) -> None:
    config = accelerate(distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 3, **section})
    recipe, reading = imported(tmp_path, None, a_yaml=config)
    assert recipe["layout"] == {"dp_shard": 8, "zero": 3, "offload": offload}
    assert [origin.split("_config.")[1].split("=")[0] for origin, _ in reading.without] == without


def test_accelerates_deepspeed_has_stage_2_and_its_accumulation(tmp_path: Path) -> None:
    section = {"gradient_accumulation_steps": 4, "deepspeed_hostfile": "~/hosts"}
    config = accelerate(distributed_type="DEEPSPEED", deepspeed_config=section)
    recipe, reading = imported(tmp_path, None, a_yaml=config)
    assert recipe["layout"] == {"dp_shard": 8, "zero": 2}
    assert told(reading, "gradient_accumulation_steps=4")
    assert not any("accumulation" in origin for origin in reading.already_so)
    recipe, reading = imported(tmp_path, None, a_yaml=config, args_json=ARGUMENTS)
    assert recipe["training"]["global_batch"] == 64
    assert not told(reading, "accumulation")
    named = accelerate(distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": "ds.json"})
    recipe, _ = imported(tmp_path, None, a_yaml=named, ds_json=deepspeed(zero_optimization={"stage": 1}))
    assert recipe["layout"] == {"dp_shard": 8, "zero": 1}


FP8: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "torchao": ({"backend": "AO", "enable_fsdp_float8_all_gather": True}, {"recipe": "tensorwise"}, ["all_gather"]),
    "of the last step": ({"fp8_backend": "TE", "margin": 2}, {"recipe": "delayed", "amax_history": 1, "margin": 2}, []),
    "of several steps": (
        {"backend": "TE", "amax_compute_algo": "max", "amax_history_len": 16, "fp8_format": "HYBRID"},
        {"recipe": "delayed", "amax_history": 16},
        [],
    ),
    "unread": (
        {"backend": "TE", "amax_history_length": 16, "fp8_format": "E4M3"},
        {"recipe": "delayed", "amax_history": 1},
        ["amax_history_length=16", "fp8_format=E4M3"],
    ),
    "unnamed": ({}, {"recipe": "tensorwise"}, []),
}


@pytest.mark.parametrize("name", FP8)
def test_accelerates_fp8_has_a_recipe(tmp_path: Path, name: str) -> None:
    section, expected, without = FP8[name]
    recipe, reading = imported(tmp_path, None, a_yaml=accelerate(mixed_precision="fp8", fp8_config=section))
    assert recipe["training"]["precision"] == "fp8"
    assert recipe["training"]["low_precision"] == expected
    assert len(reading.without) == len(without)
    assert all(told(reading, key) for key in without)
    assert any("no backend is named" in note for note in reading.notes) == (not section)


def test_without_mixed_precision_accelerate_computes_in_fp32(tmp_path: Path) -> None:
    recipe, _ = imported(tmp_path, None, a_yaml=accelerate())
    assert recipe["training"]["precision"] == "fp32"
    recipe, _ = imported(tmp_path, None, a_yaml=accelerate(), args_json=ARGUMENTS | {"bf16": True})
    assert recipe["training"]["precision"] == "bf16"
    _, reading = imported(tmp_path, None, a_yaml=accelerate(mixed_precision="bf16"))
    assert any("reduces gradients in bf16" in note for note in reading.notes)


def factory(**keys: Any) -> dict[str, Any]:
    return {
        "model_name_or_path": "gpt2",
        "stage": "sft",
        "finetuning_type": "lora",
        "dataset": "a, b",
        "cutoff_len": 64,
        "max_steps": 10,
        "bf16": True,
        **keys,
    }


def test_data_sets_in_turns_are_weighted(tmp_path: Path) -> None:
    turns = {"mix_strategy": "interleave_under", "interleave_probs": "0.7,0.3"}
    recipe, reading = imported(tmp_path, 1, f_json=factory(**turns))
    assert recipe["data"]["sources"] == [{"path": "data/a.json", "weight": 0.7}, {"path": "data/b.json", "weight": 0.3}]
    assert "interleave_probs=0.7,0.3" in reading.settings["data.sources"][1]
    assert any("shares of tokens, not chances of an example" in note for note in reading.notes)
    assert told(reading, "mix_strategy=interleave_under")
    recipe, _ = imported(tmp_path, 1, f_json=factory(mix_strategy="interleave_over"))
    assert [source["weight"] for source in recipe["data"]["sources"]] == [1.0, 1.0]
    recipe, reading = imported(tmp_path, 1, f_json=factory(mix_strategy="concat", interleave_probs="0.7,0.3"))
    assert all("weight" not in source for source in recipe["data"]["sources"])
    assert told(reading, "interleave_probs")
    with pytest.raises(UserError, match="1 chances for 2 data sets"):
        imported(tmp_path, 1, f_json=factory(mix_strategy="interleave_over", interleave_probs="0.7"))
    with pytest.raises(UserError, match="interleave_probs=x,y: this value is not allowed"):
        imported(tmp_path, 1, f_json=factory(interleave_probs="x,y"))


def test_what_changes_the_model_is_not_said_to_have_no_effect(tmp_path: Path) -> None:
    keys = {"shift_attn": True, "resize_vocab": True, "quantization_method": "hqq", "adapter_name_or_path": "a,b"}
    _, reading = imported(tmp_path, 1, f_json=factory(**keys))
    for key in keys:
        assert len(told(reading, key)) == 1
        assert "does not affect" not in told(reading, key)[0]


@pytest.mark.parametrize("packing", [{"packing": True}, {"packing": True, "neat_packing": True}, {"packing": False}])
def test_what_was_imported_is_not_listed_as_without_effect(tmp_path: Path, packing: dict[str, bool]) -> None:
    recipe, reading = imported(tmp_path, 1, f_json=factory(dataset_dir="sets", **packing))
    assert recipe["data"]["packing"] == ("best_fit" if packing["packing"] else "padded")
    assert recipe["data"]["sources"][0]["path"] == "sets/a.json"
    assert not reading.already_so


def test_freezing_trains_the_last_layers(tmp_path: Path) -> None:
    recipe, reading = imported(tmp_path, 1, f_json=factory(finetuning_type="freeze", lora_rank=8, lora_target="all"))
    assert recipe["finetune"] == {"method": "full", "last_layers": 2}
    assert all("without finetuning_type=lora" in told(reading, key)[0] for key in ("lora_rank", "lora_target"))
    recipe, _ = imported(tmp_path, 1, f_json=factory(finetuning_type="freeze", freeze_trainable_layers=3))
    assert recipe["finetune"] == {"method": "full", "last_layers": 3}
    recipe, reading = imported(tmp_path, 1, f_json=factory(finetuning_type="full", freeze_trainable_layers=3))
    assert recipe["finetune"] == {"method": "full"}
    assert told(reading, "freeze_trainable_layers=3")
    recipe, reading = imported(tmp_path, 1, f_json=factory(finetuning_type="freeze", freeze_trainable_layers=-3))
    assert "last_layers" not in recipe["finetune"]
    assert told(reading, "freeze_trainable_layers=-3")


def test_a_method_without_a_counterpart_is_named(tmp_path: Path) -> None:
    recipe, reading = imported(tmp_path, 1, f_json=factory(finetuning_type="oft", oft_block_size=32))
    assert "finetune" not in recipe
    assert told(reading, "finetuning_type=oft") == ["supported: full, freeze, lora"]


def test_factorys_precisions(tmp_path: Path) -> None:
    recipe, _ = imported(tmp_path, 1, f_json=factory(bf16=False, pure_bf16=True, finetuning_type="full"))
    assert recipe["training"]["precision"] == "bf16"
    assert recipe["training"]["master_dtype"] == "bf16"
    assert recipe["training"]["optimizer"]["state_dtype"] == "bf16"
    assert recipe["training"]["optimizer"]["rounding"] == "nearest"
    recipe, _ = imported(tmp_path, 1, f_json=factory(fp8=True, fp8_backend="torchao", finetuning_type="full"))
    assert recipe["training"]["precision"] == "fp8"
    assert recipe["training"]["low_precision"] == {"recipe": "tensorwise"}


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_factorys_deepspeed_has_its_scheduler(tmp_path: Path, kind: str) -> None:
    config = deepspeed(train_batch_size="auto", scheduler=scheduler(kind, total_num_steps="auto", warmup_max_lr="auto"))
    arguments = factory(deepspeed="ds.json", learning_rate=1e-4, lr_scheduler_type="cosine")
    recipe, reading = imported(tmp_path, 1, f_json=arguments, ds_json=config)
    assert recipe["training"]["lr_schedule"]["name"] == {"WarmupLR": "constant", "WarmupDecayLR": "linear"}[kind]
    assert recipe["training"]["optimizer"]["lr"] == 1e-4
    assert recipe["training"]["micro_batch"] == 8
    assert told(reading, "lr_scheduler_type=cosine")


@pytest.mark.parametrize("make", [dict, factory])
def test_intervals_count_only_under_the_strategy_steps(tmp_path: Path, make: Any) -> None:
    arguments = {**make(), **ARGUMENTS, "eval_steps": 7, "save_steps": 9}
    cases: list[tuple[dict[str, Any], Any, Any]] = [
        ({}, None, 9),
        ({"eval_strategy": "steps"}, 7, 9),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, None, None),
        ({"eval_strategy": False, "save_strategy": False}, None, None),
        ({"save_steps": 0.1}, None, None),
    ]
    for keys, evaluates, saves in cases:
        recipe, reading = imported(tmp_path, 1, f_json=arguments | keys)
        assert recipe["training"].get("evaluation", {}).get("every") == evaluates
        assert recipe.get("checkpoint", {}).get("every") == saves
        assert bool(told(reading, "eval_steps=7")) == (evaluates is None)
        assert bool(told(reading, "save_steps=")) == (saves is None)
    recipe, _ = imported(tmp_path, 1, f_json={**make(), **ARGUMENTS, "eval_strategy": "steps", "logging_steps": 5})
    assert recipe["training"]["evaluation"]["every"] == 5
    assert recipe["checkpoint"]["every"] == 500


def test_a_backend_or_mode_compiles_in_the_trainer(tmp_path: Path) -> None:
    for key, value in (("torch_compile_backend", "inductor"), ("torch_compile_mode", "default")):
        recipe, reading = imported(tmp_path, 1, args_json=ARGUMENTS | {key: value})
        assert recipe["training"]["compile"] is True
        assert not told(reading, key)
    _, reading = imported(tmp_path, 1, args_json=ARGUMENTS | {"torch_compile_mode": "max-autotune"})
    assert told(reading, "torch_compile_mode=max-autotune")


@pytest.mark.parametrize("make", [dict, factory])
def test_a_share_of_the_steps_is_named_with_its_number(tmp_path: Path, make: Any) -> None:
    arguments = {**make(), **ARGUMENTS, "eval_steps": 0.0301, "save_steps": 0.1, "eval_strategy": "steps"}
    _, reading = imported(tmp_path, 1, f_json=arguments)
    assert told(reading, "save_steps=0.1") == ["a share of all steps; set checkpoint.every, in steps: 500"]
    assert told(reading, "eval_steps=") == ["a share of all steps; set training.evaluation.every, in steps: 151"]
    _, reading = imported(tmp_path, 1, f_json=arguments | {"max_steps": -1})
    assert told(reading, "save_steps=0.1") == ["a share of all steps; set checkpoint.every, in steps"]
    _, reading = imported(tmp_path, 1, f_json=arguments | {"save_strategy": "epoch"})
    assert told(reading, "save_steps=0.1") == ["the Trainer ignores it with the strategy epoch"]


@pytest.mark.parametrize(
    ("accelerates", "trainers", "ours", "lost"),
    [
        ("bf16", {"fp16": True}, "fp16", "mixed_precision=bf16"),
        ("fp8", {"bf16": True}, "bf16", "mixed_precision=fp8"),
        ("no", {"bf16": True}, "bf16", "mixed_precision=False"),
        ("bf16", {"bf16": False, "fp16": False}, "bf16", ""),
        ("fp8", {}, "fp8", ""),
        ("bf16", {"bf16": True}, "bf16", ""),
    ],
)
def test_a_precision_of_the_trainer_beside_accelerates_is_told_in_either_order(
    tmp_path: Path, accelerates: str, trainers: dict[str, Any], ours: str, lost: str
) -> None:
    config = f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: {accelerates}\n"
    arguments = {**ARGUMENTS, **trainers}
    recipe, reading = imported(tmp_path, args_json=arguments, acc_yaml=config)
    assert recipe["training"]["precision"] == ours
    assert ("low_precision" in recipe["training"]) == (ours == "fp8")
    assert not lost or told(reading, lost)
    recipe, reading = imported(tmp_path, acc_yaml=config, args_json=arguments)
    assert recipe["training"]["precision"] == {"no": "fp32"}.get(accelerates, accelerates)
    note = f"args.json: {ours}=True: the Trainer takes this, not Accelerate's precision"
    assert any(text.startswith(note) for text in reading.notes) == bool(lost)


FASTCHAT = """\
export WANDB_PROJECT=vicuna
torchrun --nproc_per_node=4 --master_port=20001 fastchat/train/train_mem.py \\
    --model_name_or_path gpt2 --data_path data/talks.json --bf16 True --output_dir out \\
    --num_train_epochs 3 --per_device_train_batch_size 2 --gradient_accumulation_steps 16 \\
    --learning_rate 2e-5 --weight_decay 0. --lr_scheduler_type "cosine" --fsdp "full_shard auto_wrap" \\
    --model-max-length 2048 --gradient_checkpointing True --tf32 True
"""


def test_flags_of_a_script_are_training_arguments(tmp_path: Path) -> None:
    """As FastChat's and Alpaca's scripts start the Trainer; the same as the arguments in a file."""
    recipe, reading = imported(tmp_path, None, train_sh=FASTCHAT)
    arguments = {"model_name_or_path": "gpt2", "bf16": True, "output_dir": "out", "num_train_epochs": 3}
    arguments |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16, "learning_rate": 2e-5}
    arguments |= {"weight_decay": 0.0, "lr_scheduler_type": "cosine", "fsdp": "full_shard auto_wrap"}
    arguments |= {"gradient_checkpointing": True, "max_length": 2048}
    expected, _ = imported(tmp_path, 4, args_json=arguments)
    assert recipe["data"] == {"sources": ["data/talks.json"], "sequence_length": 2048}
    recipe.pop("data"), expected.pop("data", None)
    assert recipe == expected
    assert recipe["layout"]["dp_shard"] == 4
    assert recipe["training"]["global_batch"] == 2 * 16 * 4
    assert not told(reading, "master_port")
    assert told(reading, "tf32")
    other = tmp_path / "other.sh"
    other.write_text("python train.py --lr 3\n")
    with pytest.raises(UserError, match=r"neither Megatron-LM's flags .* nor TrainingArguments"):
        import_files([other], ranks=1, model="gpt2")


def test_a_program_of_alpa_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import alpa\n\n@alpa.parallelize\ndef step(state, batch): ...\n")
    with pytest.raises(UserError, match="a program of Alpa, which is configured in code"):
        import_files([tmp_path / "train.py"], ranks=1, model="gpt2")
