"""The verb `export`: write a trained model as a Hugging Face directory, proved by comparing logits."""

import argparse
from pathlib import Path

from meshwright.cli.output import add_json_argument, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Operands and options of `export`."""
    parser.add_argument("model", metavar="MODEL", type=Path, help="run directory or checkpoint")
    parser.add_argument("--hf", metavar="DIR", type=Path, required=True, help="directory to write; it must not exist")
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], help="of the stored weights (default: the run's precision)"
    )
    add_json_argument(parser)
    parser.epilog = (
        "The directory appears only when the model read back from it gives the same logits, in transformers too\n"
        "where that is installed.\n\n"
        "example:\n  meshwright export runs/demo --hf runs/demo/export"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export and say how closely the logits agree."""
    # Torch loads here, so that --help and misuse never wait for it.
    from meshwright.trainer.trained import export_trained, open_trained

    trained = open_trained(arguments.model, device="cpu", dtype="fp32")
    difference, dtype = export_trained(trained, arguments.hf, dtype=arguments.dtype)
    if arguments.json:
        figures = {"dtype": dtype, "largest_logit_difference": difference}
        print_json({"model": str(trained.source), "directory": str(arguments.hf), **figures})
    else:
        print(f"{trained.source} written to {arguments.hf} in {dtype}; logits differ by at most {difference:.1e}")
        print(f"next        meshwright generate {arguments.hf} --prompt 'Once upon a time'")
    return 0
