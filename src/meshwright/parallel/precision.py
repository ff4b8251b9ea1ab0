"""The dtypes that FSDP2 gathers weights and reduces gradients in.

Under bf16 and fp16 the optimizer updates fp32 weights with fp32 gradients, and the model computes with low-precision
copies. On several ranks FSDP2 keeps both; on one process `state/masters.py` does, without a process group. Weights kept
only in bf16 are gathered in bf16, and their gradients keep the dtype of the reduction.
"""

from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.models.dtypes import torch_dtype
from meshwright.spec.precision import Precision


def build_fsdp_policy(precision: Precision) -> MixedPrecisionPolicy:
    """FSDP2's policy: gather weights in `store`, reduce gradients in `reduce`."""
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(precision.store) if precision.mixed else None,
        reduce_dtype=torch_dtype(precision.reduce) if precision.narrow else None,
        cast_forward_inputs=False,
    )
