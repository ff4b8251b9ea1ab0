"""Searches layouts of a 405B model on ever larger clusters and draws the time: `python docs/plot_search_time.py`.

With `--measure` it searches, each cluster in a process of its own, and writes docs/search-time.json; it always writes
docs/search-time.svg from that.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

from meshwright.families import PRESETS, resolve_model
from meshwright.predict.blueprint import blueprint
from meshwright.predict.hardware import resolve_cluster
from meshwright.predict.job import Job
from meshwright.predict.search import search

DOCS = Path(__file__).parent
DATA, PLOT = DOCS / "search-time.json", DOCS / "search-time.svg"
DEVICES = tuple(8 * 2**n for n in range(14))
WIDTH, HEIGHT, LEFT, TOP = 640, 260, 60, 30


def measure(devices: int) -> dict[str, float | str]:
    """Processor seconds, memory and outcome of one search."""
    model = blueprint(resolve_model(PRESETS["llama-3.1-405b"], base_dir=DOCS))
    job = Job(model=model, sequence=8192, global_batch=max(2048, devices), micro_batch=1)
    start = time.process_time()
    found = search(job, resolve_cluster(f"{devices}xh100", base_dir=DOCS))
    return {
        "devices": devices,
        "seconds": round(time.process_time() - start, 3),
        "legal": found.legal,
        "looked_at": found.looked_at,
        "mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "fastest": found.ranked[0].strategy if found.ranked else "nothing fits",
    }


def draw(rows: list[dict[str, float]]) -> str:
    """Seconds over devices, both logarithmic; beside it memory, on a scale of its own."""
    top = 10.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 70} {HEIGHT + TOP + 50}" '
        'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-weight="bold">Search for llama-3.1-405b on H100s: processor seconds (blue), '
        "memory of the process in MiB (grey)</text>",
    ]

    def across(devices: float) -> float:
        return LEFT + (WIDTH - LEFT) * math.log2(devices / DEVICES[0]) / math.log2(DEVICES[-1] / DEVICES[0])

    def down(seconds: float) -> float:
        return TOP + HEIGHT * (math.log10(top) - math.log10(seconds)) / 3

    for tick in (0.01, 0.1, 1, 10):
        y = down(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{tick:g} s</text>')
    for mebibytes in (0, 25, 50, 75, 100):
        y = TOP + HEIGHT * (1 - mebibytes / 100)
        parts.append(f'<text x="{WIDTH + 8}" y="{y + 4:.0f}" fill="#777">{mebibytes} MiB</text>')
    for row in rows[::2]:
        parts.append(f'<text x="{across(row["devices"]):.0f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">'
                     f"{row['devices']:,}</text>")  # fmt: skip
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">devices</text>')
    lines = (
        ("#0072b2", [(across(row["devices"]), down(row["seconds"])) for row in rows]),
        ("#999999", [(across(row["devices"]), TOP + HEIGHT * (1 - row["mebibytes"] / 100)) for row in rows]),
    )
    for colour, points in lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>\n"])


def table(rows: list[dict[str, float]]) -> str:
    """The same as a table for docs/plan.md."""
    head = "| devices | legal layouts | predicted | time | memory of the process | fastest |\n|---|---|---|---|---|---|"
    return "\n".join(
        [head]
        + [
            f"| {row['devices']} | {row['legal']} | {row['looked_at']} | {row['seconds']:.2f} s | "
            f"{row['mebibytes']} MiB | {row['fastest']} |"
            for row in rows
        ]
    )


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--measure", action="store_true", help="search anew first")
    words.add_argument("--one", type=int, metavar="DEVICES", help="one search, for a process of its own")
    arguments = words.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        sys.exit()
    if arguments.measure:
        words = [sys.executable, __file__, "--one"]
        found = [subprocess.run([*words, str(n)], check=True, capture_output=True).stdout for n in DEVICES]
        DATA.write_text(json.dumps([json.loads(text) for text in found], indent=1) + "\n", encoding="utf-8")
    measured = json.loads(DATA.read_text(encoding="utf-8"))
    PLOT.write_text(draw(measured), encoding="utf-8")
    print(table(measured[::2]))
