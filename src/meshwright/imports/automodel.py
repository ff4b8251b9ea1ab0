"""NVIDIA NeMo AutoModel's YAML configuration."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshwright.imports.automodel_keys import MOMENTS, RULES
from meshwright.imports.claims import Always, Has, NoEffect
from meshwright.imports.megatron import RULES as FLAGS
from meshwright.imports.reading import Reading, check_count, check_number, flat, joined
from meshwright.imports.rules import apply, last_name, place

CONSTANT = {"training.lr_schedule.name": "constant", "training.lr_schedule.warmup": 0}


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
        reason = "Adam adds weight decay to the gradient; only AdamW's decoupled decay is supported"
        reading.drop(reading.facts["coupled"][1], reason)
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
        reading.ignore("saves")
        return
    reading.set("checkpoint.every", saves if saves < steps[0] else 0, joined(where, origin))


def _dataset(reading: Reading, given: Mapping[str, Any], where: str, default: str) -> None:
    keys, kind = dict(given), last_name(given.get("_target_"))
    target = keys.pop("_target_", None)
    tokenizer = keys.pop("tokenizer", None)
    if isinstance(tokenizer, Mapping) and (name := tokenizer.get("pretrained_model_name_or_path")):
        reading.set("data.tokenizer", name, f"{where}.tokenizer.pretrained_model_name_or_path={name}")
    if kind.startswith("MegatronPretraining"):
        paths = keys.pop("paths")
        reading.set("data.sources", _blended(paths), f"{where}.paths={paths}")
        length = keys.pop("seq_length", None)
        reading.set("data.sequence_length", length or 2048, f"{where}.seq_length={length}" if length else default)
        split = keys.pop("split", None)
        origin = f"{where}.split={split}" if split else f"{default}: split=900,50,50"
        apply(FLAGS["split"], reading, (split or "900,50,50").replace(" ", ""), origin)
        if keys.get("splits_to_build") == "train":
            reading.seen.append(f"{where}.splits_to_build={keys.pop('splits_to_build')}")
            reading.claim(reading.seen[-1], Always("the first share is trained"))
        for key in ("index_mapping_dir", "splits_to_build", "seed", "num_val_samples", "mmap_bin_files"):
            if key in keys:
                reading.drop(f"{where}.{key}={keys.pop(key)}", "training.seed shuffles; set data.held_out")
    elif kind.startswith("ChatDataset"):
        path = str(keys.pop("path_or_dataset_id"))
        source = {"path": place(path, ".json", ".jsonl", ".parquet"), "format": "messages"}
        source |= {"split": keys.pop("split")} if keys.get("split") not in (None, "train") else {}
        source |= {"subset": keys.pop("name")} if keys.get("name") else {}
        keys.pop("split", None)
        reading.set("data.sources", [source], f"{where}.path_or_dataset_id={path}")
        if length := keys.pop("seq_length", None):
            reading.set("data.sequence_length", length, f"{where}.seq_length={length}")
        if "data.packing" not in reading.settings:
            reading.set("data.packing", "padded", f"{where} (not packed)")
        if keys.pop("mask_history", False):
            reading.set("data.chat.train_on", "last", f"{where}.mask_history=True")
    else:
        reading.drop(
            f"{where}._target_={target}", "only MegatronPretraining and ChatDataset are read; set data.sources"
        )
    for key, value in keys.items():
        reading.drop(f"{where}.{key}={value}", "set it under data")


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
        reading.ignore("microbatch", "schedule")
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
        reading.fact("zero", 2 if reshards is False else 3, joined(where, origin))
        copies, origin = reading.facts.get("replicate", (1, ""))
        reading.replicate(copies, origin)
        if copies == 1 and origin:
            reading.claim(origin, Has("layout.dp_replicate", 1))


def _dtypes(reading: Reading, default: str) -> None:
    """FSDP2 computes in bf16 by default, on weights as they are stored."""
    sharded = reading.known("strategy", "fsdp2") == "fsdp2"
    storage, where = reading.facts.get("storage", ("bf16", f"{default}: torch_dtype=auto, usually bf16"))
    plain = ("bf16", default) if sharded else (storage, where)
    compute = reading.facts.get("compute" if sharded else "autocast", plain)
    reading.set("training.precision", *compute)
    for name in ("output", "pipeline"):
        if name in reading.facts:
            reading.claim(reading.facts[name][1], Has("training.precision", reading.known(name)))
    if sharded:
        reading.ignore("autocast", reason=NoEffect.OVERRULED)
    _moments(reading)
    masters, origin = reading.facts.get("masters", (False, ""))
    if storage == "fp16":
        reading.drop(where, "weights are kept in fp32 or bf16")
    if origin and storage != "bf16":
        reading.no_effect.append((origin, NoEffect.OVERRULED))
    if compute[0] != "bf16":
        for name in ("storage", "reduced"):
            if name in reading.facts:
                reading.claim(reading.facts[name][1], Has("training.precision", reading.known(name)))
        return
    reading.set("training.reduce_dtype", *reading.facts.get("reduced", ("fp32", default)))
    if storage == "bf16" and masters is not True:
        reading.in_bf16(joined(where, origin))
    else:
        reading.claim(f"{where}; {origin}", Has("training.master_dtype", "fp32"))


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
        reading.drop(origin, f"both moments have one dtype, fp32 or bf16; set {path}")


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
            reason = "warm-up is a tenth of the unknown number of steps, at most 1000; set training.lr_schedule.warmup"
            reading.drop(default, reason)
    peak, origin = reading.settings.get("training.optimizer.lr", (1e-4, default))
    check_number(peak, origin)
    if "min_lr" not in reading.facts and reading.value("training.lr_schedule.name") != "constant":
        reading.set("training.lr_schedule.final", 0.01, f"{default}: min_lr=0.01 lr")
    first, where = reading.facts.get("first rate", (peak / 10, f"{default}: init_lr=0.1 lr"))
    if not reading.value("training.lr_schedule.warmup"):
        reading.ignore("first rate")
    elif first:
        reading.drop(where, "warm-up always starts at 0")
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
    if not reading.value("finetune.dropout"):
        reading.ignore("dropout position")
    elif position == "post":
        reading.drop(f"{where}: dropout_position={position}", "dropout is applied before the adapters")
    else:
        reading.claim(where, Always("dropout is applied before the adapters"))
