"""How long a layer with the gated delta rule takes beside its matrix products alone, on this CPU.

    python benchmarks/gated_delta.py [--tokens 4096] [--dtype float32] [--rounds 5]

The layer has Qwen3-Next's sizes. Its products, forward and backward, are recorded with their shapes and strides, and
run again on random numbers, alternating with the layer. Prints each one's fastest time, and their ratio.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.families import parameter_table, resolve_model
from meshwright.models.cpu_kernels import MATMULS
from meshwright.models.gated_delta import GatedDelta
from meshwright.models.init import draw_rows
from meshwright.spec.model import ModelFields

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, *MATMULS}

PREFIX = "layers.0.attention."


class Recorded(TorchDispatchMode):
    """Keeps the function of every matrix product, and what its arguments are like."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any], dict[str, Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in PRODUCTS:
            self.calls.append((func, [_like(x) for x in args], dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _like(x: Any) -> Any:
    """Random numbers with a tensor's shape and strides."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).uniform_(-0.01, 0.01)


def build(dtype: torch.dtype) -> GatedDelta:
    """Qwen3-Next's first layer, as initialized."""
    spec = resolve_model(ModelFields(name="qwen3-next-80b-a3b"), base_dir=Path())
    layer = GatedDelta(spec, 0).to(dtype)
    rows = {row.name.removeprefix(PREFIX): row for row in parameter_table(spec) if row.name.startswith(PREFIX)}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(draw_rows(rows[name], 0, 0, rows[name].shape[0]))
    return layer


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also list the operations that take the longest")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    layer = build(dtype)
    x_BTD = torch.randn(1, options.tokens, layer.w_out.out_features).to(dtype).requires_grad_()
    grad_BTD = torch.randn_like(x_BTD, requires_grad=False)

    def whole() -> None:
        layer.zero_grad()
        layer(x_BTD).backward(grad_BTD)

    with Recorded() as recorded:
        whole()

    def products() -> None:
        for func, args, kwargs in recorded.calls:
            func(*args, **kwargs)

    times = [(seconds(whole), seconds(products)) for _ in range(options.rounds)]
    layer_seconds, products_seconds = (min(column) for column in zip(*times, strict=True))
    print(f"{processor()}, {torch.get_num_threads()} threads, {options.dtype}, {options.tokens} tokens")
    print(f"layer, forward and backward  {layer_seconds:.2f} s")
    print(f"its {len(recorded.calls)} products alone       {products_seconds:.2f} s")
    print(f"ratio                        {layer_seconds / products_seconds:.2f}")
    if options.profile:
        with torch.profiler.profile() as profile:
            whole()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


if __name__ == "__main__":
    main()
