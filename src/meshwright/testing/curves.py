"""Loss curves of a small model under several layouts, for the picture in the docs."""

import argparse
from pathlib import Path

import numpy as np

from meshwright.data.loader import Loader
from meshwright.data.packing import ConcatenatedSamples
from meshwright.spec.run import ResolvedRun
from meshwright.testing.equivalence import build_here


def loss_curve(resolved: ResolvedRun, steps: int) -> list[float]:
    """Losses of the first steps on the bytes of a module of the standard library; collective."""
    trainer = build_here(resolved)
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
    samples = ConcatenatedSamples(text, resolved.run.data.sequence_length)
    with Loader.of_run(samples, resolved, trainer.data_rank, trainer.places) as loader:
        return [trainer.train_step(step, loader.microbatches(step - 1)).loss for step in range(1, steps + 1)]
