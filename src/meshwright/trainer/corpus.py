"""A run's tokens, and whether they fit its model, its weights and its objective."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from meshwright.checkpoint.manifest import list_checkpoints
from meshwright.data.defaults import with_packing, with_template
from meshwright.data.plugged import has_datasets, write_datasets
from meshwright.data.prepare import Corpus, StartingModel, find_tokenizer, prepare_corpus
from meshwright.data.readers import told_apart
from meshwright.data.sources import find_files
from meshwright.data.tokenizer import TextTokenizer, load_tokenizer
from meshwright.families import pretrained_directory, resolve_model, starting_weights
from meshwright.spec.data import HUB, SMALLEST_VOCAB
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.spec.plugins import said_of
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.text import quoted
from meshwright.trainer.folder import read_resolved, records_in, starting_records


def corpus_of(resolved: ResolvedRun, progress: Callable[[str, int, int], None] | None = None) -> Corpus:
    """The run's tokens, prepared or from the cache."""
    run, base_dir = resolved.run, Path(resolved.base_dir)
    return prepare_corpus(run.data, base_dir=base_dir, model=starting_model(run, base_dir), progress=progress)


def starting_model(run: Run, base_dir: Path) -> StartingModel:
    """What the run's corpus takes from its model."""
    directory = pretrained_directory(run.model, base_dir=base_dir)
    return StartingModel(directory, rows_given(run, base_dir))


def rows_given(run: Run, base_dir: Path) -> int | None:
    """The embedding rows of the weights that a run starts from; None if the recipe chooses their number."""
    if run.checkpoint.start_from is None and starting_weights(run.model, base_dir=base_dir) == "random":
        return None
    return resolve_model(run.model, base_dir=base_dir, vocab=run.data.tokenizer_vocab).vocab


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


def with_data_defaults(run: Run, base_dir: Path) -> tuple[Run, dict[str, str]]:
    """The recipe with a packing and a chat template that suit its records, where it names none, and the reasons. Data
    that cannot be read leave it as it is: reading them raises the error. So do datasets on the hub, because resolving a
    recipe downloads nothing."""
    data, reasons = run.data, dict[str, str]()
    on_hub = any(source.path.startswith(HUB) for source in data.sources)
    if "sources" not in data.model_fields_set or has_datasets(data) or on_hub:
        return run, reasons
    with suppress(UserError, OSError):
        files = [file for file in told_apart(find_files(data, base_dir)) if file.is_records]
        if not files:
            return run, reasons
        model = resolve_model(run.model, base_dir=base_dir, vocab=data.tokenizer_vocab)
        data, reasons["data.packing"] = with_packing(data, files, separates=model.foreign is None)
        tokenizer = find_tokenizer(data, base_dir=base_dir, model=starting_model(run, base_dir))
        data, reasons["data.chat.template"] = with_template(data, files, tokenizer)
    return run.model_copy(update={"data": data}), {name: reason for name, reason in reasons.items() if reason}


def check_corpus(resolved: ResolvedRun, corpus: Corpus, resume: str | None) -> None:
    """Raise `UserError` if the tokens do not fit the model, the weights or the objective."""
    run_dir = Path(resolved.run.run_dir)
    continued = run_dir if resume and list_checkpoints(run_dir / "checkpoints") else None
    check_vocabulary(resolved.run, resolved.model, corpus.tokenizer.vocab_size, Path(resolved.base_dir))
    check_tokenizer(resolved, corpus.tokenizer, continued=continued)
    check_objective(resolved.run, {stream.name: stream.train.is_pairs for stream in corpus.streams})


def check_vocabulary(run: Run, model: ModelSpec, size: int, base_dir: Path) -> None:
    """Raise `UserError` if a tokenizer of `size` tokens has tokens without a row in the model, and the recipe can give
    it rows."""
    if size > model.vocab and rows_given(run, base_dir) is None:
        trained = run.data.tokenizer == "auto" and size == run.data.tokenizer_vocab
        smaller = f", or data.tokenizer_vocab={model.vocab}" if trained and model.vocab >= SMALLEST_VOCAB else ""
        raise UserError(
            f"the tokenizer has {size} tokens but the model only {model.vocab} rows; set model.vocab={size}{smaller}"
        )


def check_tokenizer(resolved: ResolvedRun, tokenizer: TextTokenizer | None, *, continued: Path | None = None) -> None:
    """Raise `UserError` if token ids differ from those that the weights were trained with, in the run `continued` or
    else in the one that `checkpoint.start_from` names.

    A tokenizer of None is still to be trained; it will be the same only on the same data.
    """
    records = records_in(continued) if continued else starting_records(resolved)
    if records is None or not records.tokenizer.is_dir():
        return
    if tokenizer is None:
        ours, theirs = resolved.run.data, read_resolved(records.resolved).run.data
        decisive = ("sources", "exclude", "held_out", "tokenizer", "tokenizer_vocab")
        same = all(getattr(ours, field) == getattr(theirs, field) for field in decisive)
    else:
        same = tokenizer.extends(load_tokenizer(records.tokenizer))
    if not same:
        verb = "continues" if continued else "starts from"
        raise UserError(
            f"data.tokenizer={resolved.run.data.tokenizer} assigns other ids to tokens than the tokenizer of "
            f"{records.resolved.parent}, which this run {verb}; set "
            + quoted(f"data.tokenizer={os.path.relpath(records.tokenizer, resolved.base_dir)}")
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
