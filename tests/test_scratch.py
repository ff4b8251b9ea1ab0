"""Temporary folders of killed processes are removed; those of live ones, of others and with other names stay."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.storage.scratch import ABANDONED, GRACE, OWNER, scratch_folder

HOLD = """
import time
from meshwright.storage.scratch import scratch_folder
with scratch_folder("run") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_is_gone_afterwards(temporary: Path) -> None:
    with scratch_folder("run") as folder:
        assert folder.parent == temporary
        (folder / "file").write_text("x")
        with scratch_folder("run") as another:
            assert folder.exists()  # the folder of a live process
            assert another != folder
    assert not list(temporary.iterdir())


def test_what_a_killed_process_has_left_is_removed(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environment, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        with scratch_folder("verify"):
            assert left.exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with scratch_folder("verify"):
        assert left.exists()  # processes started by the killed one may still read
    minute = (left / ABANDONED).stat().st_mtime - GRACE - 1
    os.utime(left / ABANDONED, (minute, minute))
    with scratch_folder("verify"):
        assert not left.exists()


def test_other_folders_stay(temporary: Path) -> None:
    mine = temporary / "meshwright-thesis"
    mine.mkdir()
    (mine / "chapter.txt").write_text("x")
    (temporary / "meshwright-file").write_text("x")
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).touch()
    (temporary / "meshwright-link").symlink_to(elsewhere)
    with scratch_folder("run"):
        pass
    assert (mine / "chapter.txt").exists()
    assert elsewhere.exists()
