"""The verb `generate`: continues prompts with a trained model."""

import argparse
import contextlib
import sys

from meshwright.cli.common import (
    add_model_arguments,
    add_sampling_arguments,
    compile_steps,
    note,
    open_model,
    sampling_settings,
)
from meshwright.cli.output import add_json_argument, print_result
from meshwright.cli.ranks import follows, started
from meshwright.cli.waiting import waiting
from meshwright.spec.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `generate`."""
    add_model_arguments(parser, family=True, compiles=True)
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        required=True,
        help="text to continue; may be repeated, in one batch; - reads one from standard input",
    )
    parser.add_argument(
        "--chat", action="store_true", help="each prompt is a user message, rendered by the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before the prompt")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        help="maximum number of new tokens (default 128, or the rest of the context)",
    )
    add_sampling_arguments(parser)
    add_json_argument(parser)
    parser.epilog = (
        "examples:\n"
        "  meshwright generate runs/demo --prompt 'def main():' --prompt 'import '\n"
        "  meshwright generate runs/tuned --chat --prompt 'What is a tuple?'\n"
        "  meshwright generate path/to/Llama-3.2-1B --prompt - --temperature 0 < prompt.txt"
    )


def run(arguments: argparse.Namespace) -> int:
    """Continue every prompt and print it with its continuation."""
    if (status := started(arguments)) is not None:
        return status
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.models.from_disk import blocks_from_disk
    from meshwright.models.generate import Sampling
    from meshwright.serve.trained import Settings, answer_texts, continue_texts

    if arguments.system and not arguments.chat:
        raise UserError("--system needs --chat")
    sampling = Sampling(**sampling_settings(arguments))
    trained = open_model(arguments)
    if follows(arguments, trained.model):
        return 0
    compile_steps(arguments, trained.model)
    prompts = [sys.stdin.read().rstrip("\n") if text == "-" else text for text in arguments.prompt]
    settings = Settings(sampling=sampling, max_tokens=arguments.max_tokens, stops=arguments.stop)
    report = note if blocks_from_disk(trained.model) is not None else lambda line: None
    streams = len(prompts) == 1 and not arguments.json
    listeners = {"report": report, "stream": _show if streams else lambda part: None}
    if streams and not arguments.chat:
        _show(prompts[0])
    with contextlib.nullcontext() if streams else waiting("generating"):
        if arguments.chat:
            texts = answer_texts(trained, prompts, settings, system=arguments.system, **listeners)
        else:
            texts = continue_texts(trained, prompts, settings, **listeners)
    if streams:
        print()
        return 0
    pairs, lines = [], []
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        pairs.append({"prompt": prompt, "continuation": text})
        lines.append(f"--- {number} of {len(prompts)}")
        lines.append(text if arguments.chat else prompt + text)
    print_result(arguments, {"model": str(trained.source), "texts": pairs}, lines)
    return 0


def _show(part: str) -> None:
    print(part, end="", flush=True)
