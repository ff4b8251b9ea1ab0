"""Hooks of a run: their arguments, their requests, their state after a stop, and their transfer to workers."""

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.callbacks import Callback, Training, named_callbacks
from meshwright.checkpoint.manifest import list_checkpoints
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import PluginSpec, find_plugin, make_plugin
from meshwright.spec.run import ResolvedRun, Run
from meshwright.testing.equivalence import whole
from meshwright.testing.ranks import RankPool
from meshwright.trainer.metrics import History, read_journal
from meshwright.trainer.plugins import Plugins, read_plugins, write_plugins
from sessions import STEPS, tiny, train


class Asks(Callback):
    """Makes requests on the last rank only: an evaluation at step 1, a checkpoint at step 2, the end after step 4."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_start(self, training: Training) -> None:
        self.seen.append(("start", training.step))

    def on_step(self, training: Training, record: dict[str, Any]) -> None:
        assert record["step"] == training.step
        if training.rank == training.world_size - 1:
            if training.step == 1:
                training.request_evaluation()
            if training.step == 2:
                training.request_save()
            if training.step == 4:
                training.stop("seen enough")

    def on_evaluate(self, training: Training, record: dict[str, Any]) -> None:
        self.seen.append((record["kind"], record["step"]))
        training.request_evaluation()  # it has just been measured: nothing happens

    def on_save(self, training: Training, record: dict[str, Any]) -> None:
        self.seen.append((record["kind"], record["step"]))

    def on_stop(self, training: Training, record: dict[str, Any]) -> None:
        self.seen.append((record["kind"], training.step))
        assert record["why"] == "seen enough"


def what_was_asked_for(run: ResolvedRun, root: Path) -> list[tuple[str, int]]:
    asks = Asks()
    train(run, root, [asks])
    return asks.seen


@pytest.mark.parametrize("strategy", ["single", "zero-3"])
def test_what_one_rank_asks_for_happens_on_all_at_the_same_step(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    run = tiny(strategy, checkpoint={"asynchronous": False})
    happened = [("evaluation", 1), ("checkpoint", 2), ("evaluation", 4), ("checkpoint", 4), ("end", 4)]
    for seen in ranks.run(run.run.layout.world_size, what_was_asked_for, run, tmp_path):
        assert seen == [("start", 0), *happened]
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002", "step-00000004"]
    written = [(record["kind"], record["step"]) for record in read_journal(tmp_path / "metrics.jsonl")]
    assert [each for each in written if each[0] != "step"] == happened
    assert [step for kind, step in written if kind == "step"] == [1, 2, 3, 4]


class Sums(Callback):
    """The sum of the weights after every step, and the losses: tensors sharded like the weights, and a value."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.sums: dict[str, torch.Tensor] = {}

    def tensors(self, parameters: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        self.sums = self.sums or {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        return self.sums

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])

    def on_step(self, training: Training, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        for name, total in self.tensors(training.parameters).items():
            total += training.parameters[name].detach()


def summed(run: ResolvedRun, root: Path, resume: Path | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    sums = Sums()
    train(run, root, [sums], resume)
    return sums.losses, {name: whole(tensor) for name, tensor in sums.sums.items()}


@pytest.mark.slow
def test_state_and_tensors_survive_a_stop_and_another_layout(ranks: RankPool, tmp_path: Path) -> None:
    losses, sums = ranks.run(1, summed, tiny("single"), tmp_path / "alone")[0]
    assert len(losses) == STEPS
    saving = tiny("zero-3", checkpoint={"every": 3})
    world = saving.run.layout.world_size
    ranks.run(world, summed, saving, tmp_path / "split")
    halfway = tmp_path / "split/checkpoints/step-00000003"
    for strategy in ("single", "zero-3", "ddp"):
        run = tiny(strategy)
        root = tmp_path / f"again-{strategy}"
        for again, continued in ranks.run(run.run.layout.world_size, summed, run, root, halfway):
            assert again == pytest.approx(losses, rel=1e-9)
            for name, total in sums.items():
                torch.testing.assert_close(continued[name], total, rtol=0, atol=1e-8)


def test_a_callback_that_the_checkpoint_does_not_know_begins_anew(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, what_was_asked_for, tiny("single"), tmp_path)
    losses, _ = ranks.run(1, summed, tiny("single"), tmp_path / "b", tmp_path / "checkpoints/step-00000004")[0]
    assert len(losses) == STEPS - 4


# ---- how callbacks reach a run

MINE = """
import torch
from meshwright import Callback


class Early(Callback):
    def __init__(self, after=2):
        self.after = after

    def on_start(self, training):
        with open(f"drawn-{training.rank}", "w") as file:
            file.write(str(torch.rand(3).tolist()))

    def on_step(self, training, record):
        if training.step == self.after and training.rank == training.world_size - 1:
            training.stop(f"enough of {record['loss'] > 0}")


def nested():
    class Inner(Callback):
        pass

    return Inner()
"""

SCRIPT = """
import sys
from mine import Early
from meshwright import Callback, Run, train
from meshwright.spec.errors import UserError


class Here(Callback):
    pass


run = Run.model_validate({
    "model": {"family": "llama", "hidden": 16, "num_layers": 1, "num_heads": 2, "max_positions": 32},
    "data": {"sources": "*.txt", "tokenizer_vocab": 280, "sequence_length": 8, "cache_dir": "cache"},
    "training": {"steps": 5, "global_batch": 4, "precision": "fp32", "lr_schedule": {"warmup": 1}},
    "layout": {"dp_shard": 2}, "device": "cpu", "run_dir": "run",
})
try:
    train(run, callbacks=[Here()])
except UserError as error:
    print("UserError:", error, file=sys.stderr)
result = train(run, callbacks=[Early(after=3)])
print(result.step, result.history.of("end")[-1]["why"], len(result.history.of("step")))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "text.txt").write_text("fish number nine swims in the sea\n" * 200)
    return tmp_path


@pytest.mark.slow
def test_a_script_s_callback_reaches_its_workers(folder: Path) -> None:
    found = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "UserError: Here is defined in __main__, so worker processes cannot import it" in found.stderr
    assert "move it into an importable module" in found.stderr
    assert found.stdout.splitlines()[-1] == "3 enough of True 3"
    # PyTorch's own generator is seeded from training.seed and the rank.
    for rank in range(2):
        torch.manual_seed(rank)
        assert (folder / f"drawn-{rank}").read_text() == str(torch.rand(3).tolist())


def test_what_cannot_be_imported_elsewhere_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    import mine  # pyright: ignore[reportMissingImports]

    with pytest.raises(UserError, match=r"Inner is defined in mine inside a function"):
        write_plugins(Plugins(callbacks=(mine.nested(),)), folder)
    early = mine.Early(after=3)
    early.function = lambda: 1
    with pytest.raises(UserError, match="<lambda> is defined in test_callbacks inside a function"):
        write_plugins(Plugins(callbacks=(early,)), folder)
    early.function = io.StringIO
    early.file = (folder / "mine.py").open()
    with pytest.raises(UserError, match=r"cannot be sent to the worker processes: .*TextIOWrapper"):
        write_plugins(Plugins(callbacks=(early,)), folder)
    early.file.close()
    del early.file
    _, file = write_plugins(Plugins(callbacks=(early,)), folder)
    assert read_plugins(Path(file)).callbacks[0].after == 3
    assert write_plugins(Plugins(), folder) == []
    with pytest.raises(UserError, match="the class Early is not a Callback; pass an instance"):
        Plugins(callbacks=(mine.Early,))


def test_a_recipe_names_installed_callbacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = folder / "mine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[meshwright.callbacks]\nearly = mine:Early\nbroken = mine:Missing\n")
    monkeypatch.syspath_prepend(folder)
    run = Run.model_validate({"model": "gpt2", "callbacks": ["early", {"name": "early", "options": {"after": 9}}]})
    assert [make_plugin("callbacks", spec).after for spec in run.callbacks] == [2, 9]
    with pytest.raises(UserError, match=r"callbacks: early does not take these options: .*'afer'"):
        make_plugin("callbacks", PluginSpec(name="early", options={"afer": 1}))
    with pytest.raises(UserError, match="callbacks: broken cannot be imported"):
        make_plugin("callbacks", PluginSpec(name="broken"))
    with pytest.raises(UserError, match=r"callbacks: no 'mine:Early' is installed; there are broken, early"):
        find_plugin("callbacks", "mine:Early")


def test_callbacks_of_one_name_are_told_apart() -> None:
    assert list(named_callbacks([Sums(), Asks(), Sums(), Sums()])) == ["Sums", "Asks", "Sums-2", "Sums-3"]


def test_a_history_is_a_list_and_a_frame_where_pandas_is(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History([{"kind": "start", "step": 0}, {"kind": "step", "step": 1, "loss": 2.0}])
    assert history.of("step") == [{"kind": "step", "step": 1, "loss": 2.0}]
    assert json.loads(json.dumps(history)) == history
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        history.to_pandas()
