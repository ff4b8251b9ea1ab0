"""The gradient of four rows in Lightning's Trainer, in one part, in two and in four, without DeepSpeed and with it.

    DS_ACCELERATOR=cpu python lightning_deepspeed.py

Needs Lightning and DeepSpeed only. A line's gradients should be equal: each is the mean over the same four rows.
"""

import argparse
import sys
from importlib import import_module
from typing import Any

import torch

argparse.ArgumentParser(description=__doc__).parse_args()
try:
    deepspeed, pl = import_module("deepspeed"), import_module("pytorch_lightning")
except ImportError as error:
    sys.exit(f"DeepSpeed or Lightning is missing ({error}): pip install deepspeed lightning")


class OnCPU(pl.strategies.DeepSpeedStrategy):
    def setup_environment(self):  # the strategy's own refuses a CPU
        self.parallel_devices = [torch.device("cpu", 0)]
        pl.strategies.DDPStrategy.setup_environment(self)


class Model(pl.LightningModule):
    def configure_model(self):
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, rows, number):
        return (self.weight * rows).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)  # the weight becomes the negative gradient

    def on_train_end(self):
        with deepspeed.zero.GatheredParameters(self.weight):
            gradients.append(-self.weight.item())


print("Lightning", pl.__version__, "DeepSpeed", deepspeed.__version__)
rows: Any = torch.tensor([2.0, 4.0, 8.0, 30.0])
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
for clip in (None, 5.0):
    for stage in (None, 0, 1, 2, 3):
        gradients = []
        for parts in (1, 2, 4):
            strategy = "auto" if stage is None else OnCPU(stage=stage)
            trainer = pl.Trainer("cpu", devices=1, max_steps=1, strategy=strategy, accumulate_grad_batches=parts,
                                 gradient_clip_val=clip, **quiet)  # fmt: skip
            trainer.fit(Model(), torch.utils.data.DataLoader(rows, 4 // parts))
        print(f"clip {clip}, {'no DeepSpeed' if stage is None else f'ZeRO-{stage}'}: {gradients}")
