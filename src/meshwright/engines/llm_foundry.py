"""Export as LLM-Foundry's YAML, which its `train.py` reads and MosaicML's Composer trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from meshwright.engines.engine import refused_axes
from meshwright.engines.megatron_lm import LATER
from meshwright.engines.settings import RULES, Fate, Rule, without
from meshwright.engines.written import YamlEngine, rounded, tokenizer_of, whole
from meshwright.imports.foundry import PRECISIONS, SCHEDULES, TRAINED
from meshwright.imports.names import Names, lora
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
"""Formats of records that LLM-Foundry tells from their columns."""
LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""By a file's ending, the builder of `datasets` that reads it."""
UNDECAYED = r"norm|bias|(^|\.)ln_"
"""A pattern of the names of parameters that do not decay here; `re.search` reads it."""


def _recompute(value: Any, resolved: ResolvedRun) -> tuple[Fate, str]:
    if not resolved.run.layout.zero_stage:
        return "left_out", "LLM-Foundry recomputes only under FSDP: the same losses, more memory"
    return RULES["training.recompute"](value, resolved)


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
        run, found = resolved.run, dict[str, str]()
        if not (run.model.name or "").startswith((".", "/")):
            found["model.name"] = "LLM-Foundry loads a Hugging Face directory; write its path, starting with ./ or /"
        if run.layout.zero_stage == 1:
            found["layout.zero"] = "FSDP also shards gradients; set layout.zero=2 or 3"
        found |= refused_axes(run.layout, "tp", "pp", "cp", "ep", why="this export supports only data parallelism")
        if reason := _other_data(resolved):
            found["data.sources"] = reason
        if tokenizer_of(resolved) is None:
            found["data.tokenizer"] = "LLM-Foundry loads a tokenizer; give its folder"
        return found

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
        run, training, length = resolved.run, resolved.run.training, resolved.run.data.sequence_length
        clipped = {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": training.clip}}
        return {
            "run_name": Path(run.run_dir).name,
            "seed": training.seed,
            "max_seq_len": length,
            "max_duration": f"{training.steps}ba",
            "global_train_batch_size": resolved.global_batch,
            "device_train_microbatch_size": resolved.micro_batch,
            "accumulate_train_batch_on_tokens": True,
            "precision": PRECISIONS.write(training.precision),
            "model": _model(resolved),
            "tokenizer": {"name": tokenizer_of(resolved), "kwargs": {"model_max_length": length}},
            "train_loader": _loader(resolved),
            "optimizer": _optimizer(resolved),
            "scheduler": _rates(resolved),
            "algorithms": clipped if training.clip else None,
            "fsdp_config": _sharding(resolved),
            "compile_config": {"mode": training.compile_mode} if training.compile else None,
            "save_folder": run.run_dir,
            "save_interval": f"{run.checkpoint.every or training.steps}ba",
            "save_num_checkpoints_to_keep": run.checkpoint.keep_last,
            "loggers": {name: _logger(name, run) for name in run.trackers} or None,
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
    if not first.path.startswith("hub:") and Path(first.path).suffix not in LOADERS:
        return f"LLM-Foundry loads hub:owner/name, or files ending in {', '.join(LOADERS)}"
    return ""


def _logger(name: str, run: Run) -> dict[str, Any]:
    return {"project": "meshwright"} if name == "wandb" else {"log_dir": f"{run.run_dir}/{name}"}


def _model(resolved: ResolvedRun) -> dict[str, Any]:
    run, finetune = resolved.run, resolved.run.finetune
    found: dict[str, Any] = {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": run.model.name,
        "pretrained": run.model.weights != "random",
        "master_weights_dtype": "bf16" if run.training.master_dtype == BF16.name else "fp32",
    }
    if isinstance(finetune, LoraSpec):
        every = finetune.targets == "all-linear"
        found["peft_config"] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": finetune.rank,
            "lora_alpha": whole(finetune.alpha),
            "lora_dropout": finetune.dropout,
            "target_modules": "all-linear" if every else list(finetune.targets),
            "use_dora": finetune.dora,
            "use_rslora": finetune.rslora,
            **({"modules_to_save": list(finetune.train)} if finetune.train else {}),
        }
    return found


def _loader(resolved: ResolvedRun) -> dict[str, Any]:
    data = resolved.run.data
    source, (responses, prompts) = data.sources[0], TRAINED.write(data.chat.train_on)
    remote = source.path.startswith("hub:")
    options = {"name": source.subset} if remote else {"data_files": source.path}
    loader = LOADERS.get(Path(source.path).suffix, "json")
    return {
        "name": "finetuning",
        "dataset": {
            "hf_name": source.path.removeprefix("hub:") if remote else loader,
            **({"hf_kwargs": options} if any(options.values()) else {}),
            "split": source.split,
            "max_seq_len": data.sequence_length,
            "decoder_only_format": True,
            "target_responses": responses,
            "target_prompts": prompts,
            "shuffle": SHUFFLED.write(data.order),
            **PACKED.write(data.packing),
        },
        "drop_last": True,
        "num_workers": 0,
    }


def _optimizer(resolved: ResolvedRun) -> dict[str, Any]:
    """decoupled_adamw multiplies weights by the decay itself, not by the decay times the learning rate."""
    optimizer = resolved.run.training.optimizer
    return {
        "name": OPTIMIZERS.write(optimizer.name),
        "lr": optimizer.lr,
        "betas": list(optimizer.betas),
        "eps": optimizer.eps,
        "weight_decay": rounded(optimizer.weight_decay * optimizer.lr),
        "param_groups": [{"param_str_match": UNDECAYED, "weight_decay": 0.0}],
    }


def _rates(resolved: ResolvedRun) -> dict[str, Any]:
    training = resolved.run.training
    schedule = training.lr_schedule
    flat = schedule.name == "constant"
    return {
        "name": SCHEDULES.write(schedule.name),
        "t_warmup": f"{schedule.warmup_steps(training.steps)}ba",
        **({} if flat else {"alpha_f": schedule.final}),
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
        "activation_checkpointing": set(resolved.recompute) == {"full"},
        "activation_checkpointing_reentrant": False,
        "state_dict_type": "sharded",
    }
