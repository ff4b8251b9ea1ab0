"""Agreement between ranks, between two steps, on what none may decide alone."""

import torch

from meshwright.comm import collectives


def largest(*values: int) -> tuple[int, ...]:
    """Each value's largest over all ranks. Collective: some bytes through host memory, also where GPUs compute."""
    return tuple(collectives.all_reduce_(torch.tensor(values, dtype=torch.int64), op="max").tolist())
