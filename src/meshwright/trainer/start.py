"""Checks before any weight is read: the run's start, and its output directory."""

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, get_args

from meshwright.checkpoint.manifest import MANIFEST, CheckpointError, list_checkpoints
from meshwright.checkpoint.peft_config import CONFIG, AdapterError, check_adapter_config
from meshwright.data.plugged import has_datasets, write_datasets
from meshwright.data.prepare import StartingModel
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer
from meshwright.families import finetuned_table, parameter_table, pretrained_directory, resolve_model, starting_weights
from meshwright.families.tensor_headers import stored_tensors
from meshwright.launch.status import LOCK_LOST
from meshwright.spec.data import DATASET, SMALLEST_VOCAB
from meshwright.spec.errors import UserError
from meshwright.spec.finetune import FullSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plugins import load_plugin, make_plugin, require_plugin, said_of
from meshwright.spec.recipe import load_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.training import OptimizerName, OptimizerSpec, ScheduleName
from meshwright.storage.lock import Lock

RECIPE, RESOLVED, PLAN = "recipe.yaml", "resolved.yaml", "plan.json"
TOKENIZER, LOCK = "tokenizer", ".lock"
"""Names in a run directory: the recipe as given, the fully resolved run, the planner's result, the tokenizer's folder,
the lock."""

SETTING = "checkpoint.start_from"


def run_files(run_dir: Path) -> dict[str, bytes]:
    """The recipe, the resolved run and the tokenizer, by plain names: with them a checkpoint needs no run directory."""
    paths = [run_dir / RECIPE, run_dir / RESOLVED, *sorted((run_dir / TOKENIZER).glob("*"))]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


class Records(NamedTuple):
    """A run's records besides its tensors."""

    resolved: Path
    """A `resolved.yaml`."""
    tokenizer: Path
    """The tokenizer's folder."""


def records_in(run_dir: Path) -> Records | None:
    """The records in a run directory; None if it has none."""
    records = Records(run_dir / RESOLVED, run_dir / TOKENIZER)
    return records if records.resolved.is_file() else None


def records_of(checkpoint: Path) -> Records | None:
    """The records in a checkpoint; for one from an earlier version, those in its run directory; None if there are
    none."""
    if (checkpoint / RESOLVED).is_file():
        return Records(checkpoint / RESOLVED, checkpoint)
    return records_in(checkpoint.resolve().parent.parent)


def starting_checkpoint(resolved: ResolvedRun) -> Path:
    """The checkpoint that `checkpoint.start_from` names; raises `CheckpointError` if it does not exist."""
    return checkpoint_at(Path(resolved.base_dir) / (resolved.run.checkpoint.start_from or ""), SETTING)


def checkpoint_at(path: Path, setting: str) -> Path:
    """The checkpoint at `path`, or the newest one of the run at `path`; raises `CheckpointError`."""
    if (path / MANIFEST).is_file():
        return path
    saved = list_checkpoints(path / "checkpoints")
    if not saved:
        raise CheckpointError(f"{setting}: {path} is neither a checkpoint nor a run with one")
    return saved[-1]


def check_writable(run_dir: Path) -> None:
    """Raise `UserError` if `run_dir` cannot be made or written. Leaves no files.

    Permissions are not enough (root has all of them, even on a read-only disk), so a folder is made and removed again.
    """
    place = run_dir
    try:
        place = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".meshwright-", dir=place):
            pass
    except OSError as error:
        reason = (error.strerror or "it cannot be used").lower()
        raise UserError(f"run_dir={run_dir}: {place} is not writable ({reason}); choose another") from error


def run_lock(run_dir: Path, wait: float) -> Lock:
    """The lock of `run_dir` against other runs; waits up to `wait` seconds for its current owner.

    Raises `UserError` if nothing can be written there.
    """

    def lost(text: str) -> None:
        print(f"error: {text}; this run ends", file=sys.stderr, flush=True)
        os._exit(LOCK_LOST)  # at once: any further write would overwrite the other run's

    check_writable(run_dir)
    hint = "; wait for it with --wait-for-lock, or choose another run_dir"
    return Lock(run_dir / LOCK, wait=wait, hint=hint, say=lambda text: print(text, file=sys.stderr), lost=lost)


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
    records = _starting_records(resolved)
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
    for name in run.trackers:
        require_plugin("trackers", name)
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


def with_datasets(run: Run, base_dir: Path, *, most: int | None = None) -> Run:
    """The recipe with files instead of plugged-in datasets. Reads as much of them as the run will see, or as `most`
    samples need."""
    if not has_datasets(run.data):
        return run
    bare = run.data.tokenizer == "auto" and pretrained_directory(run.model, base_dir=base_dir) is None
    vocab = resolve_model(run.model, base_dir=base_dir, vocab=run.data.tokenizer_vocab).vocab
    steps = run.known_steps()
    if most is None and steps is None:
        raise UserError("training.epochs: a plugged-in dataset has no known length; set training.steps or tokens")
    samples = most or (steps or 0) * run.sequences_per_step()
    return run.model_copy(update={"data": write_datasets(run.data, samples=samples, vocab=vocab, numbers=bare)})


