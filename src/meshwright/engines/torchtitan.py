"""Export as a torchtitan configuration: a Python module whose function `run` gives the Trainer's `Config`."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from meshwright.engines.written import WrittenEngine, is_remote, nested, refused_tokenizer, tokenizer_of, written
from meshwright.families.registry import PRESETS
from meshwright.families.resolve import pretrained_directory, resolve_model
from meshwright.imports.names import FALLS, PRECISIONS, READERS, Names, reader_of
from meshwright.imports.rules import dotted
from meshwright.imports.torchtitan_keys import FLAVORS, PIPELINES, RULES, SCALED
from meshwright.spec.precision import FP32
from meshwright.spec.run import ResolvedRun

REDUCED = Names.same("training.reduce_dtype", FP32.name)
"""torchtitan always reduces gradients in fp32."""
OPTIMIZERS = Names("training.optimizer.name", {"adamw": "AdamW"})
RECOMPUTES = Names("training.recompute", {"none": None, "selective": "SelectiveAC.Config", "full": "FullAC.Config"})
SIZES = {
    **{f"{part}b": f"{part.upper()}B" for part in ("1", "3", "8", "70", "405")},
    **{f"{part}b": f"{part}B" for part in ("0.6", "1.7", "4", "14", "32")},
}
"""Flavors as torchtitan writes them."""
KEYS = dotted({
    "lr_scheduler": "warmup_steps",
    "training": "global_batch_size seq_len steps enable_cpu_offload dtype mixed_precision_reduce",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree "
    "pipeline_parallel_degree context_parallel_degree expert_parallel_degree",
    "compile": "enable",
    "metrics": "enable_tensorboard enable_wandb",
    "debug": "seed deterministic",
})  # fmt: skip
IMPORTS = """\
from datasets import load_dataset
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
{recomputation}from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{module} import model_registry
from torchtitan.trainer import Trainer
"""


class TorchtitanConfig(WrittenEngine):
    """torchtitan's configuration, as its releases from 0.3 on read it: `--module run_torchtitan --config run`."""

    name = "torchtitan"
    about = "torchtitan"
    file = "run_torchtitan.py"
    choices: ClassVar = (FALLS, OPTIMIZERS, PRECISIONS, REDUCED, PIPELINES)

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Models that torchtitan's code does not name, more than one source, and what it always does otherwise."""
        run, refusals = resolved.run, dict[str, str]()
        if _flavor(resolved) is None:
            refusals["model.name"] = f"torchtitan supports {', '.join(sorted(set(FLAVORS.values())))}; name one of them"
        elif resolved.model.tied_embeddings and run.layout.pp > 1:
            refusals["layout.pp"] = "torchtitan does not tie embeddings across pipeline stages"
        paths = [source.path for source in run.data.sources]
        if len(paths) > 1:
            refusals["data.sources"] = "this export supports one dataset; give one source"
        elif not is_remote(run.data.sources[0]) and not reader_of(paths[0]):
            refusals["data.sources"] = f"torchtitan's `datasets` reads hub:owner/name and {', '.join(READERS)} files"
        refusals |= refused_tokenizer(resolved, "torchtitan")
        if not run.data.separate_documents:
            refusals["data.separate_documents"] = (
                "torchtitan masks attention between documents; set data.separate_documents=true"
            )
        if run.layout.tiers.words and (run.layout.zero_stage != 3 or run.layout.offload != "cpu"):
            refusals["layout.offload"] = (
                "torchtitan offloads only with FSDP2, and then everything; set layout.zero=3 and layout.offload=cpu"
            )
        return refusals

    def notes(self, resolved: ResolvedRun) -> tuple[str, ...]:
        """Its own data order, tokens and fresh weights."""
        falls = ["the decay of the learning rate starts one step later; the final rate is the same"]
        return (
            *(falls if resolved.run.training.lr_schedule.name in ("cosine", "linear") else []),
            "documents keep their order, each rank reads its own part, and no text is held out",
            "the tokenizer adds its begin and end tokens to every document",
            "random weights follow torchtitan's initialization",
        )

    def text(self, resolved: ResolvedRun) -> str:
        """The module."""
        run = resolved.run
        module, flavor = _flavor(resolved) or ("llama3", "?")
        run_words = f"{resolved.model.family} of {resolved.model.num_layers} layers, {run.layout.strategy}"
        command = f"torchrun --nproc-per-node {run.layout.world_size} -m torchtitan.train --module run_torchtitan"
        lines = [f'"""torchtitan\'s configuration of {run_words}.', "", f"    {command} --config run", '"""', ""]
        kind = _recomputation(resolved)
        needed = (
            f"from torchtitan.distributed.activation_checkpoint import {kind.name.partition('.')[0]}\n" if kind else ""
        )
        lines += [
            IMPORTS.format(module=module, recomputation=needed),
            *_dataset(run.data.sources[0]),
            "",
            "",
            "def run() -> Trainer.Config:",
        ]
        lines += [f'    """The configuration."""\n    model_spec = model_registry("{flavor}", attn_backend="flex")']
        if (scaling := resolved.model.rope_scaling) and flavor in SCALED:
            lines += ["    for layer in model_spec.model.layers:  # torchtitan's sizes 1B and 3B use 8.0"]
            lines += [f"        layer.attention.rope.scaling_factor = {scaling.factor}"]
        lines += [f"    return {_call('Trainer.Config', _config(resolved), 4)}", ""]
        return "\n".join(lines)


