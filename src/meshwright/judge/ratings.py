"""Verdicts to win rates and Bradley-Terry ratings, with bootstrap intervals over questions."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.spec.errors import UserError
from meshwright.storage.jsonl import read_objects

WINNERS = {
    "model_a": 1.0,
    "model_b": 0.0,
    "tie": 0.5,
    "tie (bothbad)": 0.5,
    "both_bad": 0.5,
}
"""The score of each verdict for the first model, by the names in the arena's published votes."""
RESAMPLES = 1000
"""Number of bootstrap samples."""
SCALE, CENTRE = 400.0, 1000.0
"""Ratings are in Elo's units: 400 points are odds of ten to one; their mean is 1000."""
PRIOR = 0.5
"""Ties added between every two models, so that a model that always wins has a finite rating."""


@dataclass(frozen=True)
class Verdict:
    """Which of two answers to one question was better, in the order shown."""

    question: str
    model_a: str
    model_b: str
    score: float
    """1: the first; 0: the second; 0.5: a tie."""
    turn: int = 1
    """The number of the message that they answered; the first is 1."""


@dataclass(frozen=True)
class Rated:
    """A model's answer, rated alone."""

    question: str
    model: str
    rating: float
    """The rating, from 1 to 10."""
    turn: int = 1


@dataclass(frozen=True)
class BootstrapInterval:
    """A value, and the range of 95 % of its bootstrap samples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Versus:
    """Two models compared."""

    model_a: str
    model_b: str
    wins: int
    """Answers of the first that were better."""
    ties: int
    losses: int
    rate: BootstrapInterval
    """Wins and half of the ties, as a share."""


def read_verdicts(paths: Sequence[Path]) -> list[Verdict]:
    """The verdicts in files: a judge's, or people's from the arena page; other lines, such as ratings, are skipped.
    Raises `UserError` if a line has an invalid winner."""
    verdicts = []
    for path in paths:
        for place, row in read_objects(path):
            if "winner" not in row or row["winner"] is None:
                continue
            if row["winner"] not in WINNERS or not {"model_a", "model_b"} <= row.keys():
                raise UserError(
                    f"{place}: is not a vote: it must have model_a, model_b, and winner, one of {', '.join(WINNERS)}"
                )
            question = row.get("question_id", row.get("question", row.get("id", place)))
            name = question if isinstance(question, str) else json.dumps(question)
            turn = row["turn"] if isinstance(row.get("turn"), int) else 1
            verdicts.append(Verdict(name, str(row["model_a"]), str(row["model_b"]), WINNERS[row["winner"]], turn))
    return verdicts


def settled(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict for each turn of a question and pair: a tie if both orders were judged and disagree.

    After Zheng et al. (2023). Verdicts in one order only, such as people's, stay as they are.
    """
    games: dict[tuple[str, int, str, str], dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
    for verdict in verdicts:
        swapped = verdict.model_a > verdict.model_b
        first, second = sorted((verdict.model_a, verdict.model_b))
        score = 1 - verdict.score if swapped else verdict.score
        games[verdict.question, verdict.turn, first, second][swapped].append(score)
    results = []
    for (question, turn, first, second), orders in games.items():
        both = min(len(scores) for scores in orders.values())
        for one, other in zip(orders[False], orders[True], strict=False):
            results.append(Verdict(question, first, second, one if one == other else 0.5, turn))
        for scores in orders.values():
            results += [Verdict(question, first, second, score, turn) for score in scores[both:]]
    return results


def versus(verdicts: Sequence[Verdict]) -> list[Versus]:
    """Every pair of models that was compared, by settled verdicts."""
    pairs: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        pairs[verdict.model_a, verdict.model_b].append(verdict)
    pairings = []
    for (first, second), games in pairs.items():
        scores = np.array([game.score for game in games])
        wins, ties, losses = (int((scores == score).sum()) for score in (1, 0.5, 0))
        pairings.append(Versus(first, second, wins, ties, losses, _mean(scores, [game.question for game in games])))
    return pairings


def ratings(verdicts: Sequence[Verdict]) -> dict[str, BootstrapInterval]:
    """Each model's Bradley-Terry rating by settled verdicts, best first; a tie is half a win for both."""
    models = sorted({name for verdict in verdicts for name in (verdict.model_a, verdict.model_b)})
    if len(models) < 2:
        return {}
    number = {model: index for index, model in enumerate(models)}
    first = np.array([number[verdict.model_a] for verdict in verdicts])
    second = np.array([number[verdict.model_b] for verdict in verdicts])
    scores = np.array([verdict.score for verdict in verdicts])

    def rated(drawn: np.ndarray) -> np.ndarray:
        wins = np.full((len(models), len(models)), PRIOR / 2)
        np.fill_diagonal(wins, 0)
        np.add.at(wins, (first[drawn], second[drawn]), scores[drawn])
        np.add.at(wins, (second[drawn], first[drawn]), 1 - scores[drawn])
        return bradley_terry(wins)

    value = rated(np.arange(len(verdicts)))
    samples = np.array([rated(drawn) for drawn in _resamples([verdict.question for verdict in verdicts])])
    intervals = {model: _interval(value[index], samples[:, index]) for model, index in number.items()}
    return dict(sorted(intervals.items(), key=lambda item: -item[1].value))


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """Ratings of the likeliest strengths: `wins[i, j]` is how often i was better than j; all must be connected.

    By the iteration of Hunter (2004).
    """
    games, total = wins + wins.T, wins.sum(1)
    strengths = np.ones(len(wins))
    for _ in range(10_000):
        before = strengths
        strengths = total / (games / (strengths[:, None] + strengths[None, :])).sum(1)
        strengths = strengths / np.exp(np.log(strengths).mean())
        if np.abs(np.log(strengths / before)).max() < 1e-9:
            break
    return CENTRE + SCALE * np.log10(strengths)


def mean_ratings(rated: Sequence[Rated]) -> dict[str, BootstrapInterval]:
    """Each model's mean of single ratings, best first."""
    means = {}
    for model in sorted({one.model for one in rated}):
        own = [one for one in rated if one.model == model]
        means[model] = _mean(np.array([one.rating for one in own]), [one.question for one in own])
    return dict(sorted(means.items(), key=lambda item: -item[1].value))


def _resamples(questions: Sequence[str]) -> list[np.ndarray]:
    """Indices of bootstrap samples: questions are drawn, each with all its verdicts."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, question in enumerate(questions):
        places[question].append(index)
    groups = [np.array(indices) for indices in places.values()]
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(groups), size=(RESAMPLES, len(groups)))
    return [np.concatenate([groups[index] for index in sample]) for sample in drawn]


def _mean(values: np.ndarray, questions: Sequence[str]) -> BootstrapInterval:
    return _interval(values.mean(), [values[drawn].mean() for drawn in _resamples(questions)])


def _interval(value: Any, samples: Any) -> BootstrapInterval:
    low, high = np.percentile(np.asarray(samples, dtype=float), [2.5, 97.5])
    return BootstrapInterval(float(value), float(low), float(high))
