"""The verb `eval`: measures loss and perplexity of a trained model on any text."""

import argparse
from typing import Any

from meshwright.cli.common import add_family_argument, add_model_arguments, positive
from meshwright.cli.output import add_json_argument, print_json


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
    add_json_argument(parser)
    parser.epilog = (
        "examples:\n  meshwright eval runs/demo\n  meshwright eval runs/demo --source 'texts/**/*.txt' --samples 100"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
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


def _figures(found: Any) -> dict[str, Any]:
    return {"loss": found.loss, "perplexity": found.perplexity, "tokens": found.tokens}


def _line(found: Any) -> str:
    return f"loss {found.loss:.4f} nats/token  perplexity {found.perplexity:.2f}  {found.tokens} tokens"