class _Code(str):
    """Source text."""


def _config(resolved: ResolvedRun) -> dict[str, Any]:
    run, training, schedule = resolved.run, resolved.run.training, resolved.run.training.lr_schedule
    directory = pretrained_directory(run.model, base_dir=Path(resolved.base_dir))
    pretrained = run.model.weights == "pretrained" and directory is not None
    vocab = _Code("decoder_vocab_size(model_spec)")
    loss = _Call("CrossEntropyLoss.Config", {"global_vocab_size": vocab})
    steps, pipelined, sections = training.steps, run.layout.pp > 1, nested(written(RULES, KEYS, resolved))
    rates = {"total_steps": steps - 1 if steps > 1 else None}  # one earlier, so that the last step has the last rate
    falls = {"wsd": schedule.decay_steps(steps) / max(1, steps - 1)}
    return {
        "model_spec": _Code("model_spec"),
        "hf_assets_path": tokenizer_of(resolved) or "?",
        "dump_folder": run.run_dir,
        "loss": _Call("ChunkedLossWrapper.Config", {"loss_fn": loss}),
        "optimizer": _Call("OptimizersContainer.Config", {"param_groups": _groups(resolved)}),
        "lr_scheduler": _Call("LRSchedulersContainer.Config", {
            **sections["lr_scheduler"],
            **rates,
            "decay_ratio": falls.get(schedule.name),
            "decay_type": FALLS.write(schedule.name),
            "min_lr_factor": 1.0 if schedule.name == "constant" else schedule.final,
        }),
        "training": _Call("TrainingConfig", {
            **sections["training"],
            "local_batch_size": resolved.micro_batch * (resolved.accumulation if pipelined else 1),
            "max_norm": training.clip or math.inf,
            "disable_cuda_graphs": pipelined,
            "mixed_precision_param": PRECISIONS.write(training.precision),
        }),
        "parallelism": _Call("ParallelismConfig", sections["parallelism"] | _stages(resolved)),
        "checkpoint": _Call("CheckpointManager.Config", {
            "enable": True,
            "interval": run.checkpoint.every or steps,
            "keep_latest_k": max(2, run.checkpoint.keep_last),
            "async_mode": "async_with_pinned_mem" if run.checkpoint.asynchronous else "disabled",
            "last_save_model_only": False,
            **({"initial_load_path": str(Path(str(directory)).resolve()), "initial_load_in_hf": True}
               if pretrained else {}),
        }),
        "activation_checkpoint": _recomputation(resolved),
        "compile": _Call("CompileConfig", sections["compile"]),
        "dataloader": _Call("HuggingFaceTextDataLoader.Config", {"dataset": "corpus"}),
        "metrics": _Call("MetricsProcessor.Config", {"log_freq": 1, **sections["metrics"]}),
        "validator": _Call("Validator.Config", {"enable": False}),
        "debug": _Call("DebugConfig", sections["debug"]),
    }  # fmt: skip


