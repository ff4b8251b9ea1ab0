"""The difference of two computations of a number or tensor, and its allowance."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """The largest difference of a number or tensor from the reference."""

    by: float
    allowed: float
    rank: int = 0
    factor: float | None = None
    """Set if the whole difference is a factor: ours = factor x reference."""
    place: str = ""
    """The position of the largest difference, if it is informative."""

    @property
    def equal(self) -> bool:
        """Whether rounding explains it."""
        return self.by <= self.allowed

    @property
    def share(self) -> float:
        """The difference as a share of the allowance."""
        return self.by / self.allowed if self.allowed else (torch.inf if self.by else 0.0)


def largest_entry(tensor: torch.Tensor) -> float:
    """The largest absolute entry; 0 of an empty tensor."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def measure(ours: torch.Tensor, reference: torch.Tensor, allowed: float, rank: int) -> Difference:
    """The largest absolute difference; NaN counts as infinite."""
    if not ours.numel():
        return Difference(0.0, allowed, rank)
    ours = ours.detach().to(reference)
    by = (ours - reference).abs().max().nan_to_num(torch.inf).item()
    factor = None
    if by > allowed:
        square = (reference * reference).sum()
        ratio = ((ours * reference).sum() / square).item() if square else 0.0
        rest = (ours - ratio * reference).abs().max().item()
        if abs(ratio - 1) > 1e-6 and rest <= max(1e-6 * by, 2 * allowed):
            factor = ratio
    return Difference(by, allowed, rank, factor)
