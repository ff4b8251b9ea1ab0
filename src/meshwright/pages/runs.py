"""What a run's folder holds, as data: its state, its figures by step, its events, samples, recipe and plan."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.spec.errors import UserError
from meshwright.spec.files import regular
from meshwright.storage.journal import JOURNAL, Lived, lives, read_journal
from meshwright.storage.lock import is_held

MOST_POINTS = 20_000
"""Points of a run's curves; of longer runs, the least and the greatest loss of each interval are kept."""
LOCK, ENVIRONMENT, RESOLVED, RECIPE = ".lock", "env.json", "resolved.yaml", "recipe.yaml"
COUNTERS = ("kind", "time", "step", "tokens", "eta", "skipped", "spikes", "rewinds")
"""Numbers in records that are no curves."""
WITHOUT_CURVES = (
    *("start", "checkpoint", "checkpoint_missed", "rewind", "stopped", "end", "sample", "verification", "memory"),
    *("lr_finder", "lr_suggestion"),
)
"""Kinds of records whose numbers are no curves over steps."""
SPENT = {
    "step": "training",
    "evaluation": "evaluation",
    "ema": "evaluation",
    "tasks": "tasks",
    "sample": "samples",
    "checkpoint": "checkpoints",
}
"""Kind of record -> what the time before it was spent on."""

Data = dict[str, Any]


def find_runs(words: Sequence[Path]) -> list[Path]:
    """The run directories that the paths name: each a run, or a folder of runs.

    Raises `UserError` if one is neither.
    """
    runs = list[Path]()
    for word in words:
        inside = [word] if (word / JOURNAL).is_file() else runs_below(word)
        if not inside:
            what = "contains no run (no folder in it has a metrics.jsonl)" if word.is_dir() else "no such run directory"
            raise UserError(f"{word}: {what}")
        runs += [run for run in inside if run not in runs]
    return runs


def runs_below(folder: Path) -> list[Path]:
    """The run directories in a folder, at most two levels deep, the one that began first at the front."""
    places = {path.parent for pattern in ("*", "*/*") for path in folder.glob(f"{pattern}/{JOURNAL}")}
    return sorted(places, key=lambda place: (_begun(place), str(place)))


def _begun(run_dir: Path) -> float:
    records = (json_line for json_line in _first_line(run_dir / JOURNAL))
    return next((record.get("time", 0.0) for record in records), 0.0)


def _first_line(path: Path) -> Iterable[Data]:
    with regular(path).open("rb") as file:
        line = file.readline()
    try:
        record = json.loads(line)
    except ValueError:
        return
    if isinstance(record, dict):
        yield record


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """Short names of runs: the last parts of their paths that tell them apart."""
    parts = [path.resolve().parts for path in run_dirs]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in run_dirs]


def read_run(run_dir: Path, name: str) -> Data:
    """Everything that a page shows of a run. Raises `UserError` if a file of it is damaged."""
    lived = lives(read_journal(run_dir / JOURNAL))
    resolved, environment = read_yaml(run_dir / RESOLVED), read_json(run_dir / ENVIRONMENT)
    settings = flat(resolved.get("run") or {})
    tables = _tables(lived, environment.get("peak_flops"))
    return {
        "name": name,
        "folder": str(run_dir),
        "state": state_of(run_dir, lived),
        "steps": settings.get("training.steps"),
        "settings": settings,
        "given": _text(run_dir / RECIPE),
        "reasons": resolved.get("reasons") or {},
        "environment": environment,
        "planned": environment.get("planned"),
        "tables": tables,
        "events": _events(lived, tables),
        "samples": [_only(one.record, "step", "prompt", "text") for one in lived if _is(one, "sample") and one.counts],
        "memory": next((one.record for one in reversed(lived) if _is(one, "memory")), None),
        "spent": _spent(lived),
        "strategy": next((one.record.get("strategy") for one in reversed(lived) if _is(one, "start")), None),
        "updated": lived[-1].record["time"] if lived else None,
        "elapsed": lived[-1].elapsed if lived else 0.0,
    }


