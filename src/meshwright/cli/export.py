"""The verb `export`: write a trained model as a Hugging Face directory, proved by comparing logits, or its adapters as
peft's."""

import argparse
from pathlib import Path
from typing import get_args

from meshwright.checkpoint.peft_config import unread_by_vllm
from meshwright.cli.common import add_ema_argument, example_prompt
from meshwright.cli.output import add_json_argument, print_json
from meshwright.spec.errors import UserError
from meshwright.spec.precision import FP32, FP64, ComputeName


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Operands and options of `export`."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="run directory or checkpoint")
    into = parser.add_mutually_exclusive_group(required=True)
    into.add_argument("--hf", metavar="DIR", type=Path, help="write a Hugging Face directory; it must not exist")
    into.add_argument("--adapter", metavar="DIR", type=Path, help="write the adapters alone, as peft reads them")
    parser.add_argument("--merge", action="store_true", help="with --hf: merge adapters into the weights")
    parser.add_argument(
        "--dtype",
        choices=[name for name in get_args(ComputeName) if name != FP64.name],
        help="of the stored weights (default: the run's precision)",
    )
    add_ema_argument(parser)
    add_json_argument(parser)
    parser.epilog = (
        "The directory appears only when the model read back from it gives the same logits, in transformers too\n"
        "where that is installed; merged, only when its logits are those of base and adapters.\n\n"
        "examples:\n"
        "  meshwright export runs/demo --hf runs/demo/export\n"
        "  meshwright export runs/lora --adapter runs/lora/adapter\n"
        "  meshwright export runs/lora --hf runs/lora/merged --merge"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export and say how closely the logits agree."""
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.serve.trained import export_adapter, export_trained, open_trained

    if arguments.adapter and (arguments.merge or arguments.dtype):
        raise UserError("--merge and --dtype are about whole models, written with --hf; leave them out")
    trained = open_trained(arguments.model, device="cpu", dtype=FP32.name, averaged=arguments.ema)
    if arguments.adapter:
        parameters = export_adapter(trained, arguments.adapter)
        if arguments.json:
            print_json({"model": str(trained.source), "adapter": str(arguments.adapter), "parameters": parameters})
        else:
            print(f"{trained.source} written to {arguments.adapter}: {parameters} parameters, in fp32")
            if reasons := unread_by_vllm(arguments.adapter):
                print(f"not for vLLM: it does not read {' and '.join(reasons)}; for it, export --hf DIR --merge")
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
