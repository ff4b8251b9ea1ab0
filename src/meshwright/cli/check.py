"""The verb `check`: reports every error in a recipe, and its facts, without training, torch or a GPU."""

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from meshwright.cli.common import add_recipe_arguments, read_recipe
from meshwright.cli.output import add_json_argument, print_json, size_text
from meshwright.data.beginning import first_records, first_tokens
from meshwright.data.describe import describe_counts, describe_note, describe_sample
from meshwright.data.packing import build_samples
from meshwright.data.plugged import has_datasets
from meshwright.data.prepare import (
    NO_MODEL,
    StartingModel,
    check_whole,
    encoder_of_records,
    find_tokenizer,
    group_files,
    needs_tokenizer,
)
from meshwright.data.readers import UNDECODABLE, read_all, told_apart
from meshwright.data.sources import SourceFile, find_files, names_of
from meshwright.data.token_file import file_in_memory
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families import active_parameters, count_trained, parameter_table, pretrained_directory, resolve_model
from meshwright.families.adapters import frozen_experts
from meshwright.families.derived import with_derived
from meshwright.families.described import (
    describe_context,
    describe_cuts,
    describe_experts,
    describe_split,
    describe_table,
)
from meshwright.families.wrapped import describe_files
from meshwright.machine import find_machine
from meshwright.predict.forecast import forecast, warnings
from meshwright.predict.stages import describe_pipeline
from meshwright.predict.traffic import predict_traffic
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec
from meshwright.spec.problems import RecipeError
from meshwright.spec.recipe import with_place
from meshwright.spec.run import RecipeFile, ResolvedRun, Run
from meshwright.spec.text import command, counted
from meshwright.spec.training import TrainingSpec
from meshwright.terminal import printable
from meshwright.trainer.corpus import (
    check_objective,
    check_tokenizer,
    check_vocabulary,
    starting_model,
    with_data_defaults,
    with_datasets,
)
from meshwright.trainer.display import ProgressLine, model_size, short
from meshwright.trainer.folder import check_writable
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.start import check_start, require_plugins

READ_BYTES = 1 << 28
"""Limit of the bytes read from the corpus, so that a check takes seconds."""

SAMPLE_CHARACTERS = 1 << 18
"""Characters read for the shown sample and to train a tokenizer for it; more if samples are longer."""

CHARACTERS_PER_TOKEN = 8
"""Upper bound of the mean number of characters per token, in any language."""

NO_DATA = "the recipe names no data, so it would train on the standard library of Python"
SAMPLE_RECORDS = 1000
"""Limit of the records read."""

ResultT = TypeVar("ResultT")


