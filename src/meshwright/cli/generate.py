"""The verb `generate`: continues prompts with a trained model."""

import argparse
import sys
from typing import Any

from meshwright.cli.common import (
    add_compile_argument,
    add_disk_argument,
    add_family_argument,
    add_model_arguments,
    add_sampling_arguments,
    compile_steps,
    note_disk,
    sampling_settings,
)
from meshwright.cli.output import add_json_argument, print_json
from meshwright.cli.ranks import add_layout_argument, follows, started, weights_of
from meshwright.spec.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `generate`."""
    add_model_arguments(parser)
    add_family_argument(parser)
    add_disk_argument(parser)
    add_compile_argument(parser)
    add_layout_argument(parser)
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
    from meshwright.models.generate import Sampling
    from meshwright.serve.from_disk import about_disk
    from meshwright.serve.trained import answer_texts, continue_texts, open_trained

    if arguments.system and not arguments.chat:
        raise UserError("--system needs --chat")
    sampling = Sampling(**sampling_settings(arguments), seed=arguments.seed)
    trained = open_trained(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        averaged=arguments.ema,
        family=arguments.family,
        weights=weights_of(arguments),
    )
    if follows(arguments, trained.model):
        return 0
    note_disk(trained.model)
    compile_steps(arguments, trained.model)
    prompts = [sys.stdin.read().rstrip("\n") if text == "-" else text for text in arguments.prompt]
    settings: dict[str, Any] = {"max_tokens": arguments.max_tokens, "sampling": sampling, "stops": arguments.stop}
    if about_disk(trained.model):
        settings["tell"] = lambda line: print(f"note: {line}", file=sys.stderr)
    if arguments.chat:
        texts = answer_texts(trained, prompts, system=arguments.system, **settings)
    else:
        texts = continue_texts(trained, prompts, **settings)
    if arguments.json:
        pairs = [{"prompt": prompt, "continuation": text} for prompt, text in zip(prompts, texts, strict=True)]
        print_json({"model": str(trained.source), "texts": pairs})
        return 0
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        if len(prompts) > 1:
            print(f"--- {number} of {len(prompts)}")
        whole = text if arguments.chat else prompt + text
        print(whole)
    return 0
