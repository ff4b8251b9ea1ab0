"""The length of a run in steps, where the recipe gives it in epochs: counted on the prepared data. No torch here."""

from math import ceil
from pathlib import Path

from meshwright.data.mixture import training_samples
from meshwright.data.prepare import prepare_corpus
from meshwright.spec.run import Run
from meshwright.trainer.corpus import starting_model

ROUNDING = 1e-9
"""Part of a step that an error of rounding may add to a number of epochs."""


def in_steps(run: Run, base_dir: Path) -> tuple[Run, str]:
    """The recipe with a number of steps, and the reason for the number; epochs prepare the data."""
    training, batch = run.training, run.sequences_per_step()
    if (steps := run.known_steps()) is not None:
        return run.lasting(steps), f"{steps}: {training.tokens} tokens, {batch * run.data.sequence_length} a step"
    corpus = prepare_corpus(run.data, base_dir=base_dir, model=starting_model(run, base_dir))
    samples = sum(map(len, training_samples(corpus, run.data).streams))
    steps = max(1, ceil((training.epochs or 1) * samples / batch - ROUNDING))
    return run.lasting(steps), f"{steps}: {training.epochs:g} epochs of {samples} samples, {batch} a step"
