"""The public functions as Python code calls them: their errors name arguments instead of options, and show no frames
of this package."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from meshwright.cli.common import foreign_files_named, no_recipe_at
from meshwright.launch.status import TrainingFailed, TrainingStopped
from meshwright.spec.errors import UserError
from meshwright.spec.problems import RecipeError
from meshwright.spec.recipe import with_place
from meshwright.spec.run import RecipeFile, Run

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

COMMAND = re.compile(r"(meshwright [a-z]+ [^;,)]*)")
"""A command line in a message, whose options stay."""
OPTION = re.compile(r"--(no-)?([a-z]+(?:-[a-z]+)*)(?: (auto|step-\d+|-?\d[\w.]*))?")
"""An option, and its value if it looks like one."""


def for_python(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """`function`, with its errors as Python code meets them."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        first = next(iter((*args, *kwargs.values())), None)
        try:
            return function(*args, **kwargs)
        except (UserError, TrainingStopped, TrainingFailed, FileNotFoundError) as error:
            short = reworded(_of_recipe(error, first), parameters)
        raise short.with_traceback(None) from None

    return call


def reworded(error: Any, parameters: Mapping[str, inspect.Parameter]) -> Any:
    """The same error with arguments in place of the options that have their names."""
    error.args = tuple(_words(arg, parameters) if isinstance(arg, str) else arg for arg in error.args)
    if isinstance(error, RecipeError):
        error.problems = [_words(problem, parameters) for problem in error.problems]
    return error


def _words(message: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    def argument(match: re.Match[str]) -> str:
        no, option, value = match.groups()
        name = option.replace("-", "_")
        if name not in parameters:
            return match[0]
        if isinstance(parameters[name].default, bool) and value is None:
            return f"{name}={not no}"
        if value is None:
            return f"{name}=..."
        return f"{name}={value if re.fullmatch(r'[-+.0-9e]+', value) else repr(value)}"

    parts = COMMAND.split(message)  # every second part is a command
    return "".join(part if number % 2 else OPTION.sub(argument, part) for number, part in enumerate(parts))


def _of_recipe(error: BaseException, first: Any) -> BaseException:
    """An error about a recipe as the command line words it; `first`: the function's first argument."""
    named = Path(first) if isinstance(first, str | Path) else None
    if named is not None and isinstance(error, FileNotFoundError) and Path(error.filename or "") == named:
        return UserError(no_recipe_at(named))
    if named is not None and isinstance(error, RecipeError):
        try:
            with foreign_files_named(named):
                raise error
        except UserError as worded:
            return worded
    if isinstance(error, UserError) and not isinstance(error, RecipeError):
        file = first.file if isinstance(first, Run) else RecipeFile(named)
        error.args = (with_place(str(error), file),)
    return error
