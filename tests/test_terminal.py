"""Names, documents and models' output never control a terminal; files and pipes get them unchanged."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.terminal import printable

EVIL = "\u200e\x1b]0;title\x07\x1b[2J\x9b2Jred\u202egnp\rerror"
SHOWN = r"\u200e\x1b]0;title\x07\x1b[2J\x9b2Jred\u202egnp\rerror"


def test_what_acts_is_written_out() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("tab\tand\nline, ünïcödé 漢字 👍🏽 עברית") == "tab\tand\nline, ünïcödé 漢字 👍🏽 עברית"


def said(program: str, *, terminal: bool) -> bytes:
    """A Python program's standard output: to a terminal, or to a pipe."""
    command = [sys.executable, "-c", program]
    if not terminal:
        return subprocess.run(command, capture_output=True, check=True).stdout
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        subprocess.run(command, stdout=theirs, check=True)
        os.close(theirs)
        return screen.read(1 << 16)


PRINTS = "import sys; from meshwright.terminal import guarded_terminal, renew_line\nwith guarded_terminal(): "


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_is_guarded(terminal: bool) -> None:
    shown = said(PRINTS + f"print({EVIL!r}); sys.stdout.flush()", terminal=terminal).decode()
    assert shown == (SHOWN + "\r\n" if terminal else EVIL + "\n")


def test_a_line_that_renews_itself_still_does() -> None:
    shown = said(PRINTS + "renew_line(sys.stdout, 'step 1 \\x1b[2J'); sys.stdout.flush()", terminal=True)
    assert shown == rb"step 1 \x1b[2J".join([b"\r\x1b[K", b""])


def test_an_error_shows_a_files_name_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / f"{EVIL}.yaml")]) == 2
    told = capsys.readouterr().err
    assert SHOWN.split("\\r")[0] in told
    assert "\x1b" not in told
