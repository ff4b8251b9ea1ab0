"""A run that does not fit is shown remedies: overrides that are accepted unchanged, and that fit."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.machine import Machine
from meshwright.predict.candidate import verdict
from meshwright.predict.forecast import forecast
from meshwright.spec.recipe import dump_recipe, parse_spec
from meshwright.spec.run import Run
from meshwright.trainer.remedies import remedies, remedy_lines
from meshwright.trainer.resolve import resolve_run

GPU = Machine("gpu", "NVIDIA H100 80GB HBM3", 8, 80 * 10**9, 10**12)
CPU = Machine("cpu", "cpu", 8, 64 * 10**9)

SITUATIONS: list[tuple[Machine, float, dict[str, Any]]] = [
    (GPU, 24, {"model": "llama-3.2-1b", "training": {"micro_batch": 8, "global_batch": 16}}),
    (GPU, 16, {"model": "llama-3.2-1b", "training": {"micro_batch": 2, "global_batch": 16}}),
    (GPU, 80, {"model": "llama-3.1-8b", "layout": {"dp_replicate": 8}, "training": {"micro_batch": 1}}),
    (GPU, 80, {"model": "llama-3.1-8b", "layout": {"dp_shard": 8, "zero": 1}, "training": {"micro_batch": 1}}),
    (GPU, 24, {"model": "llama-3.1-8b", "layout": {"dp_shard": 8}, "training": {"micro_batch": 1}}),
    (GPU, 4, {"model": "gpt2", "layout": {"dp_shard": 2, "zero": 1}, "training": {"micro_batch": 8}}),
    (GPU, 2.2, {"model": "gpt2", "training": {"micro_batch": 1}}),
    (GPU, 40, {"model": "llama-3.1-8b", "layout": {"tp": 2, "dp_replicate": 4}, "training": {"micro_batch": 2}}),
    (GPU, 40, {"model": "llama-3.1-8b", "layout": {"pp": 2, "dp_shard": 4}, "training": {"micro_batch": 4}}),
    (CPU, 2.0, {"model": "gpt2", "training": {"micro_batch": 4}, "device": "cpu"}),
    (CPU, 8.0, {"model": "gpt2", "layout": {"dp_replicate": 4}, "training": {"micro_batch": 8}, "device": "cpu"}),
]


@pytest.mark.parametrize(("machine", "limit", "recipe"), SITUATIONS)
def test_what_is_said_to_fit_is_accepted_and_fits(machine: Machine, limit: float, recipe: dict[str, Any]) -> None:
    recipe = {**recipe, "training": {"global_batch": 32, **recipe["training"]}}
    run = Run.model_validate(recipe)
    resolved = resolve_run(run, base_dir=Path(), machine=machine)
    found = remedies(resolved, machine, limit * 1e9)
    assert found
    assert [remedy.candidate.time.total for remedy in found] == sorted(remedy.candidate.time.total for remedy in found)
    for remedy in found:
        assert shlex.split(remedy.words) == list(remedy.overrides)
        changed = parse_spec(dump_recipe(run), Run, remedy.overrides)
        cost = forecast(resolve_run(changed, base_dir=Path(), machine=machine), machine)
        where = cost.cluster.model_copy(update={"memory_gb": limit})
        assert cost.memory == remedy.candidate.memory
        assert verdict(cost.memory, where, 0.1) == "fits"


def test_where_nothing_fits_it_says_what_is_left() -> None:
    run = Run.model_validate({"model": "llama-3.1-70b", "training": {"micro_batch": 1, "global_batch": 8}})
    found = remedies(resolve_run(run, base_dir=Path(), machine=GPU), GPU, 16e9)
    assert not found
    assert "more devices" in remedy_lines(found)[0]


@pytest.mark.exhaustive
def test_a_rehearsal_names_what_would_fit_and_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text("model: gpt2\ntraining: {micro_batch: 2, global_batch: 4}\n")
    words = ["rehearse", str(recipe), "--cluster", "1xh100", "--memory", "2.2", "--json"]
    assert main(words) == 1
    first = json.loads(capsys.readouterr().out)["remedies"][0]
    assert main([*words, *first]) == 0
    assert json.loads(capsys.readouterr().out)["remedies"] == []
