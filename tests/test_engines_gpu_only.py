"""Variants of engines for GPUs only: the packages' own classes take their settings, and their programs refuse CPUs."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.cli.main import main
from meshwright.engines.deepspeed import DeepSpeedEngine
from meshwright.engines.engine import Engine, InexpressibleError
from meshwright.engines.registry import ENGINES, WRITTEN, find_engine
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 4, ffn: 64, vocab: 300, max_positions: 64}
data: {sources: a.txt, sequence_length: 32, tokenizer_vocab: 300}
training: {steps: 10, global_batch: 16, micro_batch: 2, precision: bf16}
layout: {dp_shard: 2}
"""
VARIANTS = {
    "hf_trainer_fsdp": [["training.reduce_dtype=bf16"], ["layout.zero=2", "training.precision=fp32"]],
    "accelerate_fsdp": [[], ["layout={dp_shard: 2, dp_replicate: 2}", "training.precision=fp32"], ["layout.zero=2"]],
    "accelerate_deepspeed": [[], ["layout={dp_shard: 4, zero: 1}"], ["layout.offload=cpu"]],
    "fabric_fsdp": [[], ["layout={dp_shard: 2, dp_replicate: 2}", "training.precision=fp32"], ["layout.zero=2"]],
    "fabric_deepspeed": [[], ["layout={dp_shard: 4, zero: 1}"], ["layout.offload=cpu"]],
    "lightning_fsdp": [[], ["layout={dp_shard: 2, dp_replicate: 2}", "training.precision=fp32"], ["layout.zero=2"]],
    "lightning_deepspeed": [[], ["layout={dp_shard: 4, zero: 1}"], ["layout.offload=cpu"]],
    "deepspeed": [["layout.quantized_weights=int8", "layout.quantized_gradients=int4"]],
}
ALL = [(name, number) for name, rows in VARIANTS.items() for number in range(len(rows))]


def engine_of(name: str) -> Engine:
    return find_engine(name, written=True)


def resolved(*overrides: str) -> ResolvedRun:
    return resolve_run(parse_spec(RECIPE, Run, overrides), base_dir=Path())


def call(text: str, name: str, **known: Any) -> Any:
    """The value of the program's call of `name`."""
    found = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
                 and isinstance(node.func, ast.Name) and node.func.id == name)  # fmt: skip
    return eval(compile(ast.Expression(found), "program", "eval"), known)


@pytest.mark.parametrize(("name", "number"), ALL)
@pytest.mark.every(1)
def test_a_program_imports_as_its_recipe_and_says_that_it_needs_gpus(tmp_path, name, number):
    run = resolved(*VARIANTS[name][number])
    translation = engine_of(name).translate(run)
    text = translation.files[translation.program]
    assert 'sys.exit("This program needs GPUs: ' in text
    recipe, _ = import_files([translation.write(tmp_path)])
    again = resolve_run(parse_spec(recipe, Run), base_dir=Path())
    assert again.run == run.run


@pytest.mark.parametrize("name", VARIANTS)
def test_a_cpu_is_refused_with_the_reason(name):
    with pytest.raises(InexpressibleError, match=r"device=cpu: .* use device=auto"):
        engine_of(name).translate(resolved(*VARIANTS[name][0], "device=cpu"))
    if name in WRITTEN:
        with pytest.raises(UserError, match=rf"{name} can only be exported, not run here \(on a CPU .*\)"):
            find_engine(name)


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in ("deepspeed", "meshwright")])
def test_engines_that_quantize_nothing_refuse_it(name):
    with pytest.raises(InexpressibleError, match=r"layout.quantized_weights=int8: "):
        ENGINES[name].translate(resolved("layout.quantized_weights=int8"))


def test_zero_plus_plus_is_for_weights_and_gradients_of_zero_3():
    config = json.loads(DeepSpeedEngine().translate(resolved(*VARIANTS["deepspeed"][0])).files["ds_config.json"])
    assert config["zero_optimization"]["zero_quantized_weights"] is True
    assert config["zero_optimization"]["zero_quantized_gradients"] is True
    for overrides in (["layout.zero=2", "layout.quantized_gradients=int4"], ["layout.quantized_gradients=int8"]):
        with pytest.raises(InexpressibleError, match=r"layout.zero=2|layout.quantized_gradients=int8"):
            DeepSpeedEngine().translate(resolved(*overrides))


