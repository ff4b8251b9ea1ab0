"""Export as NVIDIA NeMo AutoModel's YAML, which `automodel FILE` reads."""

from collections.abc import Mapping
from typing import Any, ClassVar

from meshwright.engines.engine import refused_axes
from meshwright.engines.megatron_lm import LATER
from meshwright.engines.settings import Rule, without
from meshwright.engines.written import (
    YamlEngine,
    named_data,
    refused_model,
    refused_tokenizer,
    stated,
    tokenizer_of,
    written,
)
from meshwright.imports.automodel_keys import PIPELINES, RULES
from meshwright.imports.megatron import RULES as FLAGS
from meshwright.imports.names import PRECISIONS, SCHEDULES, Names, lora
from meshwright.imports.rules import dotted
from meshwright.spec.finetune import LoraSpec
from meshwright.spec.precision import BF16
from meshwright.spec.run import ResolvedRun

AUTO = "nemo_automodel.NeMoAutoModelForCausalLM"
DATASETS = "nemo_automodel.components.datasets"
OPTIMIZERS = Names("training.optimizer.name", {"adamw": "torch.optim.AdamW"})
BASES = Names.same("finetune.base", "plain", counts=lora)
HISTORY = Names("data.chat.train_on", {"assistant": None, "last": True})
"""Whether a conversation's earlier answers are masked."""
RECOMPUTES = Names("training.recompute", {"none": False, "selective": "selective", "full": "full"})
KEYS = dotted({
    "": "seed",
    "step_scheduler": "global_batch_size max_steps",
    "compile": "enabled mode",
    "clip_grad_norm": "max_norm",
    "optimizer": "lr betas eps weight_decay",
    "lr_scheduler": "lr_decay_style lr_warmup_steps lr_decay_steps max_lr min_lr",
    "checkpoint": "checkpoint_dir",
})  # fmt: skip
ADAPTER = dotted({"peft": "match_all_linear dim alpha dropout use_dora"})
UNDECAYED = {"pattern": "norm|bias", "wd_mult": 0.0}


class AutoModelConfig(YamlEngine):
    """AutoModel's configuration."""

    name = "automodel"
    about = "NVIDIA NeMo AutoModel"
    file = "automodel.yaml"
    choices: ClassVar = (SCHEDULES, OPTIMIZERS, PRECISIONS, PIPELINES, BASES, HISTORY)
    rules: ClassVar[Mapping[str, Rule]] = {"data.order": without("it orders samples itself")}

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Models without a directory, unsupported data, and AutoModel's fixed behaviour."""
        run, layout, refusals = resolved.run, resolved.run.layout, refused_model(resolved, "AutoModel")
        if run.training.clip is None:
            refusals["training.clip"] = "AutoModel clips at 1.0 unless a norm is given; set training.clip"
        split = layout.tp * layout.pp * layout.cp
        if not layout.zero_stage and layout.data_parallel > 1 and split > 1:
            refusals["layout.zero"] = "AutoModel's DDP cannot be combined with other axes; set layout.zero=3"
        refusals |= refused_axes(layout, "ep", reason="this export does not support expert parallelism")
        if reason := _other_data(resolved):
            refusals["data.sources"] = reason
        return refusals | refused_tokenizer(resolved, "AutoModel")

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """Its rates, order and fresh weights."""
        adapters = ["adapters are initialized by AutoModel's rule (xavier)"]
        return (
            LATER,
            "AutoModel orders samples itself; random weights follow transformers' initialization",
            *(adapters if isinstance(resolved.run.finetune, LoraSpec) else []),
        )

    def config(self, resolved: ResolvedRun) -> dict[str, Any]:
        """The recipe under its names."""
        run, training, steps = resolved.run, resolved.run.training, resolved.run.training.steps
        pretrained, schedule = run.model.weights != "random", training.lr_schedule
        microbatches = resolved.accumulation if run.layout.pp > 1 else 1
        keys = [*KEYS, *(ADAPTER if isinstance(run.finetune, LoraSpec) else [])]
        return {
            "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
            "step_scheduler": {"num_epochs": None, "val_every_steps": training.evaluation.every or None},
            **written(RULES, keys, resolved),
            "step_scheduler.local_batch_size": resolved.micro_batch * microbatches,
            "step_scheduler.ckpt_every_steps": run.checkpoint.every or steps,
            "step_scheduler.save_checkpoint_every_epoch": False,
            "model._target_": f"{AUTO}.from_pretrained" if pretrained else f"{AUTO}.from_config",
            "model.config._target_": None if pretrained else "transformers.AutoConfig.from_pretrained",
            f"model.{'' if pretrained else 'config.'}pretrained_model_name_or_path": run.model.name,
            "model.torch_dtype": "bfloat16" if training.master_dtype == BF16.name else "float32",
            **_adapters(run.finetune),
            "distributed": _distributed(resolved),
            "loss_fn._target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
            **_data(resolved),
            "optimizer._target_": OPTIMIZERS.write(training.optimizer.name),
            "optimizer.param_group_overrides": [UNDECAYED],
            "lr_scheduler.wsd_decay_steps": schedule.decay_steps(steps) if schedule.name == "wsd" else None,
            "lr_scheduler.lr_wsd_decay_style": "linear" if schedule.name == "wsd" else None,
            "lr_scheduler.init_lr": 0.0,
            "checkpoint.enabled": True,
            "checkpoint.model_save_format": "safetensors",
            "wandb": {"project": "meshwright", "name": run.run_dir} if "wandb" in run.tracker_names else None,
        }


