"""The rules of the house that import-linter cannot express; ARCHITECTURE.md gives the reasons."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "meshwright"
MODULES = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
LONG_FILES: dict[str, str] = {}
"""File -> why it may be longer."""
LONG_FUNCTIONS: dict[str, str] = {}
"""`file:function` -> why it may be longer."""

READS_ENVIRONMENT = {"trainer/launch.py", "trainer/worker.py"}
TORCH_FREE = ("cli", "data", "families", "plan", "spec")
"""Rooms that `--help`, `init`, `check` and `doctor` are made of: importing them never loads torch."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def rooms(*names: str) -> list[str]:
    """The files of these rooms."""
    files = [file for file in MODULES if file.split("/")[0] in names]
    assert files, names
    return files


def imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported at or below a node: `from a.b import c` is `a.b.c`."""
    for found in ast.walk(node):
        if isinstance(found, ast.Import):
            yield from ((alias.name, found.lineno) for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            module = "." * found.level + (found.module or "")
            yield from ((f"{module}.{alias.name}", found.lineno) for alias in found.names)


def importers(files: Iterable[str], package: str) -> list[str]:
    """The places in these files that import the package or something in it."""
    return [
        f"{file}:{line} imports {name}"
        for file in files
        for name, line in imports(MODULES[file])
        if f"{name}.".startswith(f"{package}.")
    ]


def users(dotted: str) -> set[str]:
    """The files that use a name such as `os.environ`."""
    return {
        file
        for file, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == dotted
    }


def functions(file: str) -> Iterator[Function]:
    """Every function and method of a file."""
    return (node for node in ast.walk(MODULES[file]) if isinstance(node, Function))


def public(node: ast.AST) -> Iterator[Function | ast.ClassDef]:
    """Public classes and functions of a module, and the public methods of those classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public(child)


def test_models_never_learn_that_ranks_exist() -> None:
    """import-linter refuses to forbid a part of an external package, such as torch.distributed."""
    assert not importers(rooms("models"), "torch.distributed")
    assert not {file for file in users("torch.distributed") if file.startswith("models/")}


def test_nothing_depends_on_the_test_tools() -> None:
    assert not importers(set(MODULES) - set(rooms("testing")), "meshwright.testing")


def test_imports_are_absolute() -> None:
    assert not importers(MODULES, "")


def test_own_modules_are_imported_at_the_top() -> None:
    """A verb alone may import inside a function, for torch loads there, once it is sure to be needed."""
    hidden = [
        f"{file}:{line} imports {name} inside {function.name}"
        for file in set(MODULES) - set(rooms("cli"))
        for function in functions(file)
        for name, line in imports(function)
        if f"{name}.".startswith("meshwright.")
    ]
    assert not hidden


def test_the_lower_rooms_and_the_verbs_never_load_torch() -> None:
    """import-linter sees what a file names; this sees what Python loads."""
    names = [f"meshwright.{file.removesuffix('.py').replace('/', '.')}" for file in rooms(*TORCH_FREE)]
    modules = sorted(name.removesuffix(".__init__") for name in names)
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_only_the_launcher_reads_the_environment() -> None:
    assert users("os.environ") | users("os.getenv") == READS_ENVIRONMENT
    assert not importers(MODULES, "os.environ") + importers(MODULES, "os.getenv")


def test_every_module_says_what_it_is_for() -> None:
    """A file of nothing (an empty `__init__.py`) has nothing to say."""
    assert not [file for file, tree in MODULES.items() if tree.body and ast.get_docstring(tree) is None]


def test_public_functions_and_classes_are_documented() -> None:
    bare = [
        f"{file}:{node.lineno} {node.name}"
        for file, tree in MODULES.items()
        for node in public(tree)
        if ast.get_docstring(node) is None
    ]
    assert not bare


def test_files_and_functions_fit_the_screen() -> None:
    lengths = {file: len((SOURCE / file).read_text().splitlines()) for file in MODULES}
    assert {file for file, length in lengths.items() if length > MAX_FILE_LINES} == set(LONG_FILES)
    long = {
        f"{file}:{function.name}"
        for file in MODULES
        for function in functions(file)
        if function.end_lineno and function.end_lineno - function.lineno >= MAX_FUNCTION_LINES
    }
    assert long == set(LONG_FUNCTIONS)
