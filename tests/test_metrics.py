"""Every printed figure has one definition, checked with a clock that the test controls."""

import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.trainer.display import Display, ProgressLine, duration, short
from meshwright.trainer.metrics import WINDOW, MetricsJournal, StepClock, StepRecord, new_record, read_journal


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def clock_after(seconds: list[float], *, ranks: int = 4, peak: float | None = 1e9) -> StepClock:
    fake = FakeClock()
    clock = StepClock(ranks=ranks, flops_per_token=1e3, peak_flops=peak, steps=100, clock=fake)
    for length in seconds:
        clock.begin()
        fake.now += length
        clock.end()
        fake.now += 7  # evaluation and saving between steps are not step time
    return clock


def test_the_first_step_is_warm_up() -> None:
    rates = clock_after([50.0]).rates(step=1, tokens=8000, trained=6000)
    assert set(rates.values()) == {None}


def test_rates_by_definition() -> None:
    rates = clock_after([50.0, 2.0, 4.0, 3.0]).rates(step=4, tokens=12000, trained=9000)
    assert rates["data_time"] == 0.0
    assert rates["step_time"] == 3.0  # the median of 2, 4, 3
    assert rates["tokens_per_s_per_rank"] == 12000 / 3 / 4
    assert rates["trained_per_s_per_rank"] == 9000 / 3 / 4
    assert rates["mfu"] == pytest.approx(1e3 * 1000 / 1e9)
    assert rates["eta"] == (100 - 4) * 3.0


def test_the_wait_for_data_is_a_median_too() -> None:
    fake = FakeClock()
    clock = StepClock(ranks=1, flops_per_token=1.0, peak_flops=None, steps=9, clock=fake)
    for wait in (9.0, 0.5, 0.1, 0.2):
        clock.begin()
        fake.now += wait
        clock.loaded()
        fake.now += 1
        clock.end()
    rates = clock.rates(step=4, tokens=1, trained=1)
    assert rates["data_time"] == pytest.approx(0.2)
    assert rates["step_time"] == pytest.approx(1.2)


def test_the_median_forgets_what_is_older_than_the_window() -> None:
    rates = clock_after([1.0] + [100.0] * WINDOW + [5.0] * WINDOW).rates(step=41, tokens=4, trained=4)
    assert rates["step_time"] == 5.0


def test_no_peak_no_mfu() -> None:
    assert clock_after([1.0, 1.0], peak=None).rates(step=2, tokens=4, trained=4)["mfu"] is None


RECORD = StepRecord(
    step=120,
    loss=2.3412,
    gnorm=0.834,
    lr=2.9e-4,
    tokens=983040,
    step_time=1.0,
    tokens_per_s_per_rank=7123.0,
    trained_per_s_per_rank=7000.0,
    mfu=0.412,
    mem=int(61.2 * 2**30),
    eta=4320.0,
    skipped=0,
    spikes=0,
    rewinds=0,
    expert_load=None,
)


def test_the_line_people_read() -> None:
    display = Display(steps=1000, memory_bytes=80 * 2**30, device="cuda", enabled=True, stream=io.StringIO())
    assert display.line(RECORD) == (
        "step 120/1000  loss 2.341  gnorm 0.83  lr 2.9e-04  7.1k tok/s/gpu  mfu 41%  mem 61.2/80G  eta 1h12m"
    )
    display.pressure = lambda: "host 94% full"
    assert "  mem 61.2/80G  host 94% full  eta" in display.line(RECORD)
    assert "  gnorm none yet  " in display.line(replace(RECORD, gnorm=None))


def test_plain_lines_at_intervals_and_silence_off_rank_0() -> None:
    stream = io.StringIO()
    display = Display(steps=200, memory_bytes=2**30, device="cpu", enabled=True, stream=stream)
    for step in range(1, 201):
        display.step(StepRecord(**{**vars(RECORD), "step": step}))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 51
    assert lines[0].startswith("step 1/200")
    assert lines[-1].startswith("step 200/200")
    assert "tok/s/rank" in lines[0]
    silent = io.StringIO()
    display = Display(steps=1, memory_bytes=1, device="cpu", enabled=False, stream=silent)
    display.step(RECORD)
    display.say("nothing")
    assert silent.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_line_renews_itself_and_messages_do_not_overwrite_it() -> None:
    stream = Terminal()
    display = Display(steps=1000, memory_bytes=2**30, device="cpu", enabled=True, stream=stream)
    display.step(RECORD)
    display.step(RECORD)
    display.say("saved")
    assert stream.getvalue().count("\r\x1b[Kstep 120/1000") == 2  # too narrow for the bar
    assert stream.getvalue().endswith("\nsaved\n")


def test_progress_leaves_a_clean_line_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = FakeClock(), Terminal()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressLine() as progress:
        progress("reading", 0, 4_000_000)
        clock.now += 1
        progress("reading", 1_000_000, 4_000_000)
    assert stream.getvalue() == "\r\x1b[Kreading: 25 % of 4.0M, 1.0M/s, 3s left\r\x1b[K"


@pytest.mark.parametrize(("seconds", "text"), [(4320, "1h12m"), (61, "1m01s"), (59.4, "59s"), (3599.9, "1h00m")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(999, "999"), (7100, "7.1k"), (1.24e6, "1.2M"), (8.03e9, "8.0B")])
def test_short(number: float, text: str) -> None:
    assert short(number) == text


def test_the_journal_survives_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = [new_record("step", step=1, loss=2.0), new_record("step", step=2, loss=1.0)]
    with MetricsJournal(path) as journal:
        for record in written:
            journal.write(record)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    records = read_journal(path)
    assert [record["loss"] for record in records] == [2.0, 1.0]
    assert records == written
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "step"
    with MetricsJournal(path) as journal:  # a resumed run
        journal.write(new_record("step", step=3, loss=0.5))
    assert [record["step"] for record in read_journal(path)] == [1, 2, 3]


def test_a_full_disk_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MetricsJournal(tmp_path / "metrics.jsonl") as journal:
        journal.write(new_record("step", step=1))
        really, room = journal._file, 10

        class Full:
            """A disk with space for a few more bytes, then none."""

            def write(self, data: bytes) -> int:
                if not room:
                    raise OSError(28, "No space left on device")
                return really.write(data[:room])

            def __getattr__(self, name: str) -> Any:
                return getattr(really, name)

        monkeypatch.setattr(journal, "_file", Full())
        journal.write(new_record("step", step=2))
        room = 0
        journal.write(new_record("step", step=3))
        assert [record["step"] for record in read_journal(tmp_path / "metrics.jsonl")] == [1]
        monkeypatch.setattr(journal, "_file", really)
        journal.write(new_record("step", step=4))
    assert [record["step"] for record in read_journal(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
