"""Train with ZeRO-3 by hand, in one file beside train.py: every process keeps an equal part of every weight.

    torchrun --nproc-per-node 2 solo/train_fsdp.py              # learns Python, as train.py does
    torchrun --nproc-per-node 4 solo/train_fsdp.py --layers 8 --width 384 --inner 1024

DDP keeps weights, gradients and the optimizer's two moments whole on every process: 16 bytes a weight in fp32. ZeRO-3
(Rajbhandari et al., 2020), which PyTorch calls fully sharded data parallelism (FSDP), divides all four by the number of
processes. A layer's weights are whole only while the layer computes:

    forward pass     gather the layer's weights -> compute -> let them go
    backward pass    gather them again -> compute again, and backwards -> reduce and scatter the gradient -> let them go
    update           every process steps the part of the weights that it keeps

So three messages of the model's size are sent a step, instead of DDP's two; nothing else changes, and a test holds the
losses to those of one process. What FSDP adds to this file is speed: it gathers the next layer while this one computes.
"""

import argparse
import math
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train as whole
from torch import nn
from torch.func import functional_call

Weights = dict[str, torch.Tensor]


# ----------------------------------------------------------------------------------------------------------------------
# Two messages. With W processes, each keeping n numbers: gathering makes W x n numbers of n, the same on every process;
# reducing and scattering adds up W x n numbers over the processes and leaves each with the sum of its own n.


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(part: torch.Tensor) -> torch.Tensor:
    """All processes' parts [n] in order, [W n]."""
    if world_size() == 1:
        return part.clone()
    everything = part.new_empty(world_size() * part.numel())
    dist.all_gather(list(everything.chunk(world_size())), part)
    return everything


