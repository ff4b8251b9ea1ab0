"""Ranks notice that another one is stopped, or that they are cut off, in every phase from arrival to exit."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launched import Program, ranks_of
from meshwright.launch.launchers import within
from meshwright.launch.sentry import Sentry
from meshwright.launch.status import STUCK

AFTER = 0.25


def wait_for(ended: list[int]) -> list[int]:
    deadline = time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
    return ended


def test_a_rank_that_goes_silent_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    store, ended = dist.HashStore(), {rank: list[int]() for rank in range(3)}
    sentries = [Sentry(store, "here", rank, 3, AFTER, ended[rank].append).start() for rank in range(3)]
    time.sleep(4 * AFTER)
    assert not any(ended.values()), "all live"
    sentries[1].stop()  # as a stopped process does
    assert wait_for(ended[0]) == wait_for(ended[2]) == [STUCK]
    said = capfd.readouterr().err
    assert said.count("error: ") == 1
    assert "error: rank 1 on " in said
    assert "its process is stopped or its machine is down" in said
    for sentry in sentries:
        sentry.stop()


def test_ranks_that_part_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    store, ended = dist.HashStore(), list[int]()
    sentries = [Sentry(store, "here", rank, 2, AFTER, ended.append).start() for rank in range(2)]
    time.sleep(AFTER)
    for sentry in sentries:
        sentry.stop()
    time.sleep(4 * AFTER)
    assert not ended
    assert not capfd.readouterr().err


def test_a_machine_that_is_cut_off_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    cut = threading.Event()

    class Cut:
        """A store that does not answer."""

        def set(self, *words: Any) -> None:
            cut.wait(60)
            raise dist.DistNetworkError

    ended = list[int]()
    sentry = Sentry(Cut(), "gpu1:29500", 3, 4, AFTER, ended.append).start()  # type: ignore[arg-type]
    assert wait_for(ended) == [STUCK]
    assert "has not reached the rendezvous at gpu1:29500 for" in capfd.readouterr().err
    sentry.stop()
    cut.set()


def test_a_call_without_an_answer_ends() -> None:
    assert within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 / 0)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        within(0.1, lambda: time.sleep(3))


RECIPE: dict[str, Any] = {
    "model": {"family": "llama", "hidden": 32, "num_layers": 2, "num_heads": 2, "ffn": 64},
    "data": {"sources": ["*.txt"], "sequence_length": 32, "tokenizer_vocab": 300, "held_out": 0},
    "training": {"steps": 100000, "global_batch": 8, "precision": "fp32"},
    "layout": {"dp_shard": 2},
    "guards": {"stuck_after": 3},
    "device": "cpu",
    "run_dir": "run",
}


@pytest.mark.slow
def test_a_rank_that_is_stopped_before_the_first_step_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(RECIPE))
    (tmp_path / "a.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(2000)))
    with Program("train", "run.yaml", cwd=tmp_path) as process:
        while not process.stdout.readline().startswith("model "):
            assert process.poll() is None
        os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == STUCK, errors
    assert "step 1/" not in out
    assert "error: rank 1 on " in errors
    assert "has not responded for" in errors
    assert "Traceback" not in errors
