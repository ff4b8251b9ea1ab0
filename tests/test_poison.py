"""Uninitialised memory is NaN in all tests, and a product whose operand lies in it fails on any processor."""

import pytest
import torch

from meshwright.testing.poison import OperandCheck


def poisoned_everywhere() -> bool:
    made = (torch.empty(3), torch.randn(2).new_empty(3), torch.empty_like(torch.randn(3), dtype=torch.bfloat16))
    return all(bool(tensor.isnan().all()) for tensor in made)


def test_here() -> None:
    assert poisoned_everywhere()


def test_on_ranks(ranks) -> None:
    assert ranks.run(2, poisoned_everywhere) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_a_view_of_uninitialised_memory_is_no_operand(dtype, turned) -> None:
    view = torch.empty(5, 64, dtype=dtype)[:, :50]
    view.copy_(torch.randn(5, 50))
    a = view.t() if turned else view
    b = torch.randn(a.shape[1], 3, dtype=dtype)
    with OperandCheck(), pytest.raises(AssertionError, match="operand 0 is a view of uninitialised memory"):
        torch.mm(a, b)
    with OperandCheck():
        torch.mm(a.contiguous(), b)
        torch.mm(torch.zeros(5, 64, dtype=dtype)[:, :50], torch.ones(50, 3, dtype=dtype))


def test_in_a_backward_pass() -> None:
    weight_VD = torch.empty(7, 8)[:, :5].fill_(1.0)
    y = torch.randn(2, 7, requires_grad=True) @ weight_VD.contiguous()
    with OperandCheck():
        y.sum().backward()
    y = torch.randn(2, 5, requires_grad=True) @ weight_VD.t()
    with OperandCheck(), pytest.raises(AssertionError, match="view of uninitialised memory"):
        y.sum().backward()
