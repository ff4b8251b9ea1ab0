"""NVIDIA NeMo AutoModel's YAML configuration."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshwright.imports.claims import Always, Has, HasNot, NoEffect
from meshwright.imports.megatron import RULES as FLAGS
from meshwright.imports.reading import Reading, Rule, check_count, check_number, flat
from meshwright.imports.rules import (
    apply,
    choice,
    fact,
    listed,
    no_effect,
    no_effects,
    no_tracker,
    one_of,
    only,
    positive,
    tracker,
    unless_none,
    unsupported,
    when,
    without,
)
from meshwright.imports.schedules import schedule_choice

DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32", "float16": "fp16", "fp16": "fp16"}
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
RECOMPUTES = {True: "full", False: "none", "true": "full", "false": "none", "full": "full", "none": "none"}
RECOMPUTES |= {"selective": "selective"}
PIPELINES = {"1f1b": "1f1b", "gpipe": "afab"}
CONSTANT = {"training.lr_schedule.name": "constant", "training.lr_schedule.warmup": 0}
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two moments."""
COLLATES = ("default_collate", "default_collater", "packed_sequence_thd_collater", "packed_sequence_collater")


def _last(target: Any) -> str:
    """A target without its modules."""
    return str(target).rsplit(".", 1)[-1]


def _degree(path: str) -> Rule:
    def rule(reading: Reading, value: Any, origin: str) -> None:
        if value in ("none", 0):
            reading.claim(origin, Always("it means the ranks that are left"))
            return
        check_count(value, origin)
        if "." not in path:
            reading.fact(path, value, origin)
        elif value > 1:
            reading.set(path, value, origin)
        else:
            reading.claim(origin, Has(path, 1))

    return rule


def _model(reading: Reading, value: Any, origin: str) -> None:
    kind = str(value).rsplit(".", 2)[-2:]
    if kind[-1] == "from_config":
        reading.set("model.weights", "random", origin)
    elif kind == ["NeMoAutoModelForCausalLM", "from_pretrained"]:
        reading.claim(origin, HasNot("model.weights", "random"))
    else:
        reading.give_up(
            origin, "only NeMoAutoModelForCausalLM's from_pretrained and from_config are read; give --model"
        )


def _optimizer(reading: Reading, value: Any, origin: str) -> None:
    name = _last(value)
    if name in ("AdamW", "FusedAdam"):
        reading.set("training.optimizer.name", "adamw", origin)
    elif name == "Adam":
        reading.fact("coupled", True, origin)
        reading.set("training.optimizer.name", "adamw", origin)
    else:
        reading.give_up(origin, "supported: AdamW, FusedAdam, Adam")


def _dtype(name: str) -> Rule:
    def rule(reading: Reading, value: Any, origin: str) -> None:
        word = _last(value)
        if word in DTYPES:
            reading.fact(name, DTYPES[word], origin)
        elif word == "auto":
            reading.notes.append(f"{origin}: the dtype of the files, taken as bf16")
        else:
            reading.give_up(origin, f"supported: {', '.join(DTYPES)}")

    return rule


def _config(reading: Reading, value: Any, origin: str) -> None:
    if str(value).endswith("AutoConfig.from_pretrained"):
        reading.claim(origin, HasNot("model.name", None))
    else:
        reading.give_up(origin, "give --model, or a Hugging Face directory with this config.json")


def _pipeline(reading: Reading, value: Any, origin: str) -> None:
    if str(value).lower() in PIPELINES:
        reading.fact("schedule", PIPELINES[str(value).lower()], origin)
    else:
        reading.give_up(origin, f"only {', '.join(PIPELINES)} are read; set layout.schedule")


def _packed(reading: Reading, value: Any, origin: str) -> None:
    if value > 0:
        reading.set("data.packing", "best_fit", origin)
        reading.set("data.separate_documents", True, origin)
        reading.set("data.sequence_length", value, origin)
    else:
        reading.claim(origin, HasNot("data.packing", "best_fit"))


