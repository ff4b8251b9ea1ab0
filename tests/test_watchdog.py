"""A hung rank is named, with its stack and all last collectives, within a limit that is learned from the run."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.launch import watchdog
from meshwright.launch.launcher import Nodes, Worker, join_group, start_workers
from meshwright.launch.signals import StopRequest
from meshwright.launch.status import STUCK, StuckError
from meshwright.launch.supervise import RestartPolicy
from meshwright.launch.watchdog import TIMES_LONGEST, TIMES_UNKNOWN, Collective, RankReport, Watchdog, explain
from meshwright.spec.guards import GuardSpec
from meshwright.spec.run import Run
from meshwright.testing.ranks import RankPool

LIMIT = 0.5


def test_the_limit_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watchdog = Watchdog(GuardSpec(stuck_after=60))

    def spend(kind: str, seconds: float) -> float:
        nonlocal now
        watchdog.enter(kind)
        limit = watchdog.limit
        now += seconds
        return limit

    assert [spend("step", seconds) for seconds in (100, 2, 2)] == [TIMES_UNKNOWN * 60] * 3
    assert spend("step", 2) == TIMES_LONGEST * 100
    assert spend("evaluation", 2) == TIMES_UNKNOWN * 60
    fast = Watchdog(GuardSpec(stuck_after=60))
    for _ in range(5):
        fast.enter("step")
        now += 1
    assert fast.limit == 60


def test_a_patient_phase_has_no_limit() -> None:
    ended: list[int] = []
    with Watchdog(GuardSpec(stuck_after=0.001), end=ended.append) as watchdog:
        watchdog.enter("saving", patient=True)
        time.sleep(0.3)
        assert not ended
        watchdog.enter("step", 1)
        for _ in range(100):
            if ended:
                break
            time.sleep(0.05)
    assert ended == [STUCK]


def reports(numbers: list[int], waiting: list[bool]) -> list[RankReport | None]:
    return [
        RankReport(
            rank,
            f"host{rank}",
            "step 7",
            12.0,
            10.0,
            f"stack {rank}",
            [Collective("default_pg 0", number, "all_reduce", wait)],
        )
        for rank, (number, wait) in enumerate(zip(numbers, waiting, strict=True))
    ]


def test_who_is_blamed() -> None:
    text = explain(reports([9, 8, 9], [True, False, True]), {}, 0)
    assert "no progress for 12 s in step 7 (limit 10 s)" in text
    assert "stuck: rank 1 on host1, in step 7: other ranks wait for it in all_reduce 9 of default_pg 0" in text
    assert "stack of rank 1:\nstack 1" in text
    assert text.count("waiting") == 2
    behind = explain(reports([9, 8, 9], [True, True, True]), {}, 0)  # it waits too, but for an earlier one
    assert "stuck: rank 1 on host1" in behind
    assert "check the network" in explain(reports([9, 9], [True, True]), {}, 0)
    silent = reports([9, 9, 9], [True, True, True])
    silent[2] = None
    text = explain(silent, {2: RankReport(2, "host2", "step 6", 1.0)}, 0)
    assert "stuck: rank 2 does not respond" in text
    assert "last report: on host2, in step 6" in text


def spin_forever() -> None:
    while True:
        pass


def hang(folder: str, port: int, how: str) -> None:
    """A few steps in its own group, in which rank 1 then stops or spins; the others wait. Never returns."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    errors = os.open(f"{folder}/stderr.{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 2)
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    store.set(f"process/{rank}", str(os.getpid()))
    process_of_1 = int(store.get("process/1"))

    def end(status: int) -> None:
        if how == "stop":  # as the launcher does
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_of_1, signal.SIGKILL)
        os._exit(status)

    with Watchdog(GuardSpec(stuck_after=LIMIT), rank, world_size, store, end) as watchdog:
        for step in range(6):
            watchdog.enter("step", step)
            dist.all_reduce(torch.ones(3))
        watchdog.enter("step", 6)
        if rank == 1:
            time.sleep(LIMIT / 2)  # for some pulses
            os.kill(os.getpid(), signal.SIGSTOP) if how == "stop" else spin_forever()
        dist.all_reduce(torch.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("stop", ["stuck: rank 1 does not respond", "last report", "in step 6"]),
        ("spin", ["stuck: rank 1 on ", "in step 6: other ranks wait for it in", "in spin_forever", "while True"]),
    ],
)
def test_a_rank_that_stops_or_spins_is_named(tmp_path: Path, how: str, expected: list[str]) -> None:
    port_finder = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port = port_finder.port
    del port_finder
    pool = RankPool()
    with pytest.raises(RuntimeError) as failure:
        pool.run(3, hang, str(tmp_path), port, how)
    pool.close()
    said = "".join((tmp_path / f"stderr.{rank}").read_text() for rank in range(3))
    assert said.count("error: no progress") == 1, said  # one reports for all
    assert all(text in said for text in expected), said
    assert "rank 2, step 6: gloo:all_reduce" in said
    assert str(failure.value).count(f"died with status {STUCK}") == (2 if how == "stop" else 3)


def test_a_recorder_that_hangs_with_the_gpu_hides_no_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs, ended = threading.Event(), threading.Event()

    def asks_a_gpu() -> list[Collective]:
        hangs.wait()
        return []

    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "last_collectives", asks_a_gpu)
    with Watchdog(GuardSpec(stuck_after=0.001), end=lambda status: ended.set()) as watched:
        watched.enter("step", 1)
        told = ended.wait(20)
        hangs.set()
    assert told
    assert "no progress" in capsys.readouterr().err


def test_a_rank_that_never_starts_is_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    run = Run.model_validate({"model": "gpt2-124m", "layout": {"dp_replicate": 4}, "guards": {"arrive_within": 1.5}})
    faults: dict[int, str] = {}

    def arrive(rank: int) -> None:
        worker = Worker(rank=rank, world_size=4, store=f"127.0.0.1:{store.port}")
        try:
            join_group(worker, run, torch.device("cpu"))
        except StuckError as error:
            faults[rank] = str(error)

    threads = [threading.Thread(target=arrive, args=[rank]) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(faults) == {0, 2}
    assert all("of 4 ranks, 1, 3 did not arrive within 1.5 s" in fault for fault in faults.values())


def test_nobody_at_the_address_is_told() -> None:
    run = Run.model_validate({"model": "gpt2-124m", "layout": {"dp_replicate": 2}, "guards": {"arrive_within": 0.3}})
    with pytest.raises(StuckError, match=r"rank 1 on .* could not connect to 127\.0\.0\.1:9 within 0.3 s"):
        join_group(Worker(rank=1, world_size=2, store="127.0.0.1:9"), run, torch.device("cpu"))


def test_a_first_machine_that_does_not_answer_is_told() -> None:
    """With status 69, like a rank that never arrives; it was 2, the status of a wrong recipe."""
    run = Run.model_validate({"model": "gpt2-124m", "layout": {"dp_replicate": 2}, "guards": {"arrive_within": 0.3}})
    nodes = Nodes(count=2, rank=1, port=9)
    with pytest.raises(StuckError, match=r"launcher of the first machine, 127\.0\.0\.1:9, did not answer within 0.3 s"):
        start_workers(run, nodes, [], StopRequest(raises=True), RestartPolicy(run_dir=None))
