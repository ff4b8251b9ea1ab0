"""LLaMA-Factory's v1 configuration (`src/llamafactory/v1/config`), whose parts are plugins with a name each.

Its program chooses sft, dpo or rm on the command line; a table of preference pairs means dpo.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, Has, NoEffect
from meshwright.imports.deepspeed import read_named
from meshwright.imports.experts import COMPUTES
from meshwright.imports.llama_factory import RULES as FACTORY_RULES
from meshwright.imports.llama_factory import adapter, train_last_layers
from meshwright.imports.names import READERS
from meshwright.imports.reading import Reading, Rule, flat, joined
from meshwright.imports.rules import (
    cases,
    choice,
    fact,
    in_turn,
    no_effects,
    only,
    peft,
    place,
    sets,
    targets,
    unsupported,
    when,
    without,
)
from meshwright.spec.data import HUB

DEFAULTS: Mapping[str, Any] = {
    "training.optimizer.lr": 1e-4,
    "training.optimizer.weight_decay": 0.01,
    "training.optimizer.betas": [0.9, 0.999],
    "training.lr_schedule.name": "constant",
    "training.lr_schedule.warmup": 0,
    "training.clip": 1.0,
    "training.precision": "bf16",
    "training.recompute": "full",
    "training.seed": 42,
    "data.sequence_length": 2048,
    "data.held_out": 0.0,
}
"""Of its dataclasses, and of PyTorch's AdamW, which it makes with a rate alone."""
LORA: Mapping[str, Any] = {"finetune.rank": 8, "finetune.alpha": 16, "finetune.dropout": 0.05}
CONVERTERS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "preference"}
"""Its converters of records -> a source's format."""
TABLE = {"path", "source", "converter", "split", "size", "weight", "streaming"}
"""Keys of a data set in the table that `train_dataset` names."""
METHOD, TABLES, DATA, CP = "v1 method", "v1 data table", "v1 data", "cp mode"
NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.KERNEL: {"": "flash_attn kernel_config.*"},
    NoEffect.MEMORY: {"": "init_config.*", "dist_config": "pin_memory dcp_path"},
    NoEffect.CODE: {"": "trust_remote_code"},
    NoEffect.READS: {"": "batching_workers"},
    NoEffect.GUARDS: {"": "dist_timeout"},
    NoEffect.LOGS: {"": "logging_steps"},
    NoEffect.SAVES: {"": "save_ckpt_as_hf"},
    NoEffect.HUB: {"peft_config": "export_dir export_size export_hub_model_id export_legacy_format infer_dtype"},
    NoEffect.GENERATES: {"": "sample_backend max_new_tokens"},
}


SAME = (
    "eval_dataset output_dir cutoff_len learning_rate num_train_epochs max_steps max_grad_norm seed full_determinism "
    "resume_from_checkpoint save_total_limit pref_loss pref_ftx"
)
"""Keys that mean what they mean in the older configuration."""
COUNTED = "it counts for pairs only; for dpo, set training.preference"


