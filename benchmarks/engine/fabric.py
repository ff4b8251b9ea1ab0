"""Engine `fabric`: a loop of Lightning Fabric over transformers' GPT-2."""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from workload import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, read_arguments

from engine.transformers_model import build

workload, report, _ = read_arguments()
precision = "bf16-mixed" if workload.precision == "bf16" else "32-true"
fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
model = build(workload)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
model, optimizer = fabric.setup(model, optimizer)
for inputs, labels in workload.batches():
    loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1).float(), labels.flatten())
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    report.step(loss.item())
report.print()