def _part(value: Any) -> str:
    """The last name of a class with its module."""
    return str(value).rpartition(".")[2]


def _known(names: Collection[str], what: str) -> Rule:
    """A class whose effect is as in every recipe; others have no counterpart."""
    return lambda reading, value, origin: apply(one_of(names, what), reading, _part(value), origin)


def _targets(reading: Reading, value: Any, origin: str) -> None:
    if value:
        reading.set("finetune.targets", [value] if isinstance(value, str) else list(value), origin)
    else:
        reading.claim(origin, Always("no module is named"))


def _overrides(reading: Reading, value: Any, origin: str) -> None:
    """Groups by names: here norms and biases never decay, and every rate is the same."""
    for group in value:
        undecayed = group.get("wd_mult") == 0 and "norm" in str(group.get("pattern"))
        if undecayed and group.get("lr_mult", 1) == 1:
            reading.fact("undecayed", True, origin)
        else:
            why = "weight decay never applies to norms and biases, and all parameters have one learning rate"
            reading.give_up(f"{origin.split('=')[0]}: {group}", why)


NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.LAUNCH: {"dist_env": "backend"},
    NoEffect.NAMES: {"ci": "recipe_owner"},
    NoEffect.UNREAD: {"rng": "seed"},  # AutoModel reads the top-level key instead
    NoEffect.GUARDS: {"dist_env": "timeout_minutes"},
    NoEffect.CLASS: {"rng": "_target_", "distributed": "_target_", "distributed.mp_policy": "_target_",
                     "dataloader": "_target_", "peft": "_target_"},
    NoEffect.DRAWS: {"rng": "ranked"},
    NoEffect.SAVES: {
        "step_scheduler": "save_checkpoint_every_epoch preemption_signal",
        "checkpoint": "model_save_format save_consolidated",
    },
    NoEffect.LOGS: {"step_scheduler": "log_remote_every_steps loss_average_window_steps", "wandb": "*"},
    NoEffect.MEMORY: {
        "step_scheduler": "gc_every_steps",
        "distributed": "sequence_parallel",
        "peft": "use_memory_efficient_lora",
        "model": "use_cache",
        "optimizer": "store_param_remainders",
    },
    NoEffect.CODE: {"model": "trust_remote_code"},
    NoEffect.KERNEL: {
        "model": "attn_implementation use_liger_kernel use_sdpa_patching",
        "compile": "fullgraph dynamic backend",
        "distributed.mp_policy": "cast_forward_inputs",
        "optimizer": "fused foreach",
        "peft": "use_triton",
    },
    NoEffect.OVERLAP: {
        "distributed": "defer_fsdp_grad_sync",
        "distributed.pipeline": "round_virtual_stages_to_pp_multiple",
    },
    NoEffect.READS: {"dataloader": "num_workers pin_memory persistent_workers prefetch_factor"},
    NoEffect.RESUMES: {"lr_scheduler": "use_checkpoint_opt_param_scheduler"},
}  # fmt: skip
RECIPES = ("TrainFinetuneRecipeForNextTokenPrediction", "FinetuneRecipeForNextTokenPrediction")
LOSSES = (
    *("MaskedCrossEntropy", "ChunkedCrossEntropy", "FusedLinearCrossEntropy", "TEParallelCrossEntropy"),
    "CrossEntropyLoss",
)