class Findings(list[str]):
    """The problems found so far in the recipe."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self._file = RecipeFile(arguments.recipe, tuple(arguments.overrides))

    def attempt(self, work: Callable[[], ResultT]) -> ResultT | None:
        """The result of `work`, or None if it raised a user error, which is added to the findings."""
        try:
            return work()
        except (UserError, OSError) as error:
            for sentence in getattr(error, "problems", [str(error)]):
                problem = with_place(" ".join(sentence.split()), self._file)
                if problem not in self:
                    self.append(problem)
            return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `check`."""
    add_recipe_arguments(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--table", action="store_true", help="show every parameter, and how tensor-parallel ranks split it"
    )
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors: exit status 1")
    parser.epilog = (
        "exit status: 0 no error, 1 an error (with --strict also a warning), 2 invalid command line\n\n"
        "examples:\n  meshwright check run.yaml\n  meshwright check run.yaml layout.dp_shard=4"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check a recipe and report; the exit status is 1 if anything is wrong."""
    findings, facts = Findings(arguments), {}
    try:
        recipe = read_recipe(arguments)
    except RecipeError as error:
        findings += error.problems
        if isinstance(error.rest, Run):
            findings += _besides(error.rest, error.wrong, arguments)
    else:
        facts = examine(recipe, arguments.recipe.parent, findings)
        if arguments.table:
            facts["table"] = findings.attempt(lambda: _table(recipe, arguments.recipe.parent))
    warned = facts.pop("warnings", [])
    failed = bool(findings or (arguments.strict and warned))
    if arguments.json:
        print_json({"ok": not failed, "problems": findings, "warnings": warned, **facts})
        return int(failed)
    for line in _report(facts):
        print(line)
    sys.stdout.flush()
    for finding in findings:
        print(f"error: {printable(finding)}", file=sys.stderr)
    for warning in warned:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    if failed:
        return 1
    verdict = "no errors, but see the warning" if warned else "no errors"
    print(f"\n{verdict}; train it with: {command('train', arguments.recipe, *arguments.overrides)}")
    return 0


def _besides(rest: Run, wrong: Collection[str], arguments: argparse.Namespace) -> list[str]:
    """Further problems in `rest`, the readable part of a recipe, except problems in incomplete sections."""
    findings = Findings(arguments)
    examine(rest, arguments.recipe.parent, findings)
    return [finding for finding in findings if not set(re.findall(r"\b(\w+)\.\w", finding)) & set(wrong)]


def examine(recipe: Run, base_dir: Path, findings: Findings) -> dict[str, Any]:
    """All facts about a recipe as plain data. Problems are added to `findings`, and their facts are omitted."""
    facts: dict[str, Any] = {}
    findings.attempt(lambda: check_writable(Path(recipe.run_dir)))
    vocab = recipe.data.tokenizer_vocab
    model, resolved = findings.attempt(lambda: resolve_model(recipe.model, base_dir=base_dir, vocab=vocab)), None
    if model is not None:
        facts["model"] = findings.attempt(lambda: _model_facts(recipe, model))
        resolved = findings.attempt(lambda: resolve_run(recipe, base_dir=base_dir))
        if resolved is not None:
            findings.attempt(partial(check_start, resolved))
            facts["batch"] = {
                "sequences_per_step": resolved.global_batch,
                "tokens_per_step": resolved.tokens_per_step,
                "data_parallel_ranks": resolved.run.layout.data_parallel,
                "accumulation": resolved.accumulation,
                "micro_batch": resolved.micro_batch,
                "sequence_length": recipe.data.sequence_length,
                "steps": resolved.run.training.steps,
                "reasons": resolved.reasons,
            }
            machine = find_machine(resolved.run.device)
            facts["warnings"] = findings.attempt(lambda: warnings(resolved, forecast(resolved, machine))) or []
            facts["warnings"] += [machine.note] * bool(machine.note)
            if share := frozen_experts(model, recipe.finetune):
                facts["warnings"].append(
                    f"finetune: experts have no adapters, so {share:.0%} of the model's parameters stay as they are; "
                    "finetune.train=[experts] trains them in full"
                )
            facts["warnings"] += _whole_run_decays(resolved.run.training)
            if "sources" not in recipe.data.model_fields_set:
                facts["warnings"].append(f"{NO_DATA}; set data.sources (data.sources=stdlib if it is meant)")
            if resolved.stage_layers:
                facts["pipeline"] = {"stage_layers": resolved.stage_layers, "description": describe_pipeline(resolved)}
            if resolved.run.layout.world_size > 1:
                facts["traffic"] = _traffic(resolved)
    layout = resolved.run.layout if resolved is not None else recipe.layout
    facts["layout"] = {"processes": layout.world_size, "strategy": layout.strategy}
    written = None
    if findings.attempt(lambda: (require_plugins(recipe), True)):
        written = findings.attempt(lambda: with_datasets(recipe, base_dir, most=SAMPLE_RECORDS))
    plugged, recipe = has_datasets(recipe.data), with_data_defaults(written or recipe, base_dir)[0]
    given = findings.attempt(lambda: _starting_model(recipe, base_dir, model)) or NO_MODEL
    files = None
    if written or not has_datasets(recipe.data):
        files = findings.attempt(lambda: told_apart(find_files(recipe.data, base_dir)))
    if files is not None:
        formats = {file.name: file.format for file in files if file.is_records}
        facts["data"] = {"files": len(files), "bytes": sum(file.path.stat().st_size for file in files)}
        facts["data"] |= {"formats": formats} if formats else {}
        facts["data"] |= {"plugged": True} if plugged else {}
        findings.attempt(lambda: _check_objective(recipe, files))
        if resolved is not None:
            tokenizer = findings.attempt(lambda: find_tokenizer(recipe.data, base_dir=base_dir, model=given))
            findings.attempt(partial(check_tokenizer, resolved, tokenizer))
        if formats:
            findings.attempt(lambda: check_whole(recipe.data))
        sample = findings.attempt(lambda: _sample(_whole(recipe, files), files, base_dir, given, model))
        facts |= sample or {}
    return facts


def _whole(recipe: Run, files: list[SourceFile]) -> Run:
    """The recipe with records that are neither cut nor mixed, so that a wrong packing does not hide their errors."""
    data = recipe.data
    update: dict[str, Any] = {"packing": "best_fit"} if data.packing == "concatenated" else {}
    if any(file.format == "preference" for file in files):
        update["separate_documents"] = True
    records = any(file.is_records for file in files)
    return recipe.model_copy(update={"data": data.model_copy(update=update)}) if records else recipe


def _starting_model(recipe: Run, base_dir: Path, model: ModelSpec | None) -> StartingModel:
    if model is None:  # its error is known; its directory may still have the tokenizer
        return StartingModel(pretrained_directory(recipe.model, base_dir=base_dir))
    return starting_model(recipe, base_dir)


def _check_objective(recipe: Run, files: list[SourceFile]) -> None:
    groups = group_files(recipe.data, files)
    check_objective(recipe, {name: group[0].format == "preference" for name, group in groups.items()})


def _model_facts(recipe: Run, model: ModelSpec) -> dict[str, Any]:
    table = parameter_table(model)
    trained, everything = count_trained(model, recipe.finetune)
    parameters = sum(row.numel for row in table)
    blocks = "layers" if model.foreign is None else model.foreign.blocks
    return {
        "name": recipe.model.name or model.family,
        "parameters": parameters,
        "adapter_parameters": everything - parameters,
        "active_parameters": active_parameters(model),
        "trained_parameters": trained,
        "parameters_in_blocks": sum(row.numel for row in table if row.name.startswith(f"{blocks}.")),
        "files": describe_files(model),
        **model.model_dump(mode="json"),
    }


def _table(recipe: Run, base_dir: Path) -> dict[str, Any]:
    """The parameters, and their split over the layout's tensor-parallel ranks; over two if it has none and the split
    is derived."""
    model = resolve_model(recipe.model, base_dir=base_dir, vocab=recipe.data.tokenizer_vocab)
    parts = max(2, recipe.layout.tp) if model.foreign is not None else recipe.layout.tp
    model = with_derived(model, recipe, parts, everything=True)
    described = (describe_split, describe_cuts, describe_context, describe_experts)
    shared = [line for describe in described for line in describe(model)]
    return {"parts": parts, "ranks": recipe.layout.tp, "rows": describe_table(model, recipe.finetune), "split": shared}


def _whole_run_decays(training: TrainingSpec) -> list[str]:
    """A warning if a run is too short for its schedule's decay, as with fewer steps than a preset's."""
    schedule, steps = training.lr_schedule, training.steps
    room = max(0, steps - schedule.warmup_steps(steps))
    if schedule.name != "wsd" or schedule.decay <= room:
        return []
    return [
        f"training.lr_schedule.decay={schedule.decay} is longer than the {room} steps after the warm-up, so the "
        "learning rate never stays at training.optimizer.lr; set training.lr_schedule.decay=0 (a fifth of all steps)"
    ]


def _traffic(resolved: ResolvedRun) -> list[dict[str, Any]] | str:
    """What the first rank sends in a step; the reason if it is not predicted."""
    try:
        sizes = predict_traffic(resolved)
    except UserError as error:
        return str(error)
    return [{"kind": kind, "axis": axis, "bytes": size} for (kind, axis), size in sorted(sizes.items())]


def _sample(
    recipe: Run, files: list[SourceFile], base_dir: Path, given: StartingModel, model: ModelSpec | None
) -> dict[str, Any]:
    """The tokenizer, and the first training sample of the corpus.

    Reads the corpus up to READ_BYTES to find files that are not text. If the run would train a tokenizer, one is
    trained here on the beginning of the corpus; the run's own will differ slightly.
    """
    tokenizer = find_tokenizer(recipe.data, base_dir=base_dir, model=given)
    tokens = [file for file in files if file.is_tokens]
    records = [file for file in files if file.is_records]
    characters = max(SAMPLE_CHARACTERS, CHARACTERS_PER_TOKEN * recipe.data.sequence_length)
    texts, skipped = _beginning([file for file in files if not (file.is_tokens or file.is_records)], characters)
    if not texts and not tokens and not records:
        raise UserError(f"{names_of(files)}: every document is empty")
    if (tokens or records) and tokenizer is None:
        raise needs_tokenizer((tokens or records)[0])
    size = tokenizer.vocab_size if tokenizer else recipe.data.tokenizer_vocab
    facts, notes = {"vocab": size, "trained": tokenizer is None}, [f"of the text: {skipped}"] * bool(skipped)
    if model is not None:
        check_vocabulary(recipe, model, size, base_dir)
    groups = group_files(recipe.data, files)
    tokenizer = tokenizer or train_tokenizer(texts, recipe.data.tokenizer_vocab)
    parts = [first_tokens(file, tokenizer, characters) for file in tokens]
    if records:
        encoder = encoder_of_records(recipe.data, tokenizer, base_dir)
        notes += [note] if (note := encoder.note(records)) else []
        parts[:0] = [first_records(group, encoder, SAMPLE_RECORDS) for group in groups.values() if group[0].is_records]
        counts = [count for part in parts for count in describe_counts(part)]
        notes += [f"of the first {SAMPLE_RECORDS} records at most: {', '.join(counts)}"] if counts else []
    elif texts:
        parts.insert(0, file_in_memory([[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]))
        if sum(map(len, texts)) < characters:  # the whole corpus: it must fill at least one sample
            build_samples(parts[0], recipe.data)
    samples = [build_samples(part, recipe.data, keep_tail=True) for part in parts]
    _, *lines = describe_sample(samples[0], 0, tokenizer)
    return {"tokenizer": facts, "sample": lines, "notes": notes}


def _beginning(files: list[SourceFile], characters: int) -> tuple[list[str], str]:
    """The first documents, up to this many characters in total, and how many were skipped. More of the corpus is read,
    but only checked."""
    texts, skipped, num_bytes = [], 0, 0
    total = min(READ_BYTES, sum(file.path.stat().st_size for file in files))
    with ProgressLine() as report:
        for document in read_all(files):
            num_bytes += document.num_bytes
            skipped += document.note == UNDECODABLE
            report("reading the data", min(num_bytes, total), total)
            if characters > 0 and document.text:
                texts.append(document.text[:characters])
                characters -= len(texts[-1])
            elif num_bytes >= READ_BYTES:
                break
    return texts, describe_note(UNDECODABLE, skipped) if skipped else ""


def _report(facts: dict[str, Any]) -> Iterator[str]:
    """The facts as lines of text."""
    if model := facts.get("model"):
        active = f", {short(model['active_parameters'])} active a token" if model["num_experts"] else ""
        size = model_size(model["parameters"], model["adapter_parameters"], model["trained_parameters"])
        yield (
            f"model      {model['name']}: {size} ({short(model['parameters_in_blocks'])} in blocks{active}); "
            f"{model['num_layers']} layers, width {model['hidden']}, {model['num_heads']} heads, "
            f"vocabulary {model['vocab']}"
        )
        if model["files"]:
            yield f"files      {model['files']}"
    if table := facts.get("table"):
        over = counted(table["parts"], "tensor-parallel rank")
        over = over if table["parts"] == table["ranks"] else f"the split over {over}; the layout has none"
        yield f"table      {over}"
        yield from (f"           {line}" for line in (*table["rows"], *table["split"]))
    if layout := facts.get("layout"):
        yield f"layout     {layout['strategy']}; processes: {layout['processes']}"
    if "pipeline" in facts:
        yield f"pipeline   {facts['pipeline']['description']}"
    if batch := facts.get("batch"):
        yield (
            f"batch      {batch['tokens_per_step']} tokens a step = {counted(batch['data_parallel_ranks'], 'rank')} x "
            f"{counted(batch['accumulation'], 'microbatch')} x {counted(batch['micro_batch'], 'sequence')} x "
            f"{batch['sequence_length']}; {counted(batch['steps'], 'step')}, "
            f"{short(batch['steps'] * batch['tokens_per_step'])} tokens"
        )
        yield from (f"           {setting}: {reason}" for setting, reason in batch["reasons"].items())
    if traffic := facts.get("traffic"):
        yield f"traffic    {traffic if isinstance(traffic, str) else 'of the first rank in a step'}"
    if isinstance(traffic, list):
        yield from (f"           {one['kind']} over {one['axis']}: {size_text(one['bytes'])}" for one in traffic)
    if data := facts.get("data"):
        yield f"data       {counted(data['files'], 'file')}, {short(data['bytes'])}B"
        yield from (f"           {name}: {format}" for name, format in data.get("formats", {}).items())
    if tokenizer := facts.get("tokenizer"):
        origin = "to be trained on this text" if tokenizer["trained"] else "found"
        yield f"tokenizer  {tokenizer['vocab']} tokens, {origin}"
    yield from (f"note       {note}" for note in facts.get("notes", []))
    # Of records and datasets of one's own; a corpus of text would only push the rest off the screen.
    if (sample := facts.get("sample")) and {"formats", "plugged"} & facts.get("data", {}).keys():
        yield "sample     the first; trained text after |, context after ."
        yield from (f"  {line}" for line in sample)