def test_deepspeed_has_no_error_feedback_any_more():
    with pytest.raises(InexpressibleError, match=r"layout.gradient_error_feedback=.*has removed LoCo"):
        DeepSpeedEngine().translate(resolved(*VARIANTS["deepspeed"][0], "layout.gradient_error_feedback=true"))


@pytest.mark.parametrize("number", range(len(VARIANTS["accelerate_fsdp"])))
def test_accelerate_takes_the_plug_in(number):
    accelerate = pytest.importorskip("accelerate")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    run = resolved(*VARIANTS["accelerate_fsdp"][number])
    text = WRITTEN["accelerate_fsdp"].translate(run).files["run_accelerate_fsdp_standalone.py"]
    known = {"torch": torch, "MixedPrecisionPolicy": fsdp.MixedPrecisionPolicy}
    plugin = call(
        text,
        "FullyShardedDataParallelPlugin",
        FullyShardedDataParallelPlugin=accelerate.FullyShardedDataParallelPlugin,
        **known,
    )
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward == (run.run.layout.zero_stage == 3)
    if run.run.training.precision == "bf16":
        assert (plugin.mixed_precision_policy.param_dtype, plugin.mixed_precision_policy.reduce_dtype) == (
            torch.bfloat16,
            torch.float32,
        )
    if run.run.layout.dp_replicate > 1:
        degrees = call(text, "ParallelismConfig", ParallelismConfig=accelerate.ParallelismConfig)
        assert (degrees.dp_replicate_size, degrees.dp_shard_size) == (2, 2)


LIGHTNING = {"fabric": "lightning_fabric.strategies", "lightning": "pytorch_lightning.strategies"}


@pytest.mark.parametrize("number", range(len(VARIANTS["fabric_fsdp"])))
@pytest.mark.parametrize("kind", LIGHTNING)
def test_lightning_takes_the_fsdp_strategy(kind, number):
    strategies = pytest.importorskip(LIGHTNING[kind])
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    run, name = resolved(*VARIANTS[f"{kind}_fsdp"][number]), f"{kind}_fsdp"
    text = WRITTEN[name].translate(run).files[f"run_{name}_standalone.py"]
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
    inner._no_split_modules = ["Linear"]
    known = {"torch": torch, "MixedPrecision": fsdp.MixedPrecision, "plain": inner}
    known["model"] = SimpleNamespace(modules=inner.modules, model=inner)
    strategy = call(text, "FSDPStrategy", FSDPStrategy=strategies.FSDPStrategy, **known)
    layout, kwargs = run.run.layout, getattr(strategy, "kwargs", None) or strategy._fsdp_kwargs
    hybrid = layout.dp_replicate > 1
    kinds = {2: "SHARD_GRAD_OP", 3: "HYBRID_SHARD" if hybrid else "FULL_SHARD"}
    assert strategy.sharding_strategy.name == kinds[layout.zero_stage]
    assert kwargs.get("device_mesh") == ((2, 2) if hybrid else None)
    assert kwargs["use_orig_params"]  # the program makes parameter groups before they are flattened
    assert kwargs["auto_wrap_policy"]._module_classes == {torch.nn.Linear}
    dtypes = strategy.mixed_precision and (strategy.mixed_precision.param_dtype, strategy.mixed_precision.reduce_dtype)
    assert dtypes == ((torch.bfloat16, torch.float32) if run.run.training.precision == "bf16" else None)


@pytest.mark.engines
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("number", range(len(VARIANTS["fabric_deepspeed"])))
@pytest.mark.parametrize("kind", LIGHTNING)
def test_lightning_takes_the_deepspeed_strategy(tmp_path, monkeypatch, kind, number):
    if not importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    strategies = pytest.importorskip(LIGHTNING[kind])
    run = resolved(*VARIANTS[f"{kind}_deepspeed"][number])
    path = WRITTEN[f"{kind}_deepspeed"].translate(run).write(tmp_path)
    strategy = call(
        path.read_text(), "DeepSpeedStrategy", DeepSpeedStrategy=strategies.DeepSpeedStrategy, HERE=tmp_path
    )
    if kind == "lightning":  # its Trainer refuses such a file
        assert "gradient_accumulation_steps" not in strategy.config
    config = importlib.import_module("deepspeed.runtime.config")
    ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: run.run.layout.world_size)
    monkeypatch.setattr(config, "dist", ranks)
    taken = config.DeepSpeedConfig({**strategy.config, "gradient_accumulation_steps": run.accumulation})
    assert taken.zero_config.stage == run.run.layout.zero_stage
    assert taken.gradient_clipping == 1.0


