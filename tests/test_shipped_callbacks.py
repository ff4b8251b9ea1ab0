"""The callbacks that ship: their numbers equal one process's in float64, and they leave no trace in a run."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.callbacks import EMA, Callback, EarlyStopping, GradientNoiseScale, LRFinder, Profiler
from meshwright.callbacks.lr_finder import steepest
from meshwright.callbacks.noise_scale import unbiased
from meshwright.checkpoint.dcp import load_tensors
from meshwright.cli.main import main
from meshwright.models.batch import to_device
from meshwright.serve import trained
from meshwright.serve.trained import open_trained
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import PluginSpec, make_plugin
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import build_here, whole_of_all
from meshwright.testing.ranks import RankPool
from meshwright.trainer import display
from meshwright.trainer.display import following
from meshwright.trainer.evaluate import evaluate_held_out
from meshwright.trainer.metrics import MetricsJournal, read_journal
from meshwright.trainer.run import TrainResult
from meshwright.trainer.run import train as train_run
from sessions import tiny, train
from tiny import tiny_corpus

SWEEP: dict[str, Any] = {"start": 1e-4, "end": 2.0, "steps": 6, "diverged": 1.5}


# ---- numbers, under layouts and one process


def shipped() -> list[Callback]:
    return [LRFinder(**SWEEP), EMA(decay=0.6), GradientNoiseScale(every=2)]


def outcome(run: ResolvedRun, root: Path, callbacks: list[Callback], resume: Path | None = None) -> dict[str, Any]:
    """The records of a run with these callbacks, its last weights and its averages, whole."""
    trainer = train(run, root, callbacks, resume).trainer
    averages = next((each.average for each in callbacks if isinstance(each, EMA)), {})
    records = read_journal(root / "metrics.jsonl") if trainer.worker.rank == 0 else []
    return {
        **{kind: list(group) for kind, group in _by_kind(records).items()},
        "weights": whole_of_all(trainer, trainer.parameters),
        "averages": whole_of_all(trainer, averages),
    }


def with_shipped(run: ResolvedRun, root: Path, resume: Path | None = None) -> dict[str, Any]:
    return outcome(run, root, shipped(), resume)


def without(run: ResolvedRun, root: Path) -> dict[str, Any]:
    return outcome(run, root, [])


def _by_kind(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record)
    return kinds


class Direct(Callback):
    """The same numbers as the shipped ones, computed directly for one process."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.averages: list[dict[str, torch.Tensor]] = []
        self.noise: list[tuple[float, float]] = []

    def on_start(self, training: Any) -> None:
        self.average = {name: tensor.detach().clone() for name, tensor in training.parameters.items()}

    def on_step(self, training: Any, record: dict[str, Any]) -> None:
        decay = min(0.6, (1 + training.step) / (10 + training.step))
        for name, tensor in training.parameters.items():
            self.average[name] = decay * self.average[name] + (1 - decay) * tensor.detach()
        self.averages.append(dict(self.average))
        if training.step % 2 == 0:
            self.noise.append(self._paper(training))

    def _paper(self, training: Any) -> tuple[float, float]:
        """McCandlish et al., equation A.2, from each sample's own gradient: the small batches are the two halves."""
        passes, gradients = training.trainer.train_step.passes, []
        for batch in training.loader.microbatches(training.step):
            for row in range(len(batch.tokens)):
                sample = replace(batch, tokens=batch.tokens[row : row + 1], labels=batch.labels[row : row + 1])
                loss = passes.model(to_device(sample, torch.device("cpu")), passes.loss) / (sample.labels >= 0).sum()
                found = torch.autograd.grad(loss, list(training.parameters.values()))
                gradients.append(torch.cat([gradient.flatten() for gradient in found]))
        each = torch.stack(gradients)
        big, tokens = len(each) * batch.tokens.shape[1], batch.tokens.shape[1]
        small = big // 2
        squares = [half.mean(0).square().sum().item() for half in each.split(len(each) // 2)]
        big_square, small_square = each.mean(0).square().sum().item(), sum(squares) / 2
        assert small == len(each) // 2 * tokens
        square = (big * big_square - small * small_square) / (big - small)
        return square, (small_square - big_square) / (1 / small - 1 / big)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process: the shipped callbacks and the direct computation."""
    run, direct = tiny("single", evaluate=3, accumulation=4), Direct()
    root = tmp_path_factory.mktemp("alone")
    return outcome(run, root, [*shipped(), direct]) | {"direct": direct, "root": root}


@pytest.mark.slow
def test_average_and_noise_scale_equal_their_definitions(alone: dict[str, Any]) -> None:
    direct: Direct = alone["direct"]
    for name, average in direct.average.items():
        torch.testing.assert_close(alone["averages"][name], average, rtol=0, atol=1e-15)
    assert [record["step"] for record in alone["noise_scale"]] == [2, 4, 6]
    means: tuple[float, float] | None = None
    for record, (square, trace) in zip(alone["noise_scale"], direct.noise, strict=True):
        assert record["gradient_square"] == pytest.approx(square, rel=1e-9)
        assert record["trace"] == pytest.approx(trace, rel=1e-9)
        means = (square, trace) if means is None else (0.9 * means[0] + 0.1 * square, 0.9 * means[1] + 0.1 * trace)
        assert record["terms"] == pytest.approx(means[1] / means[0] if means[0] > 0 else None, rel=1e-9)
        assert means[0] <= 0 or record["sequences"] == pytest.approx(record["terms"] / 16)


@pytest.mark.slow
def test_the_evaluation_of_an_average_is_of_its_weights(alone: dict[str, Any]) -> None:
    direct: Direct = alone["direct"]
    run = tiny("single", evaluate=3, accumulation=4)
    for record, step in zip(alone["ema"], (3, 6), strict=True):
        trainer = build_here(run)
        with torch.no_grad():
            for name, tensor in trainer.parameters.items():
                tensor.copy_(direct.averages[step - 1][name])
        found = evaluate_held_out(trainer, tiny_corpus(held_out=True), SimpleNamespace(number=0))  # pyright: ignore
        assert found is not None
        assert record["step"] == step
        assert record["loss"] == pytest.approx(found.loss, rel=1e-12)
        assert record["tokens"] == found.tokens


@pytest.mark.every(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero-3-uneven", "pp"])
def test_numbers_equal_one_process_under_layouts(
    ranks: RankPool, tmp_path: Path, alone: dict[str, Any], strategy: str
) -> None:
    run = tiny(strategy, evaluate=3, accumulation=2, checkpoint={"every": 3})
    world = run.run.layout.world_size
    found = ranks.run(world, with_shipped, run, tmp_path / "with")
    for kind, names in {
        "lr_finder": ("lr", "loss", "smoothed"),
        "lr_suggestion": ("lr",),
        "noise_scale": ("gradient_square", "trace", "terms", "sequences"),
        "ema": ("loss", "tokens"),
        "evaluation": ("loss",),
    }.items():
        assert len(found[0][kind]) == len(alone[kind]) > 0
        for ours, theirs in zip(found[0][kind], alone[kind], strict=True):
            assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-9)
    for rank in found:
        for name, average in alone["averages"].items():
            torch.testing.assert_close(rank["averages"][name], average, rtol=0, atol=1e-11)
    _no_trace(found[0], ranks.run(world, without, run, tmp_path / "without")[0])
    halfway = tmp_path / "with/checkpoints/step-00000003"
    _continues(found[0], ranks.run(world, with_shipped, run, tmp_path / "again", halfway)[0])


def _continues(straight: dict[str, Any], resumed: dict[str, Any]) -> None:
    """Averages survive a stop bit for bit, and so do the terms of averaged noise scales."""
    assert "lr_finder" not in resumed  # it has begun already
    for name, average in straight["averages"].items():
        assert torch.equal(resumed["averages"][name], average), name
        assert not torch.equal(average, straight["weights"][name]), name
    assert resumed["noise_scale"][-1]["terms"] == straight["noise_scale"][-1]["terms"]


def _no_trace(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """The run was bit-identical to one without callbacks."""
    assert [record["loss"] for record in found["step"]] == [record["loss"] for record in plain["step"]]
    for name, weight in plain["weights"].items():
        assert torch.equal(found["weights"][name], weight), name


@pytest.mark.slow
def test_a_run_with_dropout_goes_on_as_without_callbacks(tmp_path: Path) -> None:
    """Dropout would see other random numbers if a probe used some; under bf16 the model computes with copies."""
    lora = {"method": "lora", "rank": 2, "dropout": 0.5}
    run = tiny("single", evaluate=3, accumulation=2, finetune=lora, precision="bf16")
    found = with_shipped(run, tmp_path / "with")
    _no_trace(found, without(run, tmp_path / "without"))
    assert [record["loss"] for record in found["ema"]] != [record["loss"] for record in found["evaluation"]]


def test_estimates_are_unbiased() -> None:
    """Over all ways to cut a batch in two, the mean estimate of tr(Sigma) is exactly the samples' own variance, even if
    the parts have different sizes."""
    each = np.random.default_rng(0).normal(size=(6, 5)) + 1
    mean = each.mean(0)
    variance = ((each - mean) ** 2).sum() / (len(each) - 1)
    for size in (2, 3):
        found = []
        for first in itertools.combinations(range(6), size):
            second = [i for i in range(6) if i not in first]
            contrast = np.linalg.norm(each[list(first)].mean(0) - each[second].mean(0))
            found.append(unbiased(float(np.linalg.norm(mean)), float(contrast), size, 6 - size))
        square, trace = np.mean(found, axis=0)
        assert trace == pytest.approx(variance)
        assert square == pytest.approx(mean @ mean - variance / 6)


def test_the_steepest_descent_is_found() -> None:
    rates = np.logspace(-4, 0, 41)
    curve = [{"lr": rate, "smoothed": -np.tanh(3 * np.log10(rate / 1e-2))} for rate in rates]
    assert steepest(curve) == pytest.approx(1e-2)
    assert steepest([{"lr": rate, "smoothed": rate} for rate in rates]) is None
    assert steepest(curve[:2]) is None


@pytest.mark.slow
def test_a_sweep_ends_where_the_loss_diverges(tmp_path: Path) -> None:
    grown, overflown = LRFinder(1e-3, 1e6, steps=40), LRFinder(1e-3, 1e300, steps=40, diverged=1e200)
    train(tiny("single"), tmp_path, [grown, overflown])
    for finder in (grown, overflown):
        assert 2 <= len(finder.curve) < finder.steps
        assert all(np.isfinite(point["loss"]) for point in finder.curve)
    assert grown.suggestion is not None


# ---- early stopping


class Asked:
    """A run in progress, for callbacks that only read."""

    def __init__(self, step: int = 0, **training: Any) -> None:
        fields = {"steps": 9, "evaluation": {"every": 1}, **training}
        self.run = Run.model_validate({"model": "gpt2", "training": fields})
        self.step, self.world_size, self.rank, self.reason = step, 2, 0, ""

    def stop(self, reason: str) -> None:
        self.reason = reason


def stopped_at(stopping: EarlyStopping, values: list[float | None], kind: str = "evaluation") -> tuple[int, str]:
    training: Any = Asked()
    stopping.on_start(training)
    for step, value in enumerate(values, 1):
        stopping.on_record(training, {"kind": "other", "step": step, "loss": 0.0})
        stopping.on_record(training, {"kind": kind, "step": step, "loss": value})
        if training.reason:
            return step, training.reason
    return 0, ""


def test_a_run_stops_when_a_figure_stands_still() -> None:
    nan = float("nan")
    assert stopped_at(EarlyStopping(patience=2), [3, 2, 1, 1.5, 1]) == (
        5,
        "evaluation/loss was best at step 3 (1) and has not improved in 2 records since",
    )
    assert stopped_at(EarlyStopping(patience=2), [3, 2, 2.5, 1, 1.5, 0.5, nan]) == (0, "")
    assert stopped_at(EarlyStopping(patience=2), [nan, 2, None, nan])[0] == 4
    assert stopped_at(EarlyStopping(patience=2), [nan, nan])[1].startswith("evaluation/loss never was a number")
    assert stopped_at(EarlyStopping(patience=2, min_delta=0.5), [3, 2.6, 2.4, 2.2, 1.8])[0] == 0
    assert stopped_at(EarlyStopping(patience=2, min_delta=0.5), [3, 2.6, 2.5])[0] == 3
    assert stopped_at(EarlyStopping(patience=2, mode="max"), [1, 2, 3, 2.5, 3])[0] == 5
    assert stopped_at(EarlyStopping("step/loss", patience=1), [1, 2], kind="step")[0] == 2
    with pytest.raises(UserError, match=r"records of kind step have no value 'los'; they have step/loss"):
        stopped_at(EarlyStopping("step/los"), [1], kind="step")
    with pytest.raises(UserError, match=r"set training.evaluation.every and data.held_out"):
        EarlyStopping().on_start(Asked(evaluation={"every": 0}))  # pyright: ignore[reportArgumentType]


def stopping_early(run: ResolvedRun, root: Path, patience: int, resume: Path | None = None) -> dict[str, Any]:
    return outcome(run, root, [EarlyStopping("step/tokens", patience=patience)], resume)


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", ["single", "zero-3-tp"])
def test_a_stopped_run_is_saved_says_why_and_counts_on(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    """Tokens only grow, so only the first step is an improvement."""
    run = tiny(strategy, accumulation=2, checkpoint={"every": 2})
    world = run.run.layout.world_size
    found = ranks.run(world, stopping_early, run, tmp_path / "a", 3)[0]
    assert [record["step"] for record in found["step"]] == [1, 2, 3, 4]
    assert found["checkpoint"][-1]["step"] == found["evaluation"][-1]["step"] == 4
    assert found["end"][0]["why"].startswith("step/tokens was best at step 1 (192) and has not improved in 3 records")
    again = ranks.run(world, stopping_early, run, tmp_path / "b", 3, tmp_path / "a/checkpoints/step-00000002")[0]
    assert [record["step"] for record in again["step"]] == [3, 4]
    assert again["end"][0]["why"] == found["end"][0]["why"]


# ---- the profiler


def profiled(run: ResolvedRun, root: Path) -> list[int]:
    train(run, root, [Profiler([2, 3], ranks=[0, 2])])
    return []


@pytest.mark.exhaustive
def test_chosen_ranks_write_traces_of_chosen_steps(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, profiled, tiny("zero-3-tp", accumulation=2), tmp_path)
    traces = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("profile/*"))
    assert traces == ["profile/rank-0-steps-2-3.json", "profile/rank-2-steps-2-3.json"]
    for trace in traces:
        events = json.loads((tmp_path / trace).read_text())["traceEvents"]
        names = [event["name"] for event in events if event.get("ph") == "X"]
        steps = sum(name.startswith("Optimizer.step#") for name in names)
        assert steps == 2
        assert any("all_gather" in name for name in names)


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("early_stopping", {"monitor": "loss"}, "monitor='loss' must be KIND/NAME"),
        ("early_stopping", {"patience": 0}, "patience=0 must be a whole number"),
        ("early_stopping", {"min_delta": "a"}, "min_delta='a' must be a number"),
        ("early_stopping", {"mode": "least"}, "mode='least' must be min or max"),
        ("ema", {"decay": 1}, "decay=1 must be a number in"),
        ("ema", {"decya": 1}, "does not take these options: .*decya"),
        ("noise_scale", {"every": 0}, "every=0 must be a whole number"),
        ("noise_scale", {"decay": -1}, "decay=-1 must be a number in"),
        ("lr_finder", {"start": 1, "end": 0.1}, "0 < start < end"),
        ("lr_finder", {"steps": 2}, "steps=2 must be a whole number, at least 3"),
        ("lr_finder", {"diverged": 1}, "diverged=1 must be a number above 1"),
        ("lr_finder", {"smoothing": 1}, "smoothing=1 must be"),
        ("profiler", {"steps": [3, 2]}, "must be the first and the last step"),
        ("profiler", {"steps": 3}, "must be the first and the last step"),
        ("profiler", {"ranks": []}, "must be different ranks"),
        ("profiler", {"ranks": [0, 0]}, "must be different ranks"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        make_plugin("callbacks", PluginSpec(name=name, options=options))


def test_what_a_run_cannot_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one microbatch on one replica; set training.micro_batch"):
        train(tiny("single"), tmp_path / "a", [GradientNoiseScale()])
    with pytest.raises(UserError, match=r"step 7 does not exist; this run has training.steps=6"):
        train(tiny("single"), tmp_path / "b", [Profiler([6, 7])])
    with pytest.raises(UserError, match=r"rank 1 does not exist; this run has 1 ranks"):
        train(tiny("single"), tmp_path / "c", [Profiler([1, 2], ranks=[0, 1])])


# ---- a notebook


class Handle:
    """A notebook's handle for the output of `display`."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> "Handle":
        assert raw
        assert display_id
        self.shown.append(bundle["text/plain"])
        return self

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        assert bundle["text/html"].startswith("<progress value=")
        self.shown.append(bundle["text/plain"])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """This process as a Jupyter kernel."""
    handle = Handle()
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    ipython.display = SimpleNamespace(display=handle.display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    monkeypatch.setattr(display, "RENEW_SECONDS", 0.0)
    monkeypatch.setattr(display, "FOLLOW_SECONDS", 0.01)
    return handle


def test_a_notebook_shows_a_bar(kernel: Handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = train(tiny("single"), tmp_path, [])
    assert [line.split("  ")[0] for line in kernel.shown] == [f"step {step}/6" for step in range(1, 7)]
    assert "gnorm" not in session.display.stream.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    with following(tmp_path / "metrics.jsonl", 8), MetricsJournal(tmp_path / "metrics.jsonl") as journal:
        journal.write({"kind": "checkpoint", "step": 7})
        journal.write({"kind": "step", "step": 7, "loss": 1.0, "lr": 0.1, "eta": 3.2})
        journal.write({"kind": "step", "step": 8, "loss": 1.0, "lr": 0.1, "eta": None})
    assert kernel.shown[-1] == "step 8/8  loss 1.0000  lr 1.0e-01"
    assert not any("step 6/8" in line for line in kernel.shown)  # earlier records are not shown again
    monkeypatch.setattr(kernel, "update", None)
    train(tiny("single"), tmp_path / "gone", [])  # the notebook is closed: training continues
    ipython: Any = sys.modules["IPython"]
    for other in (None, SimpleNamespace()):  # plain Python, and a terminal's shell
        ipython.get_ipython = lambda other=other: other
        assert display.notebook_bar(3) is None


# ---- named in a recipe, and the average in use


@pytest.fixture(scope="module")
def run_of_all(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run whose recipe names all of them."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "text.txt").write_text("fish number nine swims in the sea\n" * 200)
    run = Run.model_validate(
        {
            "model": {"family": "llama", "hidden": 16, "num_layers": 1, "num_heads": 2, "max_positions": 32},
            "data": {"sources": "*.txt", "tokenizer_vocab": 280, "sequence_length": 8, "cache_dir": str(folder / "c")},
            "training": {"steps": 6, "global_batch": 4, "micro_batch": 2, "precision": "fp32"}
            | {"evaluation": {"every": 2, "batches": 1}, "lr_schedule": {"warmup": 1}},
            "callbacks": [
                {"name": "early_stopping", "options": {"monitor": "ema/loss", "patience": 1, "mode": "max"}},
                {"name": "ema", "options": {"decay": 0.9}},
                {"name": "lr_finder", "options": {"steps": 4}},
                {"name": "noise_scale", "options": {"every": 1}},
                {"name": "profiler", "options": {"steps": [1, 1]}},
            ],
            "device": "cpu",
            "run_dir": str(folder / "run"),
        }
    )
    return train_run(run, base_dir=folder)


@pytest.mark.slow
def test_a_recipe_names_them(run_of_all: TrainResult) -> None:
    history = run_of_all.history
    assert run_of_all.step == 4  # the loss has fallen, which is no improvement for mode max
    assert history.of("end")[0]["why"].startswith("ema/loss was best at step 2")
    assert len(history.of("lr_finder")) == 4
    assert [record["step"] for record in history.of("noise_scale")] == [1, 2, 3, 4]
    assert (run_of_all.run_dir / "profile/rank-0-steps-1-1.json").is_file()


@pytest.mark.slow
def test_averaged_weights_are_used_where_they_are_asked_for(
    run_of_all: TrainResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = dict(open_trained(run_of_all.run_dir, device="cpu").model.named_parameters())
    averaged = dict(open_trained(run_of_all.checkpoint, device="cpu", averaged=True).model.named_parameters())
    kept = {f"callbacks.EMA.{name}": torch.empty_like(tensor) for name, tensor in last.items()}
    load_tensors(run_of_all.checkpoint, kept)
    for name, tensor in last.items():
        assert torch.equal(averaged[name], kept[f"callbacks.EMA.{name}"]), name
        assert not torch.equal(averaged[name], tensor), name
    monkeypatch.setattr(trained, "AVERAGED", "callbacks.Other.")
    with pytest.raises(UserError, match=r"step-00000004 has no averaged weights; train with callbacks=\[ema\]"):
        open_trained(run_of_all.run_dir, device="cpu", averaged=True)
    with pytest.raises(UserError, match="is neither a run nor a checkpoint, so it has no averaged weights"):
        open_trained(tmp_path, device="cpu", averaged=True)
    asked: list[bool] = []

    def opened(*_: object, averaged: bool, **__: object) -> None:
        asked.append(averaged)
        raise UserError("seen")

    monkeypatch.setattr(trained, "open_trained", opened)
    for words in (["generate", "run", "--prompt", "a"], ["eval", "run"], ["export", "run", "--hf", "there"]):
        assert main(words) == main([*words, "--ema"]) == 2
    assert asked == [False, True] * 3
