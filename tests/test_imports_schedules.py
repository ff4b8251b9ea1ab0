"""Schedules of other systems: those that end by themselves, and those that no recipe has. Accelerate's Megatron-LM."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def told(reading: Reading, key: str) -> str:
    """The reasons why keys with this text have no counterpart; empty if there are none."""
    return "\n".join(why for origin, why in reading.without if key in origin)


def deepspeed(kind: str, lr: float = 1e-3, **params: Any) -> dict[str, Any]:
    """A DeepSpeed file with a scheduler."""
    optimizer = {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95]}}
    start = {"train_batch_size": 16, "gradient_clipping": 1.0, "optimizer": optimizer}
    return {**start, "scheduler": {"type": kind, "params": params}}


CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3, "cycle_first_step_size": 1000, "cycle_momentum": False}


@pytest.mark.parametrize(
    ("kind", "params", "steps", "schedule", "lr"),
    [
        ("OneCycle", CYCLE, 2000, {"name": "linear", "warmup": 1000, "final": 0.05}, 2e-3),
        (
            "OneCycle",
            {**CYCLE, "cycle_second_step_size": 3000},
            4000,
            {"name": "linear", "warmup": 1000, "final": 0.05},
            2e-3,
        ),
        (
            "CosineAnnealingLR",
            {"T_max": 900, "eta_min": 1e-4},
            900,
            {"name": "cosine", "warmup": 0, "final": 0.1},
            1e-3,
        ),
        ("CosineAnnealingLR", {"T_max": 900}, 900, {"name": "cosine", "warmup": 0, "final": 0.0}, 1e-3),
        ("PolynomialLR", {"total_iters": 900}, 900, {"name": "linear", "warmup": 0, "final": 0.0}, 1e-3),
        (
            "LinearLR",
            {"total_iters": 900, "start_factor": 1.0, "end_factor": 0.2},
            900,
            {"name": "linear", "warmup": 0, "final": 0.2},
            1e-3,
        ),
    ],
)
def test_a_schedule_with_steps_of_its_own_is_imported(
    tmp_path: Path, kind: str, params: dict[str, Any], steps: int, schedule: dict[str, Any], lr: float
) -> None:
    recipe, reading = imported(tmp_path, ds_json=deepspeed(kind, **params))
    training = recipe["training"]
    assert training["steps"] == steps
    assert training["lr_schedule"] == schedule
    assert training["optimizer"]["lr"] == lr
    assert not told(reading, "scheduler.")


def test_a_schedule_that_ends_elsewhere_than_the_run_says_so(tmp_path: Path) -> None:
    recipe, reading = imported(tmp_path, ds_json=deepspeed("OneCycle", **CYCLE), args_json=ARGUMENTS)
    assert recipe["training"]["steps"] == 5000
    assert "ends after 2000 steps" in told(reading, "cycle_first_step_size=1000")
    assert any("cycle_min_lr" in note and "starts at 0" in note for note in reading.notes)


def test_what_a_recipes_cycle_lacks_is_named(tmp_path: Path) -> None:
    cycle = {key: value for key, value in CYCLE.items() if key != "cycle_momentum"}
    _, reading = imported(tmp_path, ds_json=deepspeed("OneCycle", **cycle, cycle_min_mom=0.8, decay_step_size=10))
    assert "betas of a recipe are constant" in told(reading, "cycle_momentum=True")
    assert "betas of a recipe are constant" in told(reading, "cycle_min_mom")
    assert "nothing follows the cycle" in told(reading, "decay_step_size")


@pytest.mark.parametrize(
    ("kind", "params", "key"),
    [
        ("LRRangeTest", {"lr_range_test_min_lr": 1e-4}, "scheduler.type=LRRangeTest"),
        ("ExponentialLR", {"gamma": 0.9}, "scheduler.type=ExponentialLR"),
        ("LinearLR", {"total_iters": 10}, "(PyTorch's default)"),
    ],
)
def test_a_schedule_that_no_recipe_has_says_which_one_the_recipe_has(
    tmp_path: Path, kind: str, params: dict[str, Any], key: str
) -> None:
    recipe, reading = imported(tmp_path, ds_json=deepspeed(kind, **params))
    assert recipe["training"]["lr_schedule"]["name"] == "cosine"
    assert "the recipe's schedule is cosine instead" in told(reading, key)
    assert "in place of" in reading.settings["training.lr_schedule.name"][1]
    _, reading = imported(
        tmp_path, ds_json=deepspeed(kind, **params), args_json={**ARGUMENTS, "lr_scheduler_type": "linear"}
    )
    assert "DeepSpeed's schedule is used" in told(reading, "lr_scheduler_type=linear")
    assert "the recipe's schedule is cosine instead" in told(reading, key)


@pytest.mark.parametrize("kind", ["inverse_sqrt", "reduce_lr_on_plateau"])
def test_a_schedule_of_the_trainer_that_no_recipe_has_is_named_with_the_recipes(tmp_path: Path, kind: str) -> None:
    arguments = {**ARGUMENTS, "lr_scheduler_type": kind, "lr_scheduler_kwargs": {"timescale": 10}}
    recipe, reading = imported(tmp_path, args_json=arguments)
    assert recipe["training"]["lr_schedule"]["name"] == "cosine"
    assert "the recipe's schedule is cosine instead" in told(reading, f"lr_scheduler_type={kind}")
    assert told(reading, "lr_scheduler_kwargs")


def test_a_schedule_of_megatron_that_no_recipe_has_is_named_with_the_recipes(tmp_path: Path) -> None:
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --lr-decay-style inverse-square-root"
    recipe, reading = imported(tmp_path, run_sh=f"python pretrain_gpt.py {flags}\n")
    assert recipe["training"]["lr_schedule"]["name"] == "cosine"
    assert "the recipe's schedule is cosine instead" in told(reading, "lr-decay-style")


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("OneCycle", {"cycle_max_lr": 1e-3}, "cycle_min_lr is missing"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "cycle_first_step_size=0: must be a whole number"),
        ("OneCycle", {**CYCLE, "cycle_min_lr": "low"}, "cycle_min_lr=low: must be a number"),
        ("CosineAnnealingLR", {}, "T_max is missing"),
        ("PolynomialLR", {"total_iters": "all"}, "total_iters=all: must be a whole number"),
    ],
)
def test_wrong_parameters_of_a_schedule_end_in_one_line(
    tmp_path: Path, kind: str, params: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        imported(tmp_path, ds_json=deepspeed(kind, **params))


def test_a_list_is_no_schedule_of_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lr_scheduler_type=\['cosine'\]: must be a schedule's name"):
        imported(tmp_path, args_json={**ARGUMENTS, "lr_scheduler_type": ["cosine"]})


MEGATRON = """\
compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
mixed_precision: bf16
num_processes: 16
megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_pp_degree: 2
  megatron_lm_num_micro_batches: 4
  megatron_lm_sequence_parallelism: true
  megatron_lm_use_distributed_optimizer: true