def _other_data(resolved: ResolvedRun) -> str:
    """Why the file cannot name the recipe's data; empty if it can."""
    sources = resolved.run.data.sources
    if all(source.path.endswith(".bin") for source in sources):
        unweighed = len(sources) > 1 and sources[0].weight is None
        return "AutoModel mixes token files by weight; give every source a weight" if unweighed else ""
    first, *more = sources
    if more or first.format != "messages":
        return "AutoModel reads token files (NAME.bin with NAME.idx), or one source of format messages"
    return ""


def _distributed(resolved: ResolvedRun) -> dict[str, Any]:
    training, layout, kinds = resolved.run.training, resolved.run.layout, set(resolved.recompute)
    alone = layout.tp * layout.pp * layout.cp == 1
    narrow = training.precision == BF16.name
    recompute = RECOMPUTES.write(*kinds) if len(kinds) == 1 else False
    common = {"dp_size": layout.data_parallel, "activation_checkpointing": recompute}
    if alone and not layout.zero_stage:
        return {"strategy": "ddp", **common, "autocast_dtype": "bfloat16" if narrow else None}
    section = {
        "strategy": "fsdp2",
        **common,
        "dp_replicate_size": layout.dp_replicate if layout.zero_stage else 1,
        "tp_size": layout.tp,
        "pp_size": layout.pp,
        "cp_size": layout.cp,
        "sequence_parallel": layout.tp > 1,
        "reshard_after_forward": layout.zero_stage != 2,
        "mp_policy": {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
            "param_dtype": PRECISIONS.write(training.precision),
            "reduce_dtype": "bfloat16" if narrow and training.reduce_dtype == BF16.name else "float32",
            "output_dtype": PRECISIONS.write(training.precision),
            "cast_forward_inputs": True,
        },
    }
    if layout.pp > 1:
        section["pipeline"] = {
            "pp_schedule": PIPELINES.write(layout.schedule),
            "pp_microbatch_size": resolved.micro_batch,
        }
    return section


def _data(resolved: ResolvedRun) -> dict[str, Any]:
    """The dataset and its collation."""
    data, name = resolved.run.data, tokenizer_of(resolved)
    tokenizer = {
        "_target_": "nemo_automodel.NeMoAutoTokenizer.from_pretrained",
        "pretrained_model_name_or_path": name,
    }
    loader = {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader"}
    first, *_ = data.sources
    if first.path.endswith(".bin"):
        paths = [source.path.removesuffix(".bin") for source in data.sources]
        weights = [source.weight for source in data.sources]
        pairs = [str(word) for pair in zip(weights, paths, strict=True) for word in pair]
        return {
            "dataset": {
                "_target_": f"{DATASETS}.llm.megatron_dataset.MegatronPretraining",
                "paths": pairs if weights[0] is not None else paths,
                "seq_length": data.sequence_length,
                **written(FLAGS, ["split"], resolved),
                "splits_to_build": "train",
                "tokenizer": tokenizer,
            },
            "dataloader": {**loader, "collate_fn": "torch.utils.data.default_collate", "dataloader_type": "single"},
        }
    chat = {
        "_target_": f"{DATASETS}.llm.chat_dataset.ChatDataset",
        **named_data(first, "path_or_dataset_id", "name"),
        "split": first.split,
        "seq_length": data.sequence_length,
        "mask_history": HISTORY.write(data.chat.train_on),
        "tokenizer": tokenizer,
    }
    packed = data.packing == "best_fit"
    return {
        "dataset": stated(chat),
        "packed_sequence": {"packed_sequence_size": data.sequence_length if packed else 0},
        "dataloader": {**loader, "collate_fn": f"{DATASETS}.utils.default_collater", "shuffle": True},
    }


def _adapters(finetune: Any) -> dict[str, Any]:
    if not isinstance(finetune, LoraSpec):
        return {}
    return {
        "peft._target_": "nemo_automodel.components._peft.lora.PeftConfig",
        "peft.target_modules": [] if finetune.targets == "all-linear" else list(finetune.targets),
        "peft.dropout_position": "pre",
    }
