"""Weight initialization: any rows of any parameter, equal on every layout.

A tensor is drawn in blocks of whole rows, each from a generator seeded by (seed, name, block). A rank draws only the
blocks of its own rows, and every layout starts from the same weights.
"""

import hashlib
from collections.abc import Iterable
from typing import assert_never

import torch
from torch import nn

from meshwright.spec.errors import UserError
from meshwright.spec.model import Parameter

BLOCK_ELEMENTS = 2**18
"""Elements drawn from one generator, up to whole rows. Part of the definition of a fresh weight: never change
it."""


def draw_rows(parameter: Parameter, seed: int, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of dim 0 of the freshly drawn parameter: fp32 on the CPU, a pure function of its
    arguments."""
    rows, *rest = parameter.shape
    if not 0 <= start <= stop <= rows:
        raise UserError(f"{parameter.name}: rows [{start}, {stop}) do not lie in [0, {rows})")
    match parameter.init:
        case "ones":
            return torch.ones(stop - start, *rest)
        case "zeros":
            return torch.zeros(stop - start, *rest)
        case "normal":
            draw = torch.randn
        case "uniform":
            draw = _uniform
        case "decays":
            draw = _decays
        case "row_norms" | "quantized":
            raise AssertionError(f"{parameter.name} follows from a weight, which is not drawn here")
        case _:
            assert_never(parameter.init)
    block_rows = max(1, BLOCK_ELEMENTS * rows // parameter.numel)
    drawn = torch.empty((stop - start, *rest))
    for block in range(start // block_rows, -(-stop // block_rows)):
        first, last = block * block_rows, min((block + 1) * block_rows, rows)
        values = draw((last - first, *rest), generator=_generator(seed, parameter.name, block))
        begin, end = max(first, start), min(last, stop)
        drawn[begin - start : end - start] = values[begin - first : end - first]
    return drawn if parameter.init == "decays" else drawn.mul_(parameter.init_std)


def _uniform(shape: tuple[int, ...], *, generator: torch.Generator) -> torch.Tensor:
    """Uniform numbers of mean 0 and variance 1."""
    return torch.rand(shape, generator=generator).sub_(0.5).mul_(12**0.5)


def _decays(shape: tuple[int, ...], *, generator: torch.Generator) -> torch.Tensor:
    """Logarithms of uniform numbers between 0 and 16, as transformers draws rates of decay; none is below 0.01."""
    return torch.rand(shape, generator=generator).mul_(16).clamp_(min=0.01).log_()


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@torch.no_grad()
def initialize(model: nn.Module, table: Iterable[Parameter], seed: int) -> None:
    """Draw every parameter of a whole model in place, and set its state to zero (ranks that hold shards call
    `draw_rows` themselves)."""
    parameters = dict(model.named_parameters())
    for row in table:
        parameters[row.name].copy_(draw_rows(row, seed, 0, row.shape[0]))
    for buffer in model.buffers():
        buffer.zero_()


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and state, by name."""
    return {**dict(model.named_parameters()), **named_state(model)}


def named_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's persistent buffers by name: its constants are not persistent."""
    constants = {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in constants}
