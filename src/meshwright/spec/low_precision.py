"""Low-precision settings of matrix products: scaling of operands, and layers that stay in higher precision."""

from typing import Literal

from pydantic import Field

from meshwright.spec.base import Spec

Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "delayed"]
"""Ways to scale operands in fp8."""

BLOCKS = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Number of consecutive values that share a scale, by recipe; no block may span two ranks."""

CODED = {"tensorwise": "auto", "delayed": "auto", "blockwise": "codes"}
"""Recipes that can save inputs as quantized codes, and the weakest `saved_inputs` that does so."""

KERNELS = ("tensorwise", "rowwise", "delayed")
"""Recipes for whose products GPU kernels exist; the others are emulated everywhere."""

DELAYED = "delayed"
"""The recipe that takes scales from previous steps."""


class LowPrecisionSpec(Spec):
    """Products of the blocks' linear layers and experts under precision fp8, mxfp8 or nvfp4."""

    recipe: Fp8Recipe = "tensorwise"
    """Scaling of fp8 operands. tensorwise: one scale per tensor; gradients in e5m2. rowwise: one scale per row; all in
    e4m3. rowwise_with_gw_hp: the same, with the weight gradient in bf16. blockwise: one scale per 128 x 128 numbers of
    a weight and 1 x 128 of other operands (DeepSeek-V3). delayed: one scale per tensor, from the amax of previous steps
    (Transformer Engine). mxfp8 and nvfp4 have one recipe each."""
    keep: tuple[str, ...] = ()
    """Linear layers of blocks that stay in bf16, by name: layers.0 (the first block), layers.-1 (the last),
    *.attention.wo, *.experts, ... Embeddings, head, norms and routers always stay in bf16."""
    saved_inputs: Literal["auto", "full", "codes"] = "auto"
    """Form in which a layer saves its input for the weight gradient. codes: its quantized codes, one byte per number.
    full: the input in bf16. auto: codes if the weight gradient multiplies the same codes (tensorwise and delayed), so
    results are bit-identical. With codes, blockwise requantizes them in the other direction, as DeepSeek-V3 does."""
    amax_history: int = Field(default=1024, ge=1)
    """delayed only: number of previous steps whose amax determines the scale."""
    margin: int = Field(default=0, ge=0)
    """delayed only: headroom above the amax, in powers of two."""
    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Dtype of everything else. fp64 is for proofs."""
