"""Train a small Llama, whole, in one file: torch and the standard library, one process or several.

    python solo/train.py                                        # learns Python from the standard library's own text
    torchrun --nproc-per-node 2 solo/train.py                   # the same on two processes (DDP)
    python solo/train.py --steps 500 --resume                   # go on from solo.pt
    python solo/train.py --tokens train.bin --vocab 4096        # tokens that meshwright prepared

Read it from top to bottom: the text, the order of samples, the model, its first weights, one step, the loop. What the
modular trainer does with many files and options is here once, the plainest way that is still right; a test holds the
two to the same losses. Shapes are spelled in names: B sequences, T tokens, D width, K width of a head, V words.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import sysconfig
import time
from array import array
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

IGNORED = -100  # the label of a position without loss
END_OF_TEXT = 256  # bytes are 0 .. 255


# ----------------------------------------------------------------------------------------------------------------------
# The text. A language model sees numbers: here simply the bytes of each file, one number more to say that a file ends.


def read_stdlib() -> torch.Tensor:
    """The standard library's Python files as one long line of bytes, int64."""
    folder = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    tokens = array("H")  # unsigned 16-bit numbers
    for path in sorted(folder.rglob("*.py")):
        if not skipped & set(path.relative_to(folder).parts):
            tokens.extend(path.read_bytes())
            tokens.append(END_OF_TEXT)
    return torch.frombuffer(tokens, dtype=torch.uint16).long()


def read_token_file(path: Path) -> torch.Tensor:
    """A file of token numbers, with a json beside it that tells their width, int64."""
    about = json.loads(path.with_suffix(".json").read_text())
    dtype = {"uint16": torch.uint16, "uint32": torch.uint32}[about["dtype"]]
    return torch.from_file(str(path), size=about["num_tokens"], dtype=dtype).long()


