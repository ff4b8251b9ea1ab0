"""A dataset: endless sequences of token ids to be copied. It is read as far as the run needs."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from meshwright import Run, train


class Copies:
    """A random sequence, a separator and the same sequence again. Texts or records (dicts) would do as well."""

    def __init__(self, vocab=320, seed=0):
        self.vocab, self.seed = vocab, seed

    def __iter__(self):
        numbers = np.random.default_rng(self.seed)  # the same items whenever it begins
        while True:
            ids = numbers.integers(1, self.vocab, numbers.integers(4, 16))
            yield np.concatenate([ids, [0], ids])


RUN = {
    "model": {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 4, "ffn": 64, "vocab": 320},
    "data": {"sequence_length": 32},
    "training": {"steps": 4, "global_batch": 8, "precision": "fp32", "lr_schedule": {"warmup": 1}},
}
PLUGGED: dict[str, Any] = {"dataset": Copies()}


def main(**more):
    """Train on copies; `more` of the recipe, such as layout={"tp": 2}."""
    run = Run.model_validate({**RUN, "run_dir": "runs/example-dataset", **more})
    return train(run, base_dir=Path(__file__).parent, **PLUGGED)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(main(layout={"dp_shard": 2}))
