"""Callbacks: the hooks of a run, and the callbacks that ship."""

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.callbacks.callback import Callback, NextBatch, Training, named_callbacks
from meshwright.callbacks.tracker import Tracker, numbers_of
from meshwright.spec.plugins import OURS

if TYPE_CHECKING:
    from meshwright.callbacks.early_stopping import EarlyStopping
    from meshwright.callbacks.ema import EMA
    from meshwright.callbacks.lr_finder import LRFinder
    from meshwright.callbacks.memory import MemoryTimeline
    from meshwright.callbacks.noise_scale import GradientNoiseScale
    from meshwright.callbacks.profiler import Profiler

__all__ = [
    "EMA",
    "Callback",
    "EarlyStopping",
    "GradientNoiseScale",
    "LRFinder",
    "MemoryTimeline",
    "NextBatch",
    "Profiler",
    "Tracker",
    "Training",
    "named_callbacks",
    "numbers_of",
]

_HOMES = {name: module for module, _, name in (value.partition(":") for value in OURS["callbacks"].values())}


def __getattr__(name: str) -> Any:
    """Import one that ships when it is first used: verbs that need no torch import this package."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
