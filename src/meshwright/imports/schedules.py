"""Learning-rate schedules that no recipe has: they are named together with the schedule that the recipe has instead."""

from collections.abc import Mapping

from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import choice, words
from meshwright.spec.training import LrScheduleSpec

NAME = "training.lr_schedule.name"
LOST = "a schedule without a counterpart"
"""The fact that a file has such a schedule; its value is why it is not imported."""


def schedule_choice(known: Mapping[str, str]) -> Rule:
    """The schedule by a table of names."""
    return choice(NAME, known, lost=lose_schedule)


def schedule_words(known: Mapping[str, str]) -> Rule:
    """The schedule by a table of words, which may be in capitals."""
    return words(NAME, known, lose_schedule)


def lose_schedule(reading: Reading, origin: str, reason: str) -> None:
    """Keep a schedule without a counterpart for `settle_lost_schedule`."""
    if LOST in reading.facts:
        reading.drop(origin, reason)
    else:
        reading.fact(LOST, reason, origin)


def settle_lost_schedule(reading: Reading) -> None:
    """Name the schedule that was lost, and write the one that the recipe has instead."""
    if LOST not in reading.facts:
        return
    reason, origin = reading.facts[LOST]
    default = LrScheduleSpec.model_fields["name"].default
    instead, where = reading.settings.get(NAME, (default, f"the default of recipes, in place of {origin}"))
    reading.drop(origin, f"{reason}; the recipe's schedule is {instead} instead; set training.lr_schedule")
    reading.settings[NAME] = instead, where
