"""`plan --measure`: the best layouts are trained here, and the clock chooses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli import plan, plan_measure
from meshwright.cli.main import main
from meshwright.cli.plan_measure import MeasuredLayout, fastest, measured_lines
from meshwright.planner.query import Planned

RECIPE = """\
model: {family: llama, hidden: 32, num_layers: 2, num_heads: 2, vocab: 512}
device: cpu
data: {sources: [{path: corpus.txt}], tokenizer_vocab: 512, sequence_length: 32}
training: {global_batch: 4, steps: 1000, lr_schedule: {warmup: 100}, evaluation: {every: 1}}
layout: auto
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose data lie beside it, in another folder than the working directory."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "corpus.txt").write_text("".join(f"{i} sheep and {i * i} goats. " for i in range(3000)))
    path = tmp_path / "job" / "run.yaml"
    path.write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.slow
def test_the_best_layouts_train_here(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the recipe's length, schedule and folder; nothing is left behind but the recipe of the fastest."""
    words = ["plan", str(recipe), "--measure", "2", "--no-methods", "--json", "--write", "best.yaml"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    measured = facts["measured"]
    assert len(measured) == 2
    assert len({one["layout"] for one in measured}) == 2, "two strategies"
    for one in measured:
        assert one["error"] is None
        assert one["seconds"] > 0
        assert one["bytes"] > 2**20
    written = yaml.safe_load(Path("best.yaml").read_text())
    best = min(measured, key=lambda one: one["seconds"])["layout"].split()
    assert {f"zero={written['layout']['zero']}", f"micro_batch={written['training']['micro_batch']}"} < set(best)
    assert written["training"]["steps"] == 1000
    assert {path.name for path in tmp_path.iterdir()} <= {"job", "best.yaml", "runs"}
    assert not list(tmp_path.rglob("metrics.jsonl"))


def measuring(seconds: list[float | None], monkeypatch: pytest.MonkeyPatch) -> list[MeasuredLayout]:
    """Replace the training of layouts by these results, which are returned once measured."""
    results: list[MeasuredLayout] = []

    def measure(planned: Planned, count: int, base_dir: Path) -> list[MeasuredLayout]:
        del count, base_dir
        best = sorted(planned.plan.searched.strategies.values(), key=lambda candidate: candidate.cost)
        error = {None: "RuntimeError: no memory"}
        results[:] = [MeasuredLayout(c, s, None, error.get(s)) for c, s in zip(best, seconds, strict=False)]
        return results

    monkeypatch.setattr(plan, "measure_layouts", measure)
    return results


def test_the_clock_overrules_the_prediction(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = measuring([0.4, None, 0.3], monkeypatch)
    assert main(["plan", str(recipe), "--measure", "3", "--no-methods", "--write", "best.yaml"]) == 0
    out = capsys.readouterr().out
    best = results[2].candidate
    assert yaml.safe_load(Path("best.yaml").read_text())["layout"]["zero"] == best.job.layout.zero_stage
    line = next(line for line in out.splitlines() if line.startswith("by the clock"))
    assert "25% less than planned" in line
    assert "RuntimeError: no memory" in out
    ratios = sorted(one.ratio for one in results if one.seconds)
    assert f"by {sum(ratios) / 2:.2f}, the median" in out


def test_measurements_that_all_failed_change_nothing(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measuring([None], monkeypatch)
    assert main(["plan", str(recipe), "--measure", "--no-methods", "--write", "best.yaml"]) == 0
    assert fastest(results) is None
    chosen = results[0].candidate
    assert yaml.safe_load(Path("best.yaml").read_text())["layout"]["zero"] == chosen.job.layout.zero_stage
    assert [*measured_lines(results, chosen)][-1] == "no layout trained, so the predictions stand"
    assert [*measured_lines([replace(results[0], seconds=1.0)], chosen)][-1].endswith("the fastest of these")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cluster", "8xh100", "--measure"), "--measure trains on the devices here, but the plan is for 8 x H100"),
        (("--measure", "--explain", "memory"), "--explain derives a prediction, --measure replaces it"),
        (("--measure", "0"), "'0' is not allowed: must be a whole number, at least 1"),
        (("--measure", "--solve", "devices", "--deadline", "7d"), "--measure is for one plan"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: tuple[str, ...], message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe), *words]) == 2
    assert message in capsys.readouterr().err


def test_the_option_s_number_may_be_left_out(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting after it stays a setting."""
    counts: list[int] = []
    measured: Any = lambda planned, count, base_dir: counts.append(count) or []  # noqa: E731
    monkeypatch.setattr(plan, "measure_layouts", measured)
    assert main(["plan", str(recipe), "--measure", "training.steps=700", "--no-methods", "--json"]) == 0
    assert counts == [plan_measure.LAYOUTS]
    assert json.loads(capsys.readouterr().out)["steps"] == 700
