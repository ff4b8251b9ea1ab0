"""Objects between ranks are signed with a secret of the run, and what is not is never unpickled."""

import os
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.comm import objects
from meshwright.launch.launcher import _await_name
from meshwright.launch.secret import FILE, read_secret, write_secret
from meshwright.spec.errors import UserError
from meshwright.spec.run import ResolvedRun
from meshwright.testing.ranks import RankPool
from test_resume import differences, tiny


def exchanged() -> list[object]:
    """What four collectives give each rank, of messages of different lengths."""
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
    """A pickle that makes a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def with_a_stranger(collective: str, path: str) -> str:
    """What each rank says where rank 1 does not know the secret and sends a pickle that runs code."""
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
    assert "not signed with this run's secret and was not read" in told
    assert not planted.exists()


def test_a_run_over_machines_has_its_secret_in_a_file_of_the_user(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_secret(run_dir)
    first = read_secret(run_dir)
    assert len(first) == 64
    assert stat.S_IMODE((run_dir / FILE).stat().st_mode) == 0o600
    write_secret(run_dir)
    assert read_secret(run_dir) != first
    with pytest.raises(UserError, match=r"cannot be read here \(No such file.*run_dir must be the same folder"):
        read_secret(tmp_path)


def test_a_machine_without_a_name_is_told() -> None:
    """`.invalid` never resolves (RFC 2606)."""
    with pytest.raises(UserError, match=r"'first\.invalid', is unknown here"):
        _await_name("first.invalid", timedelta(0))


def without_torchs_exchange(run: ResolvedRun, root: Path) -> list[str]:
    """What differs after a stop, where torch's own exchange of objects raises."""
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


@pytest.mark.parametrize("strategy", ["zero-3-tp", "pp-tp", "zero-3-ep"])
def test_training_saving_and_resuming_exchange_signed_objects_alone(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    run = tiny(strategy)
    assert not any(ranks.run(run.run.layout.world_size, without_torchs_exchange, run, tmp_path))
