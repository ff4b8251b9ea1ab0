"""A run's journal: the records of `metrics.jsonl`, and those of them that count after a restart or a rewind."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.files import regular

JOURNAL = "metrics.jsonl"
JournalRecord = dict[str, Any]


def read_journal(path: Path) -> list[JournalRecord]:
    """All complete records of a JSONL file; incomplete and damaged lines are left out."""
    if not path.exists():
        return []
    lines = regular(path).read_bytes().split(b"\n")
    return [record for line in lines[:-1] if (record := _record(line)) is not None]


def _record(line: bytes) -> JournalRecord | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "kind" in record else None


@dataclass(frozen=True)
class Lived:
    """A record in the life of its run."""

    record: JournalRecord
    elapsed: float
    """Seconds that the run's processes had run when it was written; time between processes does not count."""
    seconds: float
    """Seconds since the record before it, in the same process."""
    counts: bool
    """Whether the run went on from it: not if a restart or a rewind went back to an earlier step."""


def lives(records: Iterable[JournalRecord]) -> list[Lived]:
    """The records with their times, in order. A record without step or time is left out."""
    timed = list(_timed(record for record in records if _is_placed(record)))
    latest, marked = float("inf"), list[Lived]()
    for record, elapsed, seconds in reversed(timed):
        marked.append(Lived(record, elapsed, seconds, record["step"] <= latest))
        if record["kind"] in ("start", "rewind"):
            latest = min(latest, record["step"])
    return marked[::-1]


def _is_placed(record: JournalRecord) -> bool:
    numbers = (record.get("step"), record.get("time"))
    return all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)


def _timed(records: Iterable[JournalRecord]) -> Iterator[tuple[JournalRecord, float, float]]:
    elapsed, before = 0.0, None
    for record in records:
        first = before is None or record["kind"] == "start"
        seconds = 0.0 if first else max(0.0, record["time"] - before)
        elapsed, before = elapsed + seconds, record["time"]
        yield record, elapsed, seconds
