"""Objects between ranks are signed with the run's secret; unsigned ones are never unpickled."""

import os
import socket
import stat
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from launched import Program, listening
from meshwright.comm import objects
from meshwright.comm.store import SignedStore, StrangerError
from meshwright.launch.meeting import (
    ELSEWHERE,
    SECRET_FILE,
    arrival,
    await_arrivals,
    await_name,
    interface_towards,
    loopback,
    read_secret,
    share_secret,
    write_secret,
)
from meshwright.launch.status import MISUSE, STUCK, StuckError
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun
from meshwright.testing.ranks import RankPool
from test_resume import differences, tiny


def exchanged() -> list[object]:
    """The results of four collectives on each rank, with messages of different lengths."""
    me = dist.get_rank()
    pairs: Any = dist.new_group([0, 1])
    of_pair = objects.gather_everywhere({"rank": me}, pairs) if me < 2 else None
    return [
        objects.gather("x" * me),
        objects.gather_everywhere(("y" * (3 - me), torch.tensor(me))),
        objects.scatter([list(range(n)) for n in range(3)] if me == 0 else None),
        objects.from_first({"big": b"z" * 10_000} if me == 0 else None),
        of_pair,
    ]


def test_objects_come_as_they_were_sent(ranks: RankPool) -> None:
    answers = ranks.run(3, exchanged)
    for me, (gathered, everywhere, mine, first, of_pair) in enumerate(answers):
        assert gathered == (["", "x", "xx"] if me == 0 else None)
        assert everywhere == [("yyy", torch.tensor(0)), ("yy", torch.tensor(1)), ("y", torch.tensor(2))]
        assert mine == list(range(me))
        assert first == {"big": b"z" * 10_000}
        assert of_pair == ([{"rank": 0}, {"rank": 1}] if me < 2 else None)


class Planted:
    """A pickle that creates a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def with_a_stranger(collective: str, path: str) -> str:
    """Each rank's result if rank 1 does not know the secret and sends a pickle that runs code."""
    me = dist.get_rank()
    objects.sign_with(b"another" if me == 1 else b"ours")
    try:
        if collective == "from_first":
            objects.sign_with(b"another" if me == 0 else b"ours")
            objects.from_first(Planted(path) if me == 0 else None)
        elif collective == "scatter":
            objects.sign_with(b"another" if me == 0 else b"ours")
            objects.scatter([0, Planted(path)] if me == 0 else None)
        else:
            getattr(objects, collective)(Planted(path) if me == 1 else 0)
    except UserError as error:
        return str(error)
    finally:
        objects.sign_with(b"")
    return "read"


@pytest.mark.parametrize("collective", ["gather", "gather_everywhere", "scatter", "from_first"])
def test_what_a_stranger_sends_is_not_unpickled(ranks: RankPool, tmp_path: Path, collective: str) -> None:
    planted = tmp_path / "planted"
    receiver = 0 if collective.startswith("gather") else 1
    told = ranks.run(2, with_a_stranger, collective, str(planted))[receiver]
    assert "not signed with this run's secret and was rejected" in told
    assert not planted.exists()


