"""Hugging Face directories whose experts are stored in MXFP4 (gpt-oss): 32 numbers of 4 bits share a power of two. They
are multiplied out when read.
"""

from collections.abc import Mapping
from dataclasses import replace

from meshwright.families.tensor_headers import StoredTensor
from meshwright.spec.errors import UserError

MXFP4 = "MXFP4"
"""The dtype of tensors that `with_unpacked` names."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of codes [..., O, D / 32, 16] and scales [..., O, D / 32], both uint8."""


def with_unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors with each pair of codes and scales as one tensor [..., D, O].

    Raises:
        UserError: codes without scales that fit.
    """
    shapes = dict(stored)
    for name, codes in stored.items():
        if not name.endswith(BLOCKS) or codes.dtype != "U8":
            continue
        base = name.removesuffix(BLOCKS)
        scales = shapes.pop(base + SCALES, None)
        if scales is None or scales.dtype != "U8" or scales.shape != codes.shape[:-1] or codes.shape[-1] != 16:
            raise UserError(
                f"{codes.file}: tensor {name} has no scales {base}{SCALES} of shape {list(codes.shape[:-1])}"
            )
        *outer, rows, groups, _ = codes.shape
        shapes[base] = replace(shapes.pop(name), dtype=MXFP4, shape=(*outer, groups * 32, rows))
    return shapes
