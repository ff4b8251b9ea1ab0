"""The number formats of a run: the dtype of each kind of tensor, with its bytes and rounding.

`TrainingSpec.dtypes` makes the value from the recipe with `Precision.of`; planner, engine, traffic and tolerances read
it. `models/dtypes.py` maps a `Dtype` to torch's.
"""

from dataclasses import dataclass
from typing import Literal

ComputeName = Literal["fp32", "bf16", "fp16", "fp64"]
"""Dtypes that a model computes in."""
PrecisionName = Literal["fp32", "bf16", "fp16", "fp64", "fp8", "mxfp8", "nvfp4"]
"""Names of `training.precision`: a dtype, or bf16 with low-precision matrix products."""
ReduceName = Literal["fp32", "bf16"]
"""Dtypes that gradients accumulate in under mixed precision."""
GgufName = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
"""Formats of a GGUF file's matrices. The quantized ones have blocks of 32 numbers of a row."""


@dataclass(frozen=True)
class Dtype:
    """A number format."""

    name: str
    bytes: int
    epsilon: float = 0.0
    """Distance from 1 to the next number; 0 for integers."""

    def __str__(self) -> str:
        return self.name


FP64, FP32 = Dtype("fp64", 8, 2.0**-52), Dtype("fp32", 4, 2.0**-23)
FP16, BF16 = Dtype("fp16", 2, 2.0**-10), Dtype("bf16", 2, 2.0**-7)

DTYPES = {
    dtype.name: dtype for dtype in (FP64, FP32, FP16, BF16, Dtype("int32", 4), Dtype("int8", 1), Dtype("uint8", 1))
}
"""The storage formats of the engine's tensors."""

NARROW = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
"""Formats of matrix products only, and the names of their rates in device tables."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of one run."""

    compute: Dtype
    """Dtype of activations, and of operands and results of matrix products."""
    store: Dtype
    """Dtype of the weights that the model computes with: gathered or copied from the masters, or frozen."""
    master: Dtype
    """Dtype of the weights that the optimizer updates. The optimizer's state is in fp32 or this, whichever is wider,
    unless the recipe says otherwise."""
    reduce: Dtype
    """Dtype in which gradients accumulate over microbatches and are reduced over ranks."""
    loss: Dtype
    """Dtype of softmax, losses and their sums."""
    recipe: str | None = None
    """Low-precision format of the blocks' matrix products, such as fp8; None: they use `compute`."""

    @classmethod
    def of(cls, name: str, reduce: str = FP32.name, beside: str = BF16.name, master: str = FP32.name) -> "Precision":
        """The dtypes for `training.precision`, `training.reduce_dtype` and `training.master_dtype`. A name that is not
        a dtype, such as fp8, is the format of matrix products; everything else is then in `beside`.

        Under fp64 and fp32 everything is in one dtype, and `reduce` and `master` are ignored.
        """
        compute = DTYPES.get(name) or DTYPES[beside]
        narrow = compute.bytes < FP32.bytes
        return cls(
            compute=compute,
            store=compute,
            master=DTYPES[master] if narrow else compute,
            reduce=DTYPES[reduce] if narrow else compute,
            loss=FP32 if narrow else compute,
            recipe=None if name in DTYPES else name,
        )

    @property
    def mixed(self) -> bool:
        """Whether the optimizer updates wider weights than the model computes with."""
        return self.master != self.store

    @property
    def narrow(self) -> bool:
        """Whether the model computes in 16 bits, so that the order of a sum changes it noticeably."""
        return self.compute.bytes < FP32.bytes

    @property
    def gradient(self) -> Dtype:
        """Dtype of the gradients that the optimizer gets."""
        return max(self.master, self.reduce, key=lambda dtype: dtype.bytes)

    @property
    def state(self) -> Dtype:
        """Dtype of the optimizer's state, unless the recipe says otherwise."""
        return max(self.master, FP32, key=lambda dtype: dtype.bytes)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would underflow without a loss scale: fp16 has five bits of exponent."""
        return self.compute == FP16

    @property
    def products(self) -> str:
        """The format of matrix products, as named in device tables: from `recipe`, else from `compute`."""
        return self.compute.name if self.recipe is None else NARROW.get(self.recipe, self.recipe)

    def __str__(self) -> str:
        return self.recipe or self.compute.name


MIXED = Precision.of(BF16.name)
"""bf16 with fp32 master weights: the default of recipes and plans."""
