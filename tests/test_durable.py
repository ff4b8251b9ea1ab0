"""Files and folders written in folders where others may write: names cannot be guessed, links are not followed."""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.data.cache import cached
from meshwright.launch.meeting import SECRET_FILE, write_secret
from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage import durable
from meshwright.storage.durable import TEMPORARY, complete_folder, own_folder, write_durably
from meshwright.storage.lock import Lock

STRANGER = 12345
"""Another user's id."""


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user, outside the shared one, which must not change."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "kept").write_text("the user's")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["kept"]
    assert (folder / "kept").read_text() == "the user's"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder where others may write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def names_while_writing(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The temporary names that exist while `path` is written."""
    names = list[str]()
    sync_file = durable.sync_file

    def look(file) -> None:
        names.extend(one.name for one in path.parent.iterdir() if one.name.endswith(TEMPORARY))
        sync_file(file)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_file", look)
        write_durably(path, os.urandom(8))
    return names


def test_temporary_names_cannot_be_guessed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it was `.x.writing`, each time."""
    (one,), (other,) = (names_while_writing(shared / "x", monkeypatch) for _ in range(2))
    assert one != other
    assert [path.name for path in shared.iterdir()] == ["x"]


def test_a_link_under_the_temporary_name_is_not_followed(
    shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by the name that it would have."""
    monkeypatch.setattr(durable.secrets, "token_hex", lambda length: "guessed")
    (shared / ".x.writing").symlink_to(victim / "kept")
    (shared / f".x.guessed{TEMPORARY}").symlink_to(victim / "kept")
    with pytest.raises(OSError, match="File exists"):
        write_durably(shared / "x", "new")
    assert not (shared / "x").exists()


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_permissions_are_those_of_any_new_file(shared: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_durably(shared / "x", "1")
        (shared / "plain").write_text("1")
        write_secret(shared)
    finally:
        os.umask(before)
    assert stat.S_IMODE((shared / "x").stat().st_mode) == stat.S_IMODE((shared / "plain").stat().st_mode)
    assert stat.S_IMODE((shared / SECRET_FILE).stat().st_mode) == 0o600


def test_what_a_killed_process_has_left_is_removed_and_what_another_one_writes_stays(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, writing, finish = shared / f".x.0123{TEMPORARY}", threading.Event(), threading.Event()
    left.write_text("half")
    sync_file = durable.sync_file

    def wait(file) -> None:
        if threading.current_thread() is slow:
            writing.set()
            finish.wait()
        sync_file(file)

    monkeypatch.setattr(durable, "sync_file", wait)
    slow = threading.Thread(target=write_durably, args=[shared / "x", "slow"], daemon=True)
    slow.start()
    writing.wait()
    assert not left.exists()
    write_durably(shared / "x", "fast")
    assert (shared / "x").read_text() == "fast"
    finish.set()
    slow.join()
    assert (shared / "x").read_text() == "slow"
    assert [path.name for path in shared.iterdir()] == ["x"]


def test_an_export_does_not_follow_a_link(shared: Path, victim: Path) -> None:
    """Before, it could not begin."""
    (shared / ".out.writing").symlink_to(victim)
    with complete_folder(shared / "out") as folder:
        (folder / "kept").write_text("exported")
    assert (shared / "out/kept").read_text() == "exported"


def test_a_cache_does_not_continue_in_a_planted_folder(shared: Path, victim: Path) -> None:
    """Before, it wrote through the link."""

    def build(folder: Path) -> None:
        (folder / "kept").write_text("tokens")

    made = cached(shared, "corpus", build)
    made.rename(shared / "elsewhere")
    (shared / f".{made.name}").symlink_to(victim)
    assert (cached(shared, "corpus", build) / "kept").read_text() == "tokens"
    assert not made.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_folder_of_another_user_is_not_used(shared: Path) -> None:
    folder = shared / "work"
    folder.mkdir()
    (folder / "planted").touch()
    os.chown(folder, STRANGER, STRANGER)
    assert own_folder(folder).lstat().st_uid == os.geteuid()
    assert not list(folder.iterdir())
    (folder / "mine").touch()
    assert [path.name for path in own_folder(folder).iterdir()] == ["mine"]


def test_a_lock_does_not_follow_a_link(shared: Path, victim: Path) -> None:
    (shared / "lock-1").symlink_to(victim / "kept")
    with pytest.raises(OSError, match="lock-1"), Lock(shared / "lock"):
        pass


def test_a_lock_does_not_wait_for_a_pipe(shared: Path) -> None:
    """It is taken over like any lock without an owner. Before, its reader waited forever."""
    os.mkfifo(shared / "lock-1")
    os.utime(shared / "lock-1", (0, 0))
    with Lock(shared / "lock"):
        assert [path.name for path in shared.iterdir()] == ["lock-2"]


def test_the_kind_of_a_path_is_named(shared: Path) -> None:
    os.mkfifo(shared / "fifo")
    (shared / "link").symlink_to(shared / "fifo")
    (shared / "file").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(shared / "socket"))
    kinds = {"fifo": "a pipe", "link": "a pipe", "socket": "a socket", ".": "a folder", "/dev/zero": "a device"}
    for name, kind in kinds.items():
        with pytest.raises(UserError, match=f"is {kind}, not a file"):
            regular(shared / name)
    for name in ("file", "missing", "file/below", "a\0b"):
        assert regular(shared / name) == shared / name
