"""A user's own dims in place of derived ones (`model.dims`); the slice test decides whether they hold."""

import re
from fnmatch import fnmatchcase
from typing import Any, get_args

from meshwright.derive.calls import UnsplitError, record
from meshwright.derive.derive import Blocks
from meshwright.derive.slice_test import passes
from meshwright.families.foreign import split_parameters
from meshwright.spec.errors import UserError
from meshwright.spec.foreign import ForeignModel, ForeignSplit, SplitDim, SplitModule, SplitParameter

WHOLE = "whole"


def overruled(foreign: ForeignModel, split: ForeignSplit) -> ForeignSplit:
    """The split with the dims that the recipe gives.

    Raises `UserError` for a pattern that matches nothing, dims that are not understood, or a parameter that no split
    module has.
    """
    for pattern, dims in foreign.dims:
        names = [name for name, _ in foreign.tensors if fnmatchcase(name, pattern)]
        where = f"model.dims: {pattern}: {dims}"
        if not names:
            raise UserError(f"{where}: the pattern matches no parameter; `check --table` prints their names")
        touched: set[int] = set()
        modules = list(split.modules)
        for name in names:
            inside = [
                number for number, module in enumerate(modules) if _name_within(foreign, module, name) is not None
            ]
            if not inside:
                reasons = dict(split.whole).get(re.sub(r"\.\d+(?=\.)", ".*", name), "it is in no split module")
                raise UserError(f"{where}: {name} cannot be overruled: {reasons}")
            number = max(inside, key=lambda number: len(modules[number].name))
            own = _name_within(foreign, modules[number], name)
            assert own is not None
            touched.add(number)
            if dims != WHOLE:
                modules[number] = _changed(modules[number], own, dims, dict(foreign.tensors)[name], where)
        if dims == WHOLE:
            left = [(modules[number].name, one.name) for number in touched for one in modules[number].parameters]
            whole = [
                (f"{foreign.blocks}.*.{f'{module}.{one}'.strip('.')}", "the recipe says so") for module, one in left
            ]
            split = split.model_copy(update={"whole": tuple(sorted({*split.whole, *whole}))})
            modules = [module for number, module in enumerate(modules) if number not in touched]
        split = split.model_copy(update={"modules": tuple(modules)})
    return split


def check_overruled(blocks: Blocks, split: ForeignSplit, foreign: ForeignModel, parts: int) -> None:
    """Raise `UserError` with what the slice test saw if modules with the recipe's dims do not pass it."""
    modules = {(module.layers[0], module.name): module for module in split.modules}
    calls = record(
        lambda: blocks.model(input_ids=blocks.tokens),
        {(layer, name): blocks.block(layer).get_submodule(name) for layer, name in modules},
    )
    names = set(split_parameters(foreign.model_copy(update={"split": split})))
    for (layer, name), module in modules.items():
        given = [
            f"{pattern}: {dims}"
            for pattern, dims in foreign.dims
            if any(fnmatchcase(one, pattern) and _name_within(foreign, module, one) is not None for one in names)
        ]
        try:
            if given:
                passes(blocks.block(layer).get_submodule(name), calls[layer, name], module, parts)
        except UnsplitError as error:
            raise UserError(
                f"model.dims: {given[0]}: the slice test of {name or 'the block'} refuses it: {error}"
            ) from error


def _name_within(foreign: ForeignModel, module: SplitModule, name: str) -> str | None:
    """A parameter's name within a split module; None if the module does not have it."""
    match = re.fullmatch(rf"{re.escape(foreign.blocks)}\.(\d+)\.(.+)", name)
    prefix = f"{module.name}." if module.name else ""
    if match is None or int(match[1]) not in module.layers or not match[2].startswith(prefix):
        return None
    return match[2].removeprefix(prefix)


def _changed(module: SplitModule, name: str, dims: str, shape: tuple[int, ...], where: str) -> SplitModule:
    """The module with other dims of a parameter, as `check --table` prints them: `heads, in in runs of 64, 32, 32`."""
    text, _, runs = dims.partition(" in runs of ")
    words = [word.strip() for word in text.split(",")]
    named = [index for index, word in enumerate(words) if word in get_args(SplitDim)]
    sizes = tuple(int(size) for size in runs.split(",")) if re.fullmatch(r"[\d, ]+", runs) else ()
    known = len(words) == len(shape) and len(named) == 1 and bool(sizes) == bool(runs)
    if not known or (sizes and sum(sizes) != shape[named[0]]):
        raise UserError(
            f"{where}: give {len(shape)} dims as `check --table` prints them, one of them "
            f"{', '.join(get_args(SplitDim))}, with runs that add up to its size, or {WHOLE}; the parameter is "
            f"{' x '.join(map(str, shape))}"
        )
    kind: Any = words[named[0]]
    given = SplitParameter(name=name, kind=kind, dim=named[0], segments=sizes)
    kept = [one for one in module.parameters if one.name != name]
    once, partial = (tuple(one for one in names if one != name) for names in (module.once, module.partial))
    return module.model_copy(update={"parameters": (*kept, given), "once": once, "partial": partial})
