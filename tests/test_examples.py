"""The examples of plug-ins: each is short, and equal to one process in float64 under two layouts."""

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.callbacks import Callback, Training
from meshwright.spec.plugins import plugged_in
from meshwright.spec.run import Run
from meshwright.testing.ranks import RankPool
from meshwright.trainer.corpus import corpus_of, with_datasets
from meshwright.trainer.plugins import Plugins
from meshwright.trainer.resolve import resolve_run
from meshwright.trainer.run import train
from sessions import train as train_here

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
LAYOUTS: dict[str, dict[str, Any]] = {"zero-3": {"dp_shard": 2}, "tp": {"tp": 2}}


class Losses(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, training: Training, record: dict[str, Any]) -> None:
        self.found.append(record["loss"])


def example(name: str) -> Any:
    """An example's module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def recipe(name: str, cache: Path, layout: dict[str, Any]) -> Run:
    """An example's recipe in float64, on this machine's CPUs."""
    given = example(name).RUN
    changed = {"training": given["training"] | {"precision": "fp64"}, "data": given["data"] | {"cache_dir": str(cache)}}
    return Run.model_validate(given | changed | {"layout": layout, "device": "cpu", "run_dir": str(cache / "run")})


def losses_of(name: str, cache: Path, layout: dict[str, Any], root: Path) -> list[float]:
    """The losses of an example's run. Collective."""
    plugins = Plugins(**example(name).PLUGGED)
    with plugged_in(plugins.objects()):
        run = with_datasets(plugins.named_in(recipe(name, cache, layout)), EXAMPLES)
        resolved, losses = resolve_run(run, base_dir=EXAMPLES), Losses()
        train_here(resolved, root, [*plugins.callbacks, losses], corpus=corpus_of(resolved))
    return losses.found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens shared by the examples."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_equal_under_two_layouts(ranks: RankPool, cache: Path, tmp_path: Path, name: str) -> None:
    (cache / "run").mkdir(exist_ok=True)
    alone = ranks.run(1, losses_of, name, cache, {}, tmp_path / "alone")[0]
    assert len(alone) == 4
    for layout, degrees in LAYOUTS.items():
        for found in ranks.run(2, losses_of, name, cache, degrees, tmp_path / layout):
            assert found == pytest.approx(alone, rel=1e-9), layout


@pytest.mark.exhaustive
def test_all_examples_together_reach_worker_processes(tmp_path: Path, cache: Path) -> None:
    """Seven plug-ins in one call of `train`, which starts two workers."""
    every = {}
    for name in NAMES:
        plugged = example(name).PLUGGED
        every |= {key: [*every.get(key, []), *value] if key == "callbacks" else value for key, value in plugged.items()}
    assert every.keys() == {"callbacks", "dataset", "lr_schedule", "model", "objective", "optimizer"}
    results = []
    for number, layout in enumerate(({}, {"dp_shard": 2})):
        run = recipe("model", cache, layout).model_copy(update={"run_dir": str(tmp_path / str(number))})
        results.append(train(run, base_dir=EXAMPLES, **every))
        assert len((tmp_path / str(number) / "loss.csv").read_text().splitlines()) == 5
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-9)


@pytest.mark.parametrize("page", ["README.md", "docs/plugins.md"])
def test_plug_ins_have_as_few_lines_as_pages_say(page: str) -> None:
    """From the first line of the first definition to the last line of the last one, empty lines included."""
    text = (EXAMPLES.parent / page).read_text()
    (stated,) = re.findall(r"each in under (\d+) lines\sbeside imports and recipe", text)
    longest = max(map(lines_of_plug_in, NAMES))
    assert longest < int(stated) <= longest + 5


def lines_of_plug_in(name: str) -> int:
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    parts = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name != "main"]
    return (parts[-1].end_lineno or 0) - parts[0].lineno + 1
