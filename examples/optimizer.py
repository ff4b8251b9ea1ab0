"""An optimizer: any torch.optim.Optimizer that says what it looks at."""

import argparse
from pathlib import Path
from typing import Any

import torch

from meshwright import Run, train


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023)."""

    elementwise = True  # every number from its own history: it may step the shards that a rank holds
    states = 1  # numbers that it keeps of each parameter, for plans of memory

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure=None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(mean.lerp(p.grad, 1 - group["betas"][0]).sign(), alpha=group["lr"])
                    mean.lerp_(p.grad, 1 - group["betas"][1])


RUN = {
    "model": {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 4, "ffn": 64, "vocab": 320},
    "data": {"sources": "*.py", "tokenizer_vocab": 320, "sequence_length": 32},
    "training": {"steps": 4, "global_batch": 8, "precision": "fp32", "lr_schedule": {"warmup": 1}},
}
PLUGGED: dict[str, Any] = {"optimizer": Lion}


def main(**more):
    """Train on the text of these examples; `more` of the recipe, such as layout={"tp": 2}."""
    run = Run.model_validate({**RUN, "run_dir": "runs/example-optimizer", **more})
    return train(run, base_dir=Path(__file__).parent, **PLUGGED)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    from optimizer import main  # under its own name, by which worker processes find Lion

    print(main(layout={"dp_shard": 2}))
