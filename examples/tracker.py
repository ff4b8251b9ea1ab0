"""A tracker: the loss of every step as a line of a .csv file. Trackers from Python are callbacks like others."""

import argparse
from pathlib import Path
from typing import Any

from meshwright import Run, Tracker, train


class Csv(Tracker):
    """Writes RUN_DIR/loss.csv, from the first rank alone."""

    def open(self, run):
        self.path = Path(run.run_dir) / "loss.csv"
        if not self.path.exists():
            self.path.write_text("step,loss\n")

    def write(self, record):
        if record["kind"] == "step":
            with self.path.open("a") as file:
                file.write(f"{record['step']},{record['loss']}\n")


RUN = {
    "model": {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 4, "ffn": 64, "vocab": 320},
    "data": {"sources": "*.py", "tokenizer_vocab": 320, "sequence_length": 32},
    "training": {"steps": 4, "global_batch": 8, "precision": "fp32", "lr_schedule": {"warmup": 1}},
}
PLUGGED: dict[str, Any] = {"callbacks": [Csv()]}


def main(**more):
    """Train on the text of these examples; `more` of the recipe, such as layout={"tp": 2}."""
    run = Run.model_validate({**RUN, "run_dir": "runs/example-tracker", **more})
    return train(run, base_dir=Path(__file__).parent, **PLUGGED)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    from tracker import main  # under its own name, by which worker processes find Csv

    print(main(layout={"tp": 2}))