RULES: Mapping[str, Rule] = {
    "seed": "training.seed",
    "step_scheduler.global_batch_size": "training.global_batch",
    "step_scheduler.local_batch_size": fact("local batch"),
    "step_scheduler.max_steps": unless_none("training.steps"),
    "step_scheduler.num_epochs": without(
        "runs have a number of steps: training.steps (AutoModel ends at the earlier of the two)"
    ),
    "step_scheduler.ckpt_every_steps": fact("saves"),
    "step_scheduler.val_every_steps": "training.evaluation.every",
    "model._target_": _model,
    "model.pretrained_model_name_or_path": "model.name",
    "model.config": "model.name",
    "model.config._target_": _config,
    "model.config.pretrained_model_name_or_path": "model.name",
    "model.torch_dtype": _dtype("storage"),
    "recipe": _known(RECIPES, "a recipe predicts the next token"),
    "loss_fn._target_": _known(LOSSES, "the loss is cross-entropy over the trained tokens"),
    "checkpoint.enabled": fact("saves at all"),
    "checkpoint.is_async": "checkpoint.asynchronous",
    "compile.enabled": when("training.compile", True),
    "compile.mode": "training.compile_mode",
    "clip_grad_norm.max_norm": positive("training.clip"),
    "distributed.strategy": choice(fact("strategy"), {"fsdp2": "fsdp2", "ddp": "ddp"}),
    "distributed.dp_size": _degree("replicas"),
    "distributed.dp_replicate_size": _degree("replicate"),
    "distributed.tp_size": _degree("layout.tp"),
    "distributed.pp_size": _degree("layout.pp"),
    "distributed.cp_size": _degree("layout.cp"),
    "distributed.ep_size": _degree("layout.ep"),
    "distributed.activation_checkpointing": choice("training.recompute", RECOMPUTES, "full, selective, false"),
    "distributed.reshard_after_forward": fact("reshards"),
    "distributed.mp_policy.param_dtype": _dtype("compute"),
    "distributed.mp_policy.reduce_dtype": _dtype("reduced"),
    "distributed.autocast_dtype": _dtype("autocast"),
    "distributed.pipeline.pp_schedule": _pipeline,
    "distributed.pipeline.pp_microbatch_size": fact("microbatch"),
    "distributed.mp_policy.output_dtype": _dtype("output"),
    "distributed.pipeline.dtype": _dtype("pipeline"),
    "distributed.pipeline.scale_grads_in_schedule": unsupported("the loss is a mean over all trained tokens"),
    "distributed.pipeline.layers_per_stage": without("set layout.stage_layers or layout.stages_per_rank"),
    "optimizer._target_": _optimizer,
    "optimizer.lr": "training.optimizer.lr",
    "optimizer.betas": listed("training.optimizer.betas"),
    "optimizer.eps": "training.optimizer.eps",
    "optimizer.weight_decay": "training.optimizer.weight_decay",
    "optimizer.param_group_overrides": _overrides,
    "optimizer.master_weights": fact("masters"),
    "optimizer.adam_w_mode": only(True, "weight decay is always decoupled (AdamW)"),
    "optimizer.bias_correction": only(True, "moments are always corrected for their bias"),
    **{f"optimizer.{moment}_dtype": _dtype(moment) for moment in MOMENTS},
    "lr_scheduler.lr_decay_style": schedule_choice(SCHEDULES),
    "lr_scheduler.lr_warmup_steps": "training.lr_schedule.warmup",
    "lr_scheduler.lr_decay_steps": fact("decay steps"),
    "lr_scheduler.wsd_decay_steps": "training.lr_schedule.decay",
    "lr_scheduler.lr_wsd_decay_style": FLAGS["lr-wsd-decay-style"],
    "lr_scheduler.min_lr": fact("min_lr"),
    "lr_scheduler.init_lr": fact("first rate"),
    "lr_scheduler.max_lr": "training.optimizer.lr",
    "checkpoint.checkpoint_dir": "run_dir",
    "checkpoint.restore_from": without("`meshwright train --resume` continues from the newest checkpoint"),
    "dataloader.shuffle": choice("data.order", {True: "shuffled", False: "given"}, "true, false"),
    "dataloader.drop_last": only(True, "batches are always whole"),
    "dataloader.dataloader_type": without("data.order tells the order of samples"),
    **dict.fromkeys(
        ("dataloader.collate_fn", "dataloader.collate_fn._target_"), _known(COLLATES, "rows are padded and joined")
    ),
    "packed_sequence.split_across_pack": unsupported("only documents longer than a sample are cut"),
    "peft.lora_A_init": without("A starts as peft starts it (kaiming), B at zero"),
    "packed_sequence.packed_sequence_size": _packed,
    "peft.target_modules": _targets,
    "peft.match_all_linear": when("finetune.targets", "all-linear"),
    "peft.dim": "finetune.rank",
    "peft.alpha": "finetune.alpha",
    "peft.dropout": "finetune.dropout",
    "peft.dropout_position": fact("dropout position"),
    "peft.use_dora": when("finetune.dora", True),
    "quantization.load_in_4bit": when("finetune.base", "nf4"),
    "quantization.load_in_8bit": when("finetune.base", "int8"),
    **dict.fromkeys(("mlflow", "mlflow.*", "comet", "comet.*"), without("set trackers")),
    **dict.fromkeys(
        ("validation_dataset", "validation_dataset.*", "validation_dataloader", "validation_dataloader.*"),
        without("evaluation data is a fraction of the training data; set data.held_out"),
    ),
    "wandb.enable": when(tracker("wandb"), True, no_tracker("wandb")),
    "wandb.mode": no_effect(NoEffect.LOGS),
    **no_effects(NO_EFFECT),
}


