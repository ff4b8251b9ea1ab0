"""Asks the planner of a browser tab and the command line the same queries, and compares the texts byte for byte.

    meshwright plan --site SITE && python benchmarks/planner_tab.py SITE --queries 500

The queries are drawn from `--seed` over models, clusters and settings. The tab's planner is that of the folder SITE,
run by node. Prints every query whose answers differ; exits with 1 if one does.
"""

import argparse
import contextlib
import io
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.cli.main import main as meshwright
from meshwright.families import PRESETS
from meshwright.planner.app import device_names
from meshwright.predict.changes import CHANGES, GROUPS

NODE = Path(__file__).resolve().parents[1] / "tests" / "planner_tab.mjs"
LONG = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 8, 24, 64, 100, 128, 256)
PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
COUNTS = (1, 1, 2, 2, 4, 4, 6, 8, 8, 8, 16, 64)
OTHERS = (
    "training.compile=true",
    "training.optimizer.name=adamw_8bit",
    "training.optimizer.name=muon",
    "training.recompute=full",
    "training.micro_batch=1",
    "layout.offload=none",
    "finetune={method: lora}",
    "training.master_dtype=bf16",
    "training.steps=5000",
    "layout={dp_shard: 8, zero: 2}",
    "layout={tp: 4, pp: 2}",
    "data.sequence_length=10007",
    "training.optimizr.lr=1",
)


def drawn(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """The queries, as requests of the page."""
    draw = random.Random(seed)
    models, devices = sorted(PRESETS), device_names()
    for _ in range(count):
        words = [f"data.sequence_length={draw.choice(LONG)}"] * (draw.random() < 0.6)
        words += [f"training.global_batch={draw.choice(BATCHES)}"] * (draw.random() < 0.6)
        words += [f"training.precision={draw.choice(PRECISIONS)}"] * (draw.random() < 0.3)
        words += draw.sample(OTHERS, draw.choice((0, 0, 1, 2)))
        names = [_cluster(draw, devices) for _ in range(draw.choice((1, 1, 1, 1, 2)))]
        request: dict[str, Any] = {"model": draw.choice([*models, "llama-9"]), "words": words, "clusters": names}
        few = len(names) == 1 and names[0].partition("x")[0] in ("1", "2")
        request["methods"] = few and draw.random() < 0.3
        words += ["finetune={method: qlora}"] * (few and draw.random() < 0.2)
        if draw.random() < 0.1:
            request["margin"] = draw.choice((0, 0.05, 0.2, 0.3))
        if draw.random() < 0.1:
            request["consider"] = draw.choice([*GROUPS, *CHANGES])
        yield request


def _cluster(draw: random.Random, devices: list[str]) -> str:
    rate = draw.choice(("", "", "@400Gb/s", "@100GB/s", "@200Gb/s/gpu"))
    return f"{draw.choice(COUNTS)}x{draw.choice(devices)}{rate}"


def words_of(request: dict[str, Any]) -> list[str]:
    """The same query on the command line."""
    words = ["plan", request["model"], *request["words"], "--json"]
    for cluster in request["clusters"]:
        words += ["--cluster", cluster]
    words += [] if request["methods"] else ["--no-methods"]
    for name in ("margin", "consider"):
        words += [f"--{name}", str(request[name])] if name in request else []
    return words


ERROR = 2
"""Exit status of an error, which `--json` prints as an object too."""


def on_the_command_line(request: dict[str, Any]) -> str:
    """What the command line prints: its JSON, or its errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = meshwright(words_of(request))
    return err.getvalue() if status == ERROR else out.getvalue()


class Tab:
    """The planner of a site in node."""

    def __init__(self, site: Path) -> None:
        node = shutil.which("node")
        if node is None:
            sys.exit("error: node is not installed")
        self._process = subprocess.Popen(
            [node, NODE, site], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def ask(self, request: dict[str, Any]) -> None:
        """Send a query; `answer` waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request | {"page": False}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The text of the answer, as the command line prints it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"error: node ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "problems" in answer:
            return "".join(f"error: {problem}\n" for problem in answer["problems"])
        return answer["json"] + "\n"

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(site: Path, seed: int, count: int) -> int:
    """Ask every query twice; returns the number of answers that differ."""
    tab, differ, plans, begun = Tab(site), 0, 0, time.monotonic()
    for number, request in enumerate(drawn(seed, count), 1):
        tab.ask(request)  # works while the command line does
        expected, found = on_the_command_line(request), tab.answer()
        plans += expected.startswith("{")
        if expected != found:
            differ += 1
            print(f"differs: {' '.join(words_of(request))}")
            lines = zip(expected.splitlines(), found.splitlines(), strict=False)
            print("\n".join(f"  {one.strip()} | {other.strip()}" for one, other in lines if one != other)[:2000])
        if number % 25 == 0:
            print(f"{number} queries, {differ} differ, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    tab.close()
    print(f"{count} queries (seed {seed}): {plans} plans, {count - plans} errors; {differ} answers differ")
    return differ


def main() -> int:
    """Compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, metavar="SITE", help="folder that `meshwright plan --site` wrote")
    parser.add_argument("--queries", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    return 1 if compare(arguments.site, arguments.seed, arguments.queries) else 0


if __name__ == "__main__":
    sys.exit(main())
