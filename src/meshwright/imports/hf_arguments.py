"""TrainingArguments of Hugging Face transformers, as YAML or JSON.

A step's learning rate is theirs of the step before: their first step of warm-up has rate 0, a recipe's has 1 / warm-up
of the peak. Their intervals below 1 are shares of all steps, which a recipe does not have.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.imports.accelerate_yaml import PRECISION, compile_in_mode, compile_with
from meshwright.imports.accelerate_yaml import RULES as ACCELERATE_RULES
from meshwright.imports.claims import Always, Has, HasNot, NoEffect
from meshwright.imports.deepspeed import read_named
from meshwright.imports.deepspeed_schedules import SCHEDULE
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import above_zero, fact, no_effects, only, positive, unsupported, when, without, words
from meshwright.imports.schedules import lose_schedule
from meshwright.spec.errors import UserError

EVALUATES, SAVES = "training.evaluation.every", "checkpoint.every"


def every(path: str) -> Rule:
    """The setting gets a number of steps; a share of all steps is kept for `settle_shares`."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if 0 < value < 1:
            keep_share(reading, path, value, origin)
        else:
            reading.set(path, int(value) if int(value) == value else value, origin)

    return rule


def keep_share(reading: Reading, path: str, share: float, origin: str) -> None:
    """Keep an interval that is a share of all steps."""
    reading.fact(_share(path), share, origin)


def settle_shares(reading: Reading) -> None:
    """Name the intervals that are shares of all steps, with their steps if the run's are known."""
    steps = reading.settings.get("training.steps", (None, ""))[0]
    for path in (EVALUATES, SAVES):
        if _share(path) not in reading.facts:
            continue
        share, origin = reading.facts[_share(path)]
        number = f": {math.ceil(share * steps)}" if steps else ""
        reading.give_up(origin, f"a share of all steps; set {path}, in steps{number}")


def ignore_interval(reading: Reading, path: str, key: str, why: str) -> None:
    """Take back an interval that this key has set."""
    for found, name in ((reading.settings, path), (reading.facts, _share(path))):
        if f": {key}=" in found.get(name, (0, ""))[1]:
            reading.give_up(found.pop(name)[1], why)


def settle_intervals(reading: Reading, values: Mapping[str, Any], origin: str) -> None:
    """The Trainer's intervals, which count only under the strategy `steps`.

    YAML reads the strategy `no` as false.
    """
    evaluates = values.get("eval_strategy", values.get("evaluation_strategy", "no"))
    for path, key, strategy in (
        (EVALUATES, "eval_steps", evaluates),
        (SAVES, "save_steps", values.get("save_strategy", "steps")),
    ):
        if strategy != "steps":
            ignore_interval(reading, path, key, f"the Trainer ignores it with the strategy {strategy}")
        elif values.get(key) is None:
            default_interval(reading, path, values, origin)


def default_interval(reading: Reading, path: str, values: Mapping[str, Any], origin: str) -> None:
    """The interval under the strategy `steps` if no key gives it."""
    steps = values.get("logging_steps", 500) if path == EVALUATES else 500
    if isinstance(steps, int):
        reading.default(path, steps, origin)


def _share(path: str) -> str:
    return f"{path} as a share"


TYPE, OPTIONS = "lr_scheduler_type", "lr_scheduler_kwargs"
WARMUP = "training.lr_schedule.warmup"
FINAL = "training.lr_schedule.final"


def keep_type(reading: Reading, value: Any, origin: str) -> None:
    """Keep the schedule's name for `settle_schedule`."""
    if not isinstance(value, str):
        raise UserError(f"{origin}: must be a schedule's name, as in cosine")
    reading.fact(TYPE, value, origin)


def keep_options(reading: Reading, value: Any, origin: str) -> None:
    """Keep the schedule's arguments, a mapping or its JSON."""
    options = json.loads(value) if isinstance(value, str) else value
    if options:
        reading.fact(OPTIONS, dict(options), origin)
    else:
        reading.claim(origin, Always("it is empty"))


