"""Batches on the device."""

import numpy as np
import torch

from meshwright.spec.batch import Batch

TensorBatch = Batch[torch.Tensor]
"""The batch that models and objectives take."""


def to_device(batch: Batch[np.ndarray], device: torch.device) -> TensorBatch:
    """The batch as tensors on `device`; copies to a GPU do not block, and on a CPU the arrays' memory is used."""

    def move(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return batch.map(move)