def reduce_scatter(everything: torch.Tensor) -> torch.Tensor:
    """This process's part [n] of the sum of [W n] over all processes."""
    if world_size() == 1:
        return everything
    part = everything.new_empty(everything.numel() // world_size())
    dist.reduce_scatter(part, list(everything.chunk(world_size())))
    return part


# ----------------------------------------------------------------------------------------------------------------------
# A layer's weights, laid end to end in one long line, of which each process keeps a piece. Matrices and norms have a
# line each, because weight decay treats them differently.


class Layer:
    """The weights of a module, divided over the processes. The module itself is left without any."""

    def __init__(self, module: nn.Module, device: torch.device):
        named = list(module.named_parameters())
        self.lines = [
            line for line in ([n for n in named if n[1].dim() > 1], [n for n in named if n[1].dim() == 1]) if line
        ]
        self.parts = [self.own_part([weight for _, weight in line], device) for line in self.lines]
        self.module = module.to("meta")  # names and shapes; no numbers

    @staticmethod
    def own_part(weights: list[nn.Parameter], device: torch.device) -> nn.Parameter:
        """This process's piece of a line, padded with zeros so that all pieces are equally long."""
        line = torch.cat([weight.detach().flatten() for weight in weights])
        line = F.pad(line, (0, -len(line) % world_size()))
        rank = dist.get_rank() if dist.is_initialized() else 0
        return nn.Parameter(line.chunk(world_size())[rank].clone().to(device))

    def named(self, lines: tuple[torch.Tensor, ...]) -> Weights:
        """Whole lines, cut into the weights that they are made of: views, no copies."""
        weights: Weights = {}
        for line, members in zip(lines, self.lines, strict=True):
            place = 0
            for name, like in members:
                weights[name] = line[place : place + like.numel()].view(like.shape)
                place += like.numel()
        return weights

    def __call__(self, compute: Callable[[nn.Module, Weights, torch.Tensor], torch.Tensor], x: torch.Tensor):
        """What `compute` makes of x with the layer's whole weights."""
        return Sharded.apply(self, compute, x, *self.parts)


class Sharded(torch.autograd.Function):
    """One layer's computation, whose weights are whole for as long as it takes.

    To autograd, the layer is a function of x and of this process's parts. So what `backward` returns for the parts is
    added to their `.grad`, microbatch by microbatch, as for any other parameter.
    """

    @staticmethod
    def forward(ctx, layer: Layer, compute, x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        ctx.layer, ctx.compute = layer, compute
        ctx.save_for_backward(x, *parts)  # the parts, not the lines: gathered weights end with this function
        return compute(layer.module, layer.named(tuple(map(gather, parts))), x)

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor):
        x, *parts = ctx.saved_tensors
        lines = tuple(gather(part).requires_grad_() for part in parts)
        inputs = (x.detach().requires_grad_(),) if x.is_floating_point() else ()  # tokens have no gradient
        with torch.enable_grad():
            y = ctx.compute(ctx.layer.module, ctx.layer.named(lines), *(inputs or (x,)))
        found = torch.autograd.grad(y, (*inputs, *lines), grad_outputs)
        return None, None, (found[0] if inputs else None), *(reduce_scatter(line) for line in found[len(inputs) :])


# ----------------------------------------------------------------------------------------------------------------------
# The model of train.py, layer by layer. The tied embedding is gathered twice: as the first layer and as the head.


def run(module: nn.Module, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """A module's own computation with these weights."""
    return functional_call(module, weights, x)


def head(module: nn.Module, weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """Logits: the embedding's rows as the output head."""
    return F.linear(x, weights["weight"])


class ShardedLlama(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, model: whole.Llama, device: torch.device):
        super().__init__()
        self.embedding = Layer(model.tok_embeddings, device)
        self.blocks = [Layer(block, device) for block in model.layers.values()]
        self.norm = Layer(model.norm, device)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(run, tokens_BT)
        for block in self.blocks:
            x_BTD = block(run, x_BTD)
        return self.embedding(head, self.norm(run, x_BTD))

    def parts(self, matrices: bool) -> list[nn.Parameter]:
        """This process's parts of all matrices, or of all norms."""
        layers = (self.embedding, *self.blocks, self.norm)
        return [
            part
            for layer in layers
            for line, part in zip(layer.lines, layer.parts, strict=True)
            if (line[0][1].dim() > 1) == matrices
        ]

    def whole_weights(self) -> Weights:
        """Every weight by its name in train.py, gathered layer by layer, on the CPU."""
        layers = {"tok_embeddings": self.embedding, "norm": self.norm}
        layers |= {f"layers.{number}": block for number, block in enumerate(self.blocks)}
        return {
            f"{prefix}.{name}": weight.cpu().clone()
            for prefix, layer in layers.items()
            for name, weight in layer.named(tuple(gather(part.detach()) for part in layer.parts)).items()
        }


# ----------------------------------------------------------------------------------------------------------------------
# One step. Gradients are sums over processes already; only the norm still has to be added up.


def train_step(model: ShardedLlama, optimizer, inputs, labels, step: int, args) -> tuple[float, float]:
    """One optimizer step; returns (loss per token, norm of the gradient)."""
    count = whole.total((labels != whole.IGNORED).sum())
    loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
    for inputs_BT, labels_BT in zip(inputs.split(args.micro_batch), labels.split(args.micro_batch), strict=True):
        part = whole.loss_sum(model, inputs_BT, labels_BT, args)
        (part / count).backward()
        loss += part.detach()
    parts = [part for group in optimizer.param_groups for part in group["params"]]
    squares = torch.stack([part.grad.double().square().sum() for part in parts]).sum()
    norm = math.sqrt(whole.total(squares))
    if not math.isfinite(norm):
        raise SystemExit(f"step {step}: the gradient is not finite; lower --lr")
    for part in parts:
        part.grad.mul_(min(1.0, args.clip / (norm + 1e-6)))
    for group in optimizer.param_groups:
        group["lr"] = whole.lr_at(step, args)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return whole.total(loss) / count, norm


def train(args) -> list[float]:
    """Train; returns the loss of every step."""
    if args.dtype == "bfloat16" or args.resume:
        raise SystemExit("this file trains in float32 or float64, from the first step; see train.py")
    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    on_gpu = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if args.batch % (processes * args.micro_batch):
        raise SystemExit(f"--batch must be a multiple of {processes} processes x --micro-batch {args.micro_batch}")
    if processes > 1:
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
    if args.tokens:
        tokens = held_out = whole.read_token_file(args.tokens)
    else:
        tokens = whole.read_stdlib()
        tokens, held_out = tokens[: -len(tokens) // 20], tokens[-len(tokens) // 20 :]

    # Drawn whole, then divided: a larger model would be drawn layer by layer.
    start = whole.Llama(args).to(torch.float64 if args.dtype == "float64" else torch.float32)
    whole.draw_weights(start, args.seed, args.layers)
    size = sum(weight.numel() for weight in start.parameters())
    model = ShardedLlama(start, device)
    groups = [
        {"params": model.parts(matrices=True), "weight_decay": args.weight_decay},
        {"params": model.parts(matrices=False), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    kept = sum(part.numel() for group in groups for part in group["params"])
    if rank == 0:
        print(f"{size:,} parameters, of which each process keeps {kept:,}; {len(tokens):,} tokens, {device}")

    losses = []
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        inputs, labels = whole.batch_of(tokens, step - 1, args, rank, processes)
        loss, norm = train_step(model, optimizer, inputs.to(device), labels.to(device), step, args)
        losses.append(loss)
        if rank == 0 and (step % 10 == 0 or step in (1, args.steps)):
            rate = args.batch * args.length / (time.perf_counter() - began)
            print(f"step {step}/{args.steps}  loss {loss:.4f}  gnorm {norm:.2f}  {rate:,.0f} tok/s", flush=True)
    weights = model.whole_weights()  # every process gathers; the first one writes
    last = whole.held_out_loss(model, held_out, args, device)
    if rank == 0:
        torch.save({"model": weights}, args.save)
        print(f"held-out loss {last:.4f}; saved {args.save}")
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    train(whole.parse(parser=argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])))
