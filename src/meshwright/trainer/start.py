"""The one place that says, before any weight is read, whether a run can begin: what it starts from, where it writes."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshwright.checkpoint.manifest import MANIFEST, CheckpointError, list_checkpoints
from meshwright.checkpoint.peft_config import CONFIG, AdapterError, check_adapter_config
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer
from meshwright.families import finetuned_table, parameter_table
from meshwright.spec.data import SMALLEST_VOCAB
from meshwright.spec.finetune import FullSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.recipe import load_spec
from meshwright.spec.run import ResolvedRun, Run

RESOLVED, PLAN = "resolved.yaml", "plan.json"
TOKENIZER = "tokenizer"
"""Names in a run directory: the run with nothing left open, what the planner said, and the tokenizer's folder."""

SETTING = "checkpoint.start_from"


def starting_checkpoint(resolved: ResolvedRun) -> Path:
    """The checkpoint that `checkpoint.start_from` means; raises `CheckpointError` where there is none."""
    return checkpoint_at(Path(resolved.base_dir) / (resolved.run.checkpoint.start_from or ""), SETTING)


def checkpoint_at(path: Path, setting: str) -> Path:
    """The checkpoint that is at `path`, or the newest of the run that is there; raises `CheckpointError`."""
    if (path / MANIFEST).is_file():
        return path
    saved = list_checkpoints(path / "checkpoints")
    if not saved:
        raise CheckpointError(f"{setting}: {path} is neither a checkpoint nor a run that has one")
    return saved[-1]


def check_writable(run_dir: Path) -> None:
    """Raise `ValueError` where `run_dir` cannot be made, or nothing in it. Leaves nothing behind.

    Permissions do not tell (root has all of them, on a read-only disk too), so a folder is made and removed again.
    """
    place = run_dir
    try:
        place = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".meshwright-", dir=place):
            pass
    except OSError as error:
        why = (error.strerror or "it cannot be used").lower()
        raise ValueError(f"run_dir={run_dir}: nothing can be written in {place} ({why}); choose another") from error


def check_start(resolved: ResolvedRun) -> None:
    """Raise `CheckpointError` where `checkpoint.start_from` names nothing, or a run that has not this model's weights,
    `AdapterError` where `finetune.start_from` names no adapter, or one of another kind.

    A checkpoint outside its run directory is known only when it is read, as are an adapter's tensors.
    """
    _check_given_adapter(resolved)
    run_dir = _starting_run(resolved)
    if run_dir is None:
        return
    base = read_resolved(run_dir / RESOLVED)
    saved = {row.name: row.shape for row in finetuned_table(base.model, base.run.finetune) if row.trained}
    for row in parameter_table(resolved.model):
        if row.name not in saved:
            raise CheckpointError(
                f"{SETTING}: {run_dir} holds no {row.name}; give a run that trained all of this model"
            )
        if row.shape != saved[row.name]:
            theirs, ours = base.model.model_dump(), resolved.model.model_dump()
            settings = (f"model.{name}={value}" for name, value in theirs.items() if value != ours[name])
            raise CheckpointError(
                f"{SETTING}: in {run_dir} {row.name} has shape {saved[row.name]}, but this run's is {row.shape}; "
                f"its model has {', '.join(settings)}"
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


def check_vocabulary(run: Run, model: ModelSpec, size: int) -> None:
    """Raise `ValueError` where a tokenizer of `size` tokens knows some that the model has no row for."""
    if size > model.vocab:
        trained = (
            run.data.tokenizer == "auto" and run.model.weights != "pretrained" and size == run.data.tokenizer_vocab
        )
        smaller = f", or data.tokenizer_vocab={model.vocab}" if trained and model.vocab >= SMALLEST_VOCAB else ""
        raise ValueError(
            f"the tokenizer has {size} tokens but the model only {model.vocab} rows; set model.vocab={size}{smaller}"
        )


def check_tokenizer(resolved: ResolvedRun, tokenizer: TextTokenizer | None, *, continued: Path | None = None) -> None:
    """Raise `ValueError` where tokens have other numbers than the weights have learnt, in the run `continued` or else
    in the one that `checkpoint.start_from` means.

    None: the tokenizer is yet to be trained, which gives the same one on the same data only.
    """
    run_dir = continued or _starting_run(resolved)
    if run_dir is None or not (run_dir / TOKENIZER).is_dir():
        return
    if tokenizer is None:
        ours, theirs = resolved.run.data, read_resolved(run_dir / RESOLVED).run.data
        decisive = ("sources", "held_out", "tokenizer", "tokenizer_vocab")
        same = all(getattr(ours, field) == getattr(theirs, field) for field in decisive)
    else:
        same = tokenizer.extends(load_tokenizer(run_dir / TOKENIZER))
    if not same:
        verb = "continues" if continued else "starts from"
        raise ValueError(
            f"data.tokenizer={resolved.run.data.tokenizer} gives tokens other numbers than {run_dir} learnt, which "
            f"this run {verb}; set data.tokenizer={os.path.relpath(run_dir / TOKENIZER, resolved.base_dir)}"
        )


def check_objective(run: Run, streams: Mapping[str, bool]) -> None:
    """Raise `ValueError` where pairs of answers are to be learnt from and there are none, or the other way round.

    `streams` says of each stream of the data whether it holds pairs.
    """
    pairs = [name for name, is_pairs in streams.items() if is_pairs]
    others = [name for name, is_pairs in streams.items() if not is_pairs]
    if run.training.preference is None and pairs:
        raise ValueError(f"data source {pairs[0]} holds preferences; learn from them with training.preference={{}}")
    if run.training.preference is not None and others:
        raise ValueError(f"training.preference learns from pairs of answers, which data source {others[0]} has not")


def read_resolved(path: Path) -> ResolvedRun:
    """A `resolved.yaml` as a value again, with the `plan.json` beside it."""
    resolved, plan = load_spec(path, ResolvedRun), path.with_name(PLAN)
    return resolved.model_copy(update={"plan": json.loads(plan.read_text())}) if plan.is_file() else resolved


def _starting_run(resolved: ResolvedRun) -> Path | None:
    """The directory of the run that `checkpoint.start_from` means; None where there is none, or the checkpoint lies
    elsewhere. Raises as `starting_checkpoint`."""
    if not resolved.run.checkpoint.start_from:
        return None
    run_dir = starting_checkpoint(resolved).parent.parent
    return run_dir if (run_dir / RESOLVED).is_file() else None
