"""Newer forms of other systems' files, what a recipe starts from and balances, and files that match no reader."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.families.adapters import find_adapters
from meshwright.families.registry import PRESETS
from meshwright.families.resolve import resolve_model
from meshwright.imports.reading import Reading
from meshwright.imports.recipe import import_files
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FullSpec, LoraSpec
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import Run


def imported(path: Path, content: str | dict[str, Any], **words: Any) -> tuple[Run, Reading]:
    path.parent.mkdir(exist_ok=True)
    write = json.dumps if path.suffix == ".json" else yaml.safe_dump
    path.write_text(content if isinstance(content, str) else write(content))
    text, reading = import_files([path], **{"ranks": 8, **words})
    return parse_spec(text, Run), reading


def without(reading: Reading) -> list[str]:
    return [origin.split(": ", 1)[-1].partition("=")[0] for origin, _ in reading.without]


TITAN = """\
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.trainer import Trainer
from . import model_registry


def small() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        hf_assets_path="./assets/hf/Qwen3-8B",
        model_spec=model_spec,
        optimizer=default_adamw(lr=2e-5),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096, steps=30),
        checkpoint=CheckpointManager.Config(enable=True, initial_load_in_hf=True),
    )
"""


def test_torchtitans_token_budgets_and_weights(tmp_path: Path) -> None:
    run, reading = imported(tmp_path / "mine" / "config_registry.py", TITAN)
    assert (run.data.sequence_length, run.training.micro_batch, run.training.global_batch) == (4096, 2, 16)
    assert (run.model.name, run.model.weights) == ("./assets/hf/Qwen3-8B", "pretrained")
    assert without(reading) == ["model.flavor"]


def test_a_relative_model_registry_is_its_packages(tmp_path: Path) -> None:
    path = tmp_path / "qwen3" / "config_registry.py"
    run, reading = imported(path, TITAN.replace("initial_load_in_hf=True", "interval=10"))
    assert (run.model.name, run.model.weights, run.checkpoint.every) == ("qwen3-8b", "auto", 10)
    assert not reading.without


def test_weights_of_a_named_model_are_told_where_the_command_names_another(tmp_path: Path) -> None:
    run, reading = imported(tmp_path / "qwen3" / "config_registry.py", TITAN, model="qwen3-8b")
    assert run.model.name == "qwen3-8b"
    assert run.model.weights == "auto"
    told = dict(reading.without)["config_registry.py: checkpoint.initial_load_in_hf=True"]
    assert "--model ./assets/hf/Qwen3-8B" in told
    other, reading = imported(tmp_path / "qwen3" / "config_registry.py", TITAN, model="qwen3-4b")
    assert other.model.name == "qwen3-4b"
    assert any("model.flavor=8B" in origin for origin, _ in reading.without)


def test_what_is_assigned_to_torchtitans_configuration_counts(tmp_path: Path) -> None:
    changed = (
        TITAN.replace("return Trainer", "config = Trainer") + "    config.training.steps = 40\n    return config\n"
    )
    assert imported(tmp_path / "qwen3" / "config_registry.py", changed)[0].training.steps == 40


def test_torchtitans_tokens_that_are_no_whole_sequences_are_told(tmp_path: Path) -> None:
    path = tmp_path / "qwen3" / "config_registry.py"
    run, reading = imported(path, TITAN.replace("2 * 4096", "5000"))
    assert run.training.micro_batch == 8  # torchtitan's older default
    assert "training.num_tokens_per_microbatch_per_dp_rank" in without(reading)


def test_torchtitans_pipeline_has_its_microbatches(tmp_path: Path) -> None:
    more = "parallelism=ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4),\n        checkpoint="
    run, _ = imported(tmp_path / "qwen3" / "config_registry.py", TITAN.replace("checkpoint=", more))
    assert (run.training.micro_batch, run.training.global_batch, run.layout.dp_shard) == (2, 32, 4)


def test_torchtitans_lora_is_lora(tmp_path: Path) -> None:
    lora = 'model_registry("8B", converters=[LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wq", "wkv"])])'
    run, _ = imported(tmp_path / "qwen3" / "config_registry.py", TITAN.replace('model_registry("8B")', lora))
    assert run.finetune == LoraSpec(method="lora", rank=8, alpha=16, targets=("wq", "wk", "wv"))


FACTORY = {
    "model": "Qwen/Qwen3-0.6B",
    "model_class": "llm",
    "peft_config": {"name": "lora", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all"},
    "dist_config": {"name": "fsdp2", "dcp_path": None},
    "cp_mode": "ulysses",
    "cp_size": 2,
    "train_dataset": "data/mine.yaml",
    "output_dir": "outputs/x",
    "micro_batch_size": 1,
    "cutoff_len": 2048,
    "learning_rate": 1e-5,
    "max_steps": 10,
}


def test_llama_factory_v1(tmp_path: Path) -> None:
    run, reading = imported(tmp_path / "run.yaml", FACTORY)
    assert (run.model.name, run.training.micro_batch, run.training.global_batch) == ("Qwen/Qwen3-0.6B", 1, 4)
    assert run.finetune == LoraSpec(method="lora", rank=16, alpha=32, dropout=0.05)
    assert (run.layout.cp, run.layout.cp_method, run.layout.dp_shard, run.layout.zero_stage) == (2, "ulysses", 4, 3)
    assert (run.training.lr_schedule.name, run.training.optimizer.weight_decay) == ("constant", 0.01)
    assert (run.training.precision, run.training.recompute, run.data.packing) == ("bf16", "full", "padded")
    assert without(reading) == ["train_dataset"]  # a table that was not given


def test_llama_factory_v1_reads_its_table_of_data_sets(tmp_path: Path) -> None:
    table = {
        "own": {"path": "data/own.json", "source": "local", "converter": "alpaca", "size": 500},
        "hub": {"path": "some/talks", "split": "train_sft", "converter": "sharegpt"},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(table, sort_keys=False))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(FACTORY))
    text, reading = import_files([tmp_path / "run.yaml", tmp_path / "mine.yaml"], ranks=8)
    sources = [source.model_dump(exclude_defaults=True) for source in parse_spec(text, Run).data.sources]
    assert sources == [
        {"path": "data/own.json", "format": "alpaca"},
        {"path": "hub:some/talks", "format": "sharegpt", "split": "train_sft"},
    ]
    assert [origin for origin, _ in reading.without] == ["mine.yaml: own: size=500"]
    pairs = {"pairs": {"path": "some/pairs", "converter": "pair"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(pairs))
    run = parse_spec(import_files([tmp_path / "run.yaml", tmp_path / "mine.yaml"], ranks=8)[0], Run)
    assert run.training.preference is not None
    assert run.data.separate_documents


@pytest.mark.parametrize(
    ("peft", "finetune"),
    [
        (None, FullSpec()),
        ({"name": "freeze"}, FullSpec(last_layers=2)),
        ({"name": "lora"}, LoraSpec(method="lora", rank=8, alpha=16, dropout=0.05)),
        (
            {"name": "lora", "target_modules": ["q_proj"], "use_dora": True},
            LoraSpec(method="lora", rank=8, alpha=16, dropout=0.05, targets=("q_proj",), dora=True),
        ),
    ],
)
def test_llama_factory_v1s_methods(tmp_path: Path, peft: Any, finetune: Any) -> None:
    assert imported(tmp_path / "run.yaml", {**FACTORY, "peft_config": peft})[0].finetune == finetune


BRIDGE = """\
train: {train_iters: 100, global_batch_size: 128, micro_batch_size: 2}
optimizer: {lr: 1.0e-4, min_lr: 1.0e-5, weight_decay: 0.0}
scheduler: {lr_warmup_iters: 10, lr_decay_style: cosine}
peft: PEFT
model: {seq_length: 4096, tensor_model_parallel_size: 1}
"""


@pytest.mark.parametrize(
    ("peft", "finetune"),
    [
        ("{dim: 8, alpha: 16}", LoraSpec(method="lora", rank=8, alpha=16)),
        ("{_target_: megatron.bridge.peft.dora.DoRA}", LoraSpec(method="lora", rank=32, alpha=64, dora=True)),
        (
            "{_target_: megatron.bridge.peft.canonical_lora.CanonicalLoRA, target_modules: [linear_q, linear_fc2]}",
            LoraSpec(method="lora", rank=32, alpha=32, targets=("q_proj", "down_proj")),
        ),
        ("null", None),
    ],
)
def test_megatron_bridges_adapters(tmp_path: Path, peft: str, finetune: Any) -> None:
    run, reading = imported(tmp_path / "override.yaml", BRIDGE.replace("PEFT", peft), model="llama-3.2-1b")
    assert run.finetune == finetune
    assert not reading.without
    assert any("share one A" in note for note in reading.notes) is ("dim" in peft or "DoRA" in peft)


def test_nemos_adapters(tmp_path: Path) -> None:
    scheme = {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 16, "alpha": 32, "target_modules": ["all"]}}
    model = {"tensor_model_parallel_size": 1, "micro_batch_size": 1, "global_batch_size": 8, "peft": scheme}
    config = {"trainer": {"max_steps": 10, "precision": "bf16"}, "model": model}
    assert imported(tmp_path / "nemo.yaml", config, model="gpt2")[0].finetune == LoraSpec(method="lora", rank=16)
    model["peft"] = {**scheme, "peft_scheme": "none"}
    run, reading = imported(tmp_path / "nemo.yaml", config, model="gpt2")
    assert run.finetune is None
    assert "model.peft.lora_tuning.adapter_dim" in without(reading)


def test_trls_adapters(tmp_path: Path) -> None:
    arguments = {
        "model_name_or_path": "llama-3.2-1b",
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-4,
        "max_steps": 10,
        "lora_r": 8,
        "lora_target_modules": ["q_proj"],
        "dataset_name": "trl-lib/Capybara",
    }
    run, _ = imported(tmp_path / "sft.yaml", {**arguments, "use_peft": True})
    assert run.finetune == LoraSpec(method="lora", rank=8, alpha=32, dropout=0.05, targets=("q_proj",))
    assert run.data.sources[0].path == "hub:trl-lib/Capybara"
    run, reading = imported(tmp_path / "sft.yaml", {**arguments, "use_peft": False})
    assert run.finetune is None
    assert {"lora_r", "lora_target_modules"} <= set(without(reading))


AXOLOTL = {"datasets": [{"path": "a.jsonl", "type": "alpaca"}], "micro_batch_size": 1, "max_steps": 9}
AXOLOTL |= {"learning_rate": 1e-4, "bf16": True}
MOE = {"model_type": "qwen3_moe", "router_aux_loss_coef": 0.002}


@pytest.mark.parametrize(
    ("model", "config", "more", "balance"),
    [
        ("qwen3-30b-a3b", None, {}, 0.0),
        ("Qwen/Qwen3-30B-A3B", None, {}, 0.0),
        ("./moe", MOE, {}, 0.0),
        ("./moe", {**MOE, "output_router_logits": True}, {}, None),
        ("./moe", MOE, {"overrides_of_model_config": {"output_router_logits": True}}, None),
        (
            "./moe",
            MOE,
            {"model_config": {"output_router_logits": True, "router_aux_loss_coef": 0.5}},
            0.5,
        ),
        ("qwen3-0.6b", None, {}, None),
        ("./dense", {"model_type": "llama"}, {}, None),
    ],
)
def test_transformers_balances_experts_only_where_it_is_told(
    tmp_path: Path, model: str, config: Any, more: dict[str, Any], balance: float | None
) -> None:
    if config:
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(json.dumps(config))
    run, reading = imported(tmp_path / "a.yml", {"base_model": model, **AXOLOTL, **more})
    assert run.model.balance_loss == balance
    assert not reading.without or not any("router" in origin for origin, _ in reading.without)


def test_biases_of_experts_stay_as_transformers_keeps_them(tmp_path: Path) -> None:
    run, _ = imported(tmp_path / "a.yml", {"base_model": "moonlight-16b-a3b", **AXOLOTL})
    assert (run.model.balance_loss, run.model.balance_rate) == (0.0, 0.0)


def test_a_model_that_may_have_experts_is_told(tmp_path: Path) -> None:
    _, reading = imported(tmp_path / "a.yml", {"base_model": "someone/Big-8x7B", **AXOLOTL})
    assert any("output_router_logits" in note for note in reading.notes)
    _, reading = imported(tmp_path / "a.yml", {"base_model": "someone/Small-7B", **AXOLOTL})
    assert not any("output_router_logits" in note for note in reading.notes)


def test_llama_factorys_balance_loss(tmp_path: Path) -> None:
    factory = {"model_name_or_path": "qwen3-30b-a3b", "stage": "sft", "output_dir": "x", "max_steps": 9}
    assert imported(tmp_path / "f.yaml", factory)[0].model.balance_loss == 0.0
    assert imported(tmp_path / "f.yaml", {**factory, "moe_aux_loss_coef": 0.01})[0].model.balance_loss == 0.01


UNKNOWN = {f"own_{number}": number for number in range(5)}


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("ds.json", {"train_batch_size": 8, "gradient_clipping": 1.0, **UNKNOWN}, "5 are unknown to DeepSpeed"),
        ("a.yaml", {"base_model": "gpt2", **UNKNOWN}, "5 are unknown to axolotl"),
        (
            "t.yaml",
            {"output_dir": "x", "learning_rate": 1e-4, "sequence_len": 8, "micro_batch_size": 1, "adapter": "lora",
             "sample_packing": True},
            "more of them are axolotl's",
        ),
    ],
)  # fmt: skip
def test_a_file_that_matches_no_reader_well_is_refused(tmp_path: Path, name: str, content: Any, told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        imported(tmp_path / name, content, model="gpt2")
    assert len(str(error.value)) < 500


def test_a_third_of_unknown_keys_is_still_read(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "gradient_clipping": 1.0, "own": 1}
    _, reading = imported(tmp_path / "ds.json", config, model="gpt2")
    assert without(reading) == ["own"]


def test_files_of_no_system_name_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown format; supported are a DeepSpeed JSON"):
        imported(tmp_path / "x.yaml", UNKNOWN)
    keys = {"sequence_len": 8, "micro_batch_size": 1, "adapter": "lora", "sample_packing": True}
    with pytest.raises(UserError, match="unknown format, but most of its keys are axolotl's"):
        imported(tmp_path / "x.yaml", keys)


@pytest.mark.parametrize("pattern", ["lm_head", "output"])
def test_the_head_of_a_tied_model_is_its_embedding(tmp_path: Path, pattern: str) -> None:
    model = resolve_model(PRESETS["qwen3-0.6b"], base_dir=tmp_path)
    with pytest.raises(UserError, match="the head, which this model ties to the embedding; leave it out"):
        find_adapters(model, LoraSpec(method="lora", targets=(pattern, "wq")))
    untied = model.model_copy(update={"tied_embeddings": False})
    assert find_adapters(untied, LoraSpec(method="lora", targets=(pattern,)))
