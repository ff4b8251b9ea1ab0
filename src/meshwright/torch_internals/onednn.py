"""oneDNN's products, and the order in which they read weights fastest."""

import torch

ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
"""oneDNN's `a @ b.T + bias`, which `F.linear` does not use for fp32; None if torch is built without. 2.11-2.15;
public: `torch.utils.mkldnn.to_mkldnn`, which copies the weights."""


def linear_by_onednn(a: torch.Tensor, b_ND: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """`a @ b.T + bias` by oneDNN, without autograd; see `ONEDNN_LINEAR`."""
    assert ONEDNN_LINEAR is not None
    return ONEDNN_LINEAR(a, b_ND, bias_N, "none", [], "")


def reorder_for_onednn(weight_ND: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of the weight in the order in which oneDNN reads it for a product with about `rows` rows, for
    `linear_by_onednn`. 2.11-2.15; public: none."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_ND.contiguous(), rows)


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products in this dtype on this processor: bf16 needs AVX-512. 2.11-2.15; public: none."""
    if ONEDNN_LINEAR is None:
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
