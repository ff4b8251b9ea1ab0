"""QLoRA in one file, beside train.py: fine-tune its model with the matrices frozen in four bits.

    python solo/train.py                                        # first a base: learns Python, leaves solo.pt
    python solo/finetune_qlora.py                               # then this: the base learns to write like asyncio
    python solo/finetune_qlora.py --package email --rank 4

Model, samples and step are those of train.py, beside this file. What QLoRA (Dettmers et al., 2023) adds is here once,
the plainest way that is still right: four-bit numbers, a frozen layer that computes with them, and the small matrices
beside it that learn. A test holds it to the losses of the modular trainer. Shapes are spelled in names: N out, D in, R
rank, M tokens.
"""

import argparse
import hashlib
import math
import sysconfig
from array import array
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from train import END_OF_TEXT, Llama, batch_of, build_optimizer, draw_weights, parse, read_token_file, train_step, write

# ----------------------------------------------------------------------------------------------------------------------
# Four bits. Trained weights are nearly normally distributed, so the sixteen numbers that stand for them are quantiles
# of a normal distribution: dense near zero, sparse at the ends. Each block of 64 is first divided by its largest.

BLOCK = 64
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def encode(weight_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, two to a byte, uint8 [blocks, 32], and the blocks' largest values, fp32 [blocks]: 4.5 bits a weight."""
    flat = weight_ND.float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scaled = blocks * (1 / scales.clamp(min=1e-38))[:, None]
    codes = torch.bucketize(scaled, (NF4[1:] + NF4[:-1]) / 2).to(torch.uint8)  # the nearest of the sixteen
    return codes[:, 0::2] << 4 | codes[:, 1::2], scales


def decode(codes: torch.Tensor, scales: torch.Tensor, shape_ND: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The weights that codes and scales stand for."""
    numbers = NF4.to(codes.device)[torch.stack([codes >> 4, codes & 15], -1).int()].view(-1, BLOCK) * scales[:, None]
    return numbers.flatten()[: shape_ND.numel()].view(shape_ND).to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The layer: y = W x + alpha / rank B A x, with W frozen in four bits, and A and B small and trained. B begins as zeros,
# so at first the layer computes what the base did.


class FrozenProduct(torch.autograd.Function):
    """W x, with W decoded for the moment. Autograd alone would keep the decoded W until the backward pass, and so all
    layers' at once; this keeps the codes, and decodes again."""

    @staticmethod
    def forward(ctx, x_MD, codes, scales, shape_ND):
        ctx.save_for_backward(codes, scales)
        ctx.shape_ND = shape_ND
        return x_MD @ decode(codes, scales, shape_ND, x_MD.dtype).T

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad_MN,), (codes, scales) = grad_outputs, ctx.saved_tensors
        return grad_MN @ decode(codes, scales, ctx.shape_ND, grad_MN.dtype), None, None, None


class QLoraLinear(nn.Module):
    """What takes the place of a linear layer."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.shape_ND = linear.weight.shape
        codes, scales = encode(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        out, into = self.shape_ND
        self.lora_a = nn.Parameter(linear.weight.new_zeros(rank, into))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(out, rank))
        self.factor = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen = FrozenProduct.apply(x, self.codes, self.scales, self.shape_ND)
        return frozen + x @ self.lora_a.T @ (self.lora_b * self.factor).T


def quantize(model: Llama, rank: int, alpha: float, seed: int) -> None:
    """Freeze the model, put a QLoraLinear in every linear layer's place, and draw each A.

    Embedding, which is the head too, and norms stay as they are: few numbers, and rounding them costs most.
    """
    model.requires_grad_(False)
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    for path, linear in layers:
        parent, _, name = path.rpartition(".")
        layer = QLoraLinear(linear, rank, alpha)
        draw_uniform(layer.lora_a, f"{seed}/{path}.lora_a")
        setattr(model.get_submodule(parent), name, layer)


@torch.no_grad()
def draw_uniform(a_RD: torch.Tensor, key: str) -> None:
    """Uniform up to 1 / sqrt(D), in blocks of rows of about 2**18 numbers, a generator each, as train.py draws."""
    rows, columns = a_RD.shape
    block_rows = max(1, 2**18 // columns)
    for block, start in enumerate(range(0, rows, block_rows)):
        digest = hashlib.blake2b(f"{key}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        part = a_RD[start : start + block_rows]
        part.copy_((torch.rand(part.shape, generator=generator) - 0.5) * 2 / math.sqrt(columns))


# ----------------------------------------------------------------------------------------------------------------------
# The loop: a base, four bits, some steps, and what the model writes before and after.


def read_package(name: str) -> torch.Tensor:
    """The files of one package of the standard library as bytes, int64."""
    tokens = array("H")
    for path in sorted((Path(sysconfig.get_path("stdlib")) / name).rglob("*.py")):
        tokens.extend(path.read_bytes())
        tokens.append(END_OF_TEXT)
    if not tokens:
        raise SystemExit(f"--package {name}: the standard library has no such package")
    return torch.frombuffer(tokens, dtype=torch.uint16).long()


def finetune(args: argparse.Namespace, base: Path | None, package: str, rank: int, alpha: float) -> list[float]:
    """Fine-tune; returns the loss of every step."""
    model = Llama(args).to(torch.float64 if args.dtype == "float64" else torch.float32)
    if base is None:
        draw_weights(model, args.seed, args.layers)
    else:
        model.load_state_dict(torch.load(base, map_location="cpu", weights_only=True)["model"])
    whole = sum(p.nbytes for p in model.parameters())
    quantize(model, rank, alpha, args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    model.to(device)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    kept = sum(t.nbytes for t in model.state_dict().values())
    print(f"{trained:,} parameters train; the model takes {kept / 2**20:.2f} MiB instead of {whole / 2**20:.2f}")

    tokens = read_token_file(args.tokens) if args.tokens else read_package(package)
    optimizer = build_optimizer(model, args)
    losses = []
    for step in range(1, args.steps + 1):
        inputs, labels = batch_of(tokens, step - 1, args, 0, 1)
        loss, norm = train_step(model, optimizer, inputs.to(device), labels.to(device), step, args, 1)
        losses.append(loss)
        if step % 10 == 0 or step in (1, args.steps):
            print(f"step {step}/{args.steps}  loss {loss:.4f}  gnorm {norm:.2f}", flush=True)
    adapters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    torch.save(adapters, args.save)
    print(f"saved {args.save}: the adapters alone, {args.save.stat().st_size / 2**20:.2f} MiB")
    if not args.tokens:
        print(write(model, "async def ", args, device))
    return losses


def main(words: list[str] | None = None) -> list[float]:
    """Options of its own, and those of train.py."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="Others: as train.py has them."
    )
    parser.add_argument("--base", type=Path, default=Path("solo.pt"), help="what train.py saved")
    parser.add_argument("--fresh", action="store_true", help="begin with random weights instead")
    parser.add_argument("--package", default="asyncio", help="whose files to learn")
    parser.add_argument("--rank", type=int, default=8, help="rows of A and columns of B")
    parser.add_argument("--alpha", type=float, default=16.0, help="what the adapters add is multiplied by alpha / rank")
    own, others = parser.parse_known_args(words)
    args = parse(["--steps", "60", "--lr", "2e-3", "--save", "adapters.pt", *others])
    return finetune(args, None if own.fresh else own.base, own.package, own.rank, own.alpha)


if __name__ == "__main__":
    main()
