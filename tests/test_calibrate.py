"""`plan calibrate`: two processes measure this machine; the file is a valid cluster for plans."""

from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.machine import Machine
from meshwright.predict.hardware import resolve_cluster
from meshwright.spec.recipe import dump_recipe
from meshwright.trainer.calibrate import calibrate


@pytest.mark.exhaustive
def test_this_machine_is_measured(tmp_path: Path) -> None:
    machine = Machine(kind="cpu", name="cpu", devices=2, memory_bytes=8 * 10**9)
    cluster = calibrate(machine, seconds=0.02)
    measured = cluster.measured
    assert cluster.devices == 2
    assert set(measured.matmul_tflops) == {"fp32", "bf16"}
    rates = [*measured.matmul_tflops.values(), measured.memory_gb_s, measured.attention_tflops, measured.host_us]
    assert all(rate is not None and rate > 0 for rate in rates)
    assert measured.collectives["link"].bandwidth_gb_s > 0
    (tmp_path / "here.yaml").write_text(dump_recipe(cluster))
    assert resolve_cluster("here.yaml", base_dir=tmp_path) == cluster


def test_calibrate_says_which_file_it_needs(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "calibrate"]) == 2
    assert "meshwright plan calibrate cluster.yaml" in capsys.readouterr().err
