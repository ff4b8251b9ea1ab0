"""Fine-tune a Llama with low-rank adapters (LoRA), whole, in one file: torch, safetensors, tokenizers.

    python solo/finetune_lora.py path/to/Llama-3.2-1B --text notes.txt          # writes adapter/ as peft reads it
    python solo/finetune_lora.py path/to/base --tokens train.bin                # tokens that meshwright prepared

A pretrained matrix W stays as it is. Beside it two thin ones are trained, A [rank, in] and B [out, rank]:

    y = W x + alpha / rank * B (A x)                                            (Hu et al., "LoRA", 2021)

B begins as zero, so training begins at the pretrained model; and since W does not change, it needs no gradient and no
optimizer state, which are most of the memory of training. Read the file from top to bottom: the base, the adapters, the
samples, the loop, the file. `solo/train.py` explains what is common to all training. A test holds this file to the
losses of the modular trainer. Shapes are spelled in names: B sequences, T tokens, D width, K width of a head, V words.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

# ----------------------------------------------------------------------------------------------------------------------
# The base: a Llama as Hugging Face stores it. Modules are called as in its files, so that weights find their places.


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads may share one key and value head."""

    def __init__(self, config: dict):
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.head_width = config.get("head_dim") or width // heads
        self.theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        kv_heads = config.get("num_key_value_heads") or heads
        self.q_proj = nn.Linear(width, heads * self.head_width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [B, heads, T, K]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Turn pairs of a head's numbers by an angle that grows with the position (RoPE, Su et al., 2021), in fp32."""
    length, width = x.shape[-2:]
    frequencies = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width)
    angles = torch.arange(length, device=x.device).float()[:, None] * frequencies
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): one projection opens and closes a gate on the other."""

    def __init__(self, config: dict):
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: dict):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD))
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Body(nn.Module):
    """Tokens in, the last hidden states out; Hugging Face calls it `model`."""

    def __init__(self, config: dict):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed_tokens(tokens_BT)
        for block in self.layers:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD)


class Llama(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: dict):
        super().__init__()
        self.model = Body(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens_BT))


def load_base(folder: Path, dtype: torch.dtype) -> Llama:
    """The pretrained model; raises SystemExit for what this file does not compute."""
    config = json.loads((folder / "config.json").read_text())
    scaling = config.get("rope_scaling") or {}
    scaled = (scaling or config.get("rope_parameters") or {}).get("rope_type", "default") != "default"
    if config["model_type"] != "llama" or scaled or config.get("attention_bias") or config.get("mlp_bias"):
        raise SystemExit("only plain Llamas: no biases, no scaled rope; meshwright knows more")
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= load_file(file)
    if config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):  # no memory until the weights are there
        model = Llama(config)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    return model.requires_grad_(False)


# ----------------------------------------------------------------------------------------------------------------------
# The adapters.


class LoraLinear(nn.Module):
    """A frozen linear layer and what is trained beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        like = {"dtype": torch.promote_types(base.weight.dtype, torch.float32), "device": base.weight.device}
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, **like))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, **like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        return self.base(x) + F.linear(F.linear(x, a), b * self.scale)


OUR_NAMES = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
OUR_NAMES |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def add_adapters(model: Llama, args: argparse.Namespace) -> dict[str, LoraLinear]:
    """Put an adapter beside every matrix of every layer whose name is a target; returns them by peft's names."""
    adapters = {}
    for number, block in enumerate(model.model.layers):  # type: ignore[arg-type]
        for part, ours in (("self_attn", "attention"), ("mlp", "feed_forward")):
            parent = getattr(block, part)
            for name in [name for name, child in parent.named_children() if name in args.targets]:
                adapter = LoraLinear(getattr(parent, name), args.rank, args.alpha)
                draw(adapter.lora_a, f"layers.{number}.{ours}.{OUR_NAMES[name]}.lora_a", args.seed)
                setattr(parent, name, adapter)
                adapters[f"model.layers.{number}.{part}.{name}"] = adapter
    return adapters


