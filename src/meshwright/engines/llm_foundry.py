"""Export as LLM-Foundry's YAML, which its `train.py` reads and MosaicML's Composer trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from meshwright.engines.engine import refused_axes
from meshwright.engines.megatron_lm import LATER
from meshwright.engines.settings import RULES as SETTINGS
from meshwright.engines.settings import Fate, Rule, without
from meshwright.engines.written import YamlEngine, fully, is_remote, refused_model, refused_tokenizer, rounded, written
from meshwright.imports.foundry import PRECISIONS, RULES, SCHEDULES, TRAINED
from meshwright.imports.names import Names, lora
from meshwright.imports.rules import dotted
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.precision import BF16
from meshwright.spec.run import ResolvedRun, Run

OPTIMIZERS = Names("training.optimizer.name", {"adamw": "decoupled_adamw"})
BASES = Names.same("finetune.base", "plain", counts=lora)
PACKED = Names("data.packing", {"best_fit": {"packing_ratio": "auto"}, "padded": {}})
SHUFFLED = Names("data.order", {"shuffled": True, "given": False})
SHARDED = Names("layout.zero", {3: ("FULL_SHARD", "HYBRID_SHARD"), 2: ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")})
"""FSDP's strategy over all ranks, and that over those of one replica."""
DETECTED = ("auto", "messages", "prompt_completion")
"""Formats of records that LLM-Foundry recognises by their columns."""
LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""By a file's ending, the builder of `datasets` that reads it."""
KEYS = dotted({
    "": "seed max_seq_len global_train_batch_size device_train_microbatch_size accumulate_train_batch_on_tokens "
    "precision save_num_checkpoints_to_keep",
    "model": "pretrained_model_name_or_path",
    "tokenizer": "name kwargs.model_max_length",
    "train_loader": "drop_last dataset.max_seq_len dataset.decoder_only_format",
    "optimizer": "lr betas eps",
    "scheduler": "name",
})  # fmt: skip
ADAPTER = dotted({"model.peft_config": "r lora_alpha lora_dropout target_modules use_dora use_rslora modules_to_save"})
CLIPPING = dotted({"algorithms.gradient_clipping": "clipping_type clipping_threshold"})
UNDECAYED = r"norm|bias|(^|\.)ln_"
"""A pattern of the names of parameters that do not decay here; `re.search` reads it."""