RULES: Mapping[str, Rule] = {
    **{key: FACTORY_RULES[key] for key in SAME.split()},
    "model": "model.name",
    "model_class": only("llm", "models predict the next token (llm)"),
    "custom_chat_template": without("write the template to a file and set data.chat.template to it"),
    "peft_config.name": cases(
        {
            "lora": in_turn(fact(METHOD), "finetune.method"),
            "freeze": in_turn(fact(METHOD), sets({"finetune.method": "full"})),
        },
        in_turn(fact(METHOD), without("supported: lora, freeze")),
    ),
    **peft("peft_config."),
    "peft_config.target_modules": targets("all"),
    "peft_config.adapter_name_or_path": adapter,
    "peft_config.freeze_trainable_layers": fact("freeze layers"),
    "peft_config.freeze_trainable_modules": only("all", "whole layers train; list modules in finetune.train instead"),
    "peft_config.freeze_extra_modules": unsupported("list all trained modules in finetune.train instead"),
    "peft_config.cast_trainable_params_to_fp32": only(True, "trained weights are kept in fp32"),
    "quant_config.name": fact("quantized"),
    "quant_config.quantization_bit": choice("finetune.base", {4: "nf4", 8: "int8"}, "4, 8"),
    "quant_config.double_quantization": "finetune.double_quantization",
    "quant_config.quantization_type": only("nf4", "four bits are nf4"),
    "quant_config.compute_dtype": without("training.precision decides it"),
    "train_dataset": fact(DATA),
    "micro_batch_size": "training.micro_batch",
    "global_batch_size": "training.global_batch",
    "bf16": choice("training.precision", {True: "bf16", False: "fp32"}, "true, false"),
    "batching_strategy": cases(
        {("normal", "padding_free"): sets({"data.packing": "padded"})},
        "microbatches have a number of samples; supported: normal, padding_free",
    ),
    "enable_activation_checkpointing": choice("training.recompute", {True: "full", False: "none"}, "true, false"),
    "dist_config.name": cases(
        {
            ("fsdp2", "fsdpturbo"): fact("sharded", True),
            "deepspeed": Always("its config_file tells the layout"),
        },
        "supported: fsdp2, deepspeed",
    ),
    "dist_config.config_file": read_named,
    "dist_config.reshard_after_forward": fact("reshards"),
    "dist_config.offload_params": when("layout.offload", "cpu", Has("layout.offload", "none")),
    "dist_config.ep_size": only(1, "set layout.ep, a regrouping of dp_shard x cp x tp ranks"),
    "dist_config.ep_dispatcher": NoEffect.OVERLAP,
    "cp_size": fact("cp size"),
    "cp_mode": fact(CP),
    "mp_replicate_size": fact("replicate"),
    "mp_shard_size": fact("shard degree"),
    "dp_size": fact("data ranks"),
    "optim_config.name": choice("training.optimizer.name", {"muon": "muon"}),
    "optim_config.lr": without("learning_rate counts"),
    "optim_config.wd": "training.optimizer.weight_decay",
    "optim_config.momentum": "training.optimizer.muon_momentum",
    "optim_config.nesterov": only(True, "Muon's momentum is Nesterov's"),
    "optim_config.ns_steps": only(5, "Muon takes five steps of Newton-Schulz"),
    "optim_config.adamw_betas": "training.optimizer.betas",
    "optim_config.adamw_eps": "training.optimizer.eps",
    "lr_scheduler_config.*": without("set training.lr_schedule"),
    "save_steps": "checkpoint.every",
    "save_epochs": without("intervals are in steps; set checkpoint.every"),
    "pref_beta": fact("preference beta"),
    "dpo_label_smoothing": fact("preference smoothing"),
    "simpo_gamma": NoEffect.OFF,
    "ld_alpha": unsupported("all tokens of an answer count alike"),
    **no_effects(NO_EFFECT),
}


