"""Schedules as data: the published orders, illegal schedules, and the time, bubble and memory computed from them."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from meshwright.spec.actions import (
    Action,
    Program,
    Schedule,
    ScheduleError,
    Transfer,
    forward_only,
    read_schedule,
    with_transfers,
)
from meshwright.spec.schedule import SCHEDULES, build_schedule, nearest_microbatches
from meshwright.spec.stream import cut_stream, steady_bubble
from meshwright.spec.timeline import StageCosts, in_flight, simulate

TORCH = {
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "looped-bfs": torch_schedules.ScheduleLoopedBFS,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}


def torch_order(name: str, ranks: int, chunks: int, microbatches: int) -> list[str]:
    """Each rank's actions in torch's schedule of this name, with overlapped pairs one by one."""
    rounds = max(1, microbatches // ranks)
    schedule = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=chunks,
        num_stages=ranks * chunks,
        _stages=[None] * chunks,
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // rounds,
    )
    lines = []
    for rank in range(ranks):
        actions = TORCH[name]._calculate_single_rank_operations(schedule, rank)  # type: ignore[arg-type]
        single = [one for action in actions if action is not None for one in action.sub_actions or (action,)]
        lines.append(" ".join(f"{a.stage_index}{a.computation_type.value}{a.microbatch_index}" for a in single))
    return lines


def lines(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def schedule_of(*ranks: str) -> Schedule:
    """A schedule from lines such as `0F0 0B0`."""
    return Schedule(
        "mine",
        tuple(
            tuple(Action(cell[1], int(cell[0]), int(cell[2])) for cell in rank.split())  # type: ignore[arg-type]
            for rank in ranks
        ),
    )


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_order_is_the_one_that_torch_has(name: str, ranks: int) -> None:
    compared = 0
    for chunks in (2,) if SCHEDULES[name].fixed else (1, 2, 3):
        for microbatches in range(1, 14):
            if SCHEDULES[name].problem(ranks, chunks, microbatches) is None:
                ours = build_schedule(name, ranks=ranks, microbatches=microbatches, stages_per_rank=chunks)
                if chunks > 1 or microbatches % max(1, microbatches // ranks) == 0:  # else torch refuses
                    assert lines(ours) == torch_order(name, ranks, chunks, microbatches)
                    compared += 1
    assert compared > 5


def test_1f1b_and_afab_are_those_of_their_papers() -> None:
    assert lines(build_schedule("afab", ranks=2, microbatches=3)) == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]
    assert lines(build_schedule("1f1b", ranks=3, microbatches=4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_every_schedule_is_legal_wherever_it_says_so(name: str, ranks: int) -> None:
    """`Schedule` itself refuses schedules that deadlock or omit something."""
    for microbatches in range(1, 2 * ranks + 4):
        if SCHEDULES[name].problem(ranks, SCHEDULES[name].stages_per_rank, microbatches) is None:
            schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
            assert schedule.num_microbatches == microbatches
            assert len(schedule.order) == sum(map(len, schedule.ranks))
            assert all(schedule.stages_of(rank) for rank in range(ranks))


def test_what_stands_on_which_rank() -> None:
    assert build_schedule("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=3).placement == (0, 1) * 3
    assert build_schedule("zbv", ranks=3, microbatches=6).placement == (0, 1, 2, 2, 1, 0)
    assert build_schedule("zbv", ranks=3, microbatches=6).stages_of(0) == (0, 5)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches", "message"),
    [
        ("1f1b", 4, 1, 3, "needs at least 4.*nearest number that works is 4"),
        ("1f1b", 4, 2, 8, r"has 1 stage\(s\) per rank, not 2"),
        ("zbv", 4, 3, 8, r"has 2 stage\(s\) per rank, not 3"),
        ("dualpipev", 4, 2, 7, "nearest number that works is 8"),
        ("interleaved-1f1b", 4, 2, 9, "2 rounds of equal size.*nearest number that works is 10"),
        ("2f2b", 4, 1, 8, "unknown schedule '2f2b'; known are afab, 1f1b,"),
    ],
)
def test_what_cannot_be_made_is_refused(name: str, ranks: int, chunks: int, microbatches: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, ranks=ranks, microbatches=microbatches, stages_per_rank=chunks)


def test_the_nearest_number_of_microbatches_works() -> None:
    for name in SCHEDULES:
        for microbatches in range(1, 20):
            near = nearest_microbatches(name, 4, microbatches)
            assert build_schedule(name, ranks=4, microbatches=near).num_microbatches == near


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (["0F0 0B0 1F0 1B0"], "rank 0 deadlocks at 0B0: it waits for 1B0 or 1I0"),
        (["0B0 0F0"], "deadlocks at 0B0: it waits for 0F0"),
        (["0F0 0F1 0B0"], "stage 0, microbatch 1 has 1 F, 0 B"),
        (["0F0 0I0"], "0 B, 1 I, 0 W"),
        (["0F0 0W0 0I0"], "deadlocks at 0W0: it waits for 0I0"),
        (["0F0 0B0", "0F1 0B1"], "stage 0 is on 2 ranks"),
        (["1F0 1B0"], "stage 0 is on 0 ranks"),
        (["0F1 0B1"], "stage 0, microbatch 0 has 0 F"),
        # Each rank is legal alone; together each waits for the other.
        (["0F0 2F0 2B0 0F1 2F1 2B1 0B0 0B1", "1F1 1F0 1B0 1B1"], "rank 0 deadlocks at 2F0: it waits for 1F0"),
    ],
)
def test_an_illegal_schedule_says_what_is_wrong(ranks: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule_of(*ranks)


def test_own_schedules_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    for name in SCHEDULES:
        published = build_schedule(name, ranks=2, microbatches=4)
        path.write_text(published.csv())
        assert build_schedule(str(path), ranks=2, microbatches=4).ranks == published.ranks
    path.write_text("0F0,,0F1,0B0,0B1\n\n,1F0,1F1,1B0,1B1\n")  # empty cells and lines are ignored
    assert lines(read_schedule(path)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    for ranks, microbatches, message in ((4, 2, "is for 2 pipeline ranks, the run has 4"), (2, 6, "2 microbatches")):
        with pytest.raises(ScheduleError, match=message):
            build_schedule(str(path), ranks=ranks, microbatches=microbatches)
    path.write_text("0F0,0B0\n1F0,1X0\n")
    with pytest.raises(ScheduleError, match=re.escape(f"{path}:2, cell 2: '1X0' is not an action")):
        read_schedule(path)
    with pytest.raises(ScheduleError, match="No such file"):
        read_schedule(tmp_path / "none.csv")


def bubble(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> float:
    schedule = build_schedule(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    return simulate(schedule, StageCosts.equal(schedule.num_stages)).bubble


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 8)])
def test_bubbles_are_those_of_the_papers(ranks: int, microbatches: int) -> None:
    p, m = ranks, microbatches
    assert bubble("afab", p, m) == pytest.approx((p - 1) / (m + p - 1))
    assert bubble("1f1b", p, m) == pytest.approx((p - 1) / (m + p - 1))
    for v in (1, 2, 3):  # Narayanan et al., 2021, section 2.2: (p - 1) / (v m) of the ideal time
        assert bubble("interleaved-1f1b", p, m, v) == pytest.approx((p - 1) / (v * m + p - 1))
        assert bubble("looped-bfs", p, m, v) == pytest.approx((p - 1) / (v * m + p - 1))
    # Qi et al., 2024, table 2: ZB-H1 idles for (p - 1)(F + I - W), a third of 1F1B's bubble where they are equal.
    assert bubble("interleaved-zero-bubble", p, m, 1) == pytest.approx((p - 1) / (3 * m + p - 1))
    assert bubble("zbv", p, max(m, 2 * p)) <= bubble("interleaved-zero-bubble", p, max(m, 2 * p), 1)


def test_microbatches_in_flight() -> None:
    def flying(name: str) -> tuple[int, ...]:
        return in_flight(build_schedule(name, ranks=4, microbatches=16))

    assert flying("afab") == (16, 16, 16, 16)
    assert flying("1f1b") == (4, 3, 2, 1)
    assert flying("interleaved-1f1b") == (11, 9, 7, 5)  # (v - 1) p + 2 (p - 1 - rank) + 1
    assert flying("zbv") == (8, 8, 8, 8)  # of half a rank's layers each: as many as 1F1B's first rank, on every rank
    zero = build_schedule("interleaved-zero-bubble", ranks=4, microbatches=16, stages_per_rank=1)
    assert in_flight(zero) == (4, 4, 4, 4)


def test_costs_of_stages_and_transfers_decide_the_time() -> None:
    schedule = build_schedule("afab", ranks=2, microbatches=2)
    costs = StageCosts(forward=(2, 3), backward_input=(1, 2), backward_weight=(1, 2), transfer=0.5)
    timeline = simulate(schedule, costs)
    spans = {str(span.action): (span.start, span.end) for rank in timeline.ranks for span in rank}
    assert spans["0F1"] == (2, 4)
    assert spans["1F0"] == (2.5, 5.5)  # after its transfer
    assert spans["1F1"] == (5.5, 8.5)
    assert spans["1B0"] == (8.5, 12.5)  # input and weights
    assert spans["0B0"] == (13, 15)
    assert timeline.duration == 19  # 1B1 ends at 16.5; half a unit until rank 0 has it
    assert timeline.bubbles == pytest.approx((1 - 8 / 19, 1 - 14 / 19))
    assert timeline.bubble == pytest.approx(1 - 22 / 38)
    turn = simulate(schedule_of("0F0 1F0 1B0 0B0"), StageCosts.equal(2, transfer=9))
    assert turn.duration == 6  # transfers between stages on one rank are free


def test_a_stream_is_cut_where_steps_begin() -> None:
    """Every microbatch of a step begins in it; its remaining passes come first in the next step, and none is
    repeated."""
    schedule = build_schedule("pipedream-2bw", ranks=3, microbatches=4)
    stream = cut_stream(schedule)

    def actions(programs: tuple[Program, ...]) -> list[str]:
        return [" ".join(str(item) for item in program if isinstance(item, Action)) for program in programs]

    assert actions(stream.fill) == [
        "0F0 0F1 0F2 0B0 0F3 0B1",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert actions(stream.steady) == [
        "0F4 0B2 0F5 0B3 0F6 0B4 0F7 0B5",
        "1F4 1B3 1F5 1B4 1F6 1B5 1F7 1B6",
        "2F4 2B4 2F5 2B5 2F6 2B6 2F7 2B7",
    ]
    assert actions(stream.drain) == ["0B2 0B3", "1B3", ""]
    for programs in (stream.fill, stream.steady, stream.drain):  # all that is sent in a step is received in it
        ends = [item[:3] for program in programs for item in program if isinstance(item, Transfer)]
        assert all(ends.count(end) == 2 for end in ends)
    assert steady_bubble(schedule, StageCosts.equal(3)) == 0
    slow = StageCosts(forward=(1, 2, 1), backward_input=(1, 2, 1), backward_weight=(1, 2, 1))
    assert steady_bubble(schedule, slow) == pytest.approx(1 / 3)


def test_picture() -> None:
    schedule = build_schedule("zbv", ranks=2, microbatches=2)
    assert simulate(schedule, StageCosts.equal(4)).picture() == (
        "rank 0  01 00011100 11\n        FF.fiwfiwIW.IW\nrank 1   001100001111\n        .FfFfiwIWiwIW."
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_transfers_arrive_in_the_order_in_which_they_are_sent(name: str) -> None:
    """Run each rank's list with links that deliver in order and senders that wait: no rank may wait forever."""
    schedule = build_schedule(name, ranks=4, microbatches=8)
    for one in (schedule, forward_only(schedule.placement, 5)):
        program = [list(items) for items in with_transfers(one)]
        transfers = [item for items in program for item in items if isinstance(item, Transfer)]
        crossings = sum(a != b for a, b in zip(one.placement, one.placement[1:], strict=False))
        assert len(transfers) == 2 * crossings * one.num_microbatches * (1 if one.evaluation else 2)
        have: list[set[tuple[bool, int, int]]] = [set() for _ in program]
        while any(program):
            moved = False
            for rank, items in enumerate(program):
                while items and isinstance(action := items[0], Action):
                    for group in one.needs(action):
                        needs = {(needed.kind == "F", needed.stage, needed.microbatch) for needed in group}
                        assert action.kind == "W" or needs & have[rank], (rank, action)
                    have[rank].add((action.kind == "F", action.stage, action.microbatch))
                    items.pop(0)
                    moved = True
            for items in program:
                transfer = items[0] if items else None
                if not isinstance(transfer, Transfer):
                    continue
                ends = program[transfer.source], program[transfer.target]
                if all(end[:1] == [transfer] for end in ends):
                    have[transfer.target].add(transfer[:3])
                    ends[0].pop(0)
                    ends[1].pop(0)
                    moved = True
            assert moved, program
