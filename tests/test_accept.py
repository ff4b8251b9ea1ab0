"""`meshwright accept`: its steps on a CPU, its time limits, its report."""

import json
from pathlib import Path

import pytest

from meshwright.accept import families, generate, kernels, run, settings
from meshwright.accept.check import Check, Place, read_checks, within, write_check
from meshwright.accept.report import as_page, as_text, summary, write_report
from meshwright.accept.run import StepOutcome, run_steps
from meshwright.accept.runs import write_recipe
from meshwright.accept.steps import STEPS, Step, named
from meshwright.cli.main import main

ROOT = Path(__file__).parents[1]


def place_in(folder: Path) -> Place:
    return Place("cpu", work=folder)


@pytest.mark.parametrize("step", [kernels, families, pytest.param(settings, marks=pytest.mark.exhaustive)])
def test_steps_pass_on_a_cpu(step, tmp_path: Path) -> None:
    """Each compares the device with the CPU, here with itself."""
    checks = list(step.checks(place_in(tmp_path)))
    assert sum(check.passed is True for check in checks) > 5
    assert [check for check in checks if check.passed is False] == []


@pytest.mark.slow
def test_one_step_as_a_user_runs_it(tmp_path: Path, capsys) -> None:
    words = ["accept", "--device", "cpu", "--steps", "profile", "--json"]
    assert main([*words, "--out", str(tmp_path / "report")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report" / "report.json").read_text())
    assert [check["name"] for check in report["steps"][0]["checks"]] == [
        "waits of the host",
        "kernels and idle time, while profiled",
    ]
    assert (tmp_path / "report" / "work" / "profile.txt").is_file()


@pytest.mark.exhaustive
def test_all_steps_on_a_cpu(tmp_path: Path, capsys) -> None:
    """As `make gpu` runs them: in processes of their own."""
    out = tmp_path / "report"
    assert main(["accept", "--device", "cpu", "--seconds", "1800", "--out", str(out)]) == 0, capsys.readouterr()
    report = json.loads((out / "report.json").read_text())
    assert [step["step"]["name"] for step in report["steps"]] == [step.name for step in STEPS]
    assert {step["state"] for step in report["steps"]} == {"passed"}


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The device's loss, computed after the exact one and before the plain one, with one wrong label of 64."""
    right, calls = kernels.linear_cross_entropy, []

    def wrong(x, head, labels):
        calls.append(x.dtype)
        return right(x, head, labels.where(labels != labels[1], 5) if len(calls) == 2 else labels)

    monkeypatch.setattr(kernels, "linear_cross_entropy", wrong)
    assert [check.passed for check in kernels.checks(place_in(tmp_path)) if check.name.startswith("loss")] == [False]


@pytest.mark.parametrize(
    ("difference", "passed"), [(0.1, True), (0.3, False), (float("nan"), False), (float("inf"), False)]
)
def test_nan_is_no_agreement(difference: float, passed: bool) -> None:
    assert within("", difference, 0.2).passed is passed


def test_a_step_over_its_limit_ends_and_the_next_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LEAST", 0.5)
    told = []
    steps = [Step("train", 1, ""), Step("machine", 1, "")]
    outcomes = run_steps(steps, place_in(tmp_path), tmp_path, 1.2, lambda so_far: told.append(len(so_far)))
    assert [outcome.state for outcome in outcomes] == ["failed", "not run"]
    assert "ended after its limit of 1 s" in outcomes[0].note
    assert told == [1, 2]
    assert summary(outcomes) == "failed: train; not run: machine"


def test_a_step_that_breaks_says_so(tmp_path: Path) -> None:
    """Its process has a module that does not exist."""
    (outcome,) = run_steps([Step("no_such_step", 30, "")], place_in(tmp_path), tmp_path, 60, lambda _: None)
    assert outcome.state == "failed"
    assert "No module named 'meshwright.accept.no_such_step'" in outcome.note


def test_checks_survive_the_process(tmp_path: Path) -> None:
    checks = [Check("a", passed=True, detail="x", figures={"y": 1.5}), Check("b", passed=None, detail="")]
    for check in checks:
        write_check(check, tmp_path / "lines")
    assert read_checks(tmp_path / "lines") == checks
    assert read_checks(tmp_path / "none") == []


def test_an_exception_fails_its_check_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaks(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(kernels, "grouped_matmul", breaks)
    checks = list(kernels.checks(place_in(tmp_path)))
    (failed,) = [check for check in checks if check.passed is False]
    assert failed.name == "experts without rows"
    assert "RuntimeError: no kernel image is available" in failed.detail
    assert checks[-1].name == "fused AdamW"


def test_a_second_acceptance_begins_anew(tmp_path: Path) -> None:
    """Runs refuse a folder that holds one already."""
    place = place_in(tmp_path)
    write_recipe(place, "train", {})
    (tmp_path / "train").mkdir()
    write_recipe(place, "train", {})
    assert not (tmp_path / "train").exists()


def test_generation_needs_the_run(tmp_path: Path) -> None:
    assert [(check.passed, check.detail) for check in generate.checks(place_in(tmp_path))] == [
        (False, "step train has left none; run it first")
    ]


def test_the_report(tmp_path: Path) -> None:
    checks = [
        Check("<good>", passed=True, detail="1 & 2"),
        Check("bad", passed=False, detail="3\n4"),
        Check("c", None, "5"),
    ]
    outcomes = [StepOutcome(STEPS[0], "failed", 2.0, checks), StepOutcome(STEPS[1], "not run", note="no time was left")]
    write_report(outcomes, {"devices": "1 x <GPU>"}, tmp_path)
    text, page = (tmp_path / "report.txt").read_text(), (tmp_path / "report.html").read_text()
    assert "machine     failed       2 s  1 of 2 checks passed" in text
    assert "FAILED bad: 3" in text
    assert text.endswith("failed: machine; not run: train\n")
    assert "&lt;good&gt;" in page
    assert "<GPU>" not in page
    assert page == as_page(outcomes, {"devices": "1 x <GPU>"})
    assert "1 & 2" not in as_text(outcomes, {}, details=False)
    assert json.loads((tmp_path / "report.json").read_text())["steps"][0]["checks"][1]["passed"] is False


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--steps", "kernels,tain"], "--steps: no step is called 'tain'; there are machine, train, kernels"),
        (["--nanogpt", "no/such/folder"], "no/such/folder does not exist"),
        (["--references", "no.json"], "no.json does not exist"),
        (["--device", "cuda"], "device=cuda, but this machine has no GPU"),
    ],
)
def test_mistakes(words: list[str], problem: str, capsys, tmp_path: Path) -> None:
    assert main(["accept", "--out", str(tmp_path / "out"), *words]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_steps_have_limits_that_fit_together() -> None:
    assert named(None) == STEPS
    assert [step.name for step in named(["speed", "train"])] == ["train", "speed"]
    for step in STEPS:
        assert (ROOT / f"src/meshwright/accept/{step.name}.py").exists(), step
