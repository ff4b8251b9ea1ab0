"""The verb `eval`: measures loss and perplexity of a trained model on any text, and its accuracy in tasks."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.common import (
    add_model_arguments,
    add_page_argument,
    check_page_name,
    open_model,
    positive,
    whole,
    write_page,
)
from meshwright.cli.output import add_json_argument, print_result, progress_on_stderr
from meshwright.cli.ranks import started
from meshwright.pages.scores import checkpoints_page
from meshwright.spec.errors import UserError
from meshwright.spec.tasks import TaskSpec
from meshwright.storage.durable import write_durably


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `eval`."""
    add_model_arguments(parser, family=True)
    parser.add_argument(
        "--source",
        metavar="PATH",
        action="append",
        help="text file, .jsonl file, quoted glob, or stdlib; may be repeated (default: the run's held-out text)",
    )
    parser.add_argument(
        "--sequence-length",
        metavar="T",
        type=positive,
        help="tokens per sequence (default: the run's, or 1024)",
    )
    parser.add_argument("--samples", metavar="N", type=positive, help="only N evenly spaced samples (default: all)")
    parser.add_argument(
        "--tasks",
        metavar="TASK",
        nargs="+",
        help="evaluate tasks instead: .jsonl files of questions, YAML files or names of lm-evaluation-harness",
    )
    parser.add_argument("--shots", metavar="N", type=whole, help="solved questions before each question of a task")
    parser.add_argument("--shots-from", metavar="FILE", help=".jsonl file with the solved questions")
    parser.add_argument("--limit", metavar="N", type=positive, help="only the first N questions of each task")
    parser.add_argument("--chat", action="store_true", help="ask tasks through the chat template")
    parser.add_argument("--log", metavar="FILE", type=Path, help="write every question and answer to a .jsonl file")
    parser.add_argument(
        "--all-checkpoints", action="store_true", help="evaluate every checkpoint of the run, and plot the curve"
    )
    add_page_argument(parser, "--all-checkpoints: the curves")
    add_json_argument(parser)
    parser.epilog = (
        "examples:\n"
        "  meshwright eval runs/demo\n"
        "  meshwright eval runs/demo --source 'texts/**/*.txt' --samples 100\n"
        "  meshwright eval runs/demo --tasks mmlu.jsonl gsm8k.jsonl --shots 5\n"
        "  meshwright eval runs/demo --tasks arc_easy tasks/mine.yaml --limit 200\n"
        "  meshwright eval runs/demo --all-checkpoints"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    if (status := started(arguments)) is not None:
        return status
    if arguments.tasks and (arguments.source or arguments.sequence_length or arguments.samples):
        raise UserError(
            "--tasks asks questions, and --source, --sequence-length and --samples measure text; choose one"
        )
    for name in ("shots", "shots_from", "limit", "chat", "log"):
        if getattr(arguments, name) and not arguments.tasks:
            raise UserError(f"--{name.replace('_', '-')} only applies to tasks; name them with --tasks")
    if arguments.log and arguments.all_checkpoints:
        raise UserError("--log writes the answers of one checkpoint; name it, or leave --all-checkpoints out")
    if arguments.html and not arguments.all_checkpoints:
        raise UserError("--html draws curves over checkpoints; add --all-checkpoints, or leave it out")
    if arguments.html:
        check_page_name(arguments.html)
    measure = _tasks(arguments) if arguments.tasks else _loss(arguments)
    if arguments.all_checkpoints:
        return _curve(arguments, measure)
    with progress_on_stderr(arguments.json):
        source, figures, lines = measure(arguments.model)
    print_result(arguments, {"model": source, **figures}, lines)
    return 0


Measured = tuple[str, dict[str, Any], list[str]]
"""The model, its figures as data, and as lines of text."""


def _loss(arguments: argparse.Namespace) -> Callable[[Path], Measured]:
    what = ", ".join(arguments.source or ["held-out text of the run"])
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.serve.trained import evaluate_texts

    def measure(path: Path) -> Measured:
        trained = _opened(arguments, path)
        evaluation = evaluate_texts(
            trained,
            sources=arguments.source,
            sequence_length=arguments.sequence_length,
            num_samples=arguments.samples,
        )
        figures = {"source": what, **_figures(evaluation)}
        if evaluation.sources:
            figures["sources"] = {name: _figures(part) for name, part in evaluation.sources.items()}
        parts = [f"  {name}: {_line(part)}" for name, part in evaluation.sources.items()]
        return str(trained.source), figures, [f"{trained.source} on {what}", _line(evaluation), *parts]

    return measure


def _tasks(arguments: argparse.Namespace) -> Callable[[Path], Measured]:
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.serve.examine import examinee_of
    from meshwright.tasks.ask import open_tasks

    options = {name: getattr(arguments, name) for name in ("shots", "shots_from", "limit", "chat")}
    tasks = open_tasks([TaskSpec(task=task, **options) for task in arguments.tasks], Path())

    def measure(path: Path) -> Measured:
        trained = _opened(arguments, path)
        results = tasks.ask(examinee_of(trained))
        if arguments.log and ("ranks" not in arguments or arguments.ranks.leads):
            lines = (json.dumps(record, ensure_ascii=False, default=str) for one in results for record in one.records)
            write_durably(arguments.log, "".join(f"{line}\n" for line in lines))
        figures = {"tasks": {result.name: result.figures() for result in results}}
        return str(trained.source), figures, [str(trained.source), *(result.line() for result in results)]

    return measure


def _opened(arguments: argparse.Namespace, path: Path) -> Any:
    trained = open_model(arguments, path)
    if "ranks" in arguments:
        arguments.ranks.alike(trained.model)
    return trained


def _curve(arguments: argparse.Namespace, measure: Callable[[Path], Measured]) -> int:
    """Measure every checkpoint of the run, and print the figures by step."""
    from meshwright.checkpoint.manifest import list_checkpoints, step_of

    checkpoints = list_checkpoints(arguments.model / "checkpoints")
    if not checkpoints:
        raise UserError(f"{arguments.model}: holds no checkpoints; --all-checkpoints needs a run's folder")
    rows: list[tuple[int, dict[str, Any]]] = []
    for checkpoint in checkpoints:
        with progress_on_stderr(arguments.json):
            _, figures, _ = measure(checkpoint)
        rows.append((step_of(checkpoint), figures))
    facts = {"model": str(arguments.model), "checkpoints": [{"step": step, **figures} for step, figures in rows]}
    columns = [(step, _columns(figures)) for step, figures in rows]
    print_result(arguments, facts, _plot(columns))
    if arguments.html:
        write_page(arguments.html, checkpoints_page(str(arguments.model), columns))
    return 0


def _plot(columns: Sequence[tuple[int, dict[str, float]]]) -> Iterator[str]:
    for name in columns[0][1]:
        values = [values[name] for _, values in columns]
        low, high = min(values), max(values)
        yield f"{name}, from {low:.4g} to {high:.4g}"
        for step, figures in columns:
            length = 1 + round(39 * (figures[name] - low) / (high - low)) if high > low else 1
            yield f"  step {step:>8}  {figures[name]:>10.4f}  {'#' * length}"


def _columns(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that a curve shows: the loss, or every metric of every task."""
    if "loss" in figures:
        return {"loss": figures["loss"]}
    return {
        f"{task} {name}": metric["value"]
        for task, result in figures["tasks"].items()
        for name, metric in result["metrics"].items()
    }


def _figures(evaluation: Any) -> dict[str, Any]:
    return {"loss": evaluation.loss, "perplexity": evaluation.perplexity, "tokens": evaluation.tokens}


def _line(evaluation: Any) -> str:
    return f"loss {evaluation.loss:.4f} nats/token  perplexity {evaluation.perplexity:.2f}  {evaluation.tokens} tokens"