def settle_schedule(reading: Reading, default: str, origin: str) -> None:
    """Set the schedule of the name and arguments that were kept; without a name it is `default`, from `origin`."""
    name, where = reading.facts.get(TYPE, (default, origin))
    if name not in SCHEDULES:
        if SCHEDULE in reading.facts:
            _give_up_schedule(reading)
        else:
            lose_schedule(reading, where, f"supported: {', '.join(SCHEDULES)}")
            if OPTIONS in reading.facts:
                reading.give_up(reading.facts[OPTIONS][1], f"{where} has no counterpart")
        return
    options, given = reading.facts.get(OPTIONS, ({}, where))
    kind, known, settle = SCHEDULES[name]
    if SCHEDULE in reading.facts and (reading.facts[SCHEDULE][0] != kind or name == "constant"):
        _give_up_schedule(reading)
        return
    use = reading.set if TYPE in reading.facts else reading.default
    use("training.lr_schedule.name", kind, where)
    settle(reading, options, given)
    if kind != "constant" and FINAL not in reading.settings and "min_lr" not in reading.facts:
        use(FINAL, 0.0, where)
    for key, value in options.items():
        if key not in known or known[key] not in (value, None):
            reading.give_up(f"{given}: {key}={value}", f"the schedule {kind} does not have this setting")
    if options and all(known.get(key) == value for key, value in options.items()):
        reading.claim(given, Always(f"these are constants of the schedule {kind}"))


def _give_up_schedule(reading: Reading) -> None:
    """Report the schedule that was kept: with a scheduler in DeepSpeed's file, that one is used."""
    for kept in (TYPE, OPTIONS):
        if kept in reading.facts:
            reading.give_up(reading.facts[kept][1], f"DeepSpeed's schedule is used: {reading.facts[SCHEDULE][1]}")


