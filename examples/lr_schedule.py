"""A learning-rate schedule: a function of the step."""

import argparse
from pathlib import Path
from typing import Any

from meshwright import Run, train


def inverse_root(step, steps, warmup=2):
    """The factor of the peak learning rate at a step from 1 to `steps`: the one of "Attention is all you need"."""
    return min(step / warmup, (warmup / step) ** 0.5)


RUN = {
    "model": {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 4, "ffn": 64, "vocab": 320},
    "data": {"sources": "*.py", "tokenizer_vocab": 320, "sequence_length": 32},
    "training": {"steps": 4, "global_batch": 8, "precision": "fp32"},
}
PLUGGED: dict[str, Any] = {"lr_schedule": inverse_root}


def main(**more):
    """Train on the text of these examples; `more` of the recipe, such as layout={"tp": 2}."""
    run = Run.model_validate({**RUN, "run_dir": "runs/example-lr_schedule", **more})
    return train(run, base_dir=Path(__file__).parent, **PLUGGED)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    from lr_schedule import main  # under its own name, by which worker processes find inverse_root

    print(main(layout={"dp_replicate": 2}))
