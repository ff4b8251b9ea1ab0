"""Float64 in place of float32, for proofs.

transformers computes norms, softmaxes or routers in float32 in a model of any dtype. The rounding that a proof would
have to allow hides differences between layouts.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64InPlaceOfFloat32(TorchFunctionMode):
    """Inside, what asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_wide, args), **{key: _wide(value) for key, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
