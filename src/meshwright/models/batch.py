"""Batches on the device."""

from dataclasses import replace

import numpy as np
import torch

from meshwright.devices import on_cpu, sent, widest
from meshwright.spec.batch import Batch

TensorBatch = Batch[torch.Tensor]
"""The batch that models and objectives take."""


def to_device(batch: Batch[np.ndarray], device: torch.device) -> TensorBatch:
    """The batch as tensors on `device`; copies to a GPU do not block, and on a CPU the arrays' memory is used."""

    def move(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        tensor = tensor.to(widest(device)) if tensor.dtype == torch.float64 else tensor
        return tensor if on_cpu(device) else sent(tensor, device)

    if batch.document_ids is not None:  # found on the host: a device's answer would have to be waited for
        batch = replace(batch, document_offsets=document_offsets(batch.document_ids))
    return batch.map(move)


def document_offsets(documents_BL: np.ndarray) -> np.ndarray:
    """The start of each document among the tokens of all rows, and their number at the end: int32 [D + 1]."""
    starts_BL = np.ones(documents_BL.shape, dtype=bool)
    starts_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
    return np.append(np.flatnonzero(starts_BL), documents_BL.size).astype(np.int32)
