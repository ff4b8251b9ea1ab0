"""The dtypes of a run are one value, and no other code interprets a dtype's name."""

import ast
from typing import get_args

import pytest
import torch

from meshwright.models.dtypes import TORCH, torch_dtype
from meshwright.spec.precision import DTYPES, MIXED, ComputeName, Precision, ReduceName
from meshwright.spec.training import TrainingSpec
from test_house import FILES, tree_of

FLOATS = {name for name, dtype in DTYPES.items() if dtype.epsilon}
"""int8 is also the name of an eight-bit base."""
RATES = "predict/hardware.py"
"""Measurements by dtype."""
WORDS = {"spec/synonyms.py", "validate/words.py"}
"""Users' names for a dtype."""
OTHERS = {file for file in FILES if file.startswith("imports/")} | {"engines/deepspeed.py", "handover/gguf.py"}
"""Names in the configuration files of other systems, which are read and written there."""
OWNERS = {"spec/precision.py", "models/dtypes.py", RATES, *WORDS, *OTHERS}


@pytest.mark.parametrize(
    ("compute", "reduce", "expected"),
    [  # compute, store, master, reduce, loss
        ("fp64", "bf16", "fp64 fp64 fp64 fp64 fp64"),
        ("fp32", "bf16", "fp32 fp32 fp32 fp32 fp32"),
        ("bf16", "fp32", "bf16 bf16 fp32 fp32 fp32"),
        ("bf16", "bf16", "bf16 bf16 fp32 bf16 fp32"),
        ("fp16", "fp32", "fp16 fp16 fp32 fp32 fp32"),
    ],
)
def test_two_words_of_the_recipe_say_every_dtype(compute: ComputeName, reduce: ReduceName, expected: str) -> None:
    found = TrainingSpec(precision=compute, reduce_dtype=reduce).dtypes
    assert f"{found.compute} {found.store} {found.master} {found.reduce} {found.loss}" == expected
    assert found.mixed == (compute in ("bf16", "fp16"))
    assert found.scales_loss == (compute == "fp16")
    assert found.recipe is None
    assert str(found) == found.products == compute


def test_a_recipe_for_matrix_products_stands_beside_bf16() -> None:
    found = Precision.of("fp8")
    assert (found.recipe, found.products) == ("fp8", "fp8")
    assert found.compute == MIXED.compute
    assert found.master == MIXED.master


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_torch_agrees_about_bytes_and_rounding(name: str) -> None:
    ours, torchs = DTYPES[name], torch_dtype(name)
    assert TORCH.keys() == DTYPES.keys()
    assert ours.bytes == torchs.itemsize
    assert ours.epsilon == (torch.finfo(torchs).eps if torchs.is_floating_point else 0)


@pytest.mark.slow
def test_no_other_file_says_what_a_dtypes_name_means() -> None:
    """No table by dtype, no comparison with a dtype's name; a recipe's field may have one as its default."""
    found = []
    for file in set(FILES) - OWNERS:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Dict):
                names = [key for key in node.keys if key is not None]
            elif isinstance(node, ast.Compare):
                names = [leaf for side in (node.left, *node.comparators) for leaf in ast.walk(side)]
            else:
                continue
            known = {leaf.value for leaf in names if isinstance(leaf, ast.Constant) and leaf.value in FLOATS}
            found += [f"{file}:{node.lineno} {sorted(known)}"] if known else []
    assert not found


def test_every_dtype_that_a_recipe_can_name_is_known() -> None:
    assert set(get_args(ComputeName)) | set(get_args(ReduceName)) <= DTYPES.keys()
