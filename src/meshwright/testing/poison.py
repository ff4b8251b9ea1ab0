"""Uninitialised memory made visible: new tensors are NaN until written, and no product reads past its operands."""

from typing import Any

import torch

from meshwright.torch_internals import DispatchMode, leaves

PRODUCTS = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "addmv",
    "mv",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable",
    "_linear_pointwise",
}
"""Operations whose kernels may read more of an operand's memory than the operand, and multiply it by zero."""

REACH = 64
"""Elements behind an operand's last one that a kernel may read: the widest tile of oneDNN's."""


def fill_uninitialized_memory() -> None:
    """From now on, `torch.empty` and its kin give NaN, and the largest number for integers, in this process.

    The option belongs to deterministic algorithms, so they are on, too; an operation that has none only warns.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)


class OperandCheck(DispatchMode):
    """While it is entered, an operand of a product with NaN in the memory between or behind its rows raises
    `AssertionError`.

    On processors with AMX, oneDNN 3.12 reads there, and 0 x NaN is NaN. On others this check finds the fault.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().partition("::")[2].partition(".")[0]
        if name in PRODUCTS:
            for place, tensor in enumerate(leaves(args)):
                if isinstance(tensor, torch.Tensor) and type(tensor) is torch.Tensor and has_poisoned_gaps(tensor):
                    raise AssertionError(f"{name}: operand {place} is a view of uninitialised memory")
        return function(*args, **(kwargs or {}))


def has_poisoned_gaps(tensor: torch.Tensor) -> bool:
    """Whether memory that a view spans, or that follows its last element, has a NaN outside the view."""
    if not tensor.is_floating_point() or tensor.device.type != "cpu" or not tensor.numel():
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span <= tensor.numel():  # dense, or expanded
        return False
    available = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    memory = torch.as_strided(tensor.detach(), (min(span + REACH, available),), (1,), tensor.storage_offset())
    outside = torch.ones(len(memory), dtype=torch.bool)
    torch.as_strided(outside, tensor.shape, tensor.stride()).fill_(False)
    return bool(memory[outside].isnan().any())
