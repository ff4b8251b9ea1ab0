"""Plug-ins that a recipe may name: ours, the entry points of installed packages, and, during a call of `train`, the
objects passed to it.

A recipe names a plug-in, never an import path: it can load only what is installed or already in memory.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, ValidationError, core_schema

from meshwright.spec.base import Spec
from meshwright.spec.errors import UserError
from meshwright.spec.extras import install

OURS = {
    "callbacks": {
        "early_stopping": "meshwright.callbacks.early_stopping:EarlyStopping",
        "ema": "meshwright.callbacks.ema:EMA",
        "lr_finder": "meshwright.callbacks.lr_finder:LRFinder",
        "memory": "meshwright.callbacks.memory:MemoryTimeline",
        "noise_scale": "meshwright.callbacks.noise_scale:GradientNoiseScale",
        "profiler": "meshwright.callbacks.profiler:Profiler",
    },
    "trackers": {
        "tensorboard": "meshwright.callbacks.tracker:TensorBoard",
        "wandb": "meshwright.callbacks.tracker:WandB",
    },
}
"""Kind -> name -> module and class, for shipped plug-ins that are built like a user's. Others are entry points of the
group `meshwright.KIND`."""

KINDS = ("callbacks", "trackers", "datasets", "objectives", "optimizers", "lr_schedules", "models")
"""The kinds of plug-ins; the groups of entry points are `meshwright.KIND`."""

_given: dict[tuple[str, str], Any] = {}

NEEDS = ("tensorboard", "wandb")
"""Shipped trackers that need the package of the same name, which `pip install 'meshwright[NAME]'` installs."""


class PluginSpec(Spec):
    """An installed plug-in and its options."""

    name: str
    """Name of the plug-in: one that ships, or an entry point of an installed package."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the plug-in."""


def known_plugins(kind: str) -> dict[str, EntryPoint]:
    """The installed plug-ins of a kind (one of `KINDS`), by name. Loads none."""
    group = f"meshwright.{kind}"
    ours = [EntryPoint(name, value, group) for name, value in OURS.get(kind, {}).items()]
    return {entry.name: entry for entry in [*entry_points(group=group), *ours]}


def find_plugin(kind: str, name: str) -> EntryPoint:
    """The installed plug-in called `name`; raises `UserError` if there is none."""
    known = known_plugins(kind)
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        again = (
            "; an object passed to train in Python must be passed again" if "." in name and kind != "trackers" else ""
        )
        raise UserError(
            f"{kind}: no {name!r} is installed; there are {there} (entry points of meshwright.{kind}){again}"
        )
    return known[name]


def has_plugin(kind: str, name: str) -> bool:
    """Whether a plug-in called `name` is given or installed."""
    return (kind, name) in _given or name in known_plugins(kind)


def require_plugin(kind: str, name: str) -> None:
    """Raise `UserError` if a plug-in does not exist, or a package that it needs is missing."""
    if (kind, name) not in _given:
        find_plugin(kind, name)
    if kind == "trackers" and name in NEEDS and importlib.util.find_spec(name) is None:
        raise UserError(f"trackers: {name} is not installed: {install(name)}, or leave it out")


@contextmanager
def plugged_in(objects: Mapping[tuple[str, str], Any]) -> Iterator[None]:
    """Let recipes also name these objects, (kind, name) -> object from Python code, inside the block."""
    before = dict(_given)
    _given.update(objects)
    try:
        yield
    finally:
        _given.clear()
        _given.update(before)


def given_name(plugin: Any) -> str:
    """A recipe's name for an object from Python code: module and name, so that it contains a dot."""
    named = getattr(plugin, "func", plugin)  # of a functools.partial
    named = named if hasattr(named, "__qualname__") and hasattr(named, "__module__") else type(named)
    return f"{named.__module__}.{named.__qualname__}"


def load_plugin(kind: str, name: str) -> Any:
    """The object behind a name: passed to `train`, or imported; raises `UserError` if it cannot be found."""
    if (kind, name) in _given:
        return _given[kind, name]
    try:
        return find_plugin(kind, name).load()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{kind}: {name} cannot be imported ({error}); install its package again, or leave it out"
        ) from error


def said_of(kind: str, name: str, attribute: str, default: Any) -> Any:
    """An attribute of a plug-in's class; the default if it is not set or the class cannot be loaded."""
    try:
        plugin = load_plugin(kind, name)
    except UserError:
        return default
    return getattr(getattr(plugin, "func", plugin), attribute, default)


def make_plugin(kind: str, plugin: PluginSpec) -> Any:
    """The plug-in built from the options, or the object that was passed in; raises `UserError` if it cannot be
    built."""
    factory = load_plugin(kind, plugin.name)
    if (kind, plugin.name) in _given:
        return factory
    try:
        return factory(**plugin.options)
    except TypeError as error:
        raise UserError(f"{kind}: {plugin.name} does not take these options: {error}") from error
    except UserError as error:
        raise UserError(f"{kind}: {error}") from error


def check_takes(function: Callable[..., Any], where: str, *words: str, **options: Any) -> None:
    """Raise `UserError` if a plug-in is not a function of the arguments `words` and the keyword arguments `options`."""
    if not callable(function):
        raise UserError(f"{where} is {function!r}, which cannot be called; give a function of ({', '.join(words)})")
    try:
        inspect.signature(function).bind(*words, **options)
    except TypeError as error:
        raise UserError(f"{where} cannot be called with ({', '.join([*words, *options])}): {error}") from error
    except ValueError:  # written in C, it has no signature
        return


@dataclass(frozen=True)
class Pluggable:
    """Annotation of a setting whose choices (a Literal) are ours: it may also name an installed plug-in of a kind, or
    contain a dot, like the names of objects from Python code. Names in the files of a run are not checked again."""

    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """See pydantic's documentation of custom types."""
        return core_schema.with_info_wrap_validator_function(
            self._checked, handler(source), serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Our names, which editors offer, or any other."""
        return {"anyOf": [handler(schema), {"type": "string"}]}

    def _checked(self, value: Any, ours: Callable[[Any], Any], info: ValidationInfo) -> Any:
        try:
            return ours(value)
        except ValidationError as error:
            written = isinstance(info.context, dict) and info.context.get("written")
            if isinstance(value, str) and value and (written or "." in value or value in known_plugins(self.kind)):
                return value
            expected = error.errors()[0].get("ctx", {}).get("expected", "text")
            there = ", ".join(f"'{name}'" for name in sorted(known_plugins(self.kind))) or "none"
            expected += f", or a plug-in of the group meshwright.{self.kind} (installed: {there})"
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected}) from error
