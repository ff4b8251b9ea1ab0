"""Low-precision settings of matrix products: how operands are scaled, and which layers stay in higher precision."""

from typing import Literal

from pydantic import Field

from meshwright.spec.base import Spec

Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "delayed"]
"""Ways to scale operands in fp8."""

BLOCKS = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Consecutive numbers that share a scale, by recipe; no block may span two ranks."""

CODED = {"tensorwise": "auto", "delayed": "auto", "blockwise": "codes"}
"""Recipes that can keep inputs in codes, and the least `saved_inputs` for it."""

DELAYED = "delayed"
"""The recipe with scales from previous steps."""


class LowPrecisionSpec(Spec):
    """How linear layers and experts of blocks multiply under precision fp8, mxfp8 or nvfp4."""

    recipe: Fp8Recipe = "tensorwise"
    """How fp8 operands are scaled. tensorwise: one scale a tensor; gradients in e5m2. rowwise: one a row, all in e4m3.
    rowwise_with_gw_hp: the same, with the weight's gradient in bf16. blockwise: 128 x 128 numbers of a weight and 1 x
    128 of all else (DeepSeek-V3). delayed: one a tensor, of the largest values in the steps before (Transformer
    Engine). mxfp8 and nvfp4 have one recipe each."""
    keep: tuple[str, ...] = ()
    """Linear layers of blocks that stay in bf16, by name: layers.0 (the first block), layers.-1 (the last),
    *.attention.wo, *.experts, ... Embeddings, head, norms and routers always do."""
    saved_inputs: Literal["auto", "full", "codes"] = "auto"
    """What a layer keeps of its input for the weight's gradient. codes: what its product multiplied, a byte a number.
    full: the input. auto: codes where the weight's gradient multiplies the same ones, tensorwise and delayed, so that
    no bit changes. blockwise quantizes codes once more, in the other direction, as DeepSeek-V3 does."""
    amax_history: int = Field(default=1024, ge=1)
    """delayed only: steps whose largest values decide the scale."""
    margin: int = Field(default=0, ge=0)
    """delayed only: powers of two that are left free above the largest value."""
    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Dtype of everything else. fp64 is for proofs."""
