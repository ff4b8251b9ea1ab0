"""The cost of the checks: a run with them and one without, in turns; CPU time of all its processes, and wall time.

`python -P benchmarks/checks.py` trains a tiny model with and without the checksums of token files, the lock of the run
directory, and the signatures of objects between ranks. A short run measures the start-up; speed is measured over the
additional steps of a long run.
"""

import argparse
import json
import os
import resource
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHORT = 1
RECIPE = """\
model: {family: llama, hidden: 64, num_layers: 2, num_heads: 4, max_positions: 128}
data: {sources: text.txt, tokenizer_vocab: 1000, sequence_length: 128, cache_dir: cache}
training: {steps: 1, global_batch: 8, precision: fp32, evaluation: {batches: 0}}
checkpoint: {every: 100}
device: cpu
run_dir: run
"""


def leave_out() -> None:
    """Disable the checks in this process, and in those that it starts."""
    from meshwright.comm import objects, store
    from meshwright.data.checksums import BlockChecksums
    from meshwright.launch import launcher
    from meshwright.storage.lock import Lock

    def nothing(*_: Any) -> None:
        return None

    def itself(lock: Lock) -> Lock:
        lock._file = os.open(os.devnull, os.O_RDONLY)
        return lock

    for owner, name, instead in (
        (BlockChecksums, "_compare", nothing),
        (Lock, "__enter__", itself),
        (Lock, "__exit__", nothing),
    ):
        setattr(owner, name, instead)
    for module in (objects, store):
        module.hmac = _NoSignature  # type: ignore[assignment]
    launcher.CHILD = "checks"


class _NoSignature:
    """The module `hmac`, without its work."""

    @staticmethod
    def digest(*_: Any) -> bytes:
        return bytes(32)

    @staticmethod
    def compare_digest(*_: Any) -> bool:
        return True


def measured(words: list[str], folder: Path, *, checked: bool) -> tuple[float, float]:
    """CPU and wall seconds of one `meshwright WORDS`."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    mode = ["--checked"] if checked else ["--bare"]
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(
        [sys.executable, "-P", __file__, *mode, *words], cwd=folder, env=env, check=True, capture_output=True
    )
    after, ended = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended - began


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300, help="the long run's, beside the short one's")
    arguments = parser.parse_args()
    found: dict[tuple[bool, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}, cubed {n**3}\n" for n in range(60_000)))
        (folder / "run.yaml").write_text(RECIPE)
        words = ["train", "run.yaml", f"layout.dp_shard={arguments.ranks}"]
        measured(words, folder, checked=True)  # the tokens are prepared once
        for number in range(arguments.rounds):
            for checked in (True, False) if number % 2 else (False, True):  # neither always comes first
                for steps in (SHORT, SHORT + arguments.steps):
                    spent = measured([*words, f"training.steps={steps}"], folder, checked=checked)
                    found.setdefault((checked, steps), []).append(spent)
    print(table(found, SHORT + arguments.steps))
    print(json.dumps([[*key, value] for key, value in found.items()]))


def table(found: dict[tuple[bool, int], list[tuple[float, float]]], most: int) -> str:
    """Medians with and without, and the median, least and largest of the differences and ratios of single rounds."""
    lines = ["| | with checks | without | round by round: median (least to largest) |", "|---|---:|---:|---|"]
    for which, name in enumerate(("CPU", "wall")):
        start, long = ([[spent[which] for spent in found[checked, steps]] for checked in (True, False)]
                       for steps in (SHORT, most))  # fmt: skip
        steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(start, long, strict=True)]
        gaps = [a - b for a, b in zip(*start, strict=True)]
        ratios = [a / b for a, b in zip(*steps, strict=True)]
        lines += [
            f"| start-up, {name} s | {statistics.median(start[0]):.2f} | {statistics.median(start[1]):.2f} | "
            f"{statistics.median(gaps):+.3f} s ({min(gaps):+.3f} to {max(gaps):+.3f}) |",
            f"| {most - SHORT} steps, {name} s | {statistics.median(steps[0]):.2f} | "
            f"{statistics.median(steps[1]):.2f} | "
            f"{statistics.median(ratios):.3f} times ({min(ratios):.3f} to {max(ratios):.3f}) |",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdecimal():  # a rank of a run without checks
        leave_out()
        runpy.run_module("meshwright.launch.child", run_name="__main__", alter_sys=True)
    elif sys.argv[1:2] in (["--checked"], ["--bare"]):
        from meshwright.cli.main import main as meshwright

        if sys.argv[1] == "--bare":
            leave_out()
        os._exit(meshwright(sys.argv[2:]))
    else:
        main()
