"""The keys of AutoModel's configuration."""

from collections.abc import Mapping
from typing import Any

from meshwright.imports.claims import Always, HasNot, NoEffect
from meshwright.imports.megatron import RULES as FLAGS
from meshwright.imports.names import DTYPES as TORCH
from meshwright.imports.names import SCHEDULES, Names, pipelined
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import (
    by_sign,
    cases,
    choice,
    degree,
    fact,
    groups,
    if_so,
    in_turn,
    last_name,
    listed,
    lower,
    no_effects,
    no_tracker,
    only,
    positive,
    sets,
    targets,
    tracker,
    unless_none,
    unsupported,
    when,
    whole,
    without,
)
from meshwright.imports.schedules import schedule_choice

DTYPES = {name: ours for theirs, ours in TORCH.items() for name in (theirs, ours)}
RECOMPUTES = {True: "full", False: "none", "true": "full", "false": "none", "full": "full", "none": "none"}
RECOMPUTES |= {"selective": "selective"}
PIPELINES = Names("layout.schedule", {"1f1b": "1f1b", "afab": "gpipe"}, counts=pipelined)
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two moments."""
COLLATES = ("default_collate", "default_collater", "packed_sequence_thd_collater", "packed_sequence_collater")


def _degree(rule: Rule) -> Rule:
    return cases({("none", 0): Always("it means the ranks that are left")}, rule)


def _model(reading: Reading, value: Any, origin: str) -> None:
    kind = str(value).rsplit(".", 2)[-2:]
    if kind[-1] == "from_config":
        reading.set("model.weights", "random", origin)
    elif kind == ["NeMoAutoModelForCausalLM", "from_pretrained"]:
        reading.claim(origin, HasNot("model.weights", "random"))
    else:
        reading.drop(origin, "only NeMoAutoModelForCausalLM's from_pretrained and from_config are read; give --model")


def _dtype(name: str) -> Rule:
    dtypes = {theirs: fact(name, ours) for theirs, ours in DTYPES.items()}
    auto = sets({}, "the dtype of the files, taken as bf16")
    return cases({**dtypes, "auto": auto}, f"supported: {', '.join(DTYPES)}", last_name)


def _known(names: tuple[str, ...], what: str) -> Rule:
    """A class whose effect is as in every recipe; others have no counterpart."""
    return cases({names: Always(what)}, what, last_name)


def _is_undecayed(group: Mapping[str, Any]) -> bool:
    return group.get("wd_mult") == 0 and "norm" in str(group.get("pattern")) and group.get("lr_mult", 1) == 1


ADAMW = sets({"training.optimizer.name": "adamw"})
NO_EFFECT: Mapping[NoEffect, Mapping[str, str]] = {
    NoEffect.LAUNCH: {"dist_env": "backend"},
    NoEffect.NAMES: {"ci": "*"},
    NoEffect.UNREAD: {"rng": "seed"},  # AutoModel reads the top-level key instead
    NoEffect.GUARDS: {"dist_env": "timeout_minutes", "benchmark": "*"},
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
        "distributed": "sequence_parallel moe.*",
        "peft": "use_memory_efficient_lora",
        "model": "use_cache text_config.use_cache output_hidden_states",
        "optimizer": "store_param_remainders",
    },
    NoEffect.CODE: {"model": "trust_remote_code"},
    NoEffect.KERNEL: {
        "model": "attn_implementation use_liger_kernel use_sdpa_patching force_hf backend.*",
        "distributed.pipeline": "patch_causal_lm_model patch_inner_model",
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
    "model.config._target_": cases(
        {"AutoConfig.from_pretrained": HasNot("model.name", None)},
        "give --model, or a Hugging Face directory with this config.json",
        lambda value: ".".join(str(value).split(".")[-2:]),
    ),
    "model.config.pretrained_model_name_or_path": "model.name",
    "model.torch_dtype": _dtype("storage"),
    "recipe": _known(RECIPES, "a recipe predicts the next token"),
    "loss_fn._target_": _known(LOSSES, "the loss is cross-entropy over the trained tokens"),
    "checkpoint.enabled": fact("saves at all"),
    "model.backend.fake_balanced_gate": unsupported("the router always chooses"),
    "loss_fn.fp32_upcast": only(True, "the loss is always in fp32"),
    "fp8.enabled": unsupported("set training.precision=fp8"),
    "fp8.*": without("set training.low_precision"),
    "freeze_config.*": unsupported("list the trained modules in finetune.train"),
    "processor.*": without("models read text only"),
    "peft.exclude_modules": without("list the modules with adapters in finetune.targets"),
    "checkpoint.is_async": "checkpoint.asynchronous",
    "compile.enabled": when("training.compile", True),
    "compile.mode": "training.compile_mode",
    "clip_grad_norm.max_norm": positive("training.clip"),
    "distributed.strategy": choice(fact("strategy"), {"fsdp2": "fsdp2", "ddp": "ddp"}),
    "distributed.dp_size": _degree(fact("replicas")),
    "distributed.dp_replicate_size": _degree(fact("replicate")),
    "distributed.tp_size": _degree(degree("layout.tp")),
    "distributed.pp_size": _degree(degree("layout.pp")),
    "distributed.cp_size": _degree(degree("layout.cp")),
    "distributed.ep_size": _degree(degree("layout.ep")),
    "distributed.activation_checkpointing": choice("training.recompute", RECOMPUTES, "full, selective, false"),
    "distributed.reshard_after_forward": fact("reshards"),
    "distributed.mp_policy.param_dtype": _dtype("compute"),
    "distributed.mp_policy.reduce_dtype": _dtype("reduced"),
    "distributed.autocast_dtype": _dtype("autocast"),
    "distributed.pipeline.pp_schedule": cases(
        {theirs: fact("schedule", ours) for theirs, ours in PIPELINES.read.items()},
        f"only {', '.join(PIPELINES.read)} are read; set layout.schedule",
        lower,
    ),
    "distributed.pipeline.pp_microbatch_size": fact("microbatch"),
    "distributed.mp_policy.output_dtype": _dtype("output"),
    "distributed.pipeline.dtype": _dtype("pipeline"),
    "distributed.pipeline.scale_grads_in_schedule": unsupported("the loss is a mean over all trained tokens"),
    "distributed.pipeline.layers_per_stage": without("set layout.stage_layers or layout.stages_per_rank"),
    "optimizer._target_": cases(
        {("AdamW", "FusedAdam"): ADAMW, "Adam": in_turn(fact("coupled", True), ADAMW)},
        "supported: AdamW, FusedAdam, Adam",
        last_name,
    ),
    "optimizer.lr": "training.optimizer.lr",
    "optimizer.betas": listed("training.optimizer.betas"),
    "optimizer.eps": "training.optimizer.eps",
    "optimizer.weight_decay": "training.optimizer.weight_decay",
    "optimizer.param_group_overrides": groups(_is_undecayed),
    "optimizer.master_weights": fact("masters"),
    "optimizer.adam_w_mode": only(True, "weight decay is always decoupled (AdamW)"),
    "optimizer.bias_correction": only(True, "moments are always corrected for their bias"),
    **{f"optimizer.{moment}_dtype": _dtype(moment) for moment in MOMENTS},
    "lr_scheduler.lr_decay_style": schedule_choice(SCHEDULES.read),
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
    "dataloader.dataloader_type": only("single", "data.order tells the order of samples"),
    **dict.fromkeys(
        ("dataloader.collate_fn", "dataloader.collate_fn._target_"), _known(COLLATES, "rows are padded and joined")
    ),
    "packed_sequence.split_across_pack": unsupported("only documents longer than a sample are cut"),
    "peft.lora_A_init": without("A starts as peft starts it (kaiming), B at zero"),
    "packed_sequence.packed_sequence_size": by_sign(
        in_turn(sets({"data.packing": "best_fit", "data.separate_documents": True}), "data.sequence_length"),
        HasNot("data.packing", "best_fit"),
    ),
    "peft.target_modules": if_so(targets(), Always("no module is named")),
    "peft.match_all_linear": when("finetune.targets", "all-linear"),
    "peft.dim": "finetune.rank",
    "peft.alpha": whole("finetune.alpha"),
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
    "wandb.mode": NoEffect.LOGS,
    **no_effects(NO_EFFECT),
}
