"""Other engines: the features that they can express, their generated programs, and the trusted parts of their
reports."""

import ast
import contextlib
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.engines.engine import InexpressibleError
from meshwright.engines.layouts import layout_called
from meshwright.engines.readback import SilentFallbackError, check_optimizer, check_what_ran
from meshwright.engines.registry import ENGINES, MissingPackageError, check_installed, find_engine
from meshwright.engines.settings import leaves, rule_of, settings_of
from meshwright.spec.errors import UserError
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: {family: llama, hidden: 64, num_layers: 2, num_heads: 4, num_kv_heads: 2, tied_embeddings: true}
data: {sources: "*.txt", tokenizer_vocab: 512, sequence_length: 64}
training: {steps: 10, global_batch: 8, micro_batch: 2, precision: fp32, lr_schedule: {warmup: 3}}
device: cpu
"""
GPT2 = ["model={family: gpt2, hidden: 64, num_layers: 2, num_heads: 4, max_positions: 64}"]
OTHERS = [name for name in ENGINES if name != "meshwright"]


def resolved(*overrides: str, layout: str = "single") -> ResolvedRun:
    run = parse_spec(RECIPE, Run, overrides).model_copy(update={"layout": layout_called(layout)})
    return resolve_run(run, base_dir=Path())


def test_every_setting_of_a_recipe_has_a_rule():
    filled = [
        "finetune={method: lora}",
        "training.samples={prompts: [a]}",
        "training.preference={}",
        "checkpoint.every=5",
        "model.rope_scaling={kind: yarn, factor: 2, original_max_positions: 8}",
    ]
    paths = [path for path, _ in leaves(parse_spec(RECIPE, Run, filled))]
    assert {"finetune.rank", "training.samples.prompts", "guards.spikes"} <= set(paths)
    for path in paths:
        assert rule_of(path), path
    with pytest.raises(KeyError):
        rule_of("something.new")


def test_sections_are_refused_in_the_engines_order():
    sections = ("layout", "model", "data", "training", "guards", "checkpoint")
    settings = settings_of(resolved(), dict.fromkeys(sections, "no"), {}, {})
    assert tuple(setting.path for setting in settings if setting.fate == "refused") == sections


REFUSED = {
    "training.optimizer.name": ["training.optimizer.name=muon"],
    "training.precision": ["training.precision=fp16"],
    "data.packing": ["data.packing=best_fit"],
    "data.separate_documents": ["data.separate_documents=true"],
    "finetune.method": ["finetune={method: full, last_layers: 1}"],
    "model.balance_loss": ["model.family=mixtral", "model.num_experts=4", "model.balance_loss=0.1"],
    "model.router_z_loss": ["model.family=mixtral", "model.num_experts=4", "model.router_z_loss=0.1"],
    "training.preference.beta": ["training.preference={}", "data.separate_documents=true"],
    "checkpoint.start_from": ["checkpoint.start_from=elsewhere"],
}
ROPE = "model.rope_scaling={kind: yarn, factor: 2, original_max_positions: 8}"
EXPRESSED = {
    *(("hf_trainer", f"data.{key}") for key in ("packing", "separate_documents")),
    *(("peft", f"data.{key}") for key in ("packing", "separate_documents")),
    ("trl", "training.preference.beta"),
}
"""The features of these that an engine has."""
LORA = ["finetune={method: lora}", "model.weights=random"]
PAIRS = ["training.preference={}", "data.separate_documents=true", "data.packing=padded"]
OWN = {
    ("transformers", "layout.tp"): ("tp2", GPT2),
    ("deepspeed", "layout.tp"): ("tp2", GPT2),
    ("deepspeed", "layout.zero"): ("ddp2+zero2:2", []),
    ("deepspeed", "layout.cp"): ("cp2", GPT2),
    ("deepspeed", "model.tied_embeddings"): ("pp2", []),
    ("deepspeed", "layout.dp_shard"): ("pp2+zero1:2", []),
    ("deepspeed", "layout.schedule"): ("pp2", ["layout={pp: 2, schedule: afab}"]),
    ("deepspeed", "training.precision"): ("pp2", ["model.tied_embeddings=false", "training.precision=bf16"]),
    ("deepspeed", "layout.offload"): ("ddp", ["layout.offload=cpu"]),
    ("lightning", "layout.offload"): ("zero3", ["layout.offload={optimizer: disk}"]),
    ("bare", "layout.offload"): ("zero2", ["layout.offload={optimizer: host}"]),
    ("hf_trainer", "layout.offload"): ("zero3", ["layout.offload={optimizer: disk}"]),
    ("litgpt", "model.rope_scaling"): ("single", [ROPE]),
    ("megatron", "model.rope_scaling"): ("single", [ROPE]),
    ("hf_trainer", "finetune.method"): ("single", LORA),
    ("peft", "finetune"): ("single", []),
    ("peft", "finetune.base"): ("single", [*LORA, "finetune.base=nf4"]),
    ("peft", "finetune.dropout"): ("single", [*LORA, "finetune.dropout=0.1"]),
    ("peft", "finetune.b_lr_ratio"): ("single", [*LORA, "finetune.b_lr_ratio=16"]),
    ("peft", "finetune.train"): ("single", [*LORA, "finetune.train=[output]", "model.tied_embeddings=false"]),
    ("trl", "finetune.train"): ("single", [*LORA, "finetune.train=[output]", "model.tied_embeddings=false"]),
    ("trl", "finetune.start_from"): ("single", [*LORA, *PAIRS, "finetune.start_from=elsewhere"]),
    ("trl", "training.preference.reference"): ("single", [*PAIRS, "training.preference.reference=none"]),
    ("trl", "data.separate_documents"): ("single", ["data.separate_documents=true"]),
    ("litgpt", "layout.dp_replicate"): ("ddp", []),
    ("litgpt", "model.family"): ("single", GPT2),
    ("fabric", "layout.tp"): ("tp2", GPT2),
    ("fabric", "layout.dp_replicate"): ("tp2+ddp:2", []),
    ("lightning", "layout.tp"): ("tp4", []),
    ("megatron", "model.family"): ("single", GPT2),
    ("megatron", "model.num_kv_heads"): ("tp4", []),
    ("megatron", "model.num_layers"): ("pp2", ["model.num_layers=3"]),
    ("megatron", "layout.dp_replicate"): ("pp2+ddp:2", []),
    ("megatron", "layout.schedule"): ("pp2", ["layout={pp: 2, schedule: afab}"]),
    ("nanogpt", "model.family"): ("single", []),
    ("nanogpt", "model.ffn"): ("single", [*GPT2, "model.ffn=96"]),
    ("nanogpt", "model.norm_eps"): ("single", [*GPT2, "model.norm_eps=1e-6"]),
    ("nanogpt", "model.tied_embeddings"): ("single", [*GPT2, "model.tied_embeddings=false"]),
    ("nanogpt", "training.optimizer.eps"): ("single", [*GPT2, "training.optimizer.eps=1e-7"]),
}
"""The features that one engine lacks and others have."""


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("path", REFUSED)
@pytest.mark.every(1)
def test_what_would_be_another_training_is_refused_by_name(engine, path):
    if (engine, path) in EXPRESSED:
        more = LORA if engine == "peft" else []
        assert ENGINES[engine].translate(resolved(*REFUSED[path], "data.packing=padded", *more)).program
        return
    with pytest.raises(InexpressibleError, match=f"{path}=") as refusal:
        ENGINES[engine].translate(resolved(*REFUSED[path]))
    assert len(str(refusal.value)) > len(path) + 10


@pytest.mark.parametrize(("engine", "path"), OWN)
@pytest.mark.every(1)
def test_what_one_engine_lacks_is_refused_by_name(engine, path):
    layout, overrides = OWN[engine, path]
    run = parse_spec(RECIPE, Run, overrides)
    split = type(run.layout)(
        **layout_called(layout).model_dump() | run.layout.model_dump(include={"offload", "schedule"})
    )
    resolved_run = resolve_run(run.model_copy(update={"layout": split}), base_dir=Path())
    with pytest.raises(InexpressibleError, match=f"{path}="):
        ENGINES[engine].translate(resolved_run)


@pytest.mark.parametrize("engine", OTHERS)
@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2"])
@pytest.mark.every(1)
def test_layouts_that_an_engine_does_not_split_are_refused(engine, layout):
    if layout[:2] in ENGINES[engine].axes:
        assert ENGINES[engine].translate(resolved("model.tied_embeddings=false", layout=layout)).program
        return
    with pytest.raises(InexpressibleError, match=rf"layout\.{layout[:2]}=2"):
        ENGINES[engine].translate(resolved(layout=layout))


def test_silent_fallbacks_are_refused_before_they_happen():
    """Accelerate's and the Trainer's own FSDP on a CPU are DDP."""
    with pytest.raises(InexpressibleError, match=r"layout\.zero=3: accelerate supports ddp"):
        ENGINES["accelerate"].translate(resolved(layout="zero3"))


def test_what_is_left_out_is_named_only_where_it_was_asked_for():
    engine = ENGINES["bare"]
    assert engine.translate(resolved()).left_out == []
    asked = "training.evaluation.every=5", "trackers=[wandb]", "checkpoint.keep_best=5", "training.recompute=selective"
    left_out = {setting.path: setting.reason for setting in engine.translate(resolved(*asked)).left_out}
    assert set(left_out) == {"training.evaluation.every", "trackers", "checkpoint.keep_best", "training.recompute"}
    assert all(left_out.values())


VARIANTS = [
    [],
    ["training.precision=bf16", "training.compile=true", "training.recompute=full", "device=auto"],
    ["training.lr_schedule.name=wsd", "training.clip=null", "training.deterministic=true"],
    ["training.lr_schedule.name=constant", "training.lr_schedule.warmup=0"],
    [*GPT2, "training.precision=bf16", "training.reduce_dtype=bf16", "training.compile=true"],
    [*LORA, "training.precision=bf16", "training.recompute=full"],
    [*LORA, "data.packing=best_fit", "data.separate_documents=true"],
    ["data.packing=padded", "data.separate_documents=true"],
    PAIRS,
    [*LORA, *PAIRS],
    ["model.tied_embeddings=false"],
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every program that can be written for a few recipes in every data-parallel layout."""
    folder = tmp_path_factory.mktemp("programs")
    layouts = ("single", "ddp", "zero1", "zero2", "zero3", "ddp2+zero3:2", "tp2", "tp2+zero3:2", "pp2", "cp2")
    for number, (overrides, layout) in enumerate(itertools.product(VARIANTS, layouts)):
        try:
            run = resolved(*overrides, layout=layout)
        except UserError:  # full recomputation of split blocks is not compiled
            continue
        for engine in ENGINES.values():
            with contextlib.suppress(InexpressibleError):
                engine.translate(run).write(folder / f"{number}-{engine.name}")
    return folder


