"""An objective: next-token cross-entropy and the square of the softmax's normaliser."""

import argparse
from pathlib import Path
from typing import Any

from meshwright import Objective, Run, Sums, train


class ZLoss(Objective):
    """The z-loss of PaLM (Chowdhery et al., 2022). It knows no rank: `head` answers for a vocabulary that is split."""

    metrics = ("z",)

    def __init__(self, weight=1e-2):
        self.weight = weight

    def count(self, batch):
        return int((batch.labels != -100).sum())

    def sums(self, hidden_BTD, head, batch):
        assert batch.labels is not None  # as in every batch of training
        z = head.token_terms(hidden_BTD, batch.labels, lambda logits, labels: logits.logsumexp() ** 2).sum()
        return Sums(head.loss(hidden_BTD, batch.labels) + self.weight * z, {"z": z.detach()})


RUN = {
    "model": {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 4, "ffn": 64, "vocab": 320},
    "data": {"sources": "*.py", "tokenizer_vocab": 320, "sequence_length": 32},
    "training": {"steps": 4, "global_batch": 8, "precision": "fp32", "lr_schedule": {"warmup": 1}},
}
PLUGGED: dict[str, Any] = {"objective": ZLoss()}


def main(**more):
    """Train on the text of these examples; `more` of the recipe, such as layout={"tp": 2}."""
    run = Run.model_validate({**RUN, "run_dir": "runs/example-objective", **more})
    return train(run, base_dir=Path(__file__).parent, **PLUGGED)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    from objective import main  # under its own name, by which worker processes find ZLoss

    print(main(layout={"tp": 2}))
