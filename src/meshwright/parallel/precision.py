"""The dtypes that FSDP2 gathers weights and reduces gradients in.

Under bf16 and fp16 the optimizer sees fp32 weights and gradients, and the model computes with low-precision copies. On
several ranks FSDP2 keeps both; on one process `state/masters.py` does, without a process group. Where weights are kept
in bf16 alone, they are gathered as they are, and gradients stay as they were reduced.
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