def sample(tokens: torch.Tensor, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample `index`: `length` tokens, and as labels the same moved on by one: each token's label is the next token."""
    start = index * length
    return tokens[start : start + length], tokens[start + 1 : start + length + 1]


# ----------------------------------------------------------------------------------------------------------------------
# The order of samples. Shuffling a list would need the list, and a place in it to save. A permutation that can be
# computed for any position needs neither: the step's number is all there is to remember, on any number of processes.


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """Where this epoch's permutation of 0 .. size-1 sends `index`.

    A Feistel network shuffles the numbers below a power of four that is at least `size`; each of its rounds can be
    undone, so no two numbers meet. A number that lands beyond `size` goes through it again.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for number in range(8):
            key = f"{seed} {epoch} {number} {right}".encode()
            noise = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
            left, right = right, left ^ (noise & mask)
        index = left << half_bits | right
        if index < size:
            return index


def batch_of(tokens: torch.Tensor, step: int, args: argparse.Namespace, rank: int, world_size: int):
    """This process's share of the step's global batch: inputs and labels, both [share, T]."""
    count = (len(tokens) - 1) // args.length
    share = args.batch // world_size
    first = step * args.batch + rank * share
    pairs = []
    for position in range(first, first + share):
        epoch, index = divmod(position, count)
        pairs.append(sample(tokens, permuted(index, count, args.seed, epoch), args.length))
    inputs, labels = zip(*pairs, strict=True)
    return torch.stack(inputs), torch.stack(labels)


# ----------------------------------------------------------------------------------------------------------------------
# The model: a Llama (Touvron et al., 2023). Each block adds to the residual stream x what attention reads from earlier
# tokens, then what the feed-forward layer makes of each token alone. Both see x through a norm.


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads may share one key and value head."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_width = width // heads
        self.wq = nn.Linear(width, heads * self.head_width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [B, heads, T, K]
            for project in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


def rotate(x: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    """Turn pairs of a head's numbers by an angle that grows with the position (RoPE, Su et al., 2021).

    The product of a query and a key then depends on how far apart they are, not on where they stand. Angles are
    computed in fp32: bf16 could not tell position 1000 from 1001.
    """
    length, width = x.shape[-2:]
    frequencies = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width)
    angles = torch.arange(length, device=x.device).float()[:, None] * frequencies
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): one projection opens and closes a gate on the other."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    """One layer."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.width, eps=1e-5)
        self.attention = Attention(args.width, args.heads, args.kv_heads)
        self.feed_forward_norm = nn.RMSNorm(args.width, eps=1e-5)
        self.feed_forward = FeedForward(args.width, args.inner)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class Llama(nn.Module):
    """Tokens in, logits of the next token out. The embedding is also the output head (tied)."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab, args.width)
        self.layers = nn.ModuleDict({str(i): Block(args) for i in range(args.layers)})
        self.norm = nn.RMSNorm(args.width, eps=1e-5)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tok_embeddings(tokens_BT)
        for block in self.layers.values():
            x_BTD = block(x_BTD)
        return F.linear(self.norm(x_BTD), self.tok_embeddings.weight)


# ----------------------------------------------------------------------------------------------------------------------
# The first weights: small normal numbers; smaller where a layer writes to the residual stream, which all layers add to.
# Each tensor has generators of its own, seeded by its name, so the weights do not depend on who draws them, or in what
# order.


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, layers: int, std: float = 0.02) -> None:
    """Fill every parameter, in blocks of rows of about 2**18 numbers, one generator each."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # norms
            continue
        rows, columns = parameter.shape
        block_rows = max(1, 2**18 // columns)
        scale = std / math.sqrt(2 * layers) if name.endswith(("wo.weight", "w2.weight")) else std
        for block, start in enumerate(range(0, rows, block_rows)):
            stop = min(start + block_rows, rows)
            digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            parameter[start:stop] = torch.randn(stop - start, columns, generator=generator) * scale


# ----------------------------------------------------------------------------------------------------------------------
# One step: loss, gradients, a smaller gradient if it is too large, new weights.


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW; weight decay pulls matrices towards zero, never norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def lr_at(step: int, args: argparse.Namespace) -> float:
    """Rise in a straight line over the warm-up, then fall along half a cosine to a tenth."""
    if step < args.warmup:
        return args.lr * step / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def loss_sum(model: nn.Module, inputs_BT: torch.Tensor, labels_BT: torch.Tensor, args: argparse.Namespace):
    """The summed cross-entropy of a microbatch, in nats."""
    device = inputs_BT.device.type
    with torch.autocast(device, torch.bfloat16) if args.dtype == "bfloat16" else contextlib.nullcontext():
        logits_BTV = model(inputs_BT)
    wide = logits_BTV if args.dtype == "float64" else logits_BTV.float()
    return F.cross_entropy(wide.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="sum")


def total(value: torch.Tensor) -> float:
    """Sum of a number over all processes."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value.item()


def train_step(model, optimizer, inputs, labels, step: int, args: argparse.Namespace, world_size: int):
    """One optimizer step; returns (loss per token, norm of the gradient).

    Every microbatch's sum is divided by the number of labels of the whole global batch. Dividing by its own number, as
    `reduction="mean"` does, would weigh a microbatch of few labels as much as one of many. DDP averages gradients over
    processes where a sum is wanted, hence the factor `world_size`.
    """
    count = total((labels != IGNORED).sum())
    loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
    parts = list(zip(inputs.split(args.micro_batch), labels.split(args.micro_batch), strict=True))
    for number, (inputs_BT, labels_BT) in enumerate(parts):
        last = number == len(parts) - 1
        # Gradients of the earlier microbatches stay here; only the last backward pass sends the sum round.
        wait = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else contextlib.nullcontext()
        with wait:
            part = loss_sum(model, inputs_BT, labels_BT, args)
            (part * world_size / count).backward()
        loss += part.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip).item()
    if not math.isfinite(norm):
        raise SystemExit(f"step {step}: the gradient is not finite; lower --lr")
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step, args)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total(loss) / count, norm


@torch.no_grad()
def held_out_loss(model: nn.Module, tokens: torch.Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Loss per token on text that was not trained on."""
    count = min(64, (len(tokens) - 1) // args.length)
    samples = [sample(tokens, index, args.length) for index in range(count)]
    losses = [loss_sum(model, x[None].to(device), y[None].to(device), args).item() for x, y in samples]
    return sum(losses) / (count * args.length)


@torch.no_grad()
def write(model: nn.Module, prompt: str, args: argparse.Namespace, device: torch.device, length: int = 200) -> str:
    """Let the model write: draw a byte from its distribution, append it, ask again."""
    tokens = list(prompt.encode())
    generator = torch.Generator().manual_seed(args.seed)
    for _ in range(length):
        logits = model(torch.tensor([tokens[-args.length :]], device=device))[0, -1].float().cpu()
        token = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator).item()
        if token == END_OF_TEXT:
            break
        tokens.append(int(token))
    return bytes(tokens).decode(errors="replace")


# ----------------------------------------------------------------------------------------------------------------------
# Saving. Write aside, then rename: a program killed in between leaves the old file whole.


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Everything needed to go on: weights, the optimizer's memory, and the step, the place in the data."""
    aside = path.with_name(path.name + ".writing")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
    os.replace(aside, path)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Go on from `save`; returns the step."""
    saved = torch.load(path, map_location=device, weights_only=True)  # weights_only: a file must not run code
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


# ----------------------------------------------------------------------------------------------------------------------
# The loop.


def train(args: argparse.Namespace) -> list[float]:
    """Train; returns the loss of every step made."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    on_gpu = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if args.batch % (world_size * args.micro_batch):
        raise SystemExit(f"--batch must be a multiple of {world_size} processes x --micro-batch {args.micro_batch}")
    if world_size > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")

    if args.tokens:
        tokens = held_out = read_token_file(args.tokens)
    else:
        tokens = read_stdlib()
        tokens, held_out = tokens[: -len(tokens) // 20], tokens[-len(tokens) // 20 :]
    model = Llama(args).to(torch.float64 if args.dtype == "float64" else torch.float32)
    draw_weights(model, args.seed, args.layers)
    model.to(device)
    optimizer = build_optimizer(model, args)
    start = resume(args.save, model, optimizer, device) if args.resume else 0
    trained = DistributedDataParallel(model) if world_size > 1 else model
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokens):,} tokens, {device}")

    losses = []
    for step in range(start + 1, args.steps + 1):
        began = time.perf_counter()
        inputs, labels = batch_of(tokens, step - 1, args, rank, world_size)
        loss, norm = train_step(trained, optimizer, inputs.to(device), labels.to(device), step, args, world_size)
        losses.append(loss)
        if rank == 0 and (step % 10 == 0 or step in (start + 1, args.steps)):
            rate = args.batch * args.length / (time.perf_counter() - began)
            print(f"step {step}/{args.steps}  loss {loss:.4f}  gnorm {norm:.2f}  {rate:,.0f} tok/s", flush=True)
        if rank == 0 and (step % args.save_every == 0 or step == args.steps):
            save(args.save, model, optimizer, step)
    if rank == 0:
        print(f"held-out loss {held_out_loss(model, held_out, args, device):.4f}; saved {args.save}")
        if not args.tokens:
            print(write(model, "def main(", args, device))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return losses


def parse(words: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """The command line; `--help` lists it."""
    parser = parser or argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("--steps", type=int, default=200, help="optimizer steps")
    option("--batch", type=int, default=16, help="sequences per step over all processes")
    option("--micro-batch", type=int, default=8, help="sequences a process runs at a time")
    option("--length", type=int, default=256, help="tokens per sequence")
    option("--lr", type=float, default=3e-3, help="peak learning rate")
    option("--warmup", type=int, default=20, help="steps of linear warm-up")
    option("--weight-decay", type=float, default=0.1, help="pull of matrices towards zero")
    option("--clip", type=float, default=1.0, help="largest gradient norm")
    option("--width", type=int, default=192, help="numbers per token in the residual stream")
    option("--layers", type=int, default=4, help="blocks")
    option("--heads", type=int, default=6, help="query heads")
    option("--kv-heads", type=int, default=3, help="key and value heads")
    option("--inner", type=int, default=512, help="width of the feed-forward layer")
    option("--vocab", type=int, default=257, help="rows of the embedding: 257 for bytes")
    option("--dtype", choices=("float32", "float64", "bfloat16"), default="float32", help="bfloat16 uses autocast")
    option("--seed", type=int, default=0, help="of the weights and of the samples' order")
    option("--tokens", type=Path, help="train on this token file instead of the standard library's bytes")
    option("--save", type=Path, default=Path("solo.pt"), help="checkpoint to write, and with --resume to read")
    option("--save-every", type=int, default=100, help="steps between checkpoints")
    option("--resume", action="store_true", help="go on from the checkpoint")
    option("--cpu", action="store_true", help="stay on the CPU where there is a GPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