def is_automodel(values: Mapping[str, Any]) -> bool:
    """Whether these are the sections of an AutoModel configuration."""
    model = values.get("model")
    return isinstance(values.get("step_scheduler"), Mapping) and isinstance(model, Mapping) and "_target_" in model


def read_automodel(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read an AutoModel configuration."""
    default = f"{file} (AutoModel's default)"
    reading.take(flat({key: value for key, value in values.items() if key != "dataset"}), RULES, file)
    tracked = values.get("wandb")
    if isinstance(tracked, Mapping) and "enable" not in tracked and tracked.get("mode") != "disabled":
        reading.track("wandb", f"{file}: wandb")
    if isinstance(values.get("dataset"), Mapping):
        _dataset(reading, values["dataset"], f"{file}: dataset", default)
    defaults = {"training.global_batch": 32, "training.optimizer.lr": 1e-4, "training.optimizer.weight_decay": 0.01}
    defaults |= {"training.optimizer.betas": [0.9, 0.999], "training.seed": 42, "training.clip": 1.0}
    reading.default_all(defaults, default)
    _batch(reading, default)
    _ranks(reading, default)
    _dtypes(reading, default)
    _rates(reading, values, default)
    _adapters(reading, values, default)
    _checkpoints(reading, default)
    decay, where = reading.settings.get("training.optimizer.weight_decay", (0.01, default))
    if decay and reading.known("coupled"):
        why = "Adam adds weight decay to the gradient; only AdamW's decoupled decay is supported"
        reading.give_up(reading.facts["coupled"][1], why)
    if decay and "undecayed" not in reading.facts:
        reading.notes.append(f"{where}: AutoModel also decays norms and biases; Meshwright does not")


def _checkpoints(reading: Reading, default: str) -> None:
    """How often it saves: every 100 steps, and never if it is switched off."""
    saves, where = reading.facts.get("saves", (100, default))
    check_number(saves, where)
    steps = reading.settings.get("training.steps", (2**52, ""))
    check_count(*steps)
    enabled, origin = reading.facts.get("saves at all", (True, ""))
    if enabled is False:
        reading.set("checkpoint.every", 0, origin)
        reading.no_effect += [(where, NoEffect.OFF)] if "saves" in reading.facts else []
        return
    reading.set("checkpoint.every", saves if saves < steps[0] else 0, f"{where}; {origin}" if origin else where)


def _dataset(reading: Reading, given: Mapping[str, Any], where: str, default: str) -> None:
    found, kind = dict(given), _last(given.get("_target_"))
    target = found.pop("_target_", None)
    tokenizer = found.pop("tokenizer", None)
    if isinstance(tokenizer, Mapping) and (name := tokenizer.get("pretrained_model_name_or_path")):
        reading.set("data.tokenizer", name, f"{where}.tokenizer.pretrained_model_name_or_path={name}")
    if kind.startswith("MegatronPretraining"):
        paths = found.pop("paths")
        reading.set("data.sources", _blended(paths), f"{where}.paths={paths}")
        length = found.pop("seq_length", None)
        reading.set("data.sequence_length", length or 2048, f"{where}.seq_length={length}" if length else default)
        split = found.pop("split", None)
        said = f"{where}.split={split}" if split else f"{default}: split=900,50,50"
        apply(FLAGS["split"], reading, (split or "900,50,50").replace(" ", ""), said)
        for key in ("index_mapping_dir", "splits_to_build", "seed", "num_val_samples", "mmap_bin_files"):
            if key in found:
                reading.give_up(f"{where}.{key}={found.pop(key)}", "training.seed shuffles; set data.held_out")
    elif kind.startswith("ChatDataset"):
        path = str(found.pop("path_or_dataset_id"))
        local = path.startswith((".", "/")) or path.endswith((".json", ".jsonl", ".parquet"))
        source = {"path": path if local else f"hub:{path}", "format": "messages"}
        source |= {"split": found.pop("split")} if found.get("split") not in (None, "train") else {}
        source |= {"subset": found.pop("name")} if found.get("name") else {}
        found.pop("split", None)
        reading.set("data.sources", [source], f"{where}.path_or_dataset_id={path}")
        if length := found.pop("seq_length", None):
            reading.set("data.sequence_length", length, f"{where}.seq_length={length}")
        if "data.packing" not in reading.settings:
            reading.set("data.packing", "padded", f"{where} (not packed)")
        if found.pop("mask_history", False):
            reading.set("data.chat.train_on", "last", f"{where}.mask_history=True")
    else:
        reading.give_up(
            f"{where}._target_={target}", "only MegatronPretraining and ChatDataset are read; set data.sources"
        )
    for key, value in found.items():
        reading.give_up(f"{where}.{key}={value}", "set it under data")


def _blended(paths: Any) -> list[dict[str, Any]]:
    """Token files; a list may have a weight before every path."""
    words = [str(word) for word in ([paths] if isinstance(paths, str) else paths)]
    weights: Sequence[float | None] = [None] * len(words)
    with suppress(ValueError):
        weights, words = [float(word) for word in words[::2]], words[1::2]
    files = [word if word.endswith(".bin") else f"{word}.bin" for word in words]
    return [
        {"path": path} if weight is None else {"path": path, "weight": weight}
        for path, weight in zip(files, weights, strict=True)
    ]


def _batch(reading: Reading, default: str) -> None:
    """A rank's batch goes through a pipeline in microbatches."""
    local, where = reading.facts.get("local batch", (1, default))
    check_count(local, where)
    if "layout.pp" not in reading.settings:
        for name in ("microbatch", "schedule"):
            if name in reading.facts:
                reading.no_effect.append((reading.facts[name][1], NoEffect.OFF))
    else:
        if "local batch" in reading.facts:  # it goes through the pipeline in microbatches, as the global batch does
            reading.no_effect.append((where, NoEffect.OVERRULED))
        local, where = reading.facts.get("microbatch", (1, default))
        reading.set("layout.schedule", *reading.facts.get("schedule", ("1f1b", default)))
    reading.set("training.micro_batch", local, where)


def _ranks(reading: Reading, default: str) -> None:
    strategy, where = reading.facts.get("strategy", ("fsdp2", default))
    if strategy == "ddp" and "strategy" in reading.facts:
        reading.claim(where, Has("layout.zero", "auto"))
    if "replicas" in reading.facts:
        replicas, origin = reading.facts["replicas"]
        reading.fact("ranks", replicas * reading.model_ranks(), origin)
    if strategy == "fsdp2":
        reshards, origin = reading.facts.get("reshards", (True, ""))
        reading.fact("zero", 2 if reshards is False else 3, f"{where}; {origin}" if origin else where)
        copies, origin = reading.facts.get("replicate", (1, ""))
        reading.replicate(copies, origin)
        if copies == 1 and origin:
            reading.claim(origin, Has("layout.dp_replicate", 1))


def _dtypes(reading: Reading, default: str) -> None:
    """FSDP2 computes in bf16 unless it is told, on weights as they are stored."""
    sharded = reading.known("strategy", "fsdp2") == "fsdp2"
    storage, where = reading.facts.get("storage", ("bf16", f"{default}: torch_dtype=auto, usually bf16"))
    plain = ("bf16", default) if sharded else (storage, where)
    compute = reading.facts.get("compute" if sharded else "autocast", plain)
    reading.set("training.precision", *compute)
    for name in ("output", "pipeline"):
        if name in reading.facts:
            reading.claim(reading.facts[name][1], Has("training.precision", reading.known(name)))
    if sharded and "autocast" in reading.facts:
        reading.no_effect.append((reading.facts["autocast"][1], NoEffect.OVERRULED))
    if compute[0] != "bf16":
        return
    reading.set("training.reduce_dtype", *reading.facts.get("reduced", ("fp32", default)))
    masters, origin = reading.facts.get("masters", (False, ""))
    if storage == "bf16" and masters is not True:
        reading.in_bf16(f"{where}; {origin}" if origin else where)
    else:
        reading.claim(f"{where}; {origin}", Has("training.master_dtype", "fp32"))
    _moments(reading)


def _moments(reading: Reading) -> None:
    """FusedAdam's dtype of each moment, which a recipe has for both together."""
    given = [reading.facts[moment] for moment in MOMENTS if moment in reading.facts]
    kinds = {dtype for dtype, _ in given}
    path, origin = "training.optimizer.state_dtype", "; ".join(where for _, where in given)
    if len(given) == len(MOMENTS) and kinds == {"bf16"}:
        reading.set(path, "bf16", origin)
        reading.notes.append(f"{origin}: a recipe rounds bf16 moments stochastically, FusedAdam to the nearest")
    elif kinds == {"fp32"}:
        for _, where in given:
            reading.claim(where, Has(path, "fp32"))
    elif given:
        reading.give_up(origin, f"both moments have one dtype, fp32 or bf16; set {path}")


def _rates(reading: Reading, values: Mapping[str, Any], default: str) -> None:
    """Without a section the rate is constant; with one, warm-up begins at a tenth of the peak."""
    if not values.get("lr_scheduler"):
        reading.set_all(CONSTANT, f"{default}: no lr_scheduler")
        return
    reading.default("training.lr_schedule.name", "cosine", default)
    steps = reading.value("training.steps")
    if "training.lr_schedule.warmup" not in reading.settings:
        if steps:
            reading.set("training.lr_schedule.warmup", min(1000, steps // 10), default)
        else:
            why = "warm-up is a tenth of the unknown number of steps, at most 1000; set training.lr_schedule.warmup"
            reading.give_up(default, why)
    peak, said = reading.settings.get("training.optimizer.lr", (1e-4, default))
    check_number(peak, said)
    if "min_lr" not in reading.facts and reading.value("training.lr_schedule.name") != "constant":
        reading.set("training.lr_schedule.final", 0.01, f"{default}: min_lr=0.01 lr")
    first, where = reading.facts.get("first rate", (peak / 10, f"{default}: init_lr=0.1 lr"))
    if first and reading.value("training.lr_schedule.warmup"):
        reading.give_up(where, "warm-up always starts at 0")
    else:
        reading.claim(where, Always("warm-up always starts at 0"))


def _adapters(reading: Reading, values: Mapping[str, Any], default: str) -> None:
    if not values.get("peft"):
        if reading.value("model.weights") != "random":
            reading.set("finetune.method", "full", f"{default}: no peft")
        return
    reading.set("finetune.method", "lora", f"{default}: peft")
    reading.default_all({"finetune.rank": 8, "finetune.alpha": 32}, default)
    position, where = reading.facts.get("dropout position", ("post", default))
    if position == "post" and reading.value("finetune.dropout"):
        reading.give_up(f"{where}: dropout_position={position}", "dropout is applied before the adapters")
