"""Trials of a sweep that Optuna proposes, each after the results of those before."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.extras import install

STUDY, STORAGE = "sweep", "optuna.jsonl"
"""The study's name, and its file in the sweep's folder."""

Choices = list[str] | tuple[float, float]
"""The values of a setting, or the ends of its range."""


def is_wide(least: float, most: float) -> bool:
    """Whether a range goes from a positive number to ten times as much or more: it is drawn evenly in its logarithm."""
    return least > 0 and most >= 10 * least


def require_optuna() -> None:
    """Raise `UserError` if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError(f"--tpe needs Optuna: {install('sweep')}; --random needs nothing")


def corners(choices: Sequence[Choices]) -> Iterator[tuple[str, ...]]:
    """Mixes in which each value, or end of a range, occurs once, so that mistakes are found before the first step."""
    first = [str(values[0]) for values in choices]
    for place, values in enumerate(choices):
        for value in values:
            yield (*first[:place], str(value), *first[place + 1 :])


def search(
    paths: Sequence[str], choices: Sequence[Choices], count: int, seed: int, folder: Path
) -> Iterator[tuple[tuple[str, ...], Callable[[float | None], None]]]:
    """(the settings of a trial, what takes its figure; None: it failed), `count` times. Optuna's storage in `folder`
    keeps the trials, so that a sweep goes on: one that was begun comes again with the same settings."""
    with _quiet() as optuna:
        backend = optuna.storages.journal.JournalFileBackend(str(folder / STORAGE))
        study = optuna.create_study(
            study_name=STUDY, storage=optuna.storages.JournalStorage(backend), load_if_exists=True
        )
        spaces = {path: _space(optuna, values) for path, values in zip(paths, choices, strict=True)}
        for number in range(count):
            # a sampler's random state is not kept, so each trial has a seed of its own
            study.sampler = optuna.samplers.TPESampler(seed=seed + number)
            trial = study.trials[number] if number < len(study.trials) else study.ask(spaces)
            finished = study.trials[number].state.is_finished()
            settings = tuple(f"{path}={_written(trial.params[path])}" for path in paths)

            def take(value: float | None, number: int = number, known: bool = finished) -> None:
                if not known and value is None:
                    study.tell(number, state=optuna.trial.TrialState.FAIL)
                elif not known:
                    study.tell(number, value)

            yield settings, take


def _space(optuna: Any, values: Choices) -> Any:
    if isinstance(values, list):
        return optuna.distributions.CategoricalDistribution(values)
    least, most = values
    return optuna.distributions.FloatDistribution(least, most, log=is_wide(least, most))


def _written(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


@contextmanager
def _quiet() -> Iterator[Any]:
    """Optuna, without its lines about every trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import optuna  # pyright: ignore[reportMissingImports]

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        yield optuna
