"""The result of reading another system's checkpoint, and a reader of files of plain tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.spec.model import ModelSpec


class Inert:
    """A stand-in for another system's object that is not needed: it stores its arguments and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values


@dataclass(frozen=True)
class ForeignWeights:
    """Weights of another system."""

    model: ModelSpec
    tensors: Mapping[str, torch.Tensor]
    """Whole tensors by the names, and in the orientation, of Hugging Face files."""
    notes: tuple[str, ...] = ()
    """Notes on differences in the Hugging Face directory."""


def load_plain(path: Path, inert: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """The mapping in a file of `torch.save`; classes called `inert` become `Inert`.

    Raises `UserError` if the file holds objects other than plain ones, or no mapping.
    """
    try:
        with torch.serialization.safe_globals([(Inert, name) for name in inert]):
            content = torch.load(regular(path), map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle can be malformed in any way
        messages = str(error).strip().splitlines() or ["it is damaged"]
        raise UserError(f"{path}: cannot be read as plain tensors (weights_only): {messages[0][:200]}") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: contains no mapping from names to tensors, so it is not a checkpoint")
    return content
