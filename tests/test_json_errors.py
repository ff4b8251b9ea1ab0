"""With `--json` every verb prints one object, for errors too."""

import importlib
import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.cli.parser import VERBS, Parser

WRONG = {
    "import": ["nosuch.yaml"],
    "check": ["run.yaml", "--nosuch"],
    "plan": ["nosuch"],
    "verify": ["run.yaml"],
    "data": ["show", "run.yaml"],
    "train": ["run.yaml"],
    "runs": ["nosuch"],
    "diff": ["a", "b"],
    "sweep": ["run.yaml", "training.steps=1,2"],
    "compare": ["run.yaml"],
    "rehearse": ["run.yaml"],
    "generate": ["nosuch", "--prompt", "a"],
    "eval": ["nosuch"],
    "judge": ["nosuch"],
    "export": ["nosuch", "--hf", "out"],
    "accept": ["--nosuch"],
    "doctor": ["nosuch"],
    "init": ["nosuch"],
}


def has_json(verb: str) -> bool:
    parser = Parser(verb)
    importlib.import_module(f"meshwright.cli.{verb}").add_arguments(parser)
    return "--json" in parser.format_usage()


def test_every_verb_with_json_is_tried() -> None:
    assert {verb for verb in VERBS if has_json(verb)} == WRONG.keys()


@pytest.mark.parametrize(("verb", "words"), WRONG.items(), ids=WRONG.keys())
def test_an_error_is_an_object(
    verb: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: nosuch\ntraining: {step: 1}\n")
    status = main([verb, *words, "--json"])
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert status == 2
    assert answer["status"] == status
    assert [f"error: {line}" for line in answer["error"].splitlines()] == told.err.splitlines()
    assert main([verb, *words]) == status
    assert not capsys.readouterr().out


def test_an_error_after_the_object_prints_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "llama-3-8b", "--cluster", "1xrtx4090", "--no-methods", "--write", "plan.yaml", "--json"]
    assert main(words) == 2
    told = capsys.readouterr()
    assert json.loads(told.out)["chosen"] is None
    assert "no recipe is written" in told.err


def test_a_verb_that_only_returns_a_status_prints_an_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `train` does whose worker has printed the error."""
    from meshwright.cli import doctor

    monkeypatch.setattr(doctor, "run", lambda _: 71)
    assert main(["doctor", "--json"]) == 71
    assert json.loads(capsys.readouterr().out)["status"] == 71


def test_an_interruption_is_an_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.cli import doctor

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert main(["doctor", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted", "status": 130}


def test_an_explanation_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2", "--cluster", "1xh100", "--no-methods", "--explain", "memory", "--json"]) == 0
    assert "verdict" in json.loads(capsys.readouterr().out)["memory"][-1]
