"""The weight after each of two rows, in Lightning Fabric with DeepSpeed: one batch in two parts.

    DS_ACCELERATOR=cpu python fabric_deepspeed.py

Needs Fabric and DeepSpeed only. The gradient of the mean of both rows is 11 and SGD's rate is 1, so the weight should
be 0 after the first row and -11 after the second.
"""

import argparse
import sys
from importlib import import_module

import torch
from lightning_fabric import Fabric, __version__, strategies

argparse.ArgumentParser(description=__doc__).parse_args()
try:
    deepspeed = import_module("deepspeed")
except ImportError as error:
    sys.exit(f"DeepSpeed is missing ({error}): pip install deepspeed")


class OnCPU(strategies.DeepSpeedStrategy):
    def setup_environment(self):  # the strategy's own refuses a CPU
        self.parallel_devices = [torch.device("cpu", 0)]
        strategies.DDPStrategy.setup_environment(self)


print("Fabric", __version__, "DeepSpeed", deepspeed.__version__)
ways = {"optimizer.step() after both": 1, "optimizer.step() after each": 2, "engine.step() after each": 2}
for way, accumulation in ways.items():
    for stage in (0, 1, 2, 3):
        config = {"gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": stage}}
        strategy = OnCPU(config=config | {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0})
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        plain, weights = torch.nn.Linear(1, 1, bias=False), []
        torch.nn.init.zeros_(plain.weight)
        model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
        try:
            for row in (2.0, 20.0):
                fabric.backward(model(torch.tensor([row])).sum() / (2 / accumulation))  # `backward` divides too
                if way.startswith("engine"):
                    strategy.model.step()  # it clears the gradients
                elif row == 20 or "each" in way:
                    optimizer.step()
                    optimizer.zero_grad()
                with deepspeed.zero.GatheredParameters(plain.weight):
                    weights.append(plain.weight.item())
        except KeyError as error:
            weights.append(repr(error))
        print(f"{way}, ZeRO-{stage}: {weights}, norm {strategy.model.get_global_grad_norm()}")