def state_of(run_dir: Path, lived: Sequence[Lived]) -> str:
    """`running`, `finished`, `stopped` by a signal, or `ended early`: killed, or ended by an error."""
    if is_held(run_dir / LOCK):
        return "running"
    last = lived[-1].record["kind"] if lived else ""
    return {"end": "finished", "stopped": "stopped"}.get(last, "ended early")


def _tables(lived: Sequence[Lived], peak: float | None) -> dict[str, dict[str, list[Any]]]:
    """Curves by kind of record: equally long columns, with the axes `step`, `tokens`, `time` and `flops`."""
    kept, ranks = defaultdict[str, list[Data]](list), 1
    for one in lived:
        kind = one.record["kind"]
        ranks = one.record.get("world_size", ranks) if kind == "start" else ranks
        if one.counts and kind not in WITHOUT_CURVES:
            kept[kind].append({**one.record, "time": round(one.elapsed, 3), "ranks": ranks})
    tables = {kind: _table(_thinned(rows)) for kind, rows in kept.items()}
    steps = tables.get("step")
    if steps is not None:
        _add_rates(steps, kept["step"], peak)
        for kind, columns in tables.items():
            if kind != "step":
                _add_axes(columns, steps)
    return {
        kind: {name: column for name, column in columns.items() if _says(column)} for kind, columns in tables.items()
    }


