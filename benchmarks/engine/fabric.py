"""Engine `fabric`: a loop of Lightning Fabric over transformers' GPT-2."""

import torch
from lightning_fabric import Fabric
from workload import BETAS, CLIP, EPS, LR, decay_groups, describe, read_arguments

from engine.transformers_model import build

workload, report, _ = read_arguments()
precision = "bf16-mixed" if workload.precision == "bf16" else "32-true"
fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
model = build(workload)
optimizer = torch.optim.AdamW(decay_groups(model.parameters()), lr=LR, betas=BETAS, eps=EPS, fused=True)
if workload.compile:
    model.compile()
module, fabric_optimizer = fabric.setup(model, optimizer)
for inputs, labels in workload.batches():
    # `shift_labels` says that labels are already moved on by one: each token is trained, as by the other engines.
    loss = module(input_ids=inputs, labels=labels, shift_labels=labels).loss
    fabric.backward(loss)
    fabric.clip_gradients(module, fabric_optimizer, max_norm=CLIP)
    fabric_optimizer.step()
    fabric_optimizer.zero_grad(set_to_none=True)
    report.step(loss.item())
report.end(describe(model.parameters(), optimizer))
