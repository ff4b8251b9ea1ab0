"""Engine `nanogpt`: karpathy/nanoGPT's own model, optimizer and autocast, from a checkout given on the command line."""

import contextlib
import sys

import torch
from workload import BETAS, CLIP, LR, WEIGHT_DECAY, Workload, describe, read_arguments

from meshwright.families import hf_tensors

workload, report, checkout = read_arguments()
assert checkout is not None, "the parent passes --nanogpt"
sys.path.insert(0, str(checkout))
from model import GPT, GPTConfig  # noqa: E402  # pyright: ignore[reportMissingImports]


@torch.no_grad()
def start_from_ours(model: torch.nn.Module, workload: Workload) -> None:
    """Copy our initial weights: the names are GPT-2's, but no matrix is transposed."""
    theirs = dict(model.named_parameters())
    places = hf_tensors(workload.spec)
    for name, tensor in workload.model().named_parameters():
        place = places[name]
        theirs[place.key][place.offset : place.offset + len(tensor)].copy_(tensor)


config = GPTConfig(
    block_size=workload.length,
    vocab_size=workload.vocab,
    n_layer=workload.layers,
    n_head=workload.heads,
    n_embd=workload.width,
    dropout=0.0,
    bias=True,
)
model = GPT(config)
start_from_ours(model, workload)
optimizer = model.configure_optimizers(WEIGHT_DECAY, LR, BETAS, "cpu")
if workload.compile:
    model.compile()
low = workload.precision == "bf16"
autocast = torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext()
for inputs, labels in workload.batches():
    with autocast:
        _, loss = model(inputs, labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    report.step(loss.item())
report.end(describe(model.parameters(), optimizer))
