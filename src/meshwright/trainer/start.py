"""Checks before any weight is read: the run's start, and its output directory."""

import inspect
from pathlib import Path
from typing import get_args

from meshwright.checkpoint.manifest import CheckpointError
from meshwright.checkpoint.peft_config import CONFIG, AdapterError, check_adapter_config
from meshwright.families import finetuned_table, parameter_table, pretrained_directory
from meshwright.families.tensor_headers import stored_tensors
from meshwright.spec.data import DATASET
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FullSpec
from meshwright.spec.plugins import load_plugin, make_plugin, require_plugin
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import OptimizerName, OptimizerSpec, ScheduleName
from meshwright.trainer.folder import SETTING, checkpoint_at, read_resolved, starting_records


def check_start(resolved: ResolvedRun) -> None:
    """Check where the run starts. Raises:

    - `CheckpointError` if `checkpoint.start_from` names nothing, or a run without this model's weights;
    - `AdapterError` if `finetune.start_from` names no adapter, or one of another kind;
    - `UserError` if a directory lacks its weights, or if frozen weights would be random without a request in the
      recipe.

    A checkpoint outside its run directory, and an adapter's tensors, are checked only when they are read.
    """
    _check_base(resolved)
    _check_given_adapter(resolved)
    records = starting_records(resolved)
    if records is None:
        return
    base, origin = read_resolved(records.resolved), records.resolved.parent
    saved = {row.name: row.shape for row in finetuned_table(base.model, base.run.finetune) if row.trained}
    for row in parameter_table(resolved.model):
        if row.name not in saved:
            raise CheckpointError(f"{SETTING}: {origin} has no {row.name}; give a run that trained this whole model")
        if row.shape != saved[row.name]:
            theirs, ours = base.model.model_dump(), resolved.model.model_dump()
            settings = (f"model.{name}={value}" for name, value in theirs.items() if value != ours[name])
            raise CheckpointError(
                f"{SETTING}: in {origin} {row.name} has shape {saved[row.name]}, but this run's has {row.shape}; "
                f"its model has {', '.join(settings)}"
            )


def _check_base(resolved: ResolvedRun) -> None:
    """Raise `UserError` if a Hugging Face directory lacks its weights, or if frozen weights would be random without a
    request in the recipe."""
    run, finetune = resolved.run, resolved.run.finetune
    if finetune is not None and run.checkpoint.start_from:
        return
    if run.model.weights == "pretrained":
        directory = pretrained_directory(run.model, base_dir=Path(resolved.base_dir))
        assert directory is not None  # else the model would not have resolved
        stored_tensors(directory)
        return
    given = "weights" in run.model.model_fields_set
    if finetune is None or given or all(row.trained for row in finetuned_table(resolved.model, finetune)):
        return
    model = f"model.name {run.model.name!r} has no weights" if run.model.name else "model.family has no weights"
    raise UserError(
        f"finetune.method={finetune.method}: the frozen weights would be random, because {model}; set model.name to "
        "a Hugging Face directory with weights, or checkpoint.start_from to a run (or model.weights=random if "
        "intended)"
    )


def _check_given_adapter(resolved: ResolvedRun) -> None:
    finetune, setting = resolved.run.finetune, "finetune.start_from"
    if finetune is None or isinstance(finetune, FullSpec) or finetune.start_from is None:
        return
    path = Path(resolved.base_dir) / finetune.start_from
    if path.is_dir() and not (path / CONFIG).is_file():
        checkpoint_at(path, setting)
        return
    try:
        check_adapter_config(path, resolved.model, finetune)
    except AdapterError as error:
        raise AdapterError(f"{setting}: {error}") from error


def require_plugins(run: Run) -> None:
    """Raise `UserError` if a plug-in that the recipe names is not installed, or a callback refuses its options."""
    for one in run.trackers:
        require_plugin("trackers", one if isinstance(one, str) else one.name)
        if not isinstance(one, str):
            make_plugin("trackers", one)
    for plugin in run.callbacks:
        make_plugin("callbacks", plugin)
    for kind, plugged, ours in (
        ("lr_schedules", run.training.lr_schedule, ScheduleName),
        ("optimizers", run.training.optimizer, OptimizerName),
    ):
        if plugged.name not in get_args(ours):
            require_plugin(kind, plugged.name)
        elif plugged.options:
            raise UserError(f"training.{kind[:-1]}.options belong to plug-ins, not to {plugged.name}; remove them")
    optimizer = run.training.optimizer
    for field in ("betas", "eps", "muon_lr", "muon_momentum"):
        ours = getattr(optimizer, field) == OptimizerSpec.model_fields[field].default
        if optimizer.name not in get_args(OptimizerName) and not ours:
            raise UserError(
                f"training.optimizer.{field} applies only to built-in optimizers; set {optimizer.name}'s settings "
                f"with training.optimizer.options={{{field}: ...}}"
            )
    if optimizer.name not in get_args(OptimizerName) and "weight_decay" in optimizer.model_fields_set:
        _check_decay(optimizer)
    for source in run.data.sources:
        if source.path.startswith(DATASET):
            require_plugin("datasets", source.path.removeprefix(DATASET))
    if run.training.objective is not None:
        require_plugin("objectives", run.training.objective.name)


def _check_decay(optimizer: OptimizerSpec) -> None:
    """Raise `UserError` if the recipe gives a weight decay to an optimizer that takes none. `optim/plugged.py` sees
    only values that differ from the default, because a saved run sets every field."""
    taken = inspect.signature(load_plugin("optimizers", optimizer.name)).parameters.values()
    if optimizer.weight_decay and not any(one.name == "weight_decay" or one.kind is one.VAR_KEYWORD for one in taken):
        raise UserError(
            f"training.optimizer.weight_decay={optimizer.weight_decay:g}: {optimizer.name} has no weight_decay; set it "
            "to 0"
        )
