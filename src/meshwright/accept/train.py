"""Step `train`: a run as a user starts it."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.accept.check import Check, Place, command, meshwright, within
from meshwright.accept.runs import SMALL, losses_in, write_recipe
from meshwright.launch.status import STOPPED

STEPS, HALF = 20, 10
RELATIVE = 1e-4
"""Largest relative difference of a loss in fp32 from the CPU's."""
ARRIVED = 60
"""Seconds in which a run reaches its second step."""
RUN = "train"
"""The run's name, which later steps use."""


def checks(place: Place) -> Iterator[Check]:
    """Losses, resuming, stopping."""
    recipe = write_recipe(place, RUN, {**_recipe(), "checkpoint": {"every": HALF}})
    yield meshwright("train", recipe).check("a run in fp32, deterministic")
    losses = losses_in(place.work / RUN)
    expected = cpu_losses(place)
    apart = max(abs(ours / other - 1) for ours, other in zip(losses, expected, strict=True))
    yield within("losses beside the CPU's", apart, RELATIVE, "largest relative difference")
    yield _resumed(place, losses)
    yield _stopped(place)


def cpu_losses(place: Place) -> list[float]:
    """The losses of the same run on a CPU: from the references, or trained here."""
    if place.references is not None:
        return json.loads(place.references.read_text())["losses"]
    recipe = write_recipe(place, "train-cpu", {**_recipe(), "device": "cpu"})
    ended = meshwright("train", recipe)
    assert ended.status == 0, ended.output[-1500:]
    return losses_in(place.work / "train-cpu")


def _recipe(steps: int = STEPS) -> dict[str, Any]:
    training = {"steps": steps, "global_batch": 8, "precision": "fp32", "deterministic": True}
    return {"model": SMALL, "data": {"sequence_length": 128}, "training": training}


def _resumed(place: Place, losses: list[float]) -> Check:
    """Half of the run, then the rest by another process."""
    recipe = write_recipe(place, "resumed", {**_recipe(), "checkpoint": {"every": HALF}})
    first = meshwright("train", recipe, f"training.steps={HALF}")
    second = meshwright("train", recipe, "--resume")
    if first.status or second.status:
        return (first if first.status else second).check("resuming")
    resumed = losses_in(place.work / "resumed")
    same = resumed == losses
    what = f"{HALF} steps, then {STEPS - HALF} more after resuming: losses"
    detail = f"{what} {'equal bit for bit' if same else f'differ: {resumed[HALF:]}, not {losses[HALF:]}'}"
    return Check("resuming changes nothing", same, detail)


def _stopped(place: Place) -> Check:
    """SIGTERM in the middle of a run."""
    recipe = write_recipe(place, "stopped", {**_recipe(steps=10**6), "checkpoint": {"every": 10**6}})
    metrics, run_dir = place.work / "stopped" / "metrics.jsonl", place.work / "stopped"
    process = subprocess.Popen(
        command("train", recipe), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        _await_steps(process, metrics)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        output, _ = process.communicate(timeout=ARRIVED)
    finally:
        process.kill()
    saved = (run_dir / "checkpoints").is_dir() and any((run_dir / "checkpoints").iterdir())
    passed = process.returncode == STOPPED and saved
    detail = f"status {process.returncode} {time.monotonic() - began:.1f} s after SIGTERM, expected {STOPPED}; "
    detail += "a checkpoint is there" if saved else f"no checkpoint\n{output[-1000:]}"
    shutil.rmtree(run_dir, ignore_errors=True)
    return Check("SIGTERM saves and ends", passed, detail)


def _await_steps(process: "subprocess.Popen[str]", metrics: Path) -> None:
    ends = time.monotonic() + ARRIVED
    while time.monotonic() < ends and process.poll() is None:
        if metrics.exists() and metrics.read_text().count('"loss"') > 1:
            return
        time.sleep(0.05)