def _stages(resolved: ResolvedRun) -> dict[str, Any]:
    layout = resolved.run.layout
    keys: dict[str, Any] = {"fsdp_reshard_after_forward": "never" if layout.zero_stage == 2 else "always"}
    if layout.pp > 1:
        keys["pipeline_parallel_schedule"] = PIPELINES.write(layout.schedule)
        keys["pipeline_parallel_microbatch_size"] = resolved.micro_batch
        keys["module_fqns_per_model_part"] = list(_parts(resolved))
    return keys


def _parts(resolved: ResolvedRun) -> Iterator[list[str]]:
    """The modules of every stage."""
    layers = iter(range(resolved.model.num_layers))
    stages = resolved.stage_layers
    for number, count in enumerate(stages):
        inner = [f"layers.{next(layers)}" for _ in range(count)]
        first, last = ["tok_embeddings"] * (number == 0), ["norm", "lm_head"] * (number == len(stages) - 1)
        yield [*first, *inner, *last]


def _groups(resolved: ResolvedRun) -> list[Any]:
    """AdamW's groups: norms and biases do not decay."""
    optimizer = resolved.run.training.optimizer
    name = OPTIMIZERS.write(optimizer.name)
    common = {"lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps}
    rows = ((".*norm.*|.*bias", 0.0), (".*", optimizer.weight_decay))
    return [
        _Call("ParamGroupConfig", {"pattern": pattern, "optimizer_name": name,
                                   "optimizer_kwargs": {**common, "weight_decay": decay}})
        for pattern, decay in rows
    ]  # fmt: skip


def _recomputation(resolved: ResolvedRun) -> Any:
    kind = RECOMPUTES.write(resolved.recompute[0])
    return kind and _Call(kind, {})


def _flavor(resolved: ResolvedRun) -> tuple[str, str] | None:
    """torchtitan's module and flavor of the run's model; None if it has none."""
    for (module, size), name in FLAVORS.items():
        if module == "llama2" or name not in PRESETS:
            continue
        preset = resolve_model(PRESETS[name], base_dir=Path(resolved.base_dir))
        same = preset.model_copy(update={"max_positions": resolved.model.max_positions})
        if same == resolved.model:
            return module, SIZES[size]
    return None


def _dataset(source: Any) -> Iterator[str]:
    """The source, as an entry of torchtitan's table of data sets."""
    remote = is_remote(source)
    path = source.path.removeprefix("hub:")
    more = f", name={source.subset!r}" if source.subset else ""
    load = f"load_dataset(path{more}, split={source.split!r})"
    if not remote:
        load = f"load_dataset({reader_of(path)!r}, data_files=path, split={source.split!r})"
    yield 'DATASETS["corpus"] = DatasetConfig('
    yield f"    path={path!r},"
    yield f"    loader=lambda path: {load},"
    yield f"    sample_processor=lambda sample: sample[{source.text_key!r}],"
    yield ")"


class _Call:
    """A call with keywords, to be written."""

    def __init__(self, name: str, keywords: Mapping[str, Any]) -> None:
        self.name, self.keywords = name, keywords


def _call(name: str, keywords: Mapping[str, Any], indent: int) -> str:
    """The source of a call, one keyword a line."""
    if not keywords:
        return f"{name}()"
    inner = " " * (indent + 4)
    lines = "".join(f"{inner}{key}={_source(value, indent + 4)},\n" for key, value in keywords.items())
    return f"{name}(\n{lines}{' ' * indent})"


def _source(value: Any, indent: int) -> str:
    if isinstance(value, _Call):
        return _call(value.name, value.keywords, indent)
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        inner = " " * (indent + 4)
        return "[\n" + "".join(f"{inner}{_source(item, indent + 4)},\n" for item in value) + " " * indent + "]"
    if value == math.inf:
        return 'float("inf")'
    return value if isinstance(value, _Code) else repr(value)
