"""Plug-ins of a run: objects passed to `train`, plug-ins named by the recipe, and their transfer to worker
processes."""

import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.callbacks import Callback
from meshwright.models import Model
from meshwright.objectives import Objective
from meshwright.spec.data import DATASET, SourceSpec
from meshwright.spec.errors import UserError
from meshwright.spec.plugins import PluginSpec, check_takes, given_name, make_plugin
from meshwright.spec.run import Run
from meshwright.spec.training import OptimizerSpec

FILE = "plugins.pickle"


@dataclass(frozen=True)
class Plugins:
    """The objects passed to `train` with the recipe."""

    callbacks: Sequence[Callback] = ()
    lr_schedule: Callable[[int, int], float] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    objective: Objective | None = None
    model: type[Model] | None = None
    dataset: Iterable[Any] | None = None
    """Read by the process that receives it; not sent to workers."""

    def __post_init__(self) -> None:
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                what = f"the class {callback.__name__}" if isinstance(callback, type) else repr(callback)
                raise UserError(
                    f"callbacks: {what} is not a Callback; pass an instance of a meshwright.Callback subclass"
                )
        if self.lr_schedule is not None:
            check_takes(self.lr_schedule, f"lr_schedule: {given_name(self.lr_schedule)}", "step", "steps")
        if isinstance(self.optimizer, torch.optim.Optimizer) or not callable(self.optimizer or type):
            raise UserError(
                f"optimizer: {type(self.optimizer).__name__} is not a class; pass the class, or functools.partial of "
                "it with its settings, because parameters and their shards exist only once the run has started"
            )
        if self.objective is not None and not isinstance(self.objective, Objective):
            what = "the class " * isinstance(self.objective, type) + given_name(self.objective)
            raise UserError(
                f"objective: {what} is not an Objective; pass an instance of a meshwright.Objective subclass"
            )
        if self.model is not None and not (isinstance(self.model, type) and issubclass(self.model, Model)):
            raise UserError(
                f"model: {given_name(self.model)} is not a subclass of meshwright.Model; pass a class that defines its "
                "blocks and the dims of their parameters (docs/plugins.md)"
            )

    @property
    def given(self) -> bool:
        """Whether there are any. (`==` would compare the values of a dataset that is an array.)"""
        return bool(self.callbacks or self.objects())

    def objects(self) -> dict[tuple[str, str], Any]:
        """(kind, name) -> each object that `named_in` puts into recipes by name."""
        given = {
            "lr_schedules": self.lr_schedule,
            "optimizers": self.optimizer,
            "objectives": self.objective,
            "models": self.model,
            "datasets": self.dataset,
        }
        return {(kind, given_name(plugin)): plugin for kind, plugin in given.items() if plugin is not None}

    def named_in(self, run: Run) -> Run:
        """The recipe with these objects' names in place of its own settings."""
        names, training = dict(self.objects().keys()), run.training
        if "lr_schedules" in names:
            schedule = training.lr_schedule.model_copy(update={"name": names["lr_schedules"], "options": {}})
            training = training.model_copy(update={"lr_schedule": schedule})
        if "optimizers" in names:
            given = training.optimizer.model_dump(include={"lr", "weight_decay"}, exclude_unset=True)
            optimizer = OptimizerSpec.model_validate({**given, "name": names["optimizers"]})
            training = training.model_copy(update={"optimizer": optimizer})
        if "objectives" in names:
            update = {"objective": PluginSpec(name=names["objectives"]), "preference": None}
            training = training.model_copy(update=update)
        update: dict[str, Any] = {} if training is run.training else {"training": training}
        if "datasets" in names:
            order = run.data.order if "order" in run.data.model_fields_set else "given"
            source = SourceSpec(path=f"{DATASET}{names['datasets']}")
            update["data"] = run.data.model_copy(update={"sources": (source,), "order": order})
        if "models" in names:
            update["model"] = run.model.model_copy(update={"family": names["models"]})
        return run.model_copy(update=update)


def all_callbacks(run: Run, plugins: Plugins) -> list[Callback]:
    """The recipe's callbacks, then those passed to `train`."""
    return [*(make_plugin("callbacks", spec) for spec in run.callbacks), *plugins.callbacks]


def open_trackers(run: Run) -> list[Callback]:
    """The trackers that the recipe names."""
    plugins = [PluginSpec(name=one) if isinstance(one, str) else one for one in run.trackers]
    return [make_plugin("trackers", plugin) for plugin in plugins]


def write_plugins(plugins: Plugins, folder: Path) -> list[str]:
    """Write plug-ins to a file for worker processes; returns the workers' arguments, none without plug-ins.

    Classes and functions are pickled by reference (module and name). Raises `UserError` for an object that another
    process cannot import.
    """
    plugins = replace(plugins, dataset=None)
    if not plugins.given:
        return []
    stream = io.BytesIO()
    try:
        _ByReference(stream).dump(plugins)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"a plug-in cannot be sent to the worker processes: {error}; {REMEDY}") from error
    (folder / FILE).write_bytes(pickle.dumps((sys.path, stream.getvalue())))
    return ["--plugins", str(folder / FILE)]


def read_plugins(file: Path) -> Plugins:
    """The plug-ins that `write_plugins` wrote, imported with the parent's import path. Only the parent wrote the
    file."""
    path, pickled = pickle.loads(file.read_bytes())
    sys.path.extend(folder for folder in path if folder not in sys.path)
    try:
        return pickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        raise UserError(f"a plug-in cannot be imported in a worker process: {error}; {REMEDY}") from error


REMEDY = (
    "move it into an importable module (a file mine.py beside the script, then `from mine import ...`), start the "
    "script with torchrun, or train with one process"
)


class _ByReference(pickle.Pickler):
    """Refuses objects that a worker cannot import: defined in the script itself, or inside a function."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse a class or function that is not importable; leave the rest to pickle."""
        if isinstance(obj, type | types.FunctionType) and (obj.__module__ == "__main__" or "<" in obj.__qualname__):
            raise UserError(
                f"{obj.__qualname__} is defined in {obj.__module__}{' inside a function' * ('<' in obj.__qualname__)}, "
                f"so worker processes cannot import it; {REMEDY}"
            )
        return NotImplemented
