"""Losses and logits of a bare model, without a trainer."""

from typing import Any

import torch

from meshwright.spec.batch import Batch


def summed_loss(model: Any, tokens: torch.Tensor, labels: torch.Tensor, document_ids: Any = None, **how: Any) -> Any:
    """The summed cross-entropy; for a model's first layers (`layers`), the input of the next layer."""
    return model(Batch(tokens, labels, document_ids), lambda x, head, batch: head.loss(x, batch.labels), **how)


def logits_of(model: Any, tokens: torch.Tensor, **fields: Any) -> torch.Tensor:
    """All logits; `fields` of the batch."""
    return model.logits(Batch(tokens, **fields))
