"""Step `failures`: what a person sees when a device or a rank fails."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.accept.check import Check, Place, command, meshwright
from meshwright.accept.runs import SMALL, write_recipe
from meshwright.launch.status import OUT_OF_MEMORY
from meshwright.machine import find_machine

ENDS = 10
"""Seconds in which a run ends after one of its ranks was killed."""
STARTS = 60


def checks(place: Place) -> Iterator[Check]:
    """Out of memory; a killed rank."""
    if place.on_gpu:
        yield _out_of_memory(place)
    yield _killed(place)


def _out_of_memory(place: Place) -> Check:
    """A batch whose activations are four times the device's memory."""
    floats = 16 * 4096 * SMALL["num_layers"]  # of a row, at least, with the loss's
    rows = int(4 * find_machine(place.device).memory_bytes / (4 * floats * SMALL["hidden"]))
    training = {"steps": 2, "global_batch": rows, "micro_batch": rows, "precision": "fp32"}
    fields = {"model": SMALL, "data": {"sequence_length": 4096}, "training": training}
    ended = meshwright("train", write_recipe(place, "memory", fields))
    return ended.check("out of memory is explained", status=OUT_OF_MEMORY)


def _killed(place: Place) -> Check:
    """SIGKILL for one of two ranks."""
    device = "cuda_shared" if place.on_gpu else "cpu"
    training = {"steps": 10**6, "global_batch": 8, "precision": "fp32"}
    fields = {"model": SMALL, "data": {"sequence_length": 128}, "training": training, "device": device}
    fields |= {"layout": {"dp_shard": 2}, "guards": {"restarts": 0}}
    recipe, metrics = write_recipe(place, "killed", fields), place.work / "killed" / "metrics.jsonl"
    process = subprocess.Popen(
        command("train", recipe), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        ends = time.monotonic() + STARTS
        while time.monotonic() < ends and process.poll() is None and not _has_steps(metrics):
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().startswith("meshwright:")]
        for pid in ranks[-1:]:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        output, _ = process.communicate(timeout=STARTS)
    finally:
        process.kill()
    took = time.monotonic() - began
    passed = len(ranks) >= 2 and process.returncode != 0 and took <= ENDS
    detail = f"status {process.returncode} {took:.1f} s after SIGKILL, at most {ENDS}"
    return Check("a killed rank ends the run", passed, detail if passed else f"{detail}\n{output[-1500:]}")


def _has_steps(metrics: Path) -> bool:
    return metrics.exists() and metrics.read_text().count('"loss"') > 1
