"""Every named choice is matched exhaustively: a name that nobody knows fails where it is used, and never passes for
another one; a new name that is added as ARCHITECTURE.md says is used or refused everywhere."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from meshwright.comm.quantize import Coded
from meshwright.data.packing import build_samples
from meshwright.engines.registry import ENGINES
from meshwright.families import FAMILIES, parameter_table
from meshwright.models import build_model
from meshwright.models.attention_kernels import NamedCore
from meshwright.models.init import draw_rows
from meshwright.models.rope import rope_frequencies
from meshwright.optim.bf16 import Bf16
from meshwright.optim.build import OPTIMIZERS
from meshwright.optim.schedule import SHAPES
from meshwright.parallel.context import sequence_places
from meshwright.prove.tolerance import derive_tolerance
from meshwright.spec.data import DataSpec
from meshwright.spec.layers import Rope, RopeScaling
from meshwright.spec.layout import LayoutSpec
from meshwright.spec.model import FamilyName, ModelSpec, Parameter
from meshwright.spec.quantized import sent_bytes
from meshwright.spec.recompute import stage_counts
from meshwright.spec.training import OptimizerName, ScheduleName
from served import spec_of
from tiny import tiny_run
from tokens import token_file

UNKNOWN: Any = "a name that nobody knows"


def test_names_and_registries_agree() -> None:
    assert {*FAMILIES, "transformers"} == set(get_args(FamilyName))
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))
    assert set(SHAPES) == set(get_args(ScheduleName))


def with_unknown(field: str, **more: Any) -> ModelSpec:
    return spec_of("llama", **more).model_copy(update={field: UNKNOWN})


USES: dict[str, Callable[[], Any]] = {
    "norm, in the table": lambda: parameter_table(with_unknown("norm")),
    "norm, in the module": lambda: build_model(with_unknown("norm")),
    "positions, in the table": lambda: parameter_table(with_unknown("positions")),
    "activation": lambda: build_model(with_unknown("activation")),
    "norms of queries and keys, in the table": lambda: parameter_table(with_unknown("qk_norm")),
    "norms of queries and keys, in the module": lambda: build_model(with_unknown("qk_norm")),
    "rope scaling": lambda: rope_frequencies(
        Rope(theta=1e4, scaling=RopeScaling(factor=2.0)).model_copy(
            update={"scaling": RopeScaling(factor=2.0).model_copy(update={"kind": UNKNOWN})}
        ),
        8,
        torch.device("cpu"),
    ),
    "initialization": lambda: draw_rows(Parameter(name="w", dims=("embed",), shape=(4,), init=UNKNOWN), 0, 0, 4),
    "attention": lambda: NamedCore(UNKNOWN)(*(torch.zeros(1, 2, 4, 8),) * 3, None),
    "context method": lambda: sequence_places(UNKNOWN, degree=2, rank=0, length=8),
    "quantized format": lambda: Coded(torch.zeros(1, 20, dtype=torch.uint8), 8, UNKNOWN).read(torch.zeros(1, 8)),
    "bytes of a quantized format": lambda: sent_bytes(8, UNKNOWN, 4, matrix=True),
    "recomputation": lambda: stage_counts(UNKNOWN, (2,)),
    "rounding": lambda: Bf16(rounding=UNKNOWN, moments=False, seed=0).write(
        torch.zeros(2, 2, dtype=torch.bfloat16), {}, slice(0, 2), torch.zeros(2, 2), 1
    ),
}


@pytest.mark.parametrize("use", USES)
def test_an_unknown_name_fails(use: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        USES[use]()


def test_an_unknown_packing_fails() -> None:
    data = DataSpec(sequence_length=8).model_copy(update={"packing": UNKNOWN})
    with pytest.raises(AssertionError):
        build_samples(token_file(list(range(9)), [9]), data)


def test_an_unknown_optimizer_has_no_tolerance() -> None:
    run = tiny_run(LayoutSpec())
    optimizer = run.run.training.optimizer.model_copy(update={"name": UNKNOWN})
    training = run.run.training.model_copy(update={"optimizer": optimizer})
    with pytest.raises(AssertionError, match="smoothness"):
        derive_tolerance(run.model_copy(update={"run": run.run.model_copy(update={"training": training})}))


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "meshwright"])
def test_other_engines_refuse_a_schedule_that_they_do_not_name(engine: str) -> None:
    """A schedule that was added as ARCHITECTURE.md says must not be exported as another one."""
    run = tiny_run(LayoutSpec())
    schedule = run.run.training.lr_schedule.model_copy(update={"name": "one_cycle"})
    training = run.run.training.model_copy(update={"lr_schedule": schedule})
    run = run.model_copy(update={"run": run.run.model_copy(update={"training": training})})
    settings = {setting.path: setting for setting in ENGINES[engine].settings(run)}
    assert settings["training.lr_schedule.name"].fate == "refused"
