"""A step's figures, as the reference computed them."""

from typing import TypedDict


class Facts(TypedDict):
    """A step's figures."""

    loss: float
    gnorm: float
    largest: float
    """The largest entry of all gradients, as scaled."""
    smallest_norm: float
    """Of the gradients of matrices; 0 without one."""
    factor: float
    """What clipping and the loss scale multiply gradients by: the largest so far."""
    expert_load: float | None
