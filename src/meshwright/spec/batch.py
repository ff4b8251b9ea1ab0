"""A batch: the tokens that a rank runs at once, with the further inputs of model and objective.

The same class on both sides: numpy arrays on the host (`data/loader.py`), tensors on the device (`models/batch.py`).

Shapes: B rows, T tokens of a row that are here, L tokens of the whole row, P pairs of answers of a row.
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
    """int64 [B, T]: the document of each token that is here."""
    reference_margins: ArrayT
    """float64 [B, P]: how much likelier the reference makes the chosen answer than the rejected one, in nats; NaN where
    a row has no such pair."""


@dataclass(frozen=True, eq=False)
class Batch(Generic[ArrayT]):
    """The tokens of one forward pass on a rank, and data that belongs to them."""

    tokens: ArrayT
    """int64 [B, T]."""
    labels: ArrayT | None = None
    """int64 [B, T]: the next tokens, -100 where nothing is trained; None if nothing is trained at all."""
    document_ids: ArrayT | None = None
    """int64 [B, L]: a document is a run of equal numbers in a row. Its tokens see no other document, and their
    positions count from its first. Of the whole row even where only some of its tokens are here, for attention asks
    which documents the others are in. None: every row is one document."""
    position_ids: ArrayT | None = None
    """int64 [B, T]: each token's place in its document; None: they count from the first token of each document."""
    pairs: Pairs[ArrayT] | None = None
    """Where an objective compares answers."""
    numbers: ArrayT | None = None
    """int64 [B, T]: each token's number in the run's endless order of samples, where something is drawn by it."""

    def map(self, change: Callable[[ArrayT], OtherT]) -> "Batch[OtherT]":
        """The same batch with every array changed."""
        return _changed(self, change)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A dataclass with every array in it changed; None stays None."""
    if is_dataclass(value):
        return type(value)(**{field.name: _changed(getattr(value, field.name), change) for field in fields(value)})
    return None if value is None else change(value)
