"""Hugging Face directories whose matrices are stored in fp8, by the `quantization_config` of their config.json."""

from collections.abc import Mapping
from typing import Any

from meshwright.families.tensor_headers import FLOATS, StoredTensor
from meshwright.spec.errors import UserError
from meshwright.spec.foreign import Fp8Files

QUANTIZATION = "quantization_config"

FP8 = "F8_E4M3"
"""safetensors' name of the format."""

SCALES = {"fp8": "_scale_inv", "fbgemm_fp8": "_scale", "compressed-tensors": "_scale", "modelopt": "_scale"}
"""quant_method -> suffix of the names of scales. All are factors, also those named inverse."""

OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub", "k_scale", "v_scale")
"""Last parts of the names of scales for inputs and caches, which inference needs and training does not."""


def fp8_files(config: Mapping[str, Any], *, where: str) -> Fp8Files | None:
    """The form of the fp8 matrices that config.json declares; None if the weights are not quantized, or
    are in MXFP4.

    Raises:
        UserError: they are quantized in another way.
    """
    parts = (config, config.get("text_config"))
    section = next((part[QUANTIZATION] for part in parts if isinstance(part, Mapping) and part.get(QUANTIZATION)), None)
    if section is None:
        return None
    section = section if isinstance(section, Mapping) else {}
    method = str(section.get("quant_method"))
    if method == "mxfp4":  # its tensors' names say it (`mxfp4_files.py`)
        return None
    weights = _compressed(section) if method == "compressed-tensors" else section
    blocks = weights.get("weight_block_size", weights.get("block_structure"))
    fits = method != "modelopt" or section.get("quant_algo") == "FP8"
    if method not in SCALES or not fits or weights.get("fmt", "e4m3") != "e4m3" or not _is_block(blocks):
        raise UserError(
            f"{where}: quantized weights are not supported ({method}), except matrices in fp8 (e4m3) with scales for "
            "blocks, rows or whole matrices; use the unquantized model"
        )
    return Fp8Files(scale=SCALES[method], block=None if blocks is None else tuple(blocks))


def without_scales(stored: Mapping[str, StoredTensor], form: Fp8Files | None) -> dict[str, StoredTensor]:
    """The stored tensors other than scales of fp8 matrices and of activations."""
    if form is None:
        return dict(stored)
    scales = {name + form.scale for name, tensor in stored.items() if tensor.dtype == FP8}
    return {
        name: tensor
        for name, tensor in stored.items()
        if name not in scales and name.rpartition(".")[2] not in OF_ACTIVATIONS
    }


def scale_of(stored: Mapping[str, StoredTensor], name: str, form: Fp8Files | None) -> StoredTensor:
    """The scales of the fp8 matrix `name`.

    Raises:
        UserError: they are missing, or their shape or dtype does not fit.
    """
    tensor = stored[name]
    if form is None:
        raise UserError(f"{tensor.file}: tensor {name} is {tensor.dtype}, but config.json has no {QUANTIZATION}")
    scale = stored.get(name + form.scale)
    if scale is None:
        raise UserError(f"{tensor.file}: tensor {name} is {tensor.dtype}, but has no scales {name}{form.scale}")
    *outer, rows, columns = tensor.shape
    fits: set[tuple[int, ...]] = {(), (1,), (rows,), (*outer, rows, 1), (*outer, 1, 1)}
    if form.block is not None:
        fits = {(*outer, -(-rows // form.block[0]), -(-columns // form.block[1]))}
    if scale.shape not in fits or scale.dtype not in FLOATS:
        raise UserError(
            f"{scale.file}: scales {name}{form.scale} of shape {list(scale.shape)} in {scale.dtype} do not fit the "
            f"matrix of shape {list(tensor.shape)}"
        )
    return scale


def _compressed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights' settings of compressed-tensors, if all groups of layers store fp8 in the same way."""
    groups = config.get("config_groups")
    formats = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    same = [one for one in formats if isinstance(one, Mapping) and one == formats[0]]
    fp8 = same and len(same) == len(formats) and (same[0].get("num_bits"), same[0].get("type")) == (8, "float")
    if not fp8 or not same[0].get("symmetric", True) or config.get("format") not in (None, "float-quantized"):
        return {"fmt": "other"}
    return same[0]


def _is_block(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
