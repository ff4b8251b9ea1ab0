"""The list of runs, the difference between two, and the origin that every run and checkpoint keeps."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import meshwright
from journals import at, step, write_run
from meshwright.cli.main import main
from meshwright.storage.lock import Lock


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "a")
    write_run(
        tmp_path / "runs" / "b", [at("start", 0, 2000.0, world_size=1), step(1, 2001.0), step(2, 2002.0)], lr=0.02
    )
    return tmp_path / "runs"


def test_the_list_of_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert (first["name"], first["state"], first["step"], first["steps"]) == ("a", "finished", 12, 12)
    assert (first["loss"], first["held_out_loss"], first["tokens_per_s"]) == (5.0 - 0.1 * 12, 4.5 - 0.1 * 12, 200.0)
    assert first["seconds"] == 19.0
    assert first["bytes"] == sum(path.stat().st_size for path in (folder / "a").iterdir())
    assert first["differences"] == {"training.optimizer.lr": 0.01}
    assert (second["state"], second["held_out_loss"], second["step"]) == ("ended early", None, 2)
    with Lock(folder / "b" / ".lock"):
        assert main(["runs", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "run",
        "a",
        "training.optimizer.lr=0.01",
        "b",
        "training.optimizer.lr=0.02",
    ]
    assert lines[3].split()[1:6] == ["running", "2/12", "4.8", "-", "100"]
    assert max(map(len, lines)) <= 80


def test_many_long_settings_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        run_dir = write_run(tmp_path / "runs" / name)
        settings = ", ".join(f"s{number}: {name * 99}" for number in range(11))
        (run_dir / "resolved.yaml").write_text(f"run: {{data: {{{settings}}}}}\n")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("    data.s0=aaaa")
    assert lines[10] == "    and 3 more settings (--json)"
    assert max(map(len, lines)) == 80


def test_a_folder_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 2
    assert capsys.readouterr().err == "error: runs: no such run directory\n"


def test_the_difference_of_two_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = json.loads((folder / "b" / "env.json").read_text())
    environment["origin"] |= {"commit": "abc", "packages": {"torch": "2.14.0"}, "data": {"text": "abd"}}
    (folder / "b" / "env.json").write_text(json.dumps(environment))
    a, b = str(folder / "a"), str(folder / "b")
    assert main(["diff", a, b, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"] == {
        "recipe": {"training.optimizer.lr": [0.01, 0.02]},
        "code": {"commit": [None, "abc"]},
        "versions": {"torch": ["2.13.0", "2.14.0"]},
        "data": {"text": ["abc", "abd"]},
        "machine": {},
    }
    assert main(["diff", a, a]) == 0
    assert capsys.readouterr().out == "equal: recipe, code, versions, data, machine\n"
    assert main(["diff", a, b, "--all"]) == 1
    assert "  run_dir:" in capsys.readouterr().out
    assert main(["diff", a, str(folder)]) == 2
    assert "neither a run directory nor a checkpoint" in capsys.readouterr().err


def test_every_run_and_checkpoint_keeps_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/meshwright", "train", "my run.yaml"])
    (tmp_path / "text.txt").write_text("Call me Ishmael. " * 500)
    fields: dict[str, Any] = {
        "model": {"family": "llama", "hidden": 16, "num_layers": 1, "num_heads": 2},
        "data": {"sources": str(tmp_path / "text.txt"), "sequence_length": 16, "tokenizer_vocab": 270},
        "training": {"steps": 2, "global_batch": 2, "precision": "fp32"},
        "run_dir": str(tmp_path / "run"),
        "device": "cpu",
        "cluster": "8xh100",
    }
    fields["data"]["cache_dir"] = str(tmp_path / "cache")
    result = meshwright.train(meshwright.Run.model_validate(fields))
    environment = json.loads((result.run_dir / "env.json").read_text())
    origin = environment["origin"]
    assert origin == json.loads((result.checkpoint / "trainer.json").read_text())["origin"]
    assert origin["command"] == "meshwright train 'my run.yaml'"
    assert origin["recipe_sha256"] == hashlib.sha256((result.run_dir / "recipe.yaml").read_bytes()).hexdigest()
    assert origin["meshwright"] == meshwright.__version__
    assert set(origin["packages"]) >= {"torch", "numpy"}
    assert environment["planned"]["devices"] == "1 x cpu", "the devices that it runs on, not those of the recipe"
    trained_on = json.loads((result.checkpoint / "trainer.json").read_text())["data"]
    assert origin["data"] == {stream["name"]: stream["fingerprint"] for stream in trained_on}
    assert environment["planned"]["step_time"]["value"] == pytest.approx(
        sum(environment["planned"]["step_parts"].values())
    )
    assert environment["planned"]["memory"]["value"] == pytest.approx(
        sum(environment["planned"]["memory_kinds"].values())
    )
    assert main(["diff", str(result.run_dir), str(result.checkpoint)]) == 0
    assert capsys.readouterr().out.endswith("equal: recipe, code, versions, data\nnot known of both: machine\n")
