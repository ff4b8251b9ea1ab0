"""A model: blocks of one's own, made of layers that every strategy can split."""

import argparse
from pathlib import Path
from typing import Any

from meshwright import Block, Model, Run, train
from meshwright.models import FeedForward, Linear


class SquaredReLU(FeedForward):
    """Primer's feed-forward layer (So et al., 2021)."""

    def forward(self, x_BTD):
        x_BTD = x_BTD if self.entry is None else self.entry(x_BTD)  # where tensor parallelism gathers the sequence
        return self.w2(self.w1(x_BTD).relu() ** 2)


class GatedBlock(Block):
    """What attention adds is gated by what it read."""

    def __init__(self, spec, layer):
        super().__init__(spec, layer)
        self.feed_forward = SquaredReLU(spec, spec.ffn)
        self.gate = Linear(spec.hidden, spec.hidden, bias=False)

    def compute(self, x_BTD, rope=None, mask=None, cache=None):
        h_BTD = self.attention_norm(x_BTD)
        x_BTD = x_BTD + self.gate(h_BTD).sigmoid() * self.attention(h_BTD, rope, mask, cache)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class Gated(Model):
    base, switches = "llama", {"activation": "gelu_tanh"}  # so that a layer has two matrices
    dims = {"gate.weight": ("embed", "embed")}  # of what llama has not

    def block(self, spec, layer):
        return GatedBlock(spec, layer)


RUN = {
    "model": {"hidden": 32, "num_layers": 2, "num_heads": 4, "ffn": 64, "vocab": 320},
    "data": {"sources": "*.py", "tokenizer_vocab": 320, "sequence_length": 32},
    "training": {"steps": 4, "global_batch": 8, "precision": "fp32", "lr_schedule": {"warmup": 1}},
}
PLUGGED: dict[str, Any] = {"model": Gated}


def main(**more):
    """Train on the text of these examples; `more` of the recipe, such as layout={"tp": 2}."""
    run = Run.model_validate({**RUN, "run_dir": "runs/example-model", **more})
    return train(run, base_dir=Path(__file__).parent, **PLUGGED)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    from model import main  # under its own name, by which worker processes find Gated

    print(main(layout={"tp": 2}))
