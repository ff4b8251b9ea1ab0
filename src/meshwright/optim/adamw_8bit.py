"""AdamW with moments in eight bits (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022)."""

from math import gcd, prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.models.blockwise import code_book, code_of_zero, encode_blocks
from meshwright.optim.adamw import ParameterwiseAdamW, adamw_
from meshwright.optim.bf16 import as_rows
from meshwright.optim.parameterwise import next_step, steps_done
from meshwright.optim.shards import local

BLOCK = 256
"""Most numbers of a moment that share a scale."""
SMALLEST_BLOCK, SMALLEST_TENSOR = 16, 4096
"""Smallest block and smallest tensor whose moments are quantized; others stay fp32."""

MOMENTS = {"exp_avg": "signed", "exp_avg_sq": "unsigned"}
"""Name of a moment -> its code book."""


class AdamW8bit(ParameterwiseAdamW):
    """AdamW with a byte for each number of its moments, in blocks with an fp32 scale.

    Blocks lie within rows of a parameter's last dim; their size is the largest up to 256 that divides it. They do not
    depend on the sharding of rows, so every layout has the same bits as one process. If 256 divides the last dim,
    blocks and codes equal bitsandbytes'.
    """

    def fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first step, sharded like the parameter: moments are zero.

        Quantized `exp_avg` and `exp_avg_sq` are uint8 codes in the parameter's shape; their scales are fp32 with the
        last dim divided by the block size.
        """
        state = {"step": steps_done(), **self.bf16.fresh(parameter)}
        block = block_size(parameter)
        for name, book in MOMENTS.items():
            if block is None:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                continue
            state[name] = torch.full_like(parameter, code_of_zero(book), dtype=torch.uint8)
            state[f"{name}_scale"] = _zero_scales(parameter, block)
        return state

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        """One step of one parameter, computed in fp32."""
        step, every = next_step(state), slice(None)
        weight, gradient = self.bf16.read(parameter, state, every), as_rows(gradient).float()
        first, second = (as_rows(_read(state, name)) for name in MOMENTS)
        adamw_(weight, gradient, (first, second), group, step)
        self.bf16.write(parameter, state, every, weight, step)
        for name, moment in zip(MOMENTS, (first, second), strict=True):
            _write(state, name, moment)


def block_size(parameter: torch.Tensor) -> int | None:
    """Block size of a parameter's moments; None if they stay fp32, because the tensor is small or because tensor
    parallelism cuts blocks, which would make checkpoints depend on the layout."""
    block = gcd(BLOCK, parameter.shape[-1]) if parameter.dim() > 1 else 0
    splits_blocks = block and local(parameter).shape[-1] % block
    return None if block < SMALLEST_BLOCK or parameter.numel() < SMALLEST_TENSOR or splits_blocks else block


def read_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The local state of a parameter under any optimizer, with codes dequantized."""
    return {
        key: _read(state, key) if f"{key}_scale" in state else local(value)
        for key, value in state.items()
        if not key.endswith("_scale")
    }


def _zero_scales(parameter: torch.Tensor, block: int) -> torch.Tensor:
    here = local(parameter)
    scales = torch.zeros(*here.shape[:-1], here.shape[-1] // block, dtype=torch.float32, device=here.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // block))
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(scales, mesh, placements, run_check=False, shape=shape, stride=stride)


def _read(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The local part of a moment, fp32."""
    codes = local(state[name])
    if codes.dtype != torch.uint8:
        return codes
    scales = local(state[f"{name}_scale"])
    values = code_book(MOMENTS[name], codes.device)[codes.int()]
    return (values.view(*scales.shape, -1) * scales.unsqueeze(-1)).view(codes.shape)


def _write(state: dict[str, torch.Tensor], name: str, moment: torch.Tensor) -> None:
    codes = local(state[name])
    if codes.dtype == torch.uint8 and codes.numel():
        scales = local(state[f"{name}_scale"])
        blocks, largest = encode_blocks(moment.view(scales.numel(), -1), code_book(MOMENTS[name], codes.device))
        codes.copy_(blocks.view(codes.shape))
        scales.copy_(largest.view(scales.shape))
