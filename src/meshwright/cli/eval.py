"""The verb `eval`: measures loss and perplexity of a trained model on any text, and its accuracy in tasks."""

import argparse
import json
from pathlib import Path
from typing import Any

from meshwright.cli.common import add_family_argument, add_model_arguments, positive
from meshwright.cli.output import add_json_argument, print_json, progress_on_stderr
from meshwright.spec.errors import UserError
from meshwright.spec.tasks import TaskSpec
from meshwright.storage.durable import write_durably


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `eval`."""
    add_model_arguments(parser)
    add_family_argument(parser)
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
        help="ask tasks instead: .jsonl files of questions, YAML files or names of lm-evaluation-harness",
    )
    parser.add_argument("--shots", metavar="N", type=whole, help="solved questions before each question of a task")
    parser.add_argument("--shots-from", metavar="FILE", help=".jsonl file that these come from")
    parser.add_argument("--limit", metavar="N", type=positive, help="only the first N questions of each task")
    parser.add_argument("--chat", action="store_true", help="ask tasks through the chat template")
    parser.add_argument("--log", metavar="FILE", type=Path, help="write every question and answer to a .jsonl file")
    add_json_argument(parser)
    parser.epilog = (
        "examples:\n"
        "  meshwright eval runs/demo\n"
        "  meshwright eval runs/demo --source 'texts/**/*.txt' --samples 100\n"
        "  meshwright eval runs/demo --tasks mmlu.jsonl gsm8k.jsonl --shots 5\n"
        "  meshwright eval runs/demo --tasks arc_easy tasks/mine.yaml --limit 200"
    )


def whole(text: str) -> int:
    """Parse a number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not allowed: must be a whole number of at least 0")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    if arguments.tasks:
        return _ask(arguments)
    for name in ("shots", "shots_from", "limit", "chat", "log"):
        if getattr(arguments, name):
            raise UserError(f"--{name.replace('_', '-')} is of tasks; name them with --tasks")
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.serve.trained import evaluate_texts, open_trained

    trained = open_trained(
        arguments.model, device=arguments.device, dtype=arguments.dtype, averaged=arguments.ema, family=arguments.family
    )
    result = evaluate_texts(
        trained,
        sources=arguments.source,
        sequence_length=arguments.sequence_length,
        num_samples=arguments.samples,
    )
    what = ", ".join(arguments.source or ["held-out text of the run"])
    if arguments.json:
        figures = _figures(result)
        if result.sources:
            figures["sources"] = {name: _figures(part) for name, part in result.sources.items()}
        print_json({"model": str(trained.source), "source": what, **figures})
    else:
        print(f"{trained.source} on {what}")
        print(_line(result))
        for name, part in result.sources.items():
            print(f"  {name}: {_line(part)}")
    return 0


def _ask(arguments: argparse.Namespace) -> int:
    if arguments.source or arguments.sequence_length or arguments.samples:
        raise UserError(
            "--tasks asks questions, and --source, --sequence-length and --samples measure text; choose one"
        )
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.serve.examine import examinee_of
    from meshwright.serve.trained import open_trained
    from meshwright.tasks.ask import open_tasks

    options = {name: getattr(arguments, name) for name in ("shots", "shots_from", "limit", "chat")}
    tasks = open_tasks([TaskSpec(task=task, **options) for task in arguments.tasks], Path())
    with progress_on_stderr(arguments.json):
        trained = open_trained(
            arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            averaged=arguments.ema,
            family=arguments.family,
        )
        results = tasks.ask(examinee_of(trained))
    if arguments.log:
        lines = (json.dumps(record, ensure_ascii=False, default=str) for one in results for record in one.records)
        write_durably(arguments.log, "".join(f"{line}\n" for line in lines))
    if arguments.json:
        print_json({"model": str(trained.source), "tasks": {result.name: result.figures() for result in results}})
        return 0
    print(trained.source)
    for result in results:
        print(result.line())
    return 0


def _figures(found: Any) -> dict[str, Any]:
    return {"loss": found.loss, "perplexity": found.perplexity, "tokens": found.tokens}


def _line(found: Any) -> str:
    return f"loss {found.loss:.4f} nats/token  perplexity {found.perplexity:.2f}  {found.tokens} tokens"