def _nothing(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    pass


def _without_warmup(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    """`constant` ignores the steps of warm-up."""
    for found, name in ((reading.settings, WARMUP), (reading.facts, "warmup_ratio")):
        value, where = found.pop(name, (0, ""))
        if value:
            reading.give_up(where, f"transformers ignores warm-up with {TYPE}=constant; constant_with_warmup has it")
    reading.set(WARMUP, 0, origin)


def _to_end(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    _floor(reading, {"min_lr": options.get("lr_end", 1e-7)}, origin)


def _floor(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    """The least rate, as a share of the peak or by itself."""
    if "min_lr_rate" in options:
        reading.set(FINAL, options["min_lr_rate"], origin)
    elif "min_lr" in options:
        reading.fact("min_lr", options["min_lr"], origin)


def _stable(reading: Reading, options: Mapping[str, Any], origin: str) -> None:
    """Warm-up, a constant rate, decay."""
    floor = options.get("min_lr_ratio", 0.0)
    reading.set(FINAL, floor, origin)
    if "num_decay_steps" in options:
        reading.set("training.lr_schedule.decay", options["num_decay_steps"], origin)
    if (fall := options.get("decay_type", "cosine")) != "linear":
        reading.give_up(f"{origin}: decay_type={fall}", "wsd always decays linearly")
    if floor:
        reading.give_up(f"{origin}: min_lr_ratio={floor}", "warm-up always starts at 0, not at the minimum rate")


Settle = Callable[[Reading, Mapping[str, Any], str], None]
SCHEDULES: Mapping[str, tuple[str, Mapping[str, Any], Settle]] = {
    "linear": ("linear", {}, _nothing),
    "polynomial": ("linear", {"power": 1.0, "lr_end": None}, _to_end),
    "cosine": ("cosine", {"num_cycles": 0.5}, _nothing),
    "cosine_with_restarts": ("cosine", {"num_cycles": 1}, _nothing),
    "cosine_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}, _floor),
    "cosine_warmup_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}, _floor),
    "constant": ("constant", {}, _without_warmup),
    "constant_with_warmup": ("constant", {}, _nothing),
    "warmup_stable_decay": (
        "wsd",
        {"num_decay_steps": None, "min_lr_ratio": None, "decay_type": None, "warmup_type": "linear", "num_cycles": 0.5},
        _stable,
    ),
}
"""Their name -> the recipe's, the arguments that are read (None: any value; else the one that the recipe's equals), and
what else is set."""


OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    "paged_adamw_32bit": "paged_adamw",
    "muon": "muon",
}

HYBRID = (
    "shards within a machine, whose number of GPUs is unknown; the recipe shards over all ranks; set layout.dp_shard "
    "and layout.dp_replicate"
)


def _trackers(reading: Reading, value: Any, origin: str) -> None:
    names = [value] if isinstance(value, str) else list(value or [])
    for name in names:
        if name in ("tensorboard", "wandb"):
            reading.track(name, origin)
        elif name != "none":
            reading.give_up(origin, f"{name} is not a built-in tracker; write a plug-in (docs/plugins.md)")
    if not set(names) - {"none"}:
        reading.claim(origin, Has("trackers", []))


def _sharding(reading: Reading, value: Any, origin: str) -> None:
    if isinstance(value, bool):  # as `fsdp: true`, which fsdp_config completes
        reading.fact("fsdp", value, origin)
        return
    words = value.split() if isinstance(value, str) else [str(word) for word in value or []]
    stages = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2, "no_shard": 0}
    for word in words:
        if word in stages:
            reading.fact("zero", stages[word], origin)
            if word.startswith("hybrid_shard"):
                reading.notes.append(f"{origin}: {HYBRID}")
        elif word == "offload":
            reading.set("layout.offload", "cpu", origin)
        elif word != "auto_wrap":
            reading.give_up(origin, "Meshwright always shards block by block")
    if not words:
        reading.claim(origin, Always("the Trainer does not shard"))


def _warmup(reading: Reading, value: Any, origin: str) -> None:
    """Steps; below 1, a share of all."""
    if 0 < value < 1:
        reading.fact("warmup_ratio", value, origin)
    else:
        reading.set("training.lr_schedule.warmup", int(value), origin)


def strategy(path: str) -> Rule:
    """What an interval counts. YAML reads the strategy `no` as false; then only the last step is meant."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value == "steps":
            reading.claim(origin, Always("intervals are in steps"))
        elif value in ("no", False):
            reading.claim(origin, Has(path, 0))
        else:
            reading.give_up(origin, "intervals are in steps")

    return rule


def _compiled_mode(reading: Reading, value: Any, origin: str) -> None:
    """The mode of compilation, which switches it on."""
    reading.set("training.compile", True, origin)
    compile_in_mode(reading, value, origin)


def _precision(name: str) -> Rule:
    """A switch of the Trainer, which replaces Accelerate's precision; here the first file's counts."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value is not True:
            reading.claim(origin, HasNot("training.precision", name))
            return
        accelerates, where = reading.facts.get(PRECISION, (name, ""))
        if accelerates != name and reading.settings.get("training.precision", (name, ""))[0] != name:
            reading.notes.append(
                f"{origin}: the Trainer takes this, not Accelerate's precision ({where}); the recipe has that of the "
                "first file, so give the Trainer's file first"
            )
        reading.set("training.precision", name, origin)

    return rule


def _settle_fsdp(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """`fsdp_config`, whose keys are Accelerate's, with or without their prefix; it has no effect without `fsdp`."""
    config = values.get("fsdp_config")
    if isinstance(reading.known("fsdp"), bool) and not reading.known("fsdp"):
        reading.claim(reading.facts["fsdp"][1], Always("the Trainer does not shard"))
    if isinstance(config, Mapping) and values.get("fsdp"):
        named = {f"fsdp_config.fsdp_{str(key).removeprefix('fsdp_')}": said for key, said in config.items()}
        if "fsdp_config.fsdp_cpu_offload" in named:  # the Trainer's word
            named["fsdp_config.fsdp_offload_params"] = named.pop("fsdp_config.fsdp_cpu_offload")
        newer = isinstance(named.get("fsdp_config.fsdp_reshard_after_forward"), bool)  # FSDP2's word, which counts
        if newer and reading.facts.get("zero", (0, ""))[1].startswith(f"{file}: fsdp="):
            del reading.facts["zero"]
        reading.take(named, ACCELERATE_RULES, file)
    elif config:
        reading.give_up(f"{file}: fsdp_config={config}", "it has no effect without fsdp, or is a file: pass that too")
    if reading.known("fsdp"):
        if "zero" not in reading.facts:
            reading.fact("zero", 3, reading.facts["fsdp"][1])
        reading.claim(reading.facts["fsdp"][1], HasNot("layout.zero", "auto"))


NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.LOGS: {
        "": "logging_steps logging_dir logging_strategy logging_first_step disable_tqdm log_level log_level_replica "
        "log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second "
        "skip_memory_metrics project trackio_space_id"
    },
    NoEffect.NAMES: {"": "run_name"},
    NoEffect.READS: {
        "": "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor remove_unused_columns "
        "dataloader_persistent_workers"
    },
    NoEffect.OVERLAP: {"": "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers"},
    NoEffect.GUARDS: {"": "ddp_timeout debug"},
    NoEffect.MEMORY: {"": "gradient_checkpointing_kwargs torch_empty_cache_steps"},
    NoEffect.KERNEL: {"": "use_liger_kernel liger_kernel_config"},
    NoEffect.SAVES: {"": "overwrite_output_dir save_safetensors save_only_model save_on_each_node "
                     "enable_jit_checkpoint"},
    NoEffect.HUB: {
        "": "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision"
    },
    NoEffect.EVALUATES: {
        "": "do_eval do_predict per_device_eval_batch_size eval_accumulation_steps eval_delay eval_on_start "
        "prediction_loss_only include_for_metrics batch_eval_metrics eval_do_concat_batches bf16_full_eval "
        "fp16_full_eval eval_use_gather_object"
    },
    NoEffect.LAUNCH: {"": "local_rank ddp_backend"},
}  # fmt: skip

BEST = "the last weights are the result; set checkpoint.keep_best to keep the best ones"
RULES: Mapping[str, Rule] = {
    "learning_rate": "training.optimizer.lr",
    "weight_decay": "training.optimizer.weight_decay",
    "adam_beta1": fact("beta1"),
    "adam_beta2": fact("beta2"),
    "adam_epsilon": "training.optimizer.eps",
    "max_grad_norm": positive("training.clip"),
    "optim": words("training.optimizer.name", OPTIMIZERS),
    "lr_scheduler_type": keep_type,
    "lr_scheduler_kwargs": keep_options,
    "warmup_steps": _warmup,
    "warmup_ratio": fact("warmup_ratio"),
    "max_steps": above_zero("training.steps", Always("the epochs count")),
    "num_train_epochs": fact("epochs"),
    "per_device_train_batch_size": "training.micro_batch",
    "gradient_accumulation_steps": fact("accumulation"),
    "bf16": _precision("bf16"),
    "fp16": _precision("fp16"),
    "gradient_checkpointing": when("training.recompute", "full", Has("training.recompute", "none")),
    "torch_compile": when("training.compile", True),
    "torch_compile_backend": compile_with,  # these two switch it on
    "torch_compile_mode": _compiled_mode,
    "seed": "training.seed",
    "data_seed": without("training.seed also shuffles the data"),
    "full_determinism": when("training.deterministic", True),
    "save_steps": every(SAVES),
    "save_strategy": strategy(SAVES),
    **dict.fromkeys(("evaluation_strategy", "eval_strategy"), strategy(EVALUATES)),
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": every(EVALUATES),
    "output_dir": "run_dir",
    "report_to": _trackers,
    "fsdp": _sharding,
    "deepspeed": read_named,
    "label_smoothing_factor": unsupported("label smoothing is not supported"),
    "neftune_noise_alpha": unsupported("noise on embeddings is not supported"),
    "group_by_length": unsupported("use data.packing=best_fit instead"),
    "do_train": only(True, "a recipe always trains"),
    "tf32": unsupported("fp32 products are as PyTorch computes them by default"),
    "use_cpu": when("device", "cpu"),
    "resume_from_checkpoint": unsupported("`meshwright train --resume` continues from the newest checkpoint"),
    "auto_find_batch_size": unsupported("training.micro_batch stays as it is set"),
    "load_best_model_at_end": unsupported(BEST),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), without(BEST)),
    **no_effects(NO_EFFECT),
}


