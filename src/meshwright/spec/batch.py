"""Batches: the tokens of one forward pass on a rank, with the other inputs of model and objective.

The class holds numpy arrays on the host (`data/loader.py`) and tensors on the device (`models/batch.py`).

Shapes: B rows, T tokens of a row on this rank, L tokens of the whole row, P pairs of answers of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

ArrayT = TypeVar("ArrayT")
OtherT = TypeVar("OtherT")


@dataclass(frozen=True, eq=False)
class Pairs(Generic[ArrayT]):
    """Pairs of answers: documents 0 and 1 of a row are the chosen and the rejected answer of its first pair."""

    owners: ArrayT
    """int64 [B, T]: the document of each token on this rank."""
    reference_margins: ArrayT
    """float64 [B, P]: the reference's log-probability of the chosen answer minus the rejected one's, in nats; NaN if a
    row has no such pair."""


@dataclass(frozen=True, eq=False)
class Batch(Generic[ArrayT]):
    """The tokens of one forward pass on a rank, and their data."""

    tokens: ArrayT
    """int64 [B, T]."""
    labels: ArrayT | None = None
    """int64 [B, T]: the next tokens, -100 for positions without loss; None if no position has a loss."""
    document_ids: ArrayT | None = None
    """int64 [B, L]: a document is a run of equal numbers in a row. Its tokens attend to no other document, and their
    positions count from its first token. The whole row's numbers are on every rank, because attention needs the
    documents of all its tokens. None: every row is one document."""
    position_ids: ArrayT | None = None
    """int64 [B, T]: each token's position in its document; None: positions count from the first token of each
    document."""
    pairs: Pairs[ArrayT] | None = None
    """Only for objectives that compare answers."""
    numbers: ArrayT | None = None
    """int64 [B, T]: each token's number in the run's endless order of samples, if random draws depend on it."""
    document_offsets: ArrayT | None = None
    """int32 [D + 1]: the start of each of the D documents among the B x L tokens of all rows, and B x L at the end.
    Only on the device, where `to_device` adds it to `document_ids`."""

    def map(self, change: Callable[[ArrayT], OtherT]) -> "Batch[OtherT]":
        """A copy of the batch with `change` applied to every array."""
        return _changed(self, change)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a dataclass with `change` applied to every array; None stays None."""
    if is_dataclass(value):
        return type(value)(**{field.name: _changed(getattr(value, field.name), change) for field in fields(value)})
    return None if value is None else change(value)
