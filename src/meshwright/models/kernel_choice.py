"""The choice among kernels that compute the same on a CPU, by measurement: a few milliseconds for a run's shapes.

| choice    | of products in fp32                     | attention in bf16 under a causal mask                     |
|-----------|-----------------------------------------|-----------------------------------------------------------|
| fixed     | oneDNN                                  | blocks: `cpu_kernels.causal_attention`                    |
| the other | mkl: torch's own, by the BLAS it has    | torch: its flash kernel                                   |

The results differ in rounding alone. So that no number of a proof depends on a measurement, proofs, tests, and runs
with `training.deterministic` take what is fixed. A run's choice is kept in its cache by processor, torch and shapes, so
that a resumed run gives the same bits.

Processor time of one thread is measured: other programs on the machine do not change it.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.machine import processor
from meshwright.models.cpu_kernels import ATTENTION, CHOSEN, FIXED, ONEDNN, PRODUCTS, Kernels, causal_attention, linear
from meshwright.storage.durable import write_durably
from meshwright.torch_internals import onednn_multiplies

FILE = "kernels.json"
"""In the cache folder."""
WORK = 2**28
"""Floating-point operations of a measured product, at most."""
SCORES = 2**20
"""Attention scores of a measured layer, if several sequences and heads have them."""
LONGEST = 1024
"""Tokens of a measured sequence, at most."""
TURNS = 5
"""How often each kernel is measured, in turns."""
CLEAR = 1.5
"""A kernel that takes this many times as long at first is not measured again."""


@dataclass(frozen=True)
class Shapes:
    """The sizes that a rank computes with; 0 tokens: no such kernel."""

    tokens: int
    """Rows of the products."""
    into: int
    out: int
    """Of a large matrix."""
    heads: int
    shared: int
    """Heads of queries, and of keys and values, of all sequences that are computed together."""
    length: int
    width: int
    """Of a sequence, and of a head."""
    dtype: torch.dtype
    """Products are measured in fp32, attention in bf16; nothing in other dtypes."""

    def __str__(self) -> str:
        if self.dtype == torch.float32:
            return f"fp32 products of {self.out} x {self.into}, {self.tokens} rows"
        return f"bf16 attention of {self.heads} heads over {self.shared}, {self.length} tokens, width {self.width}"


@dataclass(frozen=True)
class MeasuredKernels:
    """Kernels, and the milliseconds that each took; none where there was nothing to choose."""

    kernels: Kernels
    milliseconds: dict[str, float]

    @property
    def chosen(self) -> str:
        """The fastest kernel's name; empty if there was nothing to choose."""
        return min(self.milliseconds, key=lambda name: self.milliseconds[name], default="")

    def __str__(self) -> str:
        return ", ".join(f"{name} {ms:.2g} ms" for name, ms in self.milliseconds.items())


def measure(shapes: Shapes) -> MeasuredKernels:
    """The faster kernel of each kind for these shapes."""
    if shapes.dtype == torch.float32 and ONEDNN:
        times = _in_turns({name: _products(shapes, Kernels(products=name)) for name in PRODUCTS})
        return MeasuredKernels(Kernels(products=min(PRODUCTS, key=lambda name: times[name])), times)
    if shapes.dtype == torch.bfloat16:
        times = _in_turns({name: _attention(shapes, Kernels(attention=name)) for name in ATTENTION})
        return MeasuredKernels(Kernels(attention=min(ATTENTION, key=lambda name: times[name])), times)
    return MeasuredKernels(FIXED, {})


def kept(shapes: Shapes, folder: Path) -> MeasuredKernels:
    """The choice of an earlier measurement on such a processor, or a new one, which is kept in the folder."""
    file, key = folder / FILE, f"{here()}; {shapes}"
    known = read(file)
    if key not in known:
        measured = measure(shapes)
        if not measured.milliseconds:
            return measured
        known = read(file) | {key: measured}
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(file, json.dumps({name: asdict(one) for name, one in known.items()}, indent=1) + "\n")
    return known[key]


def here() -> str:
    """What a choice depends on besides the shapes: processor, instructions in use, torch."""
    capability, bf16 = torch.backends.cpu.get_cpu_capability(), onednn_multiplies(torch.bfloat16)
    units = f"{capability} {'with' if bf16 else 'without'} bf16"
    return f"{processor()}; {units}; torch {torch.__version__}"


def read(file: Path) -> dict[str, MeasuredKernels]:
    """The choices in a file; none if it is missing or damaged: they are measured again."""
    try:
        entries: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {key: MeasuredKernels(Kernels(**one["kernels"]), one["milliseconds"]) for key, one in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Inside, a CPU computes by these kernels."""
    token = CHOSEN.set(kernels)
    try:
        yield
    finally:
        CHOSEN.reset(token)


def _products(shapes: Shapes, kernels: Kernels) -> Callable[[], None]:
    """A linear layer's forward and backward pass."""
    rows = max(1, min(shapes.tokens, WORK // (2 * shapes.into * shapes.out)))
    x, weight = (torch.ones(size, shapes.into, requires_grad=True) for size in (rows, shapes.out))
    grad = torch.ones(rows, shapes.out)

    def run() -> None:
        with using(kernels):
            torch.autograd.grad(linear(x, weight), (x, weight), grad)

    return run


def _attention(shapes: Shapes, kernels: Kernels) -> Callable[[], None]:
    length, repeats = min(shapes.length, LONGEST), shapes.heads // shapes.shared
    pairs = max(1, min(shapes.shared, SCORES // (length**2 * repeats)))
    q, k, v = (
        torch.ones(1, heads, length, shapes.width, dtype=torch.bfloat16, requires_grad=True)
        for heads in (pairs * repeats, pairs, pairs)
    )
    grad = torch.ones_like(q)

    def run() -> None:
        if kernels.attention == "blocks":
            y = causal_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=repeats > 1)
        torch.autograd.grad(y, (q, k, v), grad)

    return run


def _in_turns(actions: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The least milliseconds of each action."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for action in actions.values():
            action()
        least = {name: _milliseconds(action) for name, action in actions.items()}
        for turn in range(TURNS - 1):
            for name in sorted(actions, reverse=bool(turn % 2)):
                if least[name] < CLEAR * min(least.values()):
                    least[name] = min(least[name], _milliseconds(actions[name]))
    finally:
        torch.set_num_threads(threads)
    return {name: round(milliseconds, 3) for name, milliseconds in least.items()}


def _milliseconds(action: Callable[[], None]) -> float:
    began = time.thread_time()
    action()
    return (time.thread_time() - began) * 1e3
