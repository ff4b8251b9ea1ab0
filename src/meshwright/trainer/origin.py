"""A run's origin: versions, commit, packages, command line, recipe and data; its machine; the planner's forecast."""

import functools
import hashlib
import importlib.metadata
import platform
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from meshwright.devices import name_of
from meshwright.machine import Machine, run_program
from meshwright.predict.forecast import forecast
from meshwright.predict.report import STEP_PARTS
from meshwright.spec.errors import UserError
from meshwright.spec.recipe import dump_recipe
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.out_of_memory import on_this_machine
from meshwright.trainer.setup import Trainer
from meshwright.version import __version__

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "transformers", "peft", "bitsandbytes")
"""Packages whose versions may change a run's numbers."""


def command_line() -> str:
    """The command that started this process, as a shell would take it."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return shlex.join(["meshwright" if program == "__main__.py" else program, *sys.argv[1:]])


@functools.cache
def commit() -> str | None:
    """The commit of this source tree, `-changed` if files differ from it; None for an installed package."""
    git = ["git", "-C", str(Path(__file__).parent)]
    name = (run_program([*git, "rev-parse", "--short=12", "HEAD"]) or "").strip()
    tracked = (run_program([*git, "ls-files", "--", str(Path(__file__).parents[1] / "__init__.py")]) or "").strip()
    if not name or not tracked:  # a package inside another project's tree
        return None
    changed = (run_program([*git, "status", "--porcelain", "--untracked-files=no"]) or "").strip()
    return f"{name}-changed" if changed else name


def describe_origin(resolved: ResolvedRun, data: list[dict[str, Any]]) -> dict[str, Any]:
    """What made a run: `env.json` and every checkpoint hold it. `data`: `Corpus.identity`."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    recipe = dump_recipe(resolved.given or resolved.run)
    return {
        "meshwright": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": versions,
        "command": resolved.command,
        "recipe_sha256": hashlib.sha256(recipe.encode()).hexdigest(),
        "data": {stream["name"]: stream["fingerprint"] for stream in data},
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_environment(trainer: Trainer) -> dict[str, Any]:
    """The contents of `env.json`: versions, device, the peak FLOP/s for MFU, the run's origin, and its forecast."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": name_of(trainer.device),
        "threads": torch.get_num_threads(),
        "world_size": trainer.worker.world_size,
        "peak_flops": trainer.peak[0],
        "peak_flops_source": trainer.peak[1],
        "origin": trainer.origin,
        "planned": planned(trainer.resolved, trainer.machine),
    }


def planned(resolved: ResolvedRun, machine: Machine) -> dict[str, Any] | None:
    """The planner's forecast of the run on its devices; None if it does not support them or the model."""
    try:
        expected = forecast(on_this_machine(resolved, machine), machine)
        seconds, memory = expected.seconds, expected.memory_bytes
    except (UserError, ValueError):
        return None
    tokens = resolved.tokens_per_step
    return {
        "devices": f"{expected.cluster.devices} x {expected.cluster.device}",
        "step_time": asdict(seconds),
        "tokens_per_s": {
            "value": tokens / seconds.value,
            "low": tokens / seconds.high,
            "high": tokens / seconds.low,
        },
        "memory": asdict(memory),
        "step_parts": {name: getattr(expected.time, name) for name in STEP_PARTS if name != "recompute"},
        "memory_kinds": expected.memory.kinds(),
    }
