"""The state in a checkpoint: saving, restoring, and a report of what is preserved."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.dcp import check_shapes, held_tensors, in_model_order, load_tensors
from meshwright.checkpoint.manifest import (
    HELD_OUT_LOSS,
    CheckpointError,
    checkpoint_name,
    latest_checkpoint,
    list_checkpoints,
    read_manifest,
)
from meshwright.checkpoint.verify import START_ANEW, newest_good_checkpoint, read_values, verify_checkpoint
from meshwright.devices import CPU, random_state_of, set_random_state
from meshwright.families import finetuned_table
from meshwright.families.low_precision import HISTORY
from meshwright.models import named_state
from meshwright.optim.schedule import SHAPES, lr_factor
from meshwright.spec.data import SourceSpec
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.run import ResolvedRun
from meshwright.spec.training import LrScheduleSpec
from meshwright.trainer.folder import starting_checkpoint
from meshwright.trainer.setup import Trainer
from meshwright.trainer.weights import base_of, check_base

NEWEST, AUTO = "newest", "auto"
"""Values of `--resume` besides a checkpoint's name: the newest checkpoint, which must exist and be good; or the newest
good one, or the beginning if there is none."""

COUNTERS = ("skipped", "spikes", "rewinds", "passed_over")

BATCH_SPLIT = (
    "micro_batch",
    "device",
    "torch",
    "training.precision",
    "training.reduce_dtype",
    "training.compile",
    "training.compile_scope",
    "training.attention",
)
"""Settings that may change the order of summation, besides the layout."""

NEW = "histories that start empty"
"""The key that `restore` adds to the saved values: layers without a history for delayed scales."""

SILENT = ("run_dir", "trackers", "callbacks", "checkpoint.", "layout.", "guards.", "data.cache_dir", *BATCH_SPLIT)
"""Settings that do not change the training, or are reported separately."""


def state_tensors(trainer: Trainer) -> dict[str, Any]:
    """Every tensor of this rank in a checkpoint, as `checkpoint/dcp.py` takes it: its own and the callbacks'."""
    tensors = own_tensors(trainer) | _callback_tensors(trainer, trainer.callbacks)
    return in_model_order(tensors, trainer.arrangements)


def own_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, optimizer state, errors of gradients and random state of this rank."""
    buffers = {f"model.{name}": buffer for name, buffer in named_state(trainer.model).items()}
    return trainer.store.tensors() | buffers | gradient_errors(trainer) | random_state(trainer)


def gradient_errors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The errors that this rank adds to its next gradients, under names unique to the rank."""
    return trainer.train_step.feedback.tensors(trainer.worker.rank)