def _thinned(rows: list[Data]) -> list[Data]:
    """At most about `MOST_POINTS` rows: of every interval the least and the greatest loss, and the last row."""
    if len(rows) <= MOST_POINTS:
        return rows
    size, kept = -(-2 * len(rows) // MOST_POINTS), list[Data]()
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        chosen = {id(pick(part, key=_loss)) for pick in (min, max)} | {id(rows[-1])}
        kept += [row for row in part if id(row) in chosen]
    return kept


def _loss(row: Data) -> float:
    loss = row.get("loss")
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else 0.0


def _table(rows: list[Data]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if _is_number(value))
    columns = {name: [_finite(row.get(name)) for row in rows] for name in names if name not in COUNTERS[:1]}
    if rows and rows[0]["kind"] != "step":
        columns.pop("tokens", None)  # of the evaluation, not of the run
    for name in ("eta", "skipped", "spikes", "rewinds"):
        columns.pop(name, None)
    return columns


def _add_rates(steps: dict[str, list[Any]], rows: list[Data], peak: float | None) -> None:
    """Figures of the whole run, from those of a rank; and the FLOPs so far."""
    ranks, rates = steps.pop("ranks"), steps.get("tokens_per_s_per_rank", [])
    steps["tokens_per_s"] = [_times(rate, count) for rate, count in zip(rates, ranks, strict=False)]
    each = next((row for row in rows if row.get("mfu") and row.get("tokens_per_s_per_rank")), None)
    if peak and each is not None and "tokens" in steps:
        flops_per_token = each["mfu"] * peak / each["tokens_per_s_per_rank"]
        steps["flops"] = [_times(tokens, flops_per_token) for tokens in steps["tokens"]]


def _add_axes(columns: dict[str, list[Any]], steps: dict[str, list[Any]]) -> None:
    """Tokens and FLOPs of records that have none: those of their step."""
    columns.pop("ranks", None)
    for axis in ("tokens", "flops"):
        if axis in steps:
            by_step = dict(zip(steps["step"], steps[axis], strict=True))
            newest = steps["step"][-1]
            each = (by_step[newest] or 0) / max(1, newest)
            columns[axis] = [by_step.get(step, step * each) for step in columns["step"]]


def _events(lived: Sequence[Lived], tables: dict[str, dict[str, list[Any]]]) -> list[Data]:
    """What happened to the run besides its steps, in order."""
    events, begun, before = list[Data](), False, dict[str, int]()
    for one in lived:
        record, kind = one.record, one.record["kind"]
        marks: list[tuple[str, str]] = []
        if kind == "step":
            marks = _outliers(record, before)
            before = {name: record.get(name, 0) for name in ("spikes", "skipped")}
        elif kind == "start":
            ranks = record.get("world_size")
            marks = [("restart", f"continued on {ranks} rank{'s' * (ranks != 1)}")] * begun
            begun = True
        elif kind == "checkpoint":
            marks = [("checkpoint", f"saved {Path(str(record.get('path'))).name}")]
        elif kind == "checkpoint_missed":
            marks = [("problem", f"checkpoint not written: {record.get('problem')}")]
        elif kind == "rewind":
            marks = [("rewind", str(record.get("why")))]
        elif kind == "verification" and not record.get("equal"):
            marks = [("problem", str(record.get("text")))]
        elif kind == "stopped":
            marks = [("stop", "stopped by a signal")]
        elif kind == "end" and record.get("why"):
            marks = [("stop", str(record["why"]))]
        events += [{"step": record["step"], "time": round(one.elapsed, 3), "kind": k, "text": t} for k, t in marks]
    if "step" in tables and events:
        axes = {"step": [event["step"] for event in events]}
        _add_axes(axes, tables["step"])
        for axis in ("tokens", "flops"):
            for event, value in zip(events, axes.get(axis, []), strict=False):
                event[axis] = value
    return events


def _outliers(record: Data, before: Data) -> list[tuple[str, str]]:
    """Whether a step was a spike, or was skipped: the counters of its record have grown."""
    if record.get("spikes", 0) > before.get("spikes", 0):
        return [("spike", f"spike: loss {record.get('loss')}, gradient norm {record.get('gnorm')}")]
    if record.get("skipped", 0) > before.get("skipped", 0):
        return [("spike", "skipped: loss or gradient not finite")]
    return []


def _spent(lived: Sequence[Lived]) -> dict[str, float]:
    """Seconds of the run's processes by cause, as far as the times of records tell."""
    spent = defaultdict[str, float](float)
    warm = False
    for one in lived:
        kind = one.record["kind"]
        if kind == "start":
            warm = True
        cause = SPENT.get(kind, "other")
        if not one.counts and kind != "start":
            cause = "repeated later"
        elif kind == "step" and warm:
            cause, warm = "first step", False
        blocked = min(one.seconds, one.record.get("blocked_seconds") or 0.0)
        spent[cause] += blocked if kind == "checkpoint" and one.counts else one.seconds
        if kind == "checkpoint" and one.counts:
            spent["training"] += one.seconds - blocked
    order = ("training", "evaluation", "tasks", "samples", "checkpoints", "first step", "repeated later", "other")
    return {cause: round(spent[cause], 3) for cause in order if spent[cause] > 0}


def differences(runs: Sequence[Data]) -> list[tuple[str, list[Any]]]:
    """Settings whose values differ between runs, with each run's value (None where it has none)."""
    settings = [run["settings"] for run in runs]
    names = dict.fromkeys(name for one in settings for name in one)
    rows = [(name, [one.get(name) for one in settings]) for name in names if name != "run_dir"]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested mapping as `a.b.c` -> value; lists stay values."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    return {k: v for name, part in value.items() for k, v in flat(part, f"{prefix}.{name}" if prefix else name).items()}


def read_yaml(path: Path) -> Data:
    """The mapping in a YAML file; empty if there is none. Raises `UserError` if it is damaged."""
    try:
        mapping = yaml.load(_text(path), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is damaged, not YAML ({' '.join(str(error).split())})") from error
    return mapping if isinstance(mapping, dict) else {}


def read_json(path: Path) -> Data:
    """The object in a JSON file; empty if there is none. Raises `UserError` if it is damaged."""
    text = _text(path)
    try:
        contents = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged, not JSON ({error})") from error
    return contents if isinstance(contents, dict) else {}


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names)


def _text(path: Path) -> str:
    return regular(path).read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _is(one: Lived, kind: str) -> bool:
    return one.record["kind"] == kind


def _only(record: Data, *names: str) -> Data:
    return {name: record.get(name) for name in names}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> Any:
    return value if _is_number(value) and math.isfinite(value) else None


def _says(column: list[Any]) -> bool:
    return any(value is not None for value in column)


def _times(a: Any, b: float) -> Any:
    return None if a is None else a * b