@torch.no_grad()
def draw(a: torch.Tensor, name: str, seed: int) -> None:
    """A's first numbers: uniform up to 1 / sqrt(in). Each tensor has a generator of its own, seeded by its name."""
    rows, columns = a.shape
    block_rows = max(1, 2**18 // columns)
    for block, start in enumerate(range(0, rows, block_rows)):
        stop = min(start + block_rows, rows)
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        numbers = torch.rand(stop - start, columns, generator=generator).sub_(0.5).mul_(12**0.5)
        a[start:stop] = numbers.mul_(1 / math.sqrt(3 * columns))


def save_adapter(folder: Path, adapters: dict[str, LoraLinear], args: argparse.Namespace) -> None:
    """The two files that peft and its friends read."""
    tensors = {}
    for name, adapter in adapters.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = adapter.lora_a.detach().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = adapter.lora_b.detach().contiguous()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(args.base)}
    config |= {"r": args.rank, "lora_alpha": args.alpha, "target_modules": sorted(args.targets), "inference_mode": True}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# The samples, in the order of `solo/train.py`, where it is explained.


def read_tokens(args: argparse.Namespace) -> torch.Tensor:
    """All tokens in one line, int64: of a token file, or of texts by the base's own tokenizer."""
    if args.tokens:
        about = json.loads(args.tokens.with_suffix(".json").read_text())
        dtype = {"uint16": torch.uint16, "uint32": torch.uint32}[about["dtype"]]
        return torch.from_file(str(args.tokens), size=about["num_tokens"], dtype=dtype).long()
    from tokenizers import Tokenizer  # only texts need it

    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    return torch.tensor([token for path in args.text for token in tokenizer.encode(path.read_text()).ids])


def permuted(index: int, size: int, seed: int, epoch: int) -> int:
    """Where this epoch's permutation of 0 .. size-1 sends `index`: a Feistel network."""
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


def batch_of(tokens: torch.Tensor, step: int, args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's inputs and labels, both [B, T]; a token's label is the next one."""
    count = (len(tokens) - 1) // args.length
    rows = []
    for position in range(step * args.batch, (step + 1) * args.batch):
        epoch, index = divmod(position, count)
        start = permuted(index, count, args.seed, epoch) * args.length
        rows.append(tokens[start : start + args.length + 1])
    batch = torch.stack(rows)
    return batch[:, :-1], batch[:, 1:]


# ----------------------------------------------------------------------------------------------------------------------
# The loop. Only the adapters are given to the optimizer.


def train(args: argparse.Namespace) -> list[float]:
    """Train and save; returns the loss of every step."""
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    model = load_base(args.base, getattr(torch, args.dtype)).to(device)
    adapters = add_adapters(model, args)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained, whole = (sum(p.numel() for p in ps) for ps in (parameters, model.parameters()))
    print(f"{trained:,} of {whole:,} parameters are trained ({100 * trained / whole:.2g} %)")
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    tokens, losses = read_tokens(args), []
    for step in range(1, args.steps + 1):
        inputs_BT, labels_BT = (tensor.to(device) for tensor in batch_of(tokens, step - 1, args))
        logits_BTV = model(inputs_BT)
        wide = logits_BTV if args.dtype == "float64" else logits_BTV.float()
        loss = F.cross_entropy(wide.flatten(0, 1), labels_BT.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, args.clip)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / args.warmup)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 10 == 0 or step in (1, args.steps):
            print(f"step {step}/{args.steps}  loss {losses[-1]:.4f}  gnorm {norm.item():.2f}", flush=True)
    save_adapter(args.save, adapters, args)
    print(f"saved {args.save}")
    return losses


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line; `--help` lists it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("base", type=Path, help="directory of a Llama as Hugging Face stores it")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, nargs="+", help="text files to learn from")
    source.add_argument("--tokens", type=Path, help="a token file to learn from")
    option("--rank", type=int, default=16, help="rows of A, columns of B")
    option("--alpha", type=float, default=32.0, help="the adapter counts alpha / rank")
    option("--targets", nargs="+", default=list(OUR_NAMES), choices=list(OUR_NAMES), help="matrices with an adapter")
    option("--steps", type=int, default=100, help="optimizer steps")
    option("--batch", type=int, default=8, help="sequences per step")
    option("--length", type=int, default=256, help="tokens per sequence")
    option("--lr", type=float, default=2e-4, help="learning rate")
    option("--warmup", type=int, default=10, help="steps of linear warm-up")
    option("--weight-decay", type=float, default=0.0, help="pull of the adapters towards zero")
    option("--clip", type=float, default=1.0, help="largest gradient norm")
    option("--dtype", choices=("float32", "float64", "bfloat16"), default="float32", help="of the base")
    option("--seed", type=int, default=0, help="of A's first numbers and of the samples' order")
    option("--save", type=Path, default=Path("adapter"), help="directory of the adapter")
    option("--cpu", action="store_true", help="stay on the CPU where there is a GPU")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
