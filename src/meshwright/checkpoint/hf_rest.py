"""What surrounds the text model of a multimodal one: tensors and files that an export copies from its directory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.fp8 import Dequantized
from meshwright.checkpoint.tensor_files import UnmappedTensor
from meshwright.families.fp8_files import FP8, scale_of, without_scales
from meshwright.families.tensor_headers import StoredTensor, stored_tensors
from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

REST_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files of processors for images, video and sound, copied unchanged if they exist."""


def rest_of(directory: Path | None, spec: ModelSpec) -> dict[str, StoredTensor]:
    """The tensors of the multimodal model in `directory` that are not of its text model; none for other models.

    Raises:
        UserError: the directory has another model than the one that the run started from.
    """
    if spec.wrapper is None:
        return {}
    assert directory is not None, "the text model inside a multimodal one cannot be written without the rest"
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        config = None
    if config != json.loads(spec.wrapper.config):
        raise UserError(
            f"{directory}: its config.json is not that of the multimodal model that was trained, so the parts besides "
            "the text model cannot be copied from it; put the original files there"
        )
    stored = without_scales(stored_tensors(directory)[0], spec.fp8)
    text = tuple(file for _, file in spec.wrapper.files)
    return {name: tensor for name, tensor in stored.items() if not name.startswith(text)}


def read_rest(directory: Path | None, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """These tensors, one by one; fp8 matrices multiplied out."""
    rest = rest_of(directory, spec)
    every = stored_tensors(directory)[0] if directory is not None and rest else {}
    for name, tensor in rest.items():
        values: Any = UnmappedTensor(tensor)
        if tensor.dtype == FP8 and spec.fp8 is not None:
            values = Dequantized(values, tensor.shape, scale_of(every, name, spec.fp8), spec.fp8.block)
        yield name, values[:].reshape(tensor.shape)