def _callback_tensors(trainer: Trainer, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of the callbacks of these names."""
    return {
        f"callbacks.{name}.{key}": tensor
        for name in names
        for key, tensor in trainer.callbacks[name].tensors(trainer.parameters).items()
    }


def state_values(trainer: Trainer, *, held_out_loss: float | None = None) -> dict[str, Any]:
    """The rest of the state, as a JSON value."""
    return {
        "step": trainer.step,
        "tokens": trainer.tokens,
        **{counter: getattr(trainer, counter) for counter in COUNTERS},
        "spike_history": trainer.train_step.spikes.state() if trainer.train_step.spikes else None,
        "loss_scale": trainer.train_step.scaler.state() if trainer.train_step.scaler else None,
        HELD_OUT_LOSS: held_out_loss,
        "callbacks": {name: callback.state_dict() for name, callback in trainer.callbacks.items()},
        "layout": trainer.resolved.run.layout.model_dump(),
        "base": trainer.base,
        "data": trainer.data,
        "origin": trainer.origin,
        **_fixed(trainer.resolved),
        "settings": _settings(trainer),
    }


def begin(trainer: Trainer, root: Path, resume: str | None) -> str:
    """Load the trainer's starting point and describe it. Collective.

    This is the checkpoint below `root` that `resume` names; without one, the weights of `checkpoint.start_from`, or
    fresh weights.
    """
    checkpoint, lines = choose_checkpoint(root, resume) if resume else (None, [])
    if checkpoint is not None:
        saved = restore(trainer, checkpoint)
        lines += [f"continuing from {checkpoint}, step {trainer.step}", describe_restored(trainer, saved)]
    elif trainer.resolved.run.finetune is not None:
        lines.append(_describe_start(trainer))
    elif trainer.resolved.run.checkpoint.start_from:
        start = starting_checkpoint(trainer.resolved)
        load_weights(trainer, start)
        lines.append(f"starting from the weights of {start}; optimizer, schedule and data start fresh")
    else:
        weights = trainer.resolved.run.model.weights
        lines.append(f"starting from {'pretrained' if weights == 'pretrained' else 'random'} weights")
    return "\n".join(lines)


def choose_checkpoint(root: Path, which: str) -> tuple[Path | None, list[str]]:
    """The checkpoint below `root` that `which` names, and messages about others. Collective.

    `which` is `NEWEST`, `AUTO` or a checkpoint's name. Raises `CheckpointError` if it does not exist, or if under
    `AUTO` all are damaged: a run never starts over above its own damaged checkpoints.
    """
    if which == AUTO:
        checkpoint, faults = newest_good_checkpoint(root)
        if faults and checkpoint is None:
            raise CheckpointError(f"{root}: all checkpoints are damaged ({'; '.join(faults)}); {START_ANEW}")
        return checkpoint, [f"warning: skipped {fault}" for fault in faults]
    if which == NEWEST:
        return latest_checkpoint(root), []
    names = [path.name for path in list_checkpoints(root)]
    name = checkpoint_name(int(which.removeprefix("step-"))) if which.removeprefix("step-").isdecimal() else which
    if name not in names:
        raise CheckpointError(f"{root}: has no checkpoint {which}; it has {', '.join(names) or 'none'}")
    return root / name, []


def check_continues(resolved: ResolvedRun, root: Path, which: str) -> None:
    """Raise `CheckpointError`, before any process starts, if the run of checkpoint `which` differs from this one in
    base, data or trained tensors. Reads no tensor."""
    checkpoint, _ = choose_checkpoint(root, which)
    assert checkpoint is not None  # only AUTO may find none
    saved = read_values(checkpoint)
    check_base(checkpoint, saved, base_of(resolved))
    _check_fixed(checkpoint, saved, resolved)
    _check_trained(checkpoint, resolved)


def restore(trainer: Trainer, checkpoint: Path) -> dict[str, Any]:
    """Continue from `checkpoint`; returns the values saved with the tensors. Collective.

    Raises `CheckpointError` if a file is damaged, or if the data cannot continue at the saved position.
    """
    saved = verify_checkpoint(checkpoint, to_resume=True)
    check_base(checkpoint, saved, trainer.base)
    _check_fixed(checkpoint, saved, trainer.resolved)
    _check_trained(checkpoint, trainer.resolved)
    kept = [name for name in trainer.callbacks if name in saved.get("callbacks", {})]
    tensors = own_tensors(trainer) | _callback_tensors(trainer, kept)
    held, random = held_tensors(checkpoint), random_state(trainer)
    new = {name for name in tensors if name.endswith(HISTORY)} - held
    for name in new:
        tensors.pop(name).zero_()
    if not _same_ranks(trainer, saved) or not random.keys() <= held:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in random}
    errors = gradient_errors(trainer)
    if not (_same_layout(trainer, saved) and errors.keys() <= held):
        trainer.train_step.feedback.drop()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in errors}
    load_tensors(checkpoint, in_model_order(tensors, trainer.arrangements))
    trainer.store.refresh()
    restore_random_state(trainer, tensors)
    trainer.step, trainer.tokens = saved["step"], saved["tokens"]
    trainer.skipped, trainer.spikes, trainer.rewinds, trainer.passed_over = (saved.get(name, 0) for name in COUNTERS)
    if trainer.train_step.spikes is not None and saved.get("spike_history"):
        trainer.train_step.spikes.load(saved["spike_history"])
    if trainer.train_step.scaler is not None and saved["loss_scale"] is not None:
        trainer.train_step.scaler.load(saved["loss_scale"])
    for name in kept:
        trainer.callbacks[name].load_state_dict(saved["callbacks"][name])
    return saved | {NEW: len(new)}


def _describe_start(trainer: Trainer) -> str:
    """The start of a fine-tuned run."""
    run = trainer.resolved.run
    base = run.model.name if run.model.weights == "pretrained" else "random weights"
    if run.checkpoint.start_from:
        base = f"{run.checkpoint.start_from}, step {read_manifest(starting_checkpoint(trainer.resolved))['step']}"
    adapters = getattr(run.finetune, "start_from", None)
    return f"starting from {base}" + (f" and the adapters of {adapters}" if adapters else "")


def load_weights(trainer: Trainer, checkpoint: Path) -> None:
    """Start from only the weights of `checkpoint`: optimizer, schedule and data start over. Collective.

    Raises `CheckpointError` if a file is damaged or the model differs.
    """
    verify_checkpoint(checkpoint)
    load_tensors(checkpoint, trainer.store.weights())
    trainer.store.refresh()


def describe_restored(trainer: Trainer, saved: dict[str, Any]) -> str:
    """A report for the banner: what is preserved exactly, what to float tolerance, and which settings have changed."""
    before, now = saved.get("settings", {}), _settings(trainer)
    changed = [
        f"{key} {_short(before[key])} -> {_short(value)}"
        for key, value in now.items()
        if key in before and before[key] != value and not key.startswith(SILENT)
    ]
    other_data = _other_data(saved.get("data"), trainer.data)
    if "data" not in saved and any(line.startswith("data.") for line in changed):
        other_data = "see below"
    exact = "weights, optimizer state, loss scale" + ("" if other_data else ", position in the data")
    if trainer.resolved.run.layout.gradient_error_feedback and _same_layout(trainer, saved):
        exact += ", errors of gradients"
    if _same_ranks(trainer, saved):
        exact += ", random state"
    layout = LayoutSpec.model_validate(saved["layout"])
    reasons = [f"{key} {before[key]} -> {now[key]}" for key in BATCH_SPLIT if key in before and before[key] != now[key]]
    if layout != trainer.resolved.run.layout:
        reasons.insert(0, f"{layout.strategy} -> {trainer.resolved.run.layout.strategy}")
    lines = [f"exact     {exact}"]
    if other_data:
        lines.append(
            f"other     the data have changed ({other_data}): from here on the run sees other samples, from the "
            "same position in a new order of all samples"
        )
    elif "data" not in saved:
        lines.append("unknown   whether the data are the same: this older checkpoint does not record its data")
    if reasons:
        lines.append(f"tolerance from here on, sums are computed in another order: {'; '.join(reasons)}")
    elif not other_data:
        lines.append("exact     from here on every step, bit by bit if kernels are deterministic")
    if not _same_layout(trainer, saved) and saved["layout"].get("gradient_error_feedback"):
        lines.append("dropped   the errors of quantized gradients: they belong to the ranks of the checkpoint's layout")
    if saved.get(NEW):
        lines.append(f"new       delayed scales of {saved[NEW]} layers start empty, because the checkpoint has none")
    if changed:
        lines.append(f"changed   {'; '.join(changed)}{_lr_change(trainer, before)}")
    return "\n".join(lines)


def _other_data(before: list[dict[str, Any]] | None, now: list[dict[str, Any]]) -> str:
    """How the data differ from a checkpoint's training data; empty if they do not, or if the checkpoint does not record
    them.

    Names do not matter: the same tokens from another path are the same data.
    """
    if before is None:
        return ""
    if len(before) != len(now):
        return f"{len(before)} -> {len(now)} streams"
    return "; ".join(filter(None, map(_other_stream, before, now)))


def _other_stream(before: dict[str, Any], now: dict[str, Any]) -> str:
    more = {unit: now[unit] - before[unit] for unit in ("documents", "tokens")}
    counts = [f"{n:+,} {unit.removesuffix('s') if abs(n) == 1 else unit}" for unit, n in more.items() if n]
    if not counts and now["fingerprint"] != before["fingerprint"]:
        counts = ["other content in as many documents and tokens"]
    if now["weight"] != before["weight"]:
        counts.append(f"weight {before['weight']} -> {now['weight']}")
    return f"{now['name']}: {', '.join(counts)}" if counts else ""


def _short(value: Any) -> Any:
    """A setting as in a recipe: sources by their settings, or only by their path."""
    if isinstance(value, list):
        return f"[{', '.join(str(_short(one)) for one in value)}]"
    if isinstance(value, dict):
        settings = {key: one for key, one in value.items() if one != SourceSpec.model_fields[key].default}
        return settings["path"] if settings.keys() == {"path"} else settings
    return value


def _lr_change(trainer: Trainer, before: dict[str, Any]) -> str:
    """The effect of changed settings on the learning rate of the next step; empty if the schedule was a plug-in, which
    may no longer exist."""
    prefix = "training.lr_schedule."
    if before[f"{prefix}name"] not in SHAPES:
        return ""
    schedule = LrScheduleSpec(**{k.removeprefix(prefix): v for k, v in before.items() if k.startswith(prefix)})
    step, training = trainer.step + 1, trainer.resolved.run.training
    old = before["training.optimizer.lr"] * lr_factor(schedule, step, before["training.steps"])
    new = training.optimizer.lr * trainer.train_step.lr_factor(step)
    return f" (learning rate of step {step}: {new:.3g} instead of {old:.3g})" if old != new else ""


def _check_trained(checkpoint: Path, resolved: ResolvedRun) -> None:
    """Raise `CheckpointError` if this run's trained tensors differ from the checkpoint's."""
    table = finetuned_table(resolved.model, resolved.run.finetune)
    trained = {f"model.{row.name}": row.shape for row in table if row.trained}
    check_shapes(checkpoint, trained)
    held = held_tensors(checkpoint)
    for name in sorted(held - trained.keys()):
        state = f"optimizer.{name.removeprefix('model.')}."
        if name.startswith("model.") and any(other.startswith(state) for other in held):
            raise CheckpointError(
                f"{checkpoint}: has {name}, which this run does not train; continue with the saved model"
            )


def _check_fixed(checkpoint: Path, saved: dict[str, Any], resolved: ResolvedRun) -> None:
    wrong = {field: value for field, value in _fixed(resolved).items() if saved[field] != value}
    if wrong:
        others = ", ".join(f"{field}={saved[field]}, not {value}" for field, value in wrong.items())
        kept = " ".join(f"{field}={saved[field]}" for field in wrong)
        raise CheckpointError(
            f"{checkpoint}: was trained with {others}; continue with {kept}, so that every sample is seen exactly once"
        )


def _fixed(resolved: ResolvedRun) -> dict[str, Any]:
    """Values that must not change for the data order to continue."""
    run = resolved.run
    return {
        "training.seed": run.training.seed,
        "training.global_batch": resolved.global_batch,
        "data.sequence_length": run.data.sequence_length,
        "data.packing": run.data.packing,
        "data.separate_documents": run.data.separate_documents,
    }


def _settings(trainer: Trainer) -> dict[str, Any]:
    """The whole run, flat: `training.optimizer.lr` -> value."""
    resolved = trainer.resolved
    training = resolved.run.training
    decided = {
        "training.lr_schedule.warmup": training.lr_schedule.warmup_steps(training.steps),
        "micro_batch": resolved.micro_batch,
        "device": trainer.device.type,
        "torch": torch.__version__,
    }
    return dict(_flat(resolved.run.model_dump(mode="json"), "")) | decided


def _flat(value: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner


def _same_ranks(trainer: Trainer, saved: dict[str, Any]) -> bool:
    return LayoutSpec.model_validate(saved["layout"]).world_size == trainer.worker.world_size


def _same_layout(trainer: Trainer, saved: dict[str, Any]) -> bool:
    return LayoutSpec.model_validate(saved["layout"]) == trainer.resolved.run.layout


def seed_generators(trainer: Trainer) -> None:
    """Seed this rank's generators from training.seed and the rank: PyTorch seeds them differently in every process.
    Meshwright itself never draws from them; users' objectives, models and callbacks may."""
    torch.manual_seed(((trainer.resolved.run.training.seed << 20) + trainer.worker.rank) % 2**63)


def random_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The states of this rank's generators, under names unique to the rank."""
    return {f"random.{device.type}.{trainer.worker.rank}": random_state_of(device) for device in {CPU, trainer.device}}


def restore_random_state(trainer: Trainer, tensors: dict[str, torch.Tensor]) -> None:
    """Give this rank's generators the states among `tensors`."""
    for device in {CPU, trainer.device}:
        name = f"random.{device.type}.{trainer.worker.rank}"
        if name in tensors:
            set_random_state(device, tensors[name])
