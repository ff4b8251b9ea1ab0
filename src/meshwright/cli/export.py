"""The verb `export`: writes a trained model as a Hugging Face directory checked by its logits, its adapters in peft's
format, or the run as another engine's program."""

import argparse
from pathlib import Path
from typing import get_args

from meshwright.checkpoint.peft_config import unread_by_vllm
from meshwright.cli.common import add_ema_argument, add_family_argument, example_prompt
from meshwright.cli.output import add_json_argument, print_json, progress_on_stderr
from meshwright.spec.errors import UserError
from meshwright.spec.precision import FP32, FP64, ComputeName


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the operands and options of `export`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=Path,
        help="run directory, checkpoint or Hugging Face directory (with --program also a recipe)",
    )
    into = parser.add_mutually_exclusive_group(required=True)
    into.add_argument("--hf", metavar="DIR", type=Path, help="write a Hugging Face directory; it must not exist")
    into.add_argument("--adapter", metavar="DIR", type=Path, help="write the adapters alone, in peft's format")
    into.add_argument(
        "--program", metavar="DIR", type=Path, help="write the run as a program of --engine, with its inputs"
    )
    parser.add_argument("--engine", metavar="NAME", help="with --program: bare, hf_trainer, accelerate, deepspeed, ...")
    parser.add_argument("--merge", action="store_true", help="with --hf: merge adapters into the weights")
    parser.add_argument(
        "--dtype",
        choices=[name for name in get_args(ComputeName) if name != FP64.name],
        help="dtype of the stored weights (default: the run's precision)",
    )
    add_ema_argument(parser)
    add_family_argument(parser)
    add_json_argument(parser)
    parser.epilog = (
        "Before the directory gets its name, the model is read back and its logits are compared, also in transformers\n"
        "(or peft, for adapters) if it is installed. A merged model must have the logits of base and adapters.\n\n"
        "examples:\n"
        "  meshwright export runs/demo --hf runs/demo/export\n"
        "  meshwright export runs/lora --adapter runs/lora/adapter\n"
        "  meshwright export runs/lora --hf runs/lora/merged --merge\n"
        "  meshwright export run.yaml --engine deepspeed --program handed-over"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export and print the largest difference of the logits."""
    if bool(arguments.engine) != bool(arguments.program):
        raise UserError("--engine and --program go together: --engine deepspeed --program DIR")
    if arguments.program:
        return _hand_over(arguments)
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.serve.adapters import export_adapter
    from meshwright.serve.trained import export_trained, open_trained

    if arguments.adapter and (arguments.merge or arguments.dtype):
        raise UserError("--merge and --dtype apply only to --hf; leave them out with --adapter")
    trained = open_trained(
        arguments.model, device="cpu", dtype=FP32.name, averaged=arguments.ema, family=arguments.family
    )
    if arguments.adapter:
        parameters, difference = export_adapter(trained, arguments.adapter)
        if arguments.json:
            figures = {"parameters": parameters, "largest_logit_difference": difference}
            print_json({"model": str(trained.source), "adapter": str(arguments.adapter), **figures})
        else:
            print(
                f"{trained.source} written to {arguments.adapter}: {parameters} parameters, in fp32; logits differ by "
                f"at most {difference:.1e}"
            )
            if reasons := unread_by_vllm(arguments.adapter):
                print(f"vLLM does not read {' and '.join(reasons)}; for vLLM, export --hf DIR --merge")
        return 0
    difference, dtype = export_trained(trained, arguments.hf, dtype=arguments.dtype, merge=arguments.merge)
    if arguments.json:
        figures = {"dtype": dtype, "largest_logit_difference": difference}
        print_json({"model": str(trained.source), "directory": str(arguments.hf), **figures})
    else:
        print(f"{trained.source} written to {arguments.hf} in {dtype}; logits differ by at most {difference:.1e}")
        prompt = example_prompt(has_template=trained.tokenizer.chat_template is not None)
        print(f"next        meshwright generate {arguments.hf} {prompt}")
    return 0


def _hand_over(arguments: argparse.Namespace) -> int:
    """Write the run as another engine's program."""
    from meshwright.engines.handover import hand_over, run_at
    from meshwright.engines.registry import find_engine

    if arguments.merge or arguments.dtype or arguments.ema:
        raise UserError("--merge, --dtype and --ema do not apply to --program; leave them out")
    engine = find_engine(arguments.engine)
    with progress_on_stderr(arguments.json):
        translation = hand_over(run_at(arguments.model), engine, arguments.program)
    left_out = {setting.path: setting.why for setting in translation.left_out}
    if arguments.json:
        files = [*translation.files, "start", "data"]
        print_json({"directory": str(arguments.program), "engine": engine.name, "files": files, "left_out": left_out})
        return 0
    print(f"{arguments.model} written to {arguments.program} as {translation.program}, {translation.lines} lines")
    for path, why in left_out.items():
        print(f"left out    {path}: {why}")
    return 0
