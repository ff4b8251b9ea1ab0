"""The page of runs: the numbers in it are those of `metrics.jsonl`, a run's history is told as it was."""

import html
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import meshwright
from journals import PLANNED, at, evaluation, run_of_all_kinds, step, write_run
from meshwright.cli.main import main
from meshwright.pages import runs as runs_of_pages
from meshwright.pages.live import serve_page
from meshwright.pages.runs import find_runs, names_of, read_run
from meshwright.pages.shell import LICENCE
from meshwright.pages.terminal_curves import braille
from meshwright.spec.errors import UserError
from meshwright.storage.lock import Lock
from meshwright.trainer.run import read_result


def page_data(page: str) -> dict[str, Any]:
    """The data block of a page."""
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(block)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "first")


def test_the_numbers_of_the_page_are_those_of_the_journal(run_dir: Path) -> None:
    (run,) = page_data(meshwright.view(run_dir).html)["runs"]
    table, last = run["tables"]["step"], dict[int, dict[str, Any]]()
    for record in run_of_all_kinds():
        if record["kind"] == "step":
            last[record["step"]] = record  # the last of each step counts
    assert table["step"] == list(range(1, 13))
    for name in ("loss", "gnorm", "lr", "tokens", "step_time", "data_time", "mfu", "mem"):
        assert table[name] == [last[number][name] for number in range(1, 13)], name
    assert table["tokens_per_s"] == [None, *[200.0] * 11], "of both ranks"
    assert table["flops"] == [tokens * 0.25 * 1e9 / 100 for tokens in table["tokens"]]
    assert set(table) == {
        *("step", "tokens", "time", "flops", "loss", "gnorm", "lr", "step_time", "data_time", "mfu", "mem"),
        *("tokens_per_s", "tokens_per_s_per_rank", "trained_per_s_per_rank"),
    }, "expert_load has no value, so it has no column"
    assert run["tables"]["evaluation"]["loss/books"] == [4.0 - 0.1 * 6, 4.0 - 0.1 * 12]
    assert run["tables"]["evaluation"]["tokens"] == [600, 1200], "of the run, not of the evaluation"
    assert run["tables"]["tasks"]["quiz/acc"] == [0.5, 0.75]


def test_time_is_that_of_the_processes(run_dir: Path) -> None:
    """An hour between two processes is not the run's; steps lost by a kill are."""
    run = read_run(run_dir, "first")
    assert run["tables"]["step"]["time"][:6] == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
    assert run["tables"]["step"]["time"][6:10] == [11.0, 12.0, 13.0, 14.0]
    assert run["elapsed"] == 10.0 + 9.0
    assert sum(run["spent"].values()) == pytest.approx(19.0)
    assert run["spent"]["repeated later"] == pytest.approx(1.0 + 1.0 + 0.5)
    assert run["spent"]["checkpoints"] == pytest.approx(0.3)
    assert run["spent"]["first step"] == pytest.approx(1.0 + 1.0)


def test_restarts_rewinds_spikes_and_checkpoints_are_marked(run_dir: Path) -> None:
    events = [(event["kind"], event["step"]) for event in read_run(run_dir, "first")["events"]]
    assert events == [("checkpoint", 6), ("restart", 6), ("checkpoint", 10), ("spike", 11), ("rewind", 10)]


def test_steps_after_a_restart_that_are_not_yet_repeated_do_not_count(tmp_path: Path) -> None:
    records = [at("start", 0, 0.0), *(step(n, float(n)) for n in range(1, 9)), evaluation(8, 9.0), at("start", 4, 99.0)]
    run = read_run(write_run(tmp_path / "run", [*records, step(5, 100.0)]), "run")
    assert run["tables"]["step"]["step"] == [1, 2, 3, 4, 5]
    assert "evaluation" not in run["tables"]


def test_what_a_run_lacks_is_not_drawn(tmp_path: Path) -> None:
    data = page_data(meshwright.view(write_run(tmp_path / "run", [at("start", 0, 0.0), step(1, 1.0)])).html)
    assert [chart["title"] for chart in data["charts"]] == [
        *("Loss", "Learning rate", "Gradient norm", "Peak memory of a rank")
    ]
    assert meshwright.view(write_run(tmp_path / "empty", [at("start", 0, 0.0)])).html


def test_charts_hold_every_figure_once(run_dir: Path) -> None:
    data = page_data(meshwright.view(run_dir).html)
    assert [chart["title"] for chart in data["charts"]] == [
        *("Loss", "Held-out loss", "Held-out loss by source", "quiz/acc", "Learning rate", "Gradient norm"),
        *("Tokens per second", "Model FLOPs utilisation", "Step time", "Peak memory of a rank"),
    ]
    assert data["runs"][0]["planned"] == PLANNED


def test_a_callbacks_own_records_are_drawn(tmp_path: Path) -> None:
    records = [at("start", 0, 0.0), step(1, 1.0), at("mine", 1, 2.0, sharpness=3.0, word="no number")]
    data = page_data(meshwright.view(write_run(tmp_path / "run", records)).html)
    assert data["charts"][-1] | {"id": ""} == {
        "id": "",
        "section": "More",
        "title": "mine: sharpness",
        "unit": "number",
        "lines": [{"table": "mine", "column": "sharpness", "name": ""}],
    }


