"""Workers as forks: they start in the state of a new process, and are children of the process that requested them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshwright.launch import forkserver

FACTS = """
import json, os, pathlib, random, signal, sys, numpy, torch
print(json.dumps({
    "parent": os.getppid(), "folder": os.getcwd(), "mine": os.environ.get("MINE"), "other": os.environ.get("OTHER"),
    "drawn": [random.random(), numpy.random.rand()], "threads": torch.get_num_threads(), "words": sys.argv[1:3],
    "open": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "name": pathlib.Path("/proc/self/comm").read_text().strip(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "hangup": signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,
}))
os._exit(7)
"""


def command(code: str) -> list[str]:
    """Runs `code` in a module of Python's own."""
    return [sys.executable, "-P", "-u", "-m", "timeit", "-n", "1", "-r", "1", code]


pytestmark = pytest.mark.skipif(not forkserver.can_fork(), reason="workers are forks on Linux, without GPUs")


def facts(tmp_path: Path, name: str, **env: str) -> tuple[dict, forkserver.Process]:
    """A fork's report, and the fork."""
    with (tmp_path / name).open("wb") as out:
        process = forkserver.start(command(FACTS), env={**os.environ, **env}, stdout=out.fileno())
        assert process.wait(60) == process.returncode == 7
    return json.loads((tmp_path / name).read_text()), process


@pytest.mark.slow
def test_a_fork_has_what_a_fresh_process_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, process = facts(tmp_path, "first", MINE="a", RANK="3", OMP_NUM_THREADS="2")
    second, _ = facts(tmp_path, "second", OTHER="b")
    assert isinstance(process, forkserver.Forked)
    assert first["parent"] == os.getpid()
    assert first["folder"] == str(tmp_path)
    assert (first["mine"], first["other"], second["mine"], second["other"]) == ("a", None, None, "b")
    assert first["threads"] == 2
    assert first["words"] == ["-n", "1"]
    assert first["name"] == "meshwright:3"
    assert first["interrupt"]
    assert first["hangup"]
    assert first["open"] == [0, 1, 2]
    assert not set(first["drawn"]) & set(second["drawn"])  # else ranks would draw the same names and numbers
    assert process.poll() == 7


@pytest.mark.slow
def test_descriptors_keep_their_numbers(tmp_path: Path) -> None:
    read, write = os.pipe()
    code = f"import os, sys; os.write({write}, b'through a pipe'); print('said', file=sys.stderr)"
    with (tmp_path / "err").open("wb") as err:
        process = forkserver.start(command(code), pass_fds=[write], stdout=err.fileno(), stderr=err.fileno())
        assert process.wait(60) == 0
    os.close(write)
    assert os.read(read, 100) == b"through a pipe"
    os.close(read)
    assert "said\n" in (tmp_path / "err").read_text()


def test_a_signal_ends_a_fork_and_its_server_lives_on() -> None:
    process = forkserver.start(command("import time; time.sleep(60)"))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    process.kill()  # it has ended: no other process with its id is killed
    assert forkserver.start(command("import os; os._exit(0)")).wait(60) == 0


def test_a_status_is_that_of_a_program(tmp_path: Path) -> None:
    with (tmp_path / "err").open("wb") as err:
        process = forkserver.start([sys.executable, "-m", "json.tool", "/nowhere"], stderr=err.fileno())
        assert process.wait(60) == 2
        process = forkserver.start([sys.executable, "-m", "no_such_module"], stderr=err.fileno())
        assert process.wait(60) == 1
    assert "No module named no_such_module" in (tmp_path / "err").read_text()


@pytest.mark.slow
def test_after_an_interrupted_request_the_next_has_an_answer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(forkserver, "_received", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forkserver.start(command("import os; os._exit(5)"))
    assert forkserver.start(command("import os; os._exit(6)")).wait(60) == 6


def test_a_closed_standard_stream_is_empty_in_the_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a daemon that has closed its standard input."""
    closed = forkserver._is_open
    monkeypatch.setattr(forkserver, "_is_open", lambda number: number != 0 and closed(number))
    with (tmp_path / "out").open("wb") as out:
        process = forkserver.start(command("import sys; print(repr(sys.stdin.read()))"), stdout=out.fileno())
        assert process.wait(60) == 0
    assert isinstance(process, forkserver.Forked)
    assert (tmp_path / "out").read_text().startswith("''\n")


def test_the_cache_that_torch_names_itself_makes_no_second_server() -> None:
    assert forkserver.start(command("import os; os._exit(0)")).wait(60) == 0
    servers = dict(forkserver._servers)
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": "/somewhere"}
    assert forkserver.start(command("import os; os._exit(0)"), env=env).wait(60) == 0
    assert forkserver._servers == servers


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """This test's own servers, which end with it."""
    servers = dict[str, forkserver._Server]()
    monkeypatch.setattr(forkserver, "_servers", servers)
    yield servers
    forkserver._end()


@pytest.mark.exhaustive
def test_a_server_that_was_killed_is_replaced_and_ends_with_its_parent(no_servers: dict) -> None:
    quick = command("import os; os._exit(3)")
    assert forkserver.start(quick).wait(60) == 3
    [server] = no_servers.values()
    server.process.kill()
    server.process.wait()
    assert forkserver.start(quick).wait(60) == 3
    [server] = no_servers.values()
    server.connection.close()
    assert server.process.wait(60) == 0


def test_where_nothing_can_be_forked_a_process_is_started_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_servers: dict
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with (tmp_path / "out").open("wb") as out:
        words = [sys.executable, "-P", "-m", "timeit", "-n", "1", "-r", "1", "import os; os._exit(5)"]
        process = forkserver.start(words, stdout=out.fileno())
        assert process.wait(60) == 5
    assert isinstance(process, subprocess.Popen)
    assert not no_servers
