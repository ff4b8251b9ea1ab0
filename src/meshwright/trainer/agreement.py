"""The one place where ranks agree, between two steps, on what none of them may decide alone."""

import torch
import torch.distributed as dist


def largest(*values: int) -> tuple[int, ...]:
    """Each value's largest over all ranks. Collective: some bytes through host memory, also where GPUs compute."""
    if not dist.is_initialized():
        return values
    most = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return tuple(most.tolist())
