"""Engine `bare`: the simplest PyTorch loop over the same module, to show the trainer's overhead."""

from pathlib import Path

import torch
from workload import BETAS, CLIP, EPS, LR, decay_groups, describe, read_arguments

from meshwright.models.cpu_kernels import CHOSEN
from meshwright.models.kernel_choice import kept
from meshwright.parallel.compile import apply_compile
from meshwright.spec.batch import Batch
from meshwright.trainer.device import keep_freed_memory

workload, report, _ = read_arguments()
keep_freed_memory()  # as our trainer does: its effect is not what is measured here
model = workload.model()
copies: list[torch.Tensor] = list(model.parameters())
weights = copies
if workload.precision == "bf16":  # the model computes with copies of fp32 weights
    weights = [weight.detach().clone() for weight in copies]
    model.bfloat16()
if workload.compile:
    apply_compile(model)
optimizer = torch.optim.AdamW(decay_groups(weights), lr=LR, betas=BETAS, eps=EPS, fused=True)
# A CPU's kernels, chosen as our trainer chooses them.
CHOSEN.set(kept(workload.shapes, Path(workload.cache)).kernels)
for inputs, labels in workload.batches():
    loss = model(Batch(inputs, labels), lambda x, head, batch: head.loss(x, batch.labels)) / labels.numel()
    loss.backward()
    if weights is not copies:
        for weight, copy in zip(weights, copies, strict=True):
            assert copy.grad is not None
            weight.grad, copy.grad = copy.grad.float(), None
    torch.nn.utils.clip_grad_norm_(weights, CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if weights is not copies:
        with torch.no_grad():
            torch._foreach_copy_(copies, weights)
    report.step(loss.item())
report.end(describe(weights, optimizer))