def _recompute(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if not resolved.run.layout.zero_stage:
        return "left_out", "LLM-Foundry recomputes only under FSDP: the same losses, more memory"
    return SETTINGS["training.recompute"](value, resolved)


class LlmFoundryConfig(YamlEngine):
    """LLM-Foundry's configuration."""

    name = "llm_foundry"
    about = "MosaicML LLM-Foundry"
    file = "llm_foundry.yaml"
    choices: ClassVar = (SCHEDULES, OPTIMIZERS, PRECISIONS, BASES, TRAINED, SHUFFLED)
    rules: ClassVar[Mapping[str, Rule]] = {
        "data.held_out": without("no text is held out"),
        "training.recompute": _recompute,
    }

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Models without a directory, other optimizers, schedules and data."""
        run, refusals = resolved.run, refused_model(resolved, "LLM-Foundry")
        if run.layout.zero_stage == 1:
            refusals["layout.zero"] = "FSDP also shards gradients; set layout.zero=2 or 3"
        refusals |= refused_axes(
            run.layout, "tp", "pp", "cp", "ep", reason="this export supports only data parallelism"
        )
        if reason := _other_data(resolved):
            refusals["data.sources"] = reason
        return refusals | refused_tokenizer(resolved, "LLM-Foundry")

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """Its rates, data and packing."""
        packs = "its packing is first-fit, and may discard records that do not fit"
        return (
            LATER,
            "the format of records is detected from their columns: messages, or prompt with response or completion",
            "Composer orders samples itself; a record that is too long is truncated, or dropped if its prompt fills "
            "the sample",
            *([packs] if resolved.run.data.packing == "best_fit" else []),
        )

    def left_to_it(self, run: Run) -> Run:
        """Without the formats that it detects from the columns."""
        sources = [
            source.model_copy(update={"format": "auto"}) if source.format in DETECTED else source
            for source in run.data.sources
        ]
        return run.model_copy(update={"data": run.data.model_copy(update={"sources": tuple(sources)})})

    def config(self, resolved: ResolvedRun) -> dict[str, Any]:
        """The recipe under its names."""
        run, training = resolved.run, resolved.run.training
        schedule, optimizer, steps = training.lr_schedule, training.optimizer, training.steps
        adapters = isinstance(run.finetune, LoraSpec)
        keys = [*KEYS, *(ADAPTER if adapters else [])]
        keys += CLIPPING if training.clip else []
        keys += [] if schedule.name == "constant" else ["scheduler.alpha_f"]
        return {
            "run_name": Path(run.run_dir).name,
            "max_duration": f"{steps}ba",
            **written(RULES, keys, resolved),
            "model.name": "hf_causal_lm",
            **({"model.peft_config.peft_type": "LORA", "model.peft_config.task_type": "CAUSAL_LM"} if adapters else {}),
            "model.pretrained": run.model.weights != "random",
            "model.master_weights_dtype": "bf16" if training.master_dtype == BF16.name else "fp32",
            **_loader(resolved),
            "optimizer.name": OPTIMIZERS.write(optimizer.name),
            # decoupled_adamw multiplies weights by the decay itself, not by the decay times the learning rate
            "optimizer.weight_decay": rounded(optimizer.weight_decay * optimizer.lr),
            "optimizer.param_groups": [{"param_str_match": UNDECAYED, "weight_decay": 0.0}],
            "scheduler.t_warmup": f"{schedule.warmup_steps(steps)}ba",
            "fsdp_config": _sharding(resolved),
            "compile_config": {"mode": training.compile_mode} if training.compile else None,
            "save_folder": run.run_dir,
            "save_interval": f"{run.checkpoint.every or steps}ba",
            "loggers": {name: _logger(name, run) for name in run.tracker_names} or None,
        }


def _other_data(resolved: ResolvedRun) -> str:
    """Why the file cannot name the recipe's data; empty if it can."""
    data = resolved.run.data
    first, *more = data.sources
    if more:
        return "this export supports one dataset; give one source"
    if first.format not in DETECTED or first.columns:
        return "LLM-Foundry reads records with columns messages, or prompt and completion; rename the columns"
    if data.packing == "concatenated":
        return (
            "LLM-Foundry concatenates text only from Mosaic's shards (MDS); for records set data.packing=padded or "
            "best_fit"
        )
    if not is_remote(first) and Path(first.path).suffix not in LOADERS:
        return f"LLM-Foundry loads hub:owner/name, or files ending in {', '.join(LOADERS)}"
    return ""


def _logger(name: str, run: Run) -> dict[str, Any]:
    return {"project": "meshwright"} if name == "wandb" else {"log_dir": f"{run.run_dir}/{name}"}


def _loader(resolved: ResolvedRun) -> dict[str, Any]:
    data = resolved.run.data
    source, (responses, prompts) = data.sources[0], TRAINED.write(data.chat.train_on)
    remote = is_remote(source)
    options = {"name": source.subset} if remote else {"data_files": source.path}
    loader = LOADERS.get(Path(source.path).suffix, "json")
    dataset = {
        "hf_name": source.path.removeprefix("hub:") if remote else loader,
        **({"hf_kwargs": options} if any(options.values()) else {}),
        "split": source.split,
        "target_responses": responses,
        "target_prompts": prompts,
        "shuffle": SHUFFLED.write(data.order),
        **PACKED.write(data.packing),
    }
    return {
        "train_loader.name": "finetuning",
        "train_loader.num_workers": 0,
        **{f"train_loader.dataset.{key}": value for key, value in dataset.items()},
    }


def _sharding(resolved: ResolvedRun) -> dict[str, Any] | None:
    training, layout = resolved.run.training, resolved.run.layout
    if not layout.zero_stage or layout.data_parallel == 1:
        return None
    hybrid = layout.dp_replicate > 1
    degrees = {"data_parallel_shard_degree": layout.dp_shard, "data_parallel_replicate_degree": layout.dp_replicate}
    narrow = training.dtypes.narrow and training.reduce_dtype == BF16.name
    return {
        "sharding_strategy": SHARDED.write(layout.zero_stage)[hybrid],
        **(degrees if hybrid else {}),
        "mixed_precision": "PURE" if narrow else "DEFAULT",
        "activation_checkpointing": fully(resolved),
        "activation_checkpointing_reentrant": False,
        "state_dict_type": "sharded",
    }