def is_hf_arguments(values: Mapping[str, Any]) -> bool:
    """Whether these are the keys of TrainingArguments."""
    return "per_device_train_batch_size" in values or ("output_dir" in values and "learning_rate" in values)


def read_hf_arguments(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read TrainingArguments; omitted fields get the Trainer's defaults where those differ from ours."""
    reading.take(deepspeed_first({key: value for key, value in values.items() if key != "fsdp_config"}), RULES, file)
    settle_intervals(reading, values, f"{file} (the Trainer's default)")
    _settle_fsdp(reading, values, file)
    take_defaults(reading, values, f"{file} (the Trainer's default)", "linear")
    take_length(reading, values, f"{file} (the Trainer's default)")
    reading.default("training.precision", "fp32", f"{file} (neither bf16 nor fp16)")


def deepspeed_first(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with DeepSpeed's configuration in front, since it wins."""
    return {"deepspeed": values.get("deepspeed"), **values}


def take_length(reading: Reading, values: Mapping[str, Any], origin: str) -> None:
    """The Trainer's batch of 8 and its 3 epochs, where neither these nor other files give another."""
    if "training.micro_batch" not in reading.settings:
        reading.set("training.micro_batch", 8, origin)
    if "num_train_epochs" not in values:
        reading.fact("epochs", 3, f"{origin}: num_train_epochs=3")


def take_defaults(reading: Reading, values: Mapping[str, Any], origin: str, schedule: str) -> None:
    """The defaults of the Trainer, and of systems on top of it, for fields that `values` omits. `schedule`: the default
    one."""
    reading.default("training.optimizer.lr", 5e-5, origin)
    reading.default("training.optimizer.weight_decay", 0.0, origin)
    if "adam_beta2" not in values and "training.optimizer.betas" not in reading.settings:
        reading.fact("beta2", 0.999, origin)
    settle_schedule(reading, schedule, origin)
    if "warmup_ratio" not in reading.facts:
        reading.default("training.lr_schedule.warmup", 0, origin)
    reading.default("training.seed", 42, origin)
