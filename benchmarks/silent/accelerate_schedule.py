"""The learning rate after every microbatch, prepared by Accelerate, with two microbatches a step.

    python accelerate_schedule.py

Needs Accelerate and torch only. The rate should move when the optimizer steps: at every second microbatch.
"""

import argparse

import accelerate
import torch
from accelerate import Accelerator

argparse.ArgumentParser(description=__doc__).parse_args()
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)
net, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
rates = []
for _ in range(4):
    with accelerator.accumulate(net):
        accelerator.backward(net(torch.ones(2, 4)).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    rates.append(schedule.get_last_lr()[0])
print(f"accelerate {accelerate.__version__}: rates {rates}")
