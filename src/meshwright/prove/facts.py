"""A step's figures, computed by the reference."""

from typing import TypedDict


class Facts(TypedDict):
    """A step's figures."""

    loss: float
    gnorm: float
    largest: float
    """The largest entry of all gradients, as scaled."""
    smallest_norm: float
    """The smallest norm of a matrix's gradient; 0 without matrices."""
    factor: float
    """The factor of gradients from clipping and the loss scale: the largest so far."""
    expert_load: float | None