@pytest.mark.slow
def test_programs_need_nothing_of_ours_and_say_what_the_recipe_says(programs):
    found = list(programs.glob("*/run_*_standalone.py"))
    assert len(found) > 90
    for path in found:
        text = path.read_text()
        imported = {
            alias.name if isinstance(node, ast.Import) else node.module
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not [name for name in imported if name and name.startswith("meshwright")]
        assert "STEPS, GLOBAL_BATCH, MICRO_BATCH, LENGTH = 10, 8, 2, 64" in text
        assert "LR, BETAS, EPS, WEIGHT_DECAY = 0.0003, (0.9, 0.95), 1e-08, 0.1" in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ruff", path=str(Path(sys.executable).parent)) is None, reason="pip install ruff")
def test_programs_are_formatted_and_free_of_what_a_linter_finds(programs):
    ruff, options = Path(sys.executable).parent / "ruff", ["--isolated", "--no-cache", "--line-length", "120"]
    for verb in (["check", "--select", "E,F,I,UP,B,C4,SIM"], ["format", "--diff"]):
        found = subprocess.run([ruff, *verb, *options, programs], capture_output=True, text=True, timeout=60)
        assert not found.returncode, (found.stdout + found.stderr)[-2000:]


def said(**changes):
    """The report of a program of two ranks with full sharding."""
    usual = {
        "world_size": 2,
        "wrappers": ["FSDPLlamaForCausalLM"],
        "parameter": ["DTensor"],
        "dtype": ["float32"],
        "parameters": 1000,
        "held": 510,
        "state": 510,
        "optimizer": "AdamW",
        "groups": [{"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}],
    }
    return usual | changes


LINE = {
    "schedule": "forward_backward_pipelining_without_interleaving",
    "ranks": [{"layers": [[0]], "sent": 4}, {"layers": [[1]], "sent": 4}],
}
"""The report of a pipeline of two stages and four microbatches."""

SILENT = {
    "DDP instead of FSDP": ("zero3", {"wrappers": ["DistributedDataParallel", "Llama"], "held": 1000, "state": 1000}),
    "two trainings instead of one": ("ddp", {"world_size": 1, "wrappers": ["Llama"]}),
    "no wrapper at all": ("ddp", {"wrappers": ["Llama"], "held": 1000, "state": 1000}),
    "state that is whole": ("zero1", {"wrappers": ["DistributedDataParallel"], "held": 1000, "state": 1000}),
    "parameters that are whole": ("zero3", {"held": 1000}),
    "DDP instead of ZeRO-2": ("zero2", {"wrappers": ["DistributedDataParallel"], "held": 1000, "state": 500}),
    "layers that are whole": ("tp2", {"matrices": [900, 900]}),
    "another split than asked": ("tp2", {"matrices": [450, 900], "axes": ["fsdp"]}),
    "nothing split by Lightning's mesh": ("tp2", {"matrices": [450, 900], "axes": ["data_parallel"]}),
    "nothing on the host": ("zero2", {"host": []}),
    "the base trained too": ("ddp", {"wrappers": ["DistributedDataParallel"], "held": 1000, "trained": 1000}),
    "samples that are not shared": ("cp2", {"sequence": 1}),
    "nothing on disk": ("zero3", {"disk": 0}),
    "stages in another order": ("pp2", {"matrices": [450, 900], **LINE, "ranks": LINE["ranks"][::-1]}),
    "no pipeline": ("pp2", {"matrices": [450, 900], **LINE, "schedule": "forward_backward_no_pipelining"}),
    "stages that send nothing": (
        "pp2",
        {"matrices": [450, 900], **LINE, "ranks": [{"layers": [[0]], "sent": 0}, {"layers": [[1]], "sent": 0}]},
    ),
    "no secondary shard": ("ddp2+zero3:2", {"world_size": 4, "second": 0}),
}


@pytest.mark.parametrize("what", SILENT)
def test_a_strategy_that_was_not_used_is_not_reported(what):
    layout, changes = SILENT[what]
    with pytest.raises(SilentFallbackError):
        check_what_ran(resolved(layout=layout), said(**changes))


def test_strategies_that_were_used_are_believed():
    whole = {"held": 1000, "state": 1000}
    check_what_ran(resolved(), said(world_size=1, wrappers=["Llama"], **whole))
    check_what_ran(resolved(layout="ddp"), said(wrappers=["DistributedDataParallel", "Llama"], **whole))
    check_what_ran(resolved(layout="zero1"), said(wrappers=["DistributedDataParallel"], held=1000))
    check_what_ran(resolved(layout="zero2"), said())
    check_what_ran(resolved(layout="zero3"), said())
    check_what_ran(resolved(layout="tp2"), said(matrices=[450, 900], axes=["tp"]))
    check_what_ran(resolved(layout="pp2"), said(matrices=[450, 900], **LINE))
    check_optimizer(resolved(), said())


@pytest.mark.parametrize("changes", [{"eps": 1e-6}, {"betas": [0.9, 0.999]}, {"weight_decay": 0.01}])
def test_another_optimizer_is_not_reported(changes):
    with pytest.raises(SilentFallbackError):
        check_optimizer(resolved(), said(groups=[said()["groups"][0] | changes]))
    with pytest.raises(SilentFallbackError):
        check_optimizer(resolved(), said(optimizer="SGD"))


def test_layouts_have_short_names():
    assert layout_called("single") == LayoutSpec()
    assert layout_called("ddp", 4) == LayoutSpec(dp_replicate=4)
    assert layout_called("fsdp:2") == layout_called("zero3", 2) == LayoutSpec(dp_shard=2, zero=3)
    assert layout_called("tp2+pp2+zero1:4") == LayoutSpec(tp=2, pp=2, dp_shard=4, zero=1)
    assert layout_called("ddp2+zero3:4") == LayoutSpec(dp_replicate=2, dp_shard=4, zero=3)


@pytest.mark.parametrize("name", ["zero4", "tp", "", "dp2", "zero3:1"])
def test_other_names_of_layouts_are_refused(name):
    with pytest.raises(UserError, match="layout"):
        layout_called(name)


@pytest.mark.every(1)
@pytest.mark.parametrize("module", ["no_such_module", "no_such.module", "json.no_such_module"])
def test_unknown_engines_and_missing_packages_are_one_sentence(module, tmp_path):
    with pytest.raises(UserError, match=r"unknown engine 'acelerate'.*did you mean 'accelerate'"):
        find_engine("acelerate")
    missing = type("Missing", (type(ENGINES["bare"]),), {"packages": {module: "compare"}})()
    with pytest.raises(MissingPackageError, match=r"is not installed: pip install 'meshwright\[compare\]'"):
        check_installed(missing, Path(sys.executable))
    fields = {"name": "old", "packages": {"numpy": "x"}, "oldest": {"numpy": "99.10"}}
    old = type("Old", (type(ENGINES["bare"]),), fields)
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    there = re.escape(f"{link} -m pip install 'meshwright[compare]'")
    with pytest.raises(MissingPackageError, match=rf"is not installed in {re.escape(str(link))}: {there}"):
        check_installed(missing, link)
    with pytest.raises(MissingPackageError, match=r"numpy \d.* is too old: old needs 99\.10 or later; pip install"):
        check_installed(old(), Path(sys.executable))
    new = type("New", (old,), {"oldest": {"numpy": "1.9"}})
    check_installed(new(), Path(sys.executable))
    if importlib.util.find_spec("transformers"):
        check_installed(ENGINES["bare"], Path(sys.executable))
