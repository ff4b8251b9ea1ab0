"""The one place that chooses the normalisation of a model."""

from torch import nn

from meshwright.spec.model import ModelSpec


def build_norm(spec: ModelSpec, width: int) -> nn.Module:
    """LayerNorm (Ba et al., 2016) or RMSNorm (Zhang and Sennrich, 2019) over the last dim, of size `width`.

    Both compute in fp32 under bf16 and fp16, and in the input's dtype otherwise.
    """
    if spec.norm == "layernorm":
        return nn.LayerNorm(width, eps=spec.norm_eps)
    return nn.RMSNorm(width, eps=spec.norm_eps)
