"""Engine `bare`: the plainest PyTorch loop over the same module, to show what the trainer adds."""

import torch
from workload import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, read_arguments

from meshwright.parallel.precision import MasterWeights
from meshwright.spec.training import TrainingSpec

workload, report, _ = read_arguments()
model = workload.model()
masters = MasterWeights(model, TrainingSpec(precision="bf16")) if workload.precision == "bf16" else None
parameters = list(masters.parameters.values()) if masters else list(model.parameters())
optimizer = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
for inputs, labels in workload.batches():
    loss = model(inputs, labels) / labels.numel()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if masters:
        masters.refresh()
    report.step(loss.item())
report.print()