@pytest.mark.parametrize("number", range(len(VARIANTS["hf_trainer_fsdp"])))
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_takes_the_arguments(tmp_path, number):
    transformers = pytest.importorskip("transformers")
    run = resolved(*VARIANTS["hf_trainer_fsdp"][number])
    text = WRITTEN["hf_trainer_fsdp"].translate(run).files["run_hf_trainer_fsdp_standalone.py"]
    numbers = {"STEPS": 10, "MICRO_BATCH": 2, "ACCUMULATION": 4, "CLIP": 1.0}
    known = {"TrainingArguments": transformers.TrainingArguments, "CHECKPOINTS": tmp_path, **numbers}
    known["options"] = SimpleNamespace(save_every=0)
    arguments = call(text, "TrainingArguments", DEVICE=torch.device("cpu"), **known)
    plugin = arguments.fsdp_plugin_args
    assert plugin["fsdp_version"] == 2
    assert plugin["reshard_after_forward"] == (run.run.layout.zero_stage == 3)


@pytest.mark.engines
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("number", range(len(VARIANTS["accelerate_deepspeed"])))
def test_deepspeed_takes_the_configuration_of_the_plug_in(tmp_path, monkeypatch, number):
    if not importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    accelerate = pytest.importorskip("accelerate")
    run = resolved(*VARIANTS["accelerate_deepspeed"][number])
    path = WRITTEN["accelerate_deepspeed"].translate(run).write(tmp_path)
    plugin = call(
        path.read_text(), "DeepSpeedPlugin", DeepSpeedPlugin=accelerate.DeepSpeedPlugin, HERE=tmp_path, str=str
    )
    assert plugin.zero_stage == run.run.layout.zero_stage
    assert plugin.gradient_accumulation_steps == run.accumulation
    config = importlib.import_module("deepspeed.runtime.config")
    ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: run.run.layout.world_size)
    monkeypatch.setattr(config, "dist", ranks)
    taken = config.DeepSpeedConfig(str(tmp_path / "ds_config.json"))
    assert taken.zero_config.stage == run.run.layout.zero_stage
    assert taken.gradient_clipping == 1.0


@pytest.mark.engines
@pytest.mark.filterwarnings("default")
def test_deepspeed_takes_zero_plus_plus(tmp_path):
    if not importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    DeepSpeedEngine().translate(resolved(*VARIANTS["deepspeed"][0])).write(tmp_path)
    given = json.loads((tmp_path / "ds_config.json").read_text())["zero_optimization"]
    zero = importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(**given)
    assert zero.zero_quantized_weights
    assert zero.zero_quantized_gradients


def test_flat_parts_of_matrices_decay_under_the_deepspeed_plug_in():
    text = WRITTEN["accelerate_deepspeed"].translate(resolved()).files["run_accelerate_deepspeed_standalone.py"]
    groups = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "decay_groups")
    known: dict[str, Any] = {"WEIGHT_DECAY": 0.1, "torch": torch}
    exec(compile(ast.Module([groups], []), "program", "exec"), known)
    matrix, vector = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.zeros(0))
    matrix.ds_shape, vector.ds_shape = torch.Size([2, 2]), torch.Size([2])  # type: ignore[attr-defined]
    decays = {id(p): group["weight_decay"]
              for group in known["decay_groups"](SimpleNamespace(parameters=lambda: [vector, matrix]))
              for p in group["params"]}  # fmt: skip
    assert decays == {id(matrix): 0.1, id(vector): 0.0}


@pytest.mark.exhaustive
def test_an_exported_program_ends_at_once_on_a_cpu(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"{n} cats sat on {n * n} mats\n" for n in range(400)))
    (tmp_path / "run.yaml").write_text(RECIPE)
    assert main(["export", "run.yaml", "--engine", "accelerate_fsdp", "--program", "out"]) == 0
    program = tmp_path / "out" / "run_accelerate_fsdp_standalone.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    if not torch.cuda.is_available():
        assert done.returncode == 1
        assert done.stderr.strip().splitlines()[-1].startswith("This program needs GPUs: on a CPU Accelerate ignores")
