"""Agreement of all ranks between two steps: stopping, evaluating and saving."""

import torch

from meshwright.comm import collectives


def largest(*values: int) -> tuple[int, ...]:
    """The maximum of each value over all ranks. Collective: a few bytes through host memory, on GPUs too."""
    return tuple(collectives.all_reduce_(torch.tensor(values, dtype=torch.int64), op="max").tolist())
