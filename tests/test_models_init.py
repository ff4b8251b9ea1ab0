"""Fresh weights are a pure function of seed, name and position, on any rank."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from meshwright.families import parameter_table, resolve_model
from meshwright.models import build_model, draw_rows, initialize
from meshwright.models.init import BLOCK_ELEMENTS
from meshwright.spec.model import ModelFields, Parameter


def matrix(rows: int, columns: int, name: str = "w", std: float = 0.5) -> Parameter:
    return Parameter(name=name, dims=("ffn", "embed"), shape=(rows, columns), init="normal", init_std=std)


@pytest.mark.parametrize(("rows", "columns"), [(700, 1000), (3, BLOCK_ELEMENTS + 5), (1, 7), (BLOCK_ELEMENTS + 3, 1)])
def test_rows_do_not_depend_on_the_slice(rows, columns):
    """Across block boundaries too: 700 rows of 1000 are drawn in blocks of 262."""
    parameter = matrix(rows, columns)
    whole = draw_rows(parameter, 3, 0, rows)
    assert whole.shape == (rows, columns)
    cuts = sorted({0, 1, rows // 3, min(262, rows), min(263, rows), rows - 1, rows})
    for start, stop in pairwise(cuts):
        assert torch.equal(draw_rows(parameter, 3, start, stop), whole[start:stop])
    assert draw_rows(parameter, 3, rows, rows).shape == (0, columns)


def test_every_number_of_every_tensor_is_its_own():
    """No block, tensor or seed repeats another's numbers."""
    drawn = [
        draw_rows(matrix(600, 1000, name), seed, 0, 600).flatten() for name, seed in (("w", 0), ("w", 1), ("v", 0))
    ]
    numbers = torch.cat(drawn)
    # Of 1.8 million fp32 normal numbers some are equal by chance; a repeated block of 262,000 is not.
    assert numbers.unique().numel() > 0.9 * numbers.numel()
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert abs(torch.corrcoef(torch.stack((drawn[left], drawn[right])))[0, 1]) < 5 / math.sqrt(600_000)


def test_the_spread_is_the_tables():
    values = draw_rows(matrix(1000, 1000, std=0.02), 0, 0, 1000)
    # Five standard errors of mean and standard deviation of a million draws.
    assert abs(values.mean().item()) < 5 * 0.02 / 1000
    assert abs(values.std().item() / 0.02 - 1) < 5 / math.sqrt(2e6)


def test_constants():
    for init, value in (("ones", 1.0), ("zeros", 0.0)):
        parameter = Parameter(name="n", dims=("embed",), shape=(8,), init=init)
        assert torch.equal(draw_rows(parameter, 0, 2, 5), torch.full((3,), value))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (2, 1), (0, 11)])
def test_rows_that_do_not_exist(start, stop):
    with pytest.raises(ValueError, match=r"w: rows \[-?\d+, \d+\) do not lie in \[0, 10\)"):
        draw_rows(matrix(10, 2), 0, start, stop)


def test_the_numbers_never_change():
    """A run's seed determines its weights: these are those of the first version."""
    drawn = draw_rows(matrix(4, 8, "tok_embeddings.weight", std=1.0), 0, 0, 2)
    first = torch.tensor([-0.14454484, -0.26064152, -0.19685926, -0.25886974])
    torch.testing.assert_close(drawn[1, :4], first, rtol=1e-5, atol=1e-6)


def test_initialize_fills_the_model():
    spec = resolve_model(ModelFields(family="gpt2", hidden=32, num_layers=2, num_heads=4, vocab=50), base_dir=Path())
    model = build_model(spec, device="cpu", dtype=torch.bfloat16)
    initialize(model, parameter_table(spec), 5)
    for row in parameter_table(spec):
        expected = draw_rows(row, 5, 0, row.shape[0]).bfloat16()
        assert torch.equal(model.get_parameter(row.name), expected)