"""


def test_accelerates_megatron_is_imported(tmp_path: Path) -> None:
    more = (
        "  megatron_lm_gradient_clipping: 0.5\n  megatron_lm_recompute_granularity: full\n"
        "  megatron_lm_recompute_method: block\n  megatron_lm_recompute_num_layers: 3\n"
        "  megatron_lm_context_parallel_size: 2\n  megatron_lm_expert_tensor_parallel_size: 2\n"
    )
    recipe, reading = imported(tmp_path, None, a_yaml=MEGATRON + more, args_json=ARGUMENTS)
    layout = {"tp": 2, "pp": 2, "cp": 2, "dp_shard": 2, "zero": 1}
    assert {key: recipe["layout"].get(key) for key in layout} == layout
    training = recipe["training"]
    assert (training["clip"], training["recompute"]) == (0.5, {"full": 3})
    assert (training["micro_batch"], training["global_batch"]) == (2, 2 * 4 * 2)
    assert told(reading, "expert_tensor_parallel_size=2") == "experts are not split"
    assert not told(reading, "MEGATRON_LM")
    assert not [note for note in reading.notes if "context_parallel_size" in note or "recompute" in note]


def test_defaults_of_accelerates_megatron_are_told(tmp_path: Path) -> None:
    recipe, reading = imported(tmp_path, None, a_yaml=MEGATRON, args_json={**ARGUMENTS, "max_grad_norm": 0.7})
    assert recipe["training"]["clip"] == 1.0
    assert told(reading, "max_grad_norm=0.7")
    notes = "\n".join(reading.notes)
    assert "context_parallel_size: Accelerate 1.15 then takes 2" in notes
    assert "recompute_granularity: Accelerate 1.15 then takes full" in notes


def test_a_wrong_degree_of_accelerates_megatron_ends_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tp_degree=two: must be a whole number"):
        imported(tmp_path, None, a_yaml=MEGATRON.replace("tp_degree: 2", "tp_degree: two"), args_json=ARGUMENTS)
