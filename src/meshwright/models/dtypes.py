"""torch's dtypes by the names of `spec/precision.py`."""

import torch

from meshwright.spec.precision import DTYPES, Dtype

TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
assert TORCH.keys() == DTYPES.keys()


def torch_dtype(dtype: Dtype | str) -> torch.dtype:
    """torch's name for a dtype, or for the name of one. Raises `KeyError` if there is no such dtype."""
    return TORCH[str(dtype)]
