"""The one place where ranks agree, between two steps, on what none of them may decide alone."""

import torch
import torch.distributed as dist


def any_rank(*flags: bool) -> tuple[bool, ...]:
    """Which of `flags` are up on any rank. Collective: a few bytes through host memory, also where GPUs compute."""
    if not dist.is_initialized():
        return flags
    up = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(up, op=dist.ReduceOp.MAX)
    return tuple(bool(flag) for flag in up.tolist())
