"""The contestants of a comparison: recipes times engines times layouts, each with a unique name."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshwright.engines.compare import Contestant
from meshwright.engines.environments import environment
from meshwright.engines.layouts import layout_called
from meshwright.engines.registry import ENGINES, find_engine
from meshwright.spec.errors import UserError
from meshwright.spec.run import Run
from meshwright.trainer.resolve import resolve_run


def contestants(
    recipes: Mapping[Path, Run],
    *,
    engines: Sequence[str] = (),
    layouts: Sequence[str] = (),
    pythons: Mapping[str, Path] | None = None,
    checkouts: Mapping[str, Path] | None = None,
) -> list[Contestant]:
    """Every combination, recipe by recipe; Meshwright comes first, because the others are compared with the first.

    `engines` defaults to all, or to Meshwright only if there are several layouts or recipes. Raises `UserError` for
    unknown names and recipes that cannot be trained.
    """
    alone = not engines and (layouts or len(recipes) > 1)
    names = engines or (["meshwright"] if alone else list(ENGINES))
    chosen = [find_engine(name) for name in dict.fromkeys(names)]
    chosen.sort(key=lambda engine: engine.name != "meshwright")
    for option, places in (("--python", pythons or {}), ("--checkout", checkouts or {})):
        if unknown := [name for name in places if name not in {engine.name for engine in chosen}]:
            raise UserError(f"{option} {unknown[0]}=...: {unknown[0]} is not in the comparison; add it to --engines")
    built = []
    for path, run in recipes.items():
        degree = run.layout.data_parallel if run.layout.data_parallel > 1 else 2
        wanted = {name: layout_called(name, degree) for name in layouts} or {"": run.layout}
        for name, layout in wanted.items():
            resolved = resolve_run(run.model_copy(update={"layout": layout}), base_dir=path.parent.resolve())
            for engine in chosen:
                parts = [path.stem] * (len(recipes) > 1) + [engine.name] * (not alone or len(chosen) > 1) + [name]
                label = " ".join(part for part in parts if part) or engine.name
                python = (pythons or {}).get(engine.name, Path(sys.executable))
                checkout = (checkouts or {}).get(engine.name)
                built.append(Contestant(name=label, engine=engine, resolved=resolved, python=python, checkout=checkout))
    return built


def pythons(words: Sequence[str]) -> dict[str, Path]:
    """The Pythons in `--python ENGINE=PATH`; raises `UserError` for an engine or path that does not exist."""
    paths = {}
    for word in words:
        engine, _, path = word.partition("=")
        find_engine(engine)
        if not Path(path).is_file():
            raise UserError(f"--python {word}: {path or 'the path'} does not exist; write ENGINE=PATH/TO/python")
        paths[engine] = Path(path).absolute()
    return paths


def installed(names: Sequence[str], given: Mapping[str, Path], say: Callable[[str], None]) -> dict[str, Path]:
    """The Pythons of the engines `names` (default: all). An engine that this Python lacks gets an environment of its
    own, unless `given` names one. An engine that cannot be installed is left out; its row reports what is missing."""
    paths = dict(given)
    for name in names or ENGINES:
        engine = find_engine(name)
        if name in paths or not engine.packages:
            continue
        try:
            paths[name] = environment(engine, say)
        except UserError as error:
            say(str(error))
    return paths


def checkouts(words: Sequence[str]) -> dict[str, Path]:
    """The folders in `--checkout ENGINE=PATH`; raises `UserError` for an engine or folder that does not exist, or an
    engine that needs none."""
    paths = {}
    for word in words:
        name, _, path = word.partition("=")
        if not find_engine(name).checkout:
            raise UserError(f"--checkout {word}: {name} is an installed package, not a checkout; leave --checkout out")
        if not Path(path).is_dir():
            raise UserError(f"--checkout {word}: folder {path} does not exist; write ENGINE=PATH/TO/ITS/FOLDER")
        paths[name] = Path(path).absolute()
    return paths
