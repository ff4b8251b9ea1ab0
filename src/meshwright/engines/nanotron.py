"""Export as Nanotron's YAML, which its `run_train.py --config-file` reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from meshwright.engines.engine import refused_axes
from meshwright.engines.megatron_lm import LATER
from meshwright.engines.settings import Rule, without
from meshwright.engines.written import YamlEngine, is_remote, named_data, refused_tokenizer, rounded, stated, written
from meshwright.imports.names import FALLS, PRECISIONS, Names, pipelined
from meshwright.imports.nanotron import OPTIMIZERS, RULES, SIZE
from meshwright.imports.rules import dotted
from meshwright.spec.precision import BF16, FP32
from meshwright.spec.run import ResolvedRun

FAMILIES = ("llama", "qwen2")
PIPELINES = Names.same("layout.schedule", "1f1b", "afab", counts=pipelined)
KEYS = dotted({
    "general": "seed",
    "parallelism": "dp tp pp recompute_layer",
    "model": "dtype init_method.std",
    "model.model_config": "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "vocab_size max_position_embeddings rms_norm_eps rope_theta tie_word_embeddings hidden_act",
    "tokenizer": "tokenizer_name_or_path",
    "tokens": "sequence_length train_steps micro_batch_size batch_accumulation_per_replica",
    "optimizer.optimizer_factory": "name adam_beta1 adam_beta2 adam_eps",
    "optimizer": "weight_decay",
    "checkpoints": "checkpoints_path",
})  # fmt: skip
UNDECAYED = [".*norm.*", ".*bias"]
"""Patterns of the names of parameters that do not decay here; `re.match` reads them."""


class NanotronConfig(YamlEngine):
    """Nanotron's configuration."""

    name = "nanotron"
    about = "Nanotron"
    file = "nanotron.yaml"
    choices: ClassVar = (FALLS, OPTIMIZERS, PRECISIONS, PIPELINES)
    rules: ClassVar[Mapping[str, Rule]] = {"data.held_out": without("no text is held out")}

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Models, layouts and data that Nanotron does not have."""
        run, model, refusals = resolved.run, resolved.model, dict[str, str]()
        refusals |= _other_models(resolved)
        if run.model.weights == "pretrained":
            refusals["model.weights"] = "Nanotron loads only checkpoints in its own format; set model.weights=random"
        if model.vocab % run.layout.tp:
            refusals["model.vocab"] = f"layout.tp={run.layout.tp} does not divide {model.vocab} rows"
        if run.training.optimizer.weight_decay and not model.tied_embeddings:
            refusals["training.optimizer.weight_decay"] = (
                "Nanotron also decays norms, and its list of exclusions raises UnboundLocalError unless a parameter "
                "is tied; set it to 0, or model.tied_embeddings=true"
            )
        refusals |= refused_axes(
            run.layout, "cp", "ep", reason="this export supports data, tensor and pipeline parallelism"
        )
        first, *more = run.data.sources
        if more:
            refusals["data.sources"] = "this export supports one dataset; give one source"
        elif not _names_data_set(first, Path(resolved.base_dir)):
            refusals["data.sources"] = "Nanotron loads the split train of hub:owner/name or of a folder of files"
        return refusals | refused_tokenizer(resolved, "Nanotron")

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """Its rates, data and fresh weights."""
        return (
            LATER,
            "texts are concatenated in order, each with the special tokens that the tokenizer adds; no text is held "
            "out",
            "random weights follow Nanotron's initialization",
        )

    def config(self, resolved: ResolvedRun) -> dict[str, Any]:
        """The recipe under its names."""
        run, training, model = resolved.run, resolved.run.training, resolved.model
        source, decay = run.data.sources[0], training.optimizer.weight_decay
        dataset = {
            **named_data(source, "hf_dataset_or_datasets", "hf_dataset_config_name"),
            "hf_dataset_splits": source.split,
            "text_column_name": source.text_key,
        }
        wide = FP32.name in (training.precision, training.reduce_dtype)
        return {
            "general": {"project": "meshwright", "run": Path(run.run_dir).name},
            "optimizer": {"clip_grad": training.clip},
            **written(RULES, KEYS, resolved),
            "parallelism.pp_engine": PIPELINES.write(run.layout.schedule) if run.layout.pp > 1 else "1f1b",
            "parallelism.tp_mode": "REDUCE_SCATTER",
            "model.init_method.scaling_method": "NUM_LAYERS",
            "model.make_vocab_size_divisible_by": 1,
            f"{SIZE}is_qwen2_config" if model.qkv_bias else f"{SIZE}is_llama_config": True,
            f"{SIZE}attention_bias": True if model.qkv_bias else None,
            f"{SIZE}rope_interleaved": False,
            f"{SIZE}z_loss_enabled": False,
            "optimizer.optimizer_factory.torch_adam_is_fused": True,
            "optimizer.zero_stage": run.layout.zero_stage,
            "optimizer.weight_decay_exclude_named_params": UNDECAYED if decay else [],
            "optimizer.accumulate_grad_in_fp32": training.precision == BF16.name and wide,
            "optimizer.learning_rate_scheduler": _rates(resolved),
            "data_stages": [{
                "name": "training",
                "start_training_step": 1,
                "data": {"dataset": stated(dataset), "seed": training.seed},
            }],
            "checkpoints.checkpoint_interval": run.checkpoint.every or training.steps,
            "logging.iteration_step_info_interval": 1,
        }  # fmt: skip


def _other_models(resolved: ResolvedRun) -> dict[str, str]:
    model, refusals = resolved.model, dict[str, str]()
    if model.family not in FAMILIES:
        refusals["model.family"] = f"this export supports {', '.join(FAMILIES)}"
    if model.rope_scaling is not None:
        refusals["model.rope_scaling"] = "Nanotron's models ignore rope_scaling"
    if model.sliding_window is not None:
        refusals["model.sliding_window"] = "this export does not support sliding windows"
    if model.head_dim * model.num_heads != model.hidden:
        refusals["model.head_dim"] = "Nanotron's head dimension is hidden / num_heads"
    return refusals


def _names_data_set(source: Any, base_dir: Path) -> bool:
    return source.split == "train" and (is_remote(source) or (base_dir / source.path).is_dir())


def _rates(resolved: ResolvedRun) -> dict[str, Any]:
    """The schedule. Warm-up of no step is `constant`: under `linear` the first step would have the rate 0."""
    training = resolved.run.training
    schedule, steps, lr = training.lr_schedule, training.steps, training.optimizer.lr
    warmup = schedule.warmup_steps(steps)
    falls = steps - warmup
    if schedule.name == "wsd":
        falls = min(falls, schedule.decay_steps(steps))
    flat = schedule.name == "constant"
    return {
        "learning_rate": lr,
        "lr_warmup_steps": warmup,
        "lr_warmup_style": "linear" if warmup else "constant",
        "lr_decay_style": FALLS.write(schedule.name),
        "lr_decay_starting_step": steps - falls,
        "lr_decay_steps": falls,
        "min_decay_lr": lr if flat else rounded(lr * schedule.final),
    }
