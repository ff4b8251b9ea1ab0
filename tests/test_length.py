"""The length of a run: in steps, in tokens, or in epochs that are counted on its data."""

from math import ceil
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.cli.main import main
from meshwright.data.mixture import training_samples
from meshwright.data.prepare import prepare_corpus
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import load_recipe
from meshwright.spec.run import Run
from meshwright.trainer.corpus import starting_model
from meshwright.trainer.folder import read_resolved
from meshwright.trainer.resolve import resolve_run


def recipe(folder: Path, **training: Any) -> Run:
    for name, words in (("a", 300), ("b", 700)):
        (folder / f"{name}.txt").write_text("".join(f"word {number} of {name}. " for number in range(words)))
    sources = [{"path": f"{name}.txt", "name": name} for name in "ab"]
    data = {"sources": sources, "sequence_length": 16, "tokenizer_vocab": 270, "cache_dir": str(folder / "cache")}
    return Run.model_validate(
        {
            "model": {"family": "llama", "hidden": 16, "num_layers": 1, "num_heads": 2},
            "data": data,
            "training": {"global_batch": 8, "precision": "fp32", **training},
            "run_dir": str(folder / "run"),
            "device": "cpu",
        }
    )


def samples_of(run: Run, folder: Path) -> int:
    corpus = prepare_corpus(run.data, base_dir=folder, model=starting_model(run, folder))
    return sum(map(len, training_samples(corpus, run.data).streams))


@pytest.mark.parametrize("epochs", [1, 2.5, 0.1])
def test_epochs_are_counted_on_the_data(tmp_path: Path, epochs: float) -> None:
    run = recipe(tmp_path, epochs=epochs)
    samples = samples_of(run, tmp_path)
    resolved = resolve_run(run, base_dir=tmp_path)
    assert samples > 100
    assert resolved.run.training.steps == ceil(epochs * samples / 8)
    assert resolved.run.training.epochs is None
    assert resolved.given == run
    assert resolved.reasons["training.steps"].endswith(f": {epochs:g} epochs of {samples} samples, 8 a step")


def test_tokens_fill_whole_steps(tmp_path: Path) -> None:
    for tokens, steps in ((1, 1), (128, 1), (129, 2), (12_800, 100)):
        assert resolve_run(recipe(tmp_path, tokens=tokens), base_dir=tmp_path).run.training.steps == steps
        assert recipe(tmp_path, tokens=tokens).known_steps() == steps
    assert recipe(tmp_path, steps=7).known_steps() == 7
    assert recipe(tmp_path, epochs=7).known_steps() is None


def test_the_schedule_is_that_of_the_counted_steps(tmp_path: Path) -> None:
    """A warm-up may be longer than the default number of steps."""
    run = recipe(tmp_path, tokens=128 * 5000, lr_schedule={"warmup": 2000})
    assert resolve_run(run, base_dir=tmp_path).run.training.lr_schedule.warmup_steps(5000) == 2000
    with pytest.raises(UserError, match="warmup=2000 exceeds steps=10"):
        resolve_run(recipe(tmp_path, tokens=1280, lr_schedule={"warmup": 2000}), base_dir=tmp_path)


@pytest.mark.parametrize("both", [{"steps": 5, "epochs": 1}, {"epochs": 1, "tokens": 5}, {"steps": 5, "tokens": 5}])
def test_one_length_alone(tmp_path: Path, both: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="all set the length of the run; give one of them"):
        recipe(tmp_path, **both)


def test_a_run_of_one_epoch_sees_every_sample_and_keeps_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = recipe(tmp_path, epochs=0.2)
    steps = ceil(0.2 * samples_of(run, tmp_path) / 8)
    result = meshwright.train(run)
    assert result.step == steps
    assert load_recipe(result.run_dir / "recipe.yaml", []).training.epochs == 0.2
    assert read_resolved(result.run_dir / "resolved.yaml").run.training.steps == steps
    assert meshwright.train(run, resume=True).step == steps


def test_check_and_plan_say_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = ceil(2 * samples_of(recipe(tmp_path, epochs=2), tmp_path) / 8)
    Path("run.yaml").write_text(
        "model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2}\n"
        "data: {sources: [{path: a.txt, name: a}, {path: b.txt, name: b}], sequence_length: 16, tokenizer_vocab: 270}\n"
        "training: {epochs: 2, global_batch: 8, precision: fp32}\ndevice: cpu\n"
    )
    assert main(["check", "run.yaml"]) == 0
    assert f"; {steps} steps, " in capsys.readouterr().out
    assert main(["plan", "run.yaml", "--cluster", "8xh100"]) == 0
    assert "the recipe's epochs are counted when the data are prepared" in capsys.readouterr().out