def check_vocabulary(run: Run, model: ModelSpec, size: int, base_dir: Path) -> None:
    """Raise `UserError` if a tokenizer of `size` tokens has tokens without a row in the model, and the recipe can give
    it rows."""
    if size > model.vocab and rows_given(run, base_dir) is None:
        trained = run.data.tokenizer == "auto" and size == run.data.tokenizer_vocab
        smaller = f", or data.tokenizer_vocab={model.vocab}" if trained and model.vocab >= SMALLEST_VOCAB else ""
        raise UserError(
            f"the tokenizer has {size} tokens but the model only {model.vocab} rows; set model.vocab={size}{smaller}"
        )


def rows_given(run: Run, base_dir: Path) -> int | None:
    """The embedding rows of the weights that a run starts from; None if the recipe chooses their number."""
    if run.checkpoint.start_from is None and starting_weights(run.model, base_dir=base_dir) == "random":
        return None
    return resolve_model(run.model, base_dir=base_dir, vocab=run.data.tokenizer_vocab).vocab


def starting_model(run: Run, base_dir: Path) -> StartingModel:
    """What the run's corpus takes from its model."""
    directory = pretrained_directory(run.model, base_dir=base_dir)
    return StartingModel(directory, rows_given(run, base_dir))


def check_tokenizer(resolved: ResolvedRun, tokenizer: TextTokenizer | None, *, continued: Path | None = None) -> None:
    """Raise `UserError` if token ids differ from those that the weights were trained with, in the run `continued` or
    else in the one that `checkpoint.start_from` names.

    A tokenizer of None is still to be trained; it will be the same only on the same data.
    """
    records = records_in(continued) if continued else _starting_records(resolved)
    if records is None or not records.tokenizer.is_dir():
        return
    if tokenizer is None:
        ours, theirs = resolved.run.data, read_resolved(records.resolved).run.data
        decisive = ("sources", "held_out", "tokenizer", "tokenizer_vocab")
        same = all(getattr(ours, field) == getattr(theirs, field) for field in decisive)
    else:
        same = tokenizer.extends(load_tokenizer(records.tokenizer))
    if not same:
        verb = "continues" if continued else "starts from"
        raise UserError(
            f"data.tokenizer={resolved.run.data.tokenizer} assigns other ids to tokens than the tokenizer of "
            f"{records.resolved.parent}, which this run {verb}; set "
            f"data.tokenizer={os.path.relpath(records.tokenizer, resolved.base_dir)}"
        )


def check_objective(run: Run, streams: Mapping[str, bool]) -> None:
    """Raise `UserError` if the objective needs pairs of answers and the data has none, or the reverse.

    `streams`: for each data stream, whether it holds pairs.
    """
    pairs = [name for name, is_pairs in streams.items() if is_pairs]
    others = [name for name, is_pairs in streams.items() if not is_pairs]
    objective, needs_pairs = run.training.objective, run.training.preference is not None
    if objective is not None:
        needs_pairs = said_of("objectives", objective.name, "needs_pairs", False)
        if pairs and not needs_pairs:
            raise UserError(f"data source {pairs[0]} contains preferences, which {objective.name} does not train on")
    if pairs and not needs_pairs:
        raise UserError(f"data source {pairs[0]} contains preferences; train on them with training.preference={{}}")
    if others and needs_pairs:
        setting = "training.preference" if objective is None else f"training.objective={objective.name}"
        raise UserError(f"{setting} trains on preference pairs, but data source {others[0]} has none")


def read_resolved(path: Path) -> ResolvedRun:
    """Read a `resolved.yaml`, with the `plan.json` next to it. Raises `UserError` if one is damaged."""
    resolved, plan = load_spec(path, ResolvedRun), path.with_name(PLAN)
    if not plan.is_file():
        return resolved
    try:
        return resolved.model_copy(update={"plan": json.loads(plan.read_bytes())})
    except (ValueError, RecursionError) as error:
        raise UserError(f"{plan} is damaged, not JSON ({error}); delete it to continue without it") from error


def _starting_records(resolved: ResolvedRun) -> Records | None:
    """The records of the run that `checkpoint.start_from` names, or of a checkpoint outside its run directory; None if
    there are none. Raises like `starting_checkpoint`."""
    if not resolved.run.checkpoint.start_from:
        return None
    checkpoint = starting_checkpoint(resolved)
    return records_in(checkpoint.parent.parent) or records_of(checkpoint)
