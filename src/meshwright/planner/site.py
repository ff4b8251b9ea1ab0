"""The planner as a static folder: its page, and what the page's worker needs to run this project in Pyodide."""

import importlib.metadata
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from meshwright.pages.shell import STATIC
from meshwright.planner.app import app_page
from meshwright.spec.errors import UserError
from meshwright.storage.durable import write_durably

ENTRY = "meshwright.planner.answer"
"""The module whose imports are packed."""
PACKAGES = ("pydantic", "annotated-types", "typing-extensions", "typing-inspection", "PyYAML")
"""Packages of this environment that the planner needs and that have no compiled part, or work without it."""
COMPILED = "pydantic_core"
ARCHIVE = "planner.zip"
"""The packed planner; a folder that has it is a site of before, to be written again."""
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
PYODIDE = "314.0.7"
PLATFORM = ("3.14", "pyemscripten_2026_0_wasm32")
"""Its Python, and the platform of wheels for it."""
LISTS_MODULES = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.modules if name.partition('.')[0] == 'meshwright']))
"""
SAME_DATE = (2020, 1, 1, 0, 0, 0)
"""Date of every packed file, so that the same planner is the same archive."""


def write_site(folder: Path, pyodide: Path) -> None:
    """Write the page and all it needs into a folder; `pyodide`: the folder that `make site` fills.

    Raises `UserError` with the commands to run if something is missing there, and if the folder has other files.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / ARCHIVE).is_file()):
        raise UserError(f"--site {folder} has other files, or is one; give a new folder, as in {folder}/planner")
    runtime, wheel = find_pyodide(pyodide)
    archive = packed_planner(wheel)
    (folder / "pyodide").mkdir(parents=True, exist_ok=True)
    for path in runtime:
        write_durably(folder / "pyodide" / path.name, path.read_bytes())
    write_durably(folder / ARCHIVE, archive)
    write_durably(folder / "planner-worker.js", (STATIC / "planner-worker.js").read_bytes())
    write_durably(folder / "index.html", app_page("tab"))


def find_pyodide(folder: Path) -> tuple[list[Path], Path]:
    """Pyodide's files, and the wheel of pydantic's compiled part. Raises `UserError` if one is missing."""
    version = importlib.metadata.version(COMPILED)
    runtime = [folder / "node_modules" / "pyodide" / name for name in RUNTIME]
    wheels = sorted(folder.glob(f"{COMPILED}-{version}-*{PLATFORM[1]}.whl"))
    missing = [path.name for path in runtime if not path.is_file()] + ([] if wheels else [f"{COMPILED} {version}"])
    if missing:
        raise UserError(
            f"{folder} lacks {', '.join(missing)}; run 'make site' in a checkout, or: {' && '.join(fetching(folder))}"
        )
    return runtime, wheels[-1]


def fetching(folder: Path) -> tuple[str, str]:
    """The commands that fill a folder for `write_site`, as `make site` runs them."""
    version = importlib.metadata.version(COMPILED)
    return (
        f"npm install --no-audit --no-fund --prefix {folder} pyodide@{PYODIDE}",
        f"{Path(sys.executable).name} -m pip download --dest {folder} --no-deps --only-binary=:all: --python-version "
        f"{PLATFORM[0]} --platform {PLATFORM[1]} pydantic-core=={version}",
    )


def packed_planner(wheel: Path) -> bytes:
    """The archive of every module that the planner imports, its data, and the packages that it needs."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _packed(wheel):
            archive.writestr(zipfile.ZipInfo(name, SAME_DATE), content, zipfile.ZIP_DEFLATED, 9)
    return stream.getvalue()


def _packed(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """(name in the archive, content)."""
    root = Path(__file__).resolve().parents[2]
    for path in sorted((*_modules(root), *root.glob("meshwright/p*/data/*.csv"))):
        yield path.relative_to(root).as_posix(), path.read_bytes()
    for package in PACKAGES:
        for file in importlib.metadata.files(package) or ():
            # Metadata too: pydantic reads its own version from it.
            if file.suffix == ".py" or file.name == "METADATA":
                yield file.as_posix(), Path(str(file.locate())).read_bytes()
    with zipfile.ZipFile(wheel) as compiled:
        for name in compiled.namelist():
            if name.endswith((".py", ".so", "METADATA")):
                yield name, compiled.read(name)


def _modules(root: Path) -> Iterator[Path]:
    """The files of this project that a process has loaded once it has imported the planner."""
    command = [sys.executable, "-P", "-c", LISTS_MODULES, ENTRY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in json.loads(done.stdout):
        path = root.joinpath(*name.split("."))
        yield path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
