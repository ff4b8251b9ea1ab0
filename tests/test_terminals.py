"""The main verbs in terminals of 80 x 24 and 200 x 50, driven by tmux: lines fit, and words stay whole."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

from meshwright.cli import waiting
from meshwright.cli.main import main
from meshwright.cli.parser import VERBS
from meshwright.terminal import folded, renew_line
from meshwright.trainer.display import Display
from meshwright.trainer.metrics import StepRecord

RECIPE = """\
model: {family: llama, hidden: 64, num_layers: 2, num_heads: 2}
data: {sources: a.txt, sequence_length: 32, tokenizer_vocab: 300, held_out: 0.2, cache_dir: cache}
training: {steps: 4, global_batch: 4, micro_batch: 1}
layout: {dp_shard: 2}
device: cpu
run_dir: runs/one
"""
COMMANDS = (
    "check run.yaml",
    "plan gpt2 data.sequence_length=1024 --cluster 8xa100",
    "plan gpt2 data.sequence_length=1024 --cluster 8xa100 --cluster 2xt4",
    "plan gpt2 data.sequence_length=1024 --cluster 8xa100 --no-methods --explain memory",
    "plan gpt2 data.sequence_length=1024 --cluster 8xa100 --no-methods --explain search",
    "rehearse run.yaml",
    "verify run.yaml",
    "train run.yaml",
    "runs",
    "diff runs/one runs/one",
    "view runs/one --terminal",
    "doctor",
    "generate runs/one --prompt brown --max-tokens 4",
    "train run.yaml",
    "--help",
)
SECONDS = 240
PROGRAM = """\
import gc, importlib, os, shlex, sys, time
from meshwright.cli.main import main
from meshwright.launch import forkserver

for module in forkserver.LOADED:
    importlib.import_module(module)
gc.freeze()
for command in sys.argv[1:]:
    print("$", command, flush=True)
    if not (process := os.fork()):
        forkserver._fresh = True  # nothing was computed yet
        sys.argv[:] = ["meshwright", *shlex.split(command)]
        status = main(sys.argv[1:])
        sys.stdout.flush()
        os._exit(status)  # to end in the usual way takes seconds with so much loaded
    print(f"[status {os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}]", flush=True)
print("[over]", flush=True)
time.sleep(600)
"""
"""Runs commands one after the other, each in a fork of a process that has loaded everything."""


def test_lines_are_folded_at_words() -> None:
    line = "binding    the optimizer step, 73% of the step; then computation, 27%; memory is 2% full"
    assert folded(line, 60) == [
        "binding    the optimizer step, 73% of the step; then",
        "           computation, 27%; memory is 2% full",
    ]
    assert folded(line, None) == folded(line, 200) == [line]
    command = "next        meshwright generate runs/one --prompt 'Once upon a time in a folder with a long name'"
    assert folded(command, 60) == [command]
    assert folded("x" * 99, 60) == ["x" * 99]


def test_every_verb_s_help_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # argparse reads it
    for words in (["--help"], *([verb, "--help"] for verb in VERBS)):
        assert main(words) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


class Narrow(StringIO):
    """A terminal that has no size, so 80 columns."""

    def isatty(self) -> bool:
        return True


def test_a_status_line_fits_or_leaves_out_what_matters_less() -> None:
    stream = Narrow()
    display = Display(steps=120000, memory_bytes=80 * 2**30, device="cuda", enabled=True, stream=stream)
    record = StepRecord(
        step=100000,
        loss=2.341,
        gnorm=0.83,
        lr=2.9e-4,
        tokens=1,
        step_time=1.0,
        tokens_per_s_per_rank=7100.0,
        trained_per_s_per_rank=7100.0,
        mfu=0.41,
        mem=61 * 2**30,
        eta=4320.0,
        skipped=0,
        spikes=0,
        rewinds=0,
        expert_load=None,
    )
    display.step(record)
    (line,) = stream.getvalue().split("\x1b[K")[1:]
    assert len(line) < 80
    assert line.startswith("step 100000/120000  loss 2.341")
    assert line.endswith("eta 1h12m")
    renew_line(stream, "a  " + "b" * 90)
    assert stream.getvalue().endswith("\x1b[Ka")


def test_what_takes_long_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "BEFORE", 0.01)
    with waiting.waiting("searching layouts"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "searching layouts ... 0 s\n"
    with waiting.waiting("quick"):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_the_main_verbs_fit_a_terminal(width: int, height: int, tmp_path: Path) -> None:
    """tmux joins the lines that the terminal had to break: none may be wider than the terminal, but for commands."""
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "all.py").write_text(PROGRAM)
    tmux = ["tmux", "-L", f"meshwright-{os.getpid()}-{width}", "-f", "/dev/null"]
    start = ["set", "-g", "history-limit", "9999", ";", "new-session", "-d", "-x", str(width), "-y", str(height)]
    program = shlex.join(["env", "LC_ALL=C", sys.executable, "-P", "all.py", *COMMANDS])
    subprocess.run([*tmux, *start, "-c", str(tmp_path), program], check=True, timeout=30)
    try:
        shown, end = "", time.monotonic() + SECONDS
        while "[over]" not in shown and time.monotonic() < end:
            time.sleep(0.5)
            capture = [*tmux, "capture-pane", "-p", "-J", "-S", "-"]
            shown = subprocess.run(capture, check=True, timeout=30, capture_output=True, text=True).stdout
    finally:
        subprocess.run([*tmux, "kill-server"], check=True, timeout=30)
    lines = [line.rstrip() for line in shown.splitlines()]
    assert "[over]" in lines, shown
    wide = [line for line in lines if len(line) > width and not line.startswith("$ ") and "/" not in line]
    assert wide == []
    statuses = [line for line in lines if line.startswith("[status ")]
    expected = ["[status 0]"] * len(COMMANDS)
    expected[-2] = "[status 2]"  # the run is there already
    assert statuses == expected, shown
    assert "Traceback" not in shown
    assert sum("step 4/4  loss" in line for line in lines) == 1, "a status line is renewed, not repeated"