def test_a_run_over_machines_has_its_secret_in_a_file_of_the_user(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_secret(run_dir)
    first = read_secret(run_dir)
    assert len(first) == 64
    assert stat.S_IMODE((run_dir / SECRET_FILE).stat().st_mode) == 0o600
    write_secret(run_dir)
    assert read_secret(run_dir) != first
    with pytest.raises(UserError, match=r"cannot be read here \(No such file.*run_dir must be the same folder"):
        read_secret(tmp_path)


def test_a_machine_without_a_name_is_told() -> None:
    """`.invalid` never resolves (RFC 2606)."""
    with pytest.raises(UserError, match=r"'first\.invalid' cannot be resolved"):
        await_name("first.invalid", timedelta(0))


def without_torchs_exchange(run: ResolvedRun, root: Path) -> list[str]:
    """The differences after a stop, with torch's own exchange of objects disabled."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [
            name for name in vars(distributed_c10d) if "object" in name and callable(getattr(dist, name, None))
        ]:
            for module in (dist, distributed_c10d):
                patch.setattr(module, name, _refuse)
        with pytest.raises(AssertionError, match="reads whatever arrives"):
            dist.all_gather_object([], None)
        return differences(run, root, [2])


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("torch's exchange of objects reads whatever arrives")


@pytest.mark.every(3)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero-3-tp", "pp-tp", "zero-3-ep"])
def test_training_saving_and_resuming_exchange_signed_objects_alone(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    run = tiny(strategy)
    assert not any(ranks.run(run.run.layout.world_size, without_torchs_exchange, run, tmp_path))


def test_what_a_stranger_writes_where_ranks_meet_is_refused() -> None:
    plain = dist.HashStore()
    ours, later = (SignedStore(plain, b"ours", "here", prefix=prefix) for prefix in ("first/", "second/"))
    ours.set("word", "said")
    assert ours.get("word") == b"said"
    assert ours.compare_set("word", "", "other") == b"said"
    stranger = SignedStore(plain, b"guessed", "here", prefix="first/")
    for written in (b"?", b"said", plain.get("first/word")[:-1] + b"!"):
        plain.set("first/word", written.decode())
        for read in (lambda: ours.get("word"), lambda: ours.compare_set("word", "", "said")):
            with pytest.raises(StrangerError, match=r"'first/word' at the rendezvous here is not signed"):
                read()
    stranger.set("word", "said")
    with pytest.raises(StrangerError):
        ours.get("word")
    ours.set("word", "said")
    plain.set("second/word", plain.get("first/word"))  # values of one attempt are not valid in another
    with pytest.raises(StrangerError, match="'second/word'"):
        later.get("word")


def test_an_old_secret_is_read_again_until_it_is_this_runs(tmp_path: Path) -> None:
    """As a network file system may still show it."""
    store, run_dir, found = dist.HashStore(), tmp_path / "run", list[bytes]()
    write_secret(run_dir)
    old = (run_dir / SECRET_FILE).read_bytes()
    first = share_secret(store, "key", run_dir, 5, first=True, where="here")
    assert first != old
    (run_dir / SECRET_FILE).write_bytes(old)
    other = threading.Thread(
        target=lambda: found.append(share_secret(store, "key", run_dir, 5, first=False, where="here"))
    )
    other.start()
    time.sleep(0.2)
    assert not found
    (run_dir / SECRET_FILE).write_bytes(first)
    other.join(10)
    assert found == [first]
    with pytest.raises(StrangerError, match="run_dir is not the same folder on all machines, or another process"):
        share_secret(store, "key", _with_secret(tmp_path / "another"), 0.1, first=False, where="here")
    with pytest.raises(StuckError, match=r"the first process of the rendezvous at here did not arrive within 0\.1 s"):
        share_secret(store, "never", run_dir, 0.1, first=False, where="here")


def _with_secret(run_dir: Path) -> Path:
    write_secret(run_dir)
    return run_dir


def test_who_arrives_without_the_secret_is_told() -> None:
    plain = dist.HashStore()
    plain.set(arrival(1), "a stranger's machine")
    with pytest.raises(StrangerError, match="'arrived/1' at the rendezvous here"):
        await_arrivals(SignedStore(plain, b"ours", "here"), 0, 2, 5)


def test_ranks_listen_at_the_interface_that_leads_to_the_first() -> None:
    assert interface_towards("127.0.0.1") == loopback()
    assert interface_towards("no.such.host.invalid") is None


def test_a_machine_whose_own_name_is_a_loopback_address_is_reached_by_its_default_route(monkeypatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.1.1")
    assert interface_towards("this-machine") == interface_towards(ELSEWHERE) != loopback()
    assert interface_towards("127.0.1.1") == loopback()


STRANGE = {"watch-0/stuck": ("0", STUCK), "verdict-0": ('{"again": true}', MISUSE)}
"""Values that a stranger may write where ranks and launcher look, and the run's status."""


@pytest.mark.slow
def test_a_stranger_ends_a_run_with_a_sentence_or_not_at_all(tmp_path: Path) -> None:
    """Another user of this machine, who connects to the store: with keys that ranks read, and with noise."""
    (tmp_path / "run.yaml").write_text(STRANGERS_RECIPE)
    (tmp_path / "a.txt").write_text("one fish two fish\n" * 300)
    for key, (value, status) in STRANGE.items():
        with Program("train", "run.yaml", cwd=tmp_path) as process:
            while not process.stdout.readline().startswith("step 1/"):
                assert process.poll() is None
            [(_, port)] = listening({process.pid})  # as any user of the machine can find out
            for noise in (b"", b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n"):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(noise)
            dist.TCPStore("127.0.0.1", port, None, False).set(key, value)
            _, said = process.communicate(timeout=60)
        assert f"error: '{key}' at the rendezvous 127.0.0.1:{port} is not signed with this run's secret" in said
        assert "Traceback" not in said
        assert process.returncode == status, said


STRANGERS_RECIPE = """\
model: {family: llama, hidden: 16, num_layers: 1, num_heads: 2, max_positions: 32}
data: {sources: "*.txt", tokenizer_vocab: 260, sequence_length: 8}
training: {steps: 1000000, global_batch: 2, precision: fp32, lr_schedule: {warmup: 1}}
layout: {dp_shard: 2}
guards: {stuck_after: 4, restarts: 0}
device: cpu
run_dir: run
"""