def test_a_long_run_keeps_its_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_of_pages, "MOST_POINTS", 50)
    losses = {
        number: 9.0 if number == 333 else 1.0 if number == 777 else 3.0 + number % 7 / 10 for number in range(1, 1001)
    }
    records = [at("start", 0, 0.0), *(step(number, float(number), loss=loss) for number, loss in losses.items())]
    table = read_run(write_run(tmp_path / "run", records), "run")["tables"]["step"]
    assert len(table["step"]) <= 51
    assert {333, 777, 1000} <= set(table["step"])
    assert all(losses[number] == loss for number, loss in zip(table["step"], table["loss"], strict=True))


def test_recipes_are_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", lr=0.02)
    data = page_data(meshwright.view(tmp_path / "runs").html)
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert data["differences"] == [["training.optimizer.lr", [0.01, 0.02]]]


def test_states(run_dir: Path) -> None:
    assert read_run(run_dir, "x")["state"] == "finished"
    with Lock(run_dir / ".lock"):
        assert read_run(run_dir, "x")["state"] == "running"
    journal = run_dir / "metrics.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:-1]) + "\n")
    assert read_run(run_dir, "x")["state"] == "ended early"
    journal.write_text("\n".join([*lines[:-1], json.dumps(at("stopped", 12, 5010.0))]) + "\n{broken")
    assert read_run(run_dir, "x")["state"] == "stopped"


def test_the_page_needs_nothing_else_and_keeps_the_licence(run_dir: Path, tmp_path: Path) -> None:
    page = (meshwright.view(run_dir).save(tmp_path / "out.html")).read_text()
    assert LICENCE in page
    assert "Permission is hereby granted" in LICENCE
    assert not re.findall(r"(?:src|href)=[\"'](?!#)[^\"']", page), "no file beside it"
    assert "<b>One" not in page, "samples are data, never markup"
    assert page_data(page)["runs"][0]["samples"][0]["prompt"] == "<b>One"


def test_a_notebook_shows_the_page_in_a_frame(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step-00000012").mkdir(parents=True)
    frame = read_result(run_dir).plot()._repr_html_()
    (inside,) = re.findall(r'^<iframe srcdoc="([^"]*)"', frame)
    assert page_data(html.unescape(inside))["runs"][0]["tables"]["step"]["step"] == list(range(1, 13))


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]


def test_mistakes_are_one_line(tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'nowhere'}: no such run directory\n"
    (tmp_path / "empty").mkdir()
    assert main(["view", str(tmp_path / "empty")]) == 2
    assert "contains no run" in capsys.readouterr().err
    assert main(["view", str(run_dir), "--html", str(run_dir / "metrics.jsonl")]) == 2
    assert "is not a page" in capsys.readouterr().err
    (run_dir / "env.json").write_text("{")
    assert main(["view", str(run_dir), "--html", str(tmp_path / "x.html")]) == 2
    assert "env.json is damaged, not JSON" in capsys.readouterr().err


def test_without_uplot_a_line_names_the_command(run_dir: Path, tmp_path: Path) -> None:
    """In a process that finds no package's files."""
    code = (
        "import importlib.metadata as m, sys; m.files = lambda name: None\n"
        "from meshwright.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "view", str(run_dir), "--html", str(tmp_path / "x.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: the page draws with uPlot, which is not installed: pip install 'meshwright[view]'\n"
    assert not (tmp_path / "x.html").exists()


def test_the_terminal_shows_curves_in_80_columns(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(run_dir), "--terminal"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("first: finished, step 12/12, loss 3.8, 200 tokens/s\n")
    assert "Gradient norm (log)" in text
    assert max(map(len, text.splitlines())) < 80
    assert any("\u2801" <= letter <= "\u28ff" for letter in text)


def test_an_encoding_without_braille_is_named(run_dir: Path) -> None:
    words = [sys.executable, "-X", "utf8=0", "-m", "meshwright", "view", str(run_dir), "--terminal"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --terminal: the encoding ")


def test_braille_draws_a_diagonal() -> None:
    rows = braille([0, 1], [0, 1], span=(0, 1), scale=(0, 1), wide=16)
    assert len(rows) == 8
    assert [len(row) for row in rows] == [16, 14, 12, 10, 8, 6, 4, 2], "each row is two characters further left"


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_live_page_follows_the_run(run_dir: Path) -> None:
    server = serve_page([run_dir], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        first = page_data(get(f"{url}/")[1])
        assert first["live"] is True
        assert get(f"{url}/data?have={first['stamp']}") == (204, "")
        with (run_dir / "metrics.jsonl").open("a") as journal:
            journal.write(
                json.dumps(at("start", 12, 6000.0, world_size=2)) + "\n" + json.dumps(step(13, 6001.0)) + "\n"
            )
        status, text = get(f"{url}/data?have={first['stamp']}")
        assert status == 200
        assert json.loads(text)["runs"][0]["tables"]["step"]["step"][-1] == 13
        assert get(f"{url}/metrics.jsonl")[0] == 404, "no file is served"
        environment = (run_dir / "env.json").read_text()
        (run_dir / "env.json").write_text("{")
        status, text = get(f"{url}/data?have=")
        assert (status, text.split(" (")[0]) == (500, f"{run_dir / 'env.json'} is damaged, not JSON")
        (run_dir / "env.json").write_text(environment)
        assert get(f"{url}/data", Host="evil.example")[0] == 403, "another site's name that points here"
        with pytest.raises(UserError, match="choose another"):
            serve_page([run_dir], server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_folder_of_runs_is_in_the_order_of_their_beginnings(tmp_path: Path) -> None:
    later = write_run(tmp_path / "a", [at("start", 0, 50.0), step(1, 51.0)])
    first = write_run(tmp_path / "deep" / "b", [at("start", 0, 10.0), step(1, 11.0)])
    assert find_runs([tmp_path]) == [first, later]