def is_llama_factory_v1(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a LLaMA-Factory v1 configuration."""
    plugins = ("peft_config", "dist_config", "kernel_config", "quant_config", "optim_config", "model_class")
    trains = "train_dataset" in values or "micro_batch_size" in values
    return isinstance(values.get("model"), str) and trains and any(key in values for key in plugins)


def read_llama_factory_v1(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read a LLaMA-Factory v1 configuration."""
    default = f"{file} (LLaMA-Factory's default)"
    keys = {key: value for key, value in flat(values).items() if value not in ({}, [])}
    reading.facts.setdefault(COMPUTES, (file, file))
    reading.take(keys, RULES, file)
    reading.otherwise("training.micro_batch", 1, default)
    if not reading.settings.keys() & {"training.steps"} and "epochs" not in reading.facts:
        reading.fact("epochs", 3, f"{default}: num_train_epochs=3")
    if "batching_strategy" not in values:
        reading.set("data.packing", "padded", f"{default}: batching_strategy=normal")
    _settle_method(reading, default)
    _settle_quantization(reading, default)
    _settle_ranks(reading, default)
    _settle_optimizer(reading)
    reading.default_all(DEFAULTS, default)


def _settle_method(reading: Reading, default: str) -> None:
    """LoRA's settings and defaults, or the layers that train; without a plugin everything trains."""
    method = reading.known(METHOD)
    if METHOD not in reading.facts:
        reading.set("finetune.method", "full", f"{default}: no peft_config")
    elif method == "lora":
        reading.default_all(LORA, default)
        reading.default("finetune.targets", "all-linear", f"{default}: target_modules=all")
    elif method == "freeze":
        train_last_layers(reading, reading.facts[METHOD][1], default)


def _settle_quantization(reading: Reading, default: str) -> None:
    if "quantized" not in reading.facts:
        return
    kind, origin = reading.facts["quantized"]
    if kind not in ("bnb", "auto"):
        reading.drop(origin, "supported: bnb, auto")
    elif kind == "bnb" and "finetune.base" not in reading.settings:
        reading.set("finetune.base", "nf4", f"{origin} (LLaMA-Factory's default: quantization_bit=4)")
    else:
        reading.claim(origin, Always("a base is quantized as bitsandbytes does: nf4, int8"))
    if "finetune.base" in reading.settings and reading.value("finetune.method") != "lora":
        quantized = "finetune.base", "finetune.double_quantization"
        reading.take_back("only a frozen base is quantized; add a peft_config", *quantized)


def _settle_ranks(reading: Reading, default: str) -> None:
    """FSDP2 shards over all ranks, those that share a sequence included; without a plugin there is DDP."""
    size, origin = reading.facts.get("cp size", (1, ""))
    mode, where = reading.facts.get(CP, ("ulysses", default))
    if size == 1:
        reading.claim(origin, Has("layout.cp", 1))
        reading.ignore(CP)
    else:
        reading.set("layout.cp", size, origin)
        reading.set("layout.cp_method", mode, where)
    if "sharded" in reading.facts:
        reshards, key_origin = reading.facts.get("reshards", (True, ""))
        sharding = reading.facts["sharded"][1]
        reading.fact("zero", 2 if reshards is False else 3, joined(sharding, key_origin))
        copies, key_origin = reading.facts.get("replicate", (1, ""))
        reading.replicate(copies, key_origin)
        reading.claim(key_origin, Has("layout.dp_replicate", copies))
    for name, axis in (("shard degree", "dp_shard"), ("data ranks", "dp_shard")):
        if name in reading.facts:
            degree, key_origin = reading.facts[name]
            reading.claim(key_origin, Has(f"layout.{axis}", degree // (size if name == "shard degree" else 1)))


def _settle_optimizer(reading: Reading) -> None:
    if reading.value("training.optimizer.name") == "muon":
        rate, origin = reading.settings.get("training.optimizer.lr", (DEFAULTS["training.optimizer.lr"], ""))
        reading.set("training.optimizer.muon_lr", rate, origin or "LLaMA-Factory's default: learning_rate=1e-4")
        reading.notes.append(
            f"{reading.settings['training.optimizer.name'][1]}: it scales updates by 0.2 sqrt(max(rows, columns)), a "
            "recipe by sqrt(max(1, rows / columns)); set training.optimizer.muon_lr"
        )


def is_v1_table(values: Mapping[str, Any]) -> bool:
    """Whether this is a table of data sets of v1."""
    entries = list(values.values())
    return bool(entries) and all(
        isinstance(entry, Mapping) and "path" in entry and not entry.keys() - TABLE for entry in entries
    )


def read_v1_table(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read the table of data sets; the configuration beside it names the table."""
    reading.fact(TABLES, values, file)


def name_v1_sources(reading: Reading) -> None:
    """The data sets as sources: as the table describes them, or the one that the configuration names."""
    named, origin = reading.facts.get(DATA, (None, ""))
    table, file = reading.facts.get(TABLES, ({}, ""))
    if table:
        sources = [_source(reading, entry, f"{file}: {name}") for name, entry in table.items()]
        reading.set("data.sources", sources, joined(origin, file))
    elif named and str(named).endswith((".yaml", ".yml")):
        reading.drop(origin, "a table of data sets, which was not given; pass that file too")
    elif named:
        reading.set("data.sources", [{"path": place(named, *READERS, ".txt")}], origin)
    _settle_preference(reading, table, file)


def _source(reading: Reading, entry: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An entry of the table as a source."""
    local = entry.get("source", "hf_hub") == "local"
    source: dict[str, Any] = {"path": entry["path"] if local else f"{HUB}{entry['path']}"}
    kind = entry.get("converter")
    if kind in CONVERTERS:
        source["format"] = CONVERTERS[kind]
    elif kind is not None:
        reading.drop(f"{where}: converter={kind}", f"set the format of the source; known: {', '.join(CONVERTERS)}")
    if entry.get("split", "train") != "train":
        source["split"] = entry["split"]
    if entry.get("weight") is not None:
        source["weight"] = entry["weight"]
    if entry.get("size") is not None:
        reading.drop(f"{where}: size={entry['size']}", "all records are read")
    return source


def _settle_preference(reading: Reading, table: Mapping[str, Any], file: str) -> None:
    """DPO where the records are pairs; its settings have no effect otherwise."""
    pairs = any(entry.get("converter") == "pair" for entry in table.values())
    if pairs:
        beta, origin = reading.facts.get("preference beta", (0.1, f"{file} (LLaMA-Factory's default: pref_beta=0.1)"))
        reading.set("training.preference.beta", beta, origin)
        reading.set("data.separate_documents", True, f"{file}: converter=pair")
        reading.set_fact("training.preference.label_smoothing", "preference smoothing")
    elif DATA in reading.facts:
        reading.ignore("preference beta", "preference smoothing", reason=COUNTED)
