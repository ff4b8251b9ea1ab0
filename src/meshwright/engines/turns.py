"""Meshwright's trainer in a comparison: the callback `TakeTurns` reports its steps and waits for its next turn."""

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.callbacks import Callback, Training
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.run import Run
from meshwright.spec.training import EvaluationSpec

KEPT = ("step", "loss", "gnorm", "lr", "tokens", "mem")
"""Figures of a step that every engine's journal has."""


def only_training(run: Run) -> Run:
    """The recipe with only training: no evaluation, no intermediate checkpoints, no trackers; and no hang guard, which
    would report a rank that waits for its turn."""
    training = run.training.model_copy(update={"evaluation": EvaluationSpec(batches=0), "samples": None})
    guards = run.guards.model_copy(update={"stuck_after": 0.0, "verify_every": 0})
    checkpoint = CheckpointSpec(start_from=run.checkpoint.start_from)
    update = {"training": training, "guards": guards, "checkpoint": checkpoint, "trackers": (), "callbacks": ()}
    return run.model_copy(update=update)


class TakeTurns(Callback):
    """Writes the same journal as the other engines' programs, at the same points of a step."""

    def __init__(self, journal: Path, pauses: Sequence[int] = ()) -> None:
        """`journal` receives a line a step; after the steps `pauses` every rank waits for a line of its input."""
        self.journal, self.pauses = journal, frozenset(pauses)
        self._began = 0.0

    def on_start(self, training: Training) -> None:
        """The first step starts."""
        if training.is_first_rank:
            self.journal.write_text("")
        self._began = time.perf_counter()

    def on_step(self, training: Training, record: dict[str, Any]) -> None:
        """Write the step's record, then wait for the next turn if it is over."""
        seconds = time.perf_counter() - self._began
        if training.is_first_rank:
            if record["step"] == 1:
                self._write("engine", record["time"], what_ran(training))
            self._write("step", record["time"], {key: record[key] for key in KEPT} | {"seconds": seconds})
        if record["step"] in self.pauses and not sys.stdin.readline():
            os._exit(1)  # the process that gives the turns has gone
        self._began = time.perf_counter()

    def _write(self, kind: str, when: float, fields: dict[str, Any]) -> None:
        with self.journal.open("a") as file:
            file.write(json.dumps({"kind": kind, "time": when, **fields}) + "\n")


def what_ran(training: Training) -> dict[str, Any]:
    """A report of what trains, read from the objects, in the format of the other engines' programs."""
    parameters = list(training.parameters.values())
    optimizers = training.optimizers
    moments = [
        value for optimizer in optimizers for state in optimizer.state.values() for value in [state.get("exp_avg")]
    ]
    return {
        "world_size": training.world_size,
        "wrappers": [type(training.model).__name__],
        "parameter": sorted({type(parameter).__name__ for parameter in parameters}),
        "dtype": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "held": _held(parameters),
        "state": _held(moment for moment in moments if moment is not None),
        "optimizer": "+".join(type(optimizer).__name__ for optimizer in optimizers),
        "groups": [
            {key: group[key] for key in ("betas", "eps", "weight_decay") if key in group}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ],
    }


def _held(tensors: Iterable[torch.Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() for tensor in tensors)
