"""The verb `data`: tokenizes a recipe's corpus, shows its samples, audits the batches of a run."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.cli.common import (
    add_page_argument,
    add_recipe_arguments,
    check_page_name,
    positive,
    read_recipe,
    write_page,
)
from meshwright.cli.output import add_json_argument, print_result
from meshwright.data.audit import CHECKS, EXAMPLES, AuditReport, PlannedRun, audit
from meshwright.data.describe import describe_formats, describe_mixture, describe_sample, length_histogram, parts_of
from meshwright.data.loader import Loader
from meshwright.data.mixture import held_out_samples, training_samples
from meshwright.data.overlap import NGRAM, Overlap, find_overlap
from meshwright.data.prepare import Corpus, prepare_corpus
from meshwright.pages.audit import audit_page
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun, Run
from meshwright.spec.text import counted
from meshwright.terminal import printable
from meshwright.trainer.corpus import starting_model, with_data_defaults, with_datasets
from meshwright.trainer.display import ProgressLine, short
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.start import require_plugins

ACTIONS = ("prepare", "show", "audit")
PAGE_ROWS = 8
"""Rows on the page of an audit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `data`."""
    parser.add_argument("action", choices=ACTIONS, help="tokenize the corpus; show samples; audit the run's batches")
    add_recipe_arguments(parser)
    parser.add_argument("--processes", type=positive, help="prepare: encoding processes (default: one per core)")
    parser.add_argument("--samples", type=positive, default=2, help="show: number of samples (default 2)")
    parser.add_argument("--steps", type=positive, help="audit: number of steps (default: the whole run)")
    parser.add_argument(
        "--against",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[],
        help="audit: also report questions of these .jsonl or text files that are in the training data",
    )
    parser.add_argument(
        "--ngram",
        metavar="N",
        type=positive,
        help=f"--against: consecutive tokens that count as shared (default {NGRAM})",
    )
    add_page_argument(parser, "audit: documents, packing, masks and what is trained")
    add_json_argument(parser)
    parser.epilog = (
        "exit status: 0 success, 1 audit found a fault, 2 invalid command line\n\n"
        "examples:\n  meshwright data prepare run.yaml\n  meshwright data show run.yaml data.packing=best_fit\n"
        "  meshwright data audit run.yaml --steps 100"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    if arguments.html and arguments.action != "audit":
        raise UserError("--html applies only to data audit")
    if arguments.html:
        check_page_name(arguments.html)
    recipe = read_recipe(arguments)
    require_plugins(recipe)
    recipe, reasons = with_data_defaults(with_datasets(recipe, arguments.recipe.parent), arguments.recipe.parent)
    action: Callable[[argparse.Namespace, Run, Corpus], int] = {"prepare": _prepare, "show": _show, "audit": _audit}[
        arguments.action
    ]
    base_dir: Path = arguments.recipe.parent
    for setting, reason in reasons.items():
        print(f"{setting}: {reason}", file=sys.stderr)
    with ProgressLine() as progress:
        corpus = prepare_corpus(
            recipe.data,
            base_dir=base_dir,
            model=starting_model(recipe, base_dir),
            progress=progress,
            processes=arguments.processes,
            mend=_mending if arguments.action == "prepare" else None,
        )
    return action(arguments, recipe, corpus)


def _mending(damage: str) -> None:
    print(f"{printable(str(damage))}; preparing it again", file=sys.stderr)


def _prepare(arguments: argparse.Namespace, recipe: Run, corpus: Corpus) -> int:
    streams = [
        {
            "name": stream.name,
            "tokens": len(stream.train.tokens),
            "documents": stream.train.num_documents,
            "held_out_tokens": len(stream.held_out.tokens) if stream.held_out else 0,
            "file": str(stream.train.path),
            "formats": list(stream.formats),
            "left_out": dict(stream.train.counts),
        }
        for stream in corpus.streams
    ]
    lines = [
        f"{stream['name']}: {short(stream['tokens'])} tokens of {stream['documents']} documents, "
        f"held out {short(stream['held_out_tokens'])}, in {stream['file']}"
        for stream in streams
    ]
    facts = {"vocab": corpus.tokenizer.vocab_size, "streams": streams, "note": corpus.note}
    print_result(arguments, facts, [*lines, *_records(corpus)])
    return 0


def _records(corpus: Corpus) -> list[str]:
    """The formats of records, and a remark about them, each a line."""
    return [*filter(None, [describe_formats(corpus)]), *(f"note: {note}" for note in filter(None, [corpus.note]))]


def _show(arguments: argparse.Namespace, recipe: Run, corpus: Corpus) -> int:
    mixture, seed = training_samples(corpus, recipe.data), recipe.training.seed
    places = [mixture.locate(position, seed) for position in range(arguments.samples)]
    histogram = _lengths(corpus)
    samples = [
        {
            "position": position,
            "stream": corpus.streams[stream].name,
            "lines": describe_sample(mixture.streams[stream], index, corpus.tokenizer),
        }
        for position, (stream, index) in enumerate(places)
    ]
    lines = [*_records(corpus), "trained text after |, context after ."]
    for sample in samples:
        lines.append(f"\nposition {sample['position']}, {sample['stream']}, " + "\n  ".join(sample["lines"]))
    lines.append("\ntokens of a document    documents")
    most = max(row["documents"] for row in histogram)
    for row in histogram:
        span = f"{row['from']} to {row['to']}"
        lines.append(f"{span:>22}  {row['documents']:>9}  {'#' * round(40 * row['documents'] / most)}")
    print_result(arguments, {"samples": samples, "lengths": histogram}, lines)
    return 0


def _lengths(corpus: Corpus) -> list[dict[str, int]]:
    return length_histogram(np.concatenate([np.diff(stream.train.starts()) for stream in corpus.streams]))


def _audit(arguments: argparse.Namespace, recipe: Run, corpus: Corpus) -> int:
    resolved = resolve_run(recipe, base_dir=arguments.recipe.parent)
    with ExitStack() as stack:
        planned = plan(resolved, corpus, arguments.steps, stack)
        report = audit(planned, stack.enter_context(ProgressLine()))
    overlaps = find_overlap(corpus, arguments.against, arguments.ngram or NGRAM) if arguments.against else []
    ok = report.ok and not any(overlap.shared for overlap in overlaps)
    checks = {name: {"count": report.counts[name], "examples": report.findings[name]} for name in CHECKS}
    facts = {"samples": report.samples, "tokens": report.tokens, "duplicates": report.duplicates}
    facts |= {"steps": planned.steps, "ranks": planned.world_size, "overlap": [asdict(one) for one in overlaps]}
    masked = any(stream.train.trained is not None for stream in corpus.streams)
    left_out = ({"attention"} if planned.sees is None else set()) | (set() if masked else {"answers"})
    where = f"{counted(planned.steps, 'step')} on {counted(planned.world_size, 'rank')}"
    about = f"{where}: {report.samples} samples, {report.tokens} labels"
    beside = [
        f"announced: {describe_mixture(corpus, planned.mixture, planned.steps * planned.global_batch)}",
        *_records(corpus),
    ]
    shared = [line for overlap in overlaps for line in _overlap_lines(overlap, arguments.ngram or NGRAM)]
    lines = [about, *beside, *_verdicts(report, left_out), *shared]
    print_result(arguments, {"ok": ok, **facts, "checks": checks}, lines)
    if arguments.html:
        named = [
            (name, "FAILED" if report.counts[name] else "ok", "\n".join([claim, *_findings(report, name)]))
            for name, claim in CHECKS.items()
            if name not in left_out
        ]
        page = audit_page(
            about=about, lines=beside + shared, checks=named, rows=_first_rows(planned), lengths=_lengths(corpus)
        )
        write_page(arguments.html, page)
    return 0 if ok else 1


def _first_rows(planned: PlannedRun) -> list[dict[str, Any]]:
    """The first samples of the run, as a page shows them."""
    rows = []
    for position in range(min(PAGE_ROWS, planned.steps * planned.global_batch)):
        stream, index = planned.mixture.locate(position, planned.seed)
        parts = parts_of(planned.mixture.streams[stream], index, planned.corpus.tokenizer)
        rows.append({"name": f"row {position}, sample {index} of {planned.corpus.streams[stream].name}", **parts})
    return rows


def _findings(report: AuditReport, name: str) -> list[str]:
    more = report.counts[name] - len(report.findings[name])
    return [*report.findings[name], *([f"and {more} more"] if more > 0 else [])]


def _overlap_lines(overlap: Overlap, ngram: int) -> Iterator[str]:
    shared, rows = len(overlap.shared), overlap.rows
    what = f"{overlap.file}: {shared} of {rows} rows share {ngram} tokens in a row with the training data"
    short = f" ({overlap.short} are shorter)" if overlap.short else ""
    yield f"{'FAULT' if shared else 'ok':<6}{'overlap':<11}{what}{short}"
    for one in overlap.shared[:EXAMPLES]:
        part = f"{100 * one.found / one.windows:.0f} %"
        yield f"      line {one.line}, {part} of it: {printable(repr(one.example))} in {one.place}"
    if shared > EXAMPLES:
        yield f"      and {shared - EXAMPLES} more"


def plan(resolved: ResolvedRun, corpus: Corpus, steps: int | None, stack: ExitStack) -> PlannedRun:
    """The run's batches as its ranks would read them, up to step `steps`."""
    run = resolved.run
    mixture = training_samples(corpus, run.data)
    steps = run.training.steps if steps is None else min(steps, run.training.steps)

    def batches(rank: int) -> Loader:
        return stack.enter_context(Loader.of_run(mixture, resolved, rank))

    return PlannedRun(
        corpus=corpus,
        data=run.data,
        mixture=mixture,
        held_out=held_out_samples(corpus, run.data) if corpus.held_out else None,
        seed=run.training.seed,
        steps=steps,
        global_batch=resolved.global_batch,
        world_size=run.layout.data_parallel,
        batches=batches,
        epochs=mixture.epochs(steps * resolved.global_batch),
        sees=attention_sees if run.data.separate_documents else None,
    )


def attention_sees(documents_bT: np.ndarray) -> np.ndarray:
    """The model's own attention mask, bool [b, T, T]: with equal logits and an identity matrix as values, the output is
    the attention weights."""
    import torch

    from meshwright.models.attention import attend_documents
    from meshwright.models.masks import Documents

    batch, length = documents_bT.shape
    nothing = torch.zeros(batch, 1, length, length)
    identity = torch.eye(length).expand(batch, 1, length, length)
    return (
        attend_documents(nothing, nothing, identity, Documents(torch.from_numpy(documents_bT), window=None))[:, 0] > 0
    ).numpy()


def _verdicts(report: AuditReport, left_out: set[str]) -> Iterator[str]:
    for name, claim in CHECKS.items():
        if name not in left_out:
            yield f"{'FAULT' if report.counts[name] else 'ok':<6}{name:<11}{claim}"
            yield from (f"      {line}" for line in _findings(report, name))
