"""A callback: it asks for a checkpoint where the gradient's norm has doubled since the step before."""

import argparse
from pathlib import Path
from typing import Any

from meshwright import Callback, Run, train


class Jumps(Callback):
    """Counts the steps whose gradient is twice as large as the one before; the count survives a stop."""

    def __init__(self, factor=2.0):
        self.factor, self.before, self.count = factor, float("inf"), 0

    def on_step(self, training, record):
        if record["gnorm"] > self.factor * self.before:
            self.count += 1
            training.request_save()
        self.before = record["gnorm"]

    def on_stop(self, training, record):
        training.say(f"{self.count} jumps of the gradient")

    def state_dict(self):
        return {"before": self.before, "count": self.count}

    def load_state_dict(self, state):
        self.before, self.count = state["before"], state["count"]


RUN = {
    "model": {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 4, "ffn": 64, "vocab": 320},
    "data": {"sources": "*.py", "tokenizer_vocab": 320, "sequence_length": 32},
    "training": {"steps": 4, "global_batch": 8, "precision": "fp32", "lr_schedule": {"warmup": 1}},
}
PLUGGED: dict[str, Any] = {"callbacks": [Jumps()]}


def main(**more):
    """Train on the text of these examples; `more` of the recipe, such as layout={"tp": 2}."""
    run = Run.model_validate({**RUN, "run_dir": "runs/example-callback", **more})
    return train(run, base_dir=Path(__file__).parent, **PLUGGED)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    from callback import main  # under its own name, by which worker processes find Jumps

    print(main(layout={"dp_shard": 2}))
