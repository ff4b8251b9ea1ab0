"""Other engines compared with our one process: correct ones are equal, and planted faults are located."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.engines.engine import Engine
from meshwright.engines.parity import EngineProof, verify_engine
from meshwright.engines.registry import ENGINES
from meshwright.prove.shrink import shrink
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run

RECIPE = """\
model: {family: FAMILY, hidden: 64, num_layers: 2, num_heads: 4, vocab: 96, max_positions: 64}
data: {sequence_length: 64}
training: {steps: 10, global_batch: 8, micro_batch: 2, precision: fp32, lr_schedule: {warmup: 2}}
device: cpu
"""


def small(family: str = "llama") -> ResolvedRun:
    run = parse_spec(RECIPE.replace("FAMILY", family), Run)
    return shrink(resolve_run(run, base_dir=Path()))


def proved(name: str, *changes: tuple[str, str], family: str = "llama") -> EngineProof:
    """The proof of an engine with a replacement in its program."""

    def changed(self: Engine, resolved: ResolvedRun) -> tuple[str, dict[str, str]]:
        program, files = ENGINES[name].files(resolved)
        for right, wrong in changes:
            assert right in files[program]
            files[program] = files[program].replace(right, wrong)
        return program, files

    engine: Engine = type("Changed", (type(ENGINES[name]),), {"files": changed})()
    return verify_engine(small(family), engine, steps=2)


@pytest.mark.engines
def test_a_right_engine_is_equal(tmp_path, monkeypatch, capsys):
    """GPT-2: its matrices are transposed in the files, and queries, keys and values are one matrix."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RECIPE.replace("FAMILY", "gpt2"))
    assert main(["verify", "run.yaml", "--engine", "bare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert found["first"] is None
    assert found["engine"] == "bare"


@pytest.mark.engines
def test_a_loss_over_a_token_too_few_is_found_in_the_loss():
    proof = proved("hf_trainer", ("(GLOBAL_BATCH * LENGTH)", "(GLOBAL_BATCH * (LENGTH - 1))"))
    assert proof.first is not None
    assert (proof.first.step, proof.first.what) == (1, "loss")
    assert proof.first.difference.factor == pytest.approx(64 / 63, rel=1e-3)


@pytest.mark.engines
def test_a_forgotten_factor_is_found_in_the_gradients():
    """The loss is right, and so is Adam's first step, which divides by the gradient, except for its epsilon."""
    proof = proved("accelerate", ("loss * WORLD * ACCUMULATION", "loss * WORLD"))
    assert proof.first is not None
    assert (proof.first.step, proof.first.what) == (1, "gradient")
    assert proof.first.difference.factor == pytest.approx(1 / 3, rel=1e-3)
    assert proof.first.name == "lm_head.weight"


@pytest.mark.exhaustive
def test_weight_decay_on_norms_is_found_in_their_update():
    proof = proved("bare", ('{"params": vectors, "weight_decay": 0.0}', '{"params": vectors, "weight_decay": 0.1}'))
    assert proof.first is not None
    assert proof.first.what == "update"
    assert "norm" in proof.first.name


def test_only_other_engines_are_held_to_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RECIPE.replace("FAMILY", "llama"))
    assert main(["verify", "run.yaml", "--engine", "meshwright"]) == 2
    assert "without --engine" in capsys.readouterr().err
    assert main(["verify", "run.yaml", "--engine", "bare", "--steps", "11"]) == 2
    assert "training.steps=10" in capsys.readouterr().err
    assert main(["verify", "run.yaml", "--engine", "bare", "training.optimizer.name=muon"]) == 2
    assert "training.optimizer.name=muon: the program supports only adamw" in capsys.readouterr().err
    assert main(["verify", "run.yaml", "--engine", "bare", "--precision", "fp64"]) == 2
    assert "--engine compares the whole layout in fp32; leave --precision out" in capsys.readouterr().err
    assert main(["verify", "run.yaml", "--patience", "9"]) == 2
    assert "--patience applies only to --engine" in capsys.readouterr().err
    assert main(["verify", "run.yaml", "--python", "python3"]) == 2
    assert "--python" in capsys.readouterr().err
