"""The project's rules that import-linter cannot express; ARCHITECTURE.md gives the reasons."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "meshwright"
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 400, 60, 6
LONG_FILES = {"torch_internals.py": "one file holds every private use of PyTorch"}
"""File -> why it may be longer."""
LONG_FUNCTIONS: dict[str, str] = {}
"""`file:function` -> why it may be longer."""
PUBLIC = ("trainer/run.py:train", "planner/python.py:plan", "serve/python.py:evaluate", "serve/python.py:generate")
MANY_PARAMETERS = dict.fromkeys(PUBLIC, "the public function's keyword arguments")
"""`file:function` -> why it may have more parameters."""

READS_ENVIRONMENT = {
    "launch/forkserver.py",
    "launch/launcher.py",
    "trainer/worker.py",
    "cli/completion.py",
    "cli/judge.py",
    "machine.py",
}
TORCH_FREE = ("cli", "data", "families", "imports", "pages", "planner", "predict", "spec", "storage", "validate")
"""Rooms used by `--help`, `init`, `check` and `doctor`: importing them never loads torch."""
TENSOR_COLLECTIVES = (
    *("all_gather", "all_reduce", "all_to_all", "reduce", "gather", "scatter", "broadcast", "batch_isend_irecv"),
    *("send", "recv", "isend", "irecv", "P2POp", "ReduceOp"),
)
"""Prefixes of the names of `torch.distributed`'s functions that take tensors."""
PRIVATE_BUT_NOT_TORCHS = {
    *("_replace", "_exit", "_current_frames", "_forkserver", "_forkserver_alive_fd", "_option_string_actions"),
    *("_action_groups", "_group_actions", "_get_formatter", "_format_action_invocation", "_expand_help"),
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
}
"""Python's own, of `argparse` among them, and the attributes of `nn.Module` that every subclass has."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def modules() -> dict[str, ast.Module]:
    """File -> its syntax tree. The trees are millions of objects that every garbage collection would visit, so they
    exist only while a test needs them."""
    return {file: tree_of(file) for file in FILES}


def tree_of(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text())


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a file: several tests look at each."""
    return tuple(ast.walk(tree))


@pytest.fixture(scope="module", autouse=True)
def trees_are_dropped() -> Iterator[None]:
    yield
    nodes.cache_clear()
    classes.cache_clear()
    modules.cache_clear()


def rooms(*names: str) -> list[str]:
    """The files of these rooms."""
    files = [file for file in FILES if file.split("/")[0] in names]
    assert files, names
    return files


def imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported at or below a node: `from a.b import c` is `a.b.c`."""
    for found in nodes(node):
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
        for name, line in imports(modules()[file])
        if f"{name}.".startswith(f"{package}.")
    ]


def users(dotted: str) -> set[str]:
    """The files that use a name such as `os.environ`."""
    return {
        file
        for file, tree in modules().items()
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and dotted.endswith(node.attr) and ast.unparse(node) == dotted
    }


def functions(file: str) -> Iterator[Function]:
    """Every function and method of a file."""
    return (node for node in nodes(modules()[file]) if isinstance(node, Function))


def public(owner: ast.AST) -> Iterator[tuple[Function | ast.ClassDef, ast.AST]]:
    """Public classes and functions of a module, and the public methods of those classes; each with its owner."""
    for child in ast.iter_child_nodes(owner):
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
            yield child, owner
            if isinstance(child, ast.ClassDef):
                yield from public(child)


def test_models_never_learn_that_ranks_exist() -> None:
    """import-linter cannot forbid a part of an external package, such as torch.distributed."""
    rankless = rooms("models", "objectives")
    assert not importers(rankless, "torch.distributed")
    assert not users("torch.distributed").intersection(rankless)


def test_tensors_are_sent_from_one_file() -> None:
    """FSDP2 and DTensor send some themselves; objects sent as bytes, stores and barriers are not tensors."""
    found = {
        f"{file}:{node.lineno} {ast.unparse(node)}"
        for file, tree in modules().items()
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith(TENSOR_COLLECTIVES)
        and ast.unparse(node.value) in ("dist", "torch.distributed", "torch.ops", "funcol")
    }
    assert found
    assert {place for place in found if not place.startswith("comm/")} == set()


def test_private_torch_is_used_in_one_file() -> None:
    """Names that begin with `_`: imported from torch, read from it, or not defined in this project."""
    ours = {name for tree in modules().values() for name in given_names(tree)} | PRIVATE_BUT_NOT_TORCHS
    found = {(file, place) for file, tree in modules().items() for place in private_parts(tree, ours)}
    outside = [f"{file}:{place}" for file, place in found if file != "torch_internals.py"]
    assert found
    assert not outside


def private_parts(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    """`line what` of every private part of torch, except names in `ours`."""
    from_torch = {"torch"}
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if f"{module}{alias.name}.".startswith("torch."):
                    from_torch.add((alias.asname or alias.name).split(".")[0])
                    if "._" in f"{module}{alias.name}":
                        yield f"{node.lineno} imports {module}{alias.name}"
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = ast.unparse(node).split(".")[0]
            if root in from_torch or node.attr not in ours:
                yield f"{node.lineno} uses {ast.unparse(node)}"


def given_names(tree: ast.Module) -> Iterator[str]:
    """Names that a file gives to functions, classes and attributes."""
    for node in nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_nobody_replaces_a_method_of_the_model_its_head_its_objective_or_its_passes() -> None:
    """A strategy changes these only through slots (`HeadSplit`)."""
    files = ["models/decoder.py", "models/head.py", "models/foreign.py", "parallel/passes.py", *rooms("objectives")]
    methods = {function.name for file in files for function in functions(file)}
    assert {"forward", "token_losses", "sums", "evaluate"} <= methods
    replaced = [
        f"{file}:{node.lineno} sets {ast.unparse(target)}"
        for file, tree in modules().items()
        for node in nodes(tree)
        if isinstance(node, ast.Assign)
        for listed in node.targets
        for target in (listed.elts if isinstance(listed, ast.Tuple) else [listed])
        if isinstance(target, ast.Attribute) and target.attr in methods
        if ast.unparse(target.value) != "self"
    ]
    assert not replaced


def test_nothing_depends_on_the_test_tools() -> None:
    """Except `accept/`, which tests the product on a machine."""
    assert not importers(set(FILES) - set(rooms("testing", "accept")), "meshwright.testing")


def test_imports_are_absolute() -> None:
    assert not importers(FILES, "")


def test_own_modules_are_imported_at_the_top() -> None:
    """Only a verb may import inside a function, because that loads torch when it is certain to be needed."""
    hidden = [
        f"{file}:{line} imports {name} inside {function.name}"
        for file in set(FILES) - set(rooms("cli"))
        for function in functions(file)
        for name, line in imports(function)
        if f"{name}.".startswith("meshwright.")
    ]
    assert not hidden


def test_the_lower_rooms_and_the_verbs_never_load_torch() -> None:
    """import-linter checks the names in files; this checks what Python loads."""
    names = [f"meshwright.{file.removesuffix('.py').replace('/', '.')}" for file in rooms(*TORCH_FREE)]
    modules = sorted(name.removesuffix(".__init__") for name in names)
    code = f"import importlib, sys; [*map(importlib.import_module, {modules})]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_only_the_launcher_reads_the_environment() -> None:
    """Except `judge`, which reads its API key there, because a command line should not show it, a shell's question for
    completions, and the search for GPUs, some of which the environment may hide."""
    assert users("os.environ") | users("os.getenv") == READS_ENVIRONMENT
    assert not importers(FILES, "os.environ") + importers(FILES, "os.getenv")


NAMES_DEVICES = {
    "devices.py": "the file for it",
    "torch_internals.py": "the history of allocations, which is not public",
    "spec/run.py": "the recipe's word",
    "spec/fit.py": "the recipe's word",
    "state/store.py": "FSDP2's setting of pinned memory",
    "machine.py": "the recipe's word, and names of the driver's programs",
    "cli/common.py": "the option with the recipe's words",
    "cli/accept.py": "the option with the recipe's words",
    "cli/verify.py": "the option with the recipe's words",
    "cli/doctor.py": "the line on NCCL",
}
"""Files that name a kind of device -> why."""


OF_DEVICES = {"cuda", "is_cuda", "xpu", "is_xpu", "mps", "is_mps", "accelerator", "cudart", "Stream"}
OF_DEVICES |= {"pin_memory", "is_pinned", "get_device_module", "get_rng_state", "set_rng_state"}
"""Attributes of torch and of tensors that belong to a kind of device."""
KINDS = re.compile(r"(cuda|xpu|mps|hip)(:\d+)?|nccl|xccl")
"""Words for kinds of devices, and for backends of their collectives."""


def names_of_devices(file: str) -> Iterator[str]:
    """Uses of a device by its kind: torch's modules, streams, pinned memory and seeds, tensors' attributes, words."""
    for node in nodes(modules()[file]):
        if isinstance(node, ast.Attribute) and node.attr in OF_DEVICES:
            yield f"{file}:{node.lineno} {ast.unparse(node)}"
        if isinstance(node, ast.keyword) and node.arg == "pin_memory" and ast.unparse(node.value) != "False":
            yield f"{file}:{node.value.lineno} pin_memory={ast.unparse(node.value)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and KINDS.fullmatch(node.value):
            yield f"{file}:{node.lineno} {node.value!r}"


def test_devices_are_named_in_one_file() -> None:
    """So that another kind of accelerator is a row there. Files for other systems use those systems' words."""
    files = [file for file in FILES if not file.startswith(("engines/", "imports/"))]
    uses = [use for file in files if file not in NAMES_DEVICES for use in names_of_devices(file)]
    assert not uses
    assert all(any(names_of_devices(file)) for file in NAMES_DEVICES)


MAKES_FUNCTIONS = {"functools.partial", "partial", "property", "torch.compile", "torch.compiler.disable"}


def overrides(tree: ast.AST) -> Iterator[str]:
    """Assignments to a function, method, class or `__dict__` entry of an object built elsewhere.

    Code that changes a module's behaviour fills a slot (`models/slots.py`), so that other code can see it.
    """
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in nodes(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    names = {node.name for node in nodes(tree) if isinstance(node, Function)}
    for node in nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            yield ast.unparse(node)
        for target, value in assignments(node):
            if not isinstance(target, ast.Attribute | ast.Subscript):
                continue
            owner = ast.unparse(target.value)
            entry = isinstance(target, ast.Subscript) and (owner.endswith("__dict__") or owner.startswith("vars("))
            if owner.split(".")[0] in ("self", "cls", "ctx") and not entry:
                continue
            function = (
                isinstance(value, ast.Lambda)
                or (isinstance(value, ast.Name) and value.id in names)
                or (isinstance(value, ast.Call) and ast.unparse(value.func) in MAKES_FUNCTIONS)
            )
            named = isinstance(target, ast.Attribute) and (
                target.attr in ("forward", "__class__") or owner.split(".")[0] in imported or owner.startswith("type(")
            )
            if entry or named or (function and isinstance(target, ast.Attribute)):
                yield ast.unparse(target)


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, a tuple's one by one."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value


def test_nothing_built_elsewhere_is_overridden() -> None:
    """`tests/test_slots.py` checks the built objects."""
    found = {f"{file} {what}" for file, tree in modules().items() for what in overrides(tree)}
    assert not found


def test_overrides_are_found() -> None:
    code = """
block.forward = f
module.__class__ = New
module.__dict__["attend"] = attend
model.pick = lambda x: x
model.loss, model.count = loss, 3
layer.run = functools.partial(f, 1)
vars(module)["x"] = 1
F.rms_norm = norm
def loss(): pass
import torch.nn.functional as F
"""
    assert len(set(overrides(ast.parse(code)))) == 8


def test_no_python_is_started_that_imports_from_the_working_directory() -> None:
    """`python -m` and `-c` import from it first, a `queue.py` beside a recipe included, unless -P comes before."""
    unsafe, safe = [], 0
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if not isinstance(node, ast.List | ast.Tuple):
                continue
            words = [ast.unparse(element) for element in node.elts]
            if words[:1] == ["sys.executable"] and {"'-m'", "'-c'"} & {*words}:
                safe += words[1] == "'-P'"
                unsafe += [] if words[1] == "'-P'" else [f"{file}:{node.lineno}"]
    assert not unsafe
    assert safe > 5


def test_every_module_says_what_it_is_for() -> None:
    """An empty file (`__init__.py`) needs no docstring."""
    assert not [file for file, tree in modules().items() if tree.body and ast.get_docstring(tree) is None]


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    """Name -> class; `test_a_class_name_means_one_thing`."""
    return {node.name: node for tree in modules().values() for node in nodes(tree) if isinstance(node, ast.ClassDef)}


def implemented(owner: ast.ClassDef, name: str) -> bool:
    """Whether a base class, however far up, documents the method."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in owner.bases]
    known = [classes()[last] for base in bases if (last := ast.unparse(base).split(".")[-1]) in classes()]
    return any(
        any(isinstance(node, Function) and node.name == name and ast.get_docstring(node) for node in base.body)
        or implemented(base, name)
        for base in known
    )


def documented(node: Function | ast.ClassDef, owner: ast.AST) -> bool:
    """Whether a function or class has a docstring, or implements a method that has one."""
    return ast.get_docstring(node) is not None or (isinstance(owner, ast.ClassDef) and implemented(owner, node.name))


def test_public_functions_and_classes_are_documented() -> None:
    """A method that a base class documents needs no docstring of its own."""
    bare = [
        f"{file}:{node.lineno} {node.name}"
        for file, tree in modules().items()
        for node, owner in public(tree)
        if not documented(node, owner)
    ]
    assert not bare


SEE = re.compile(r"See `[^`]*`\.")
ONLY_SEE = ("models/", "predict/", "trainer/step.py")
"""Rooms and files in which docstrings may still say no more than `See X`; the list only shrinks."""


def test_no_docstring_only_names_another() -> None:
    """A method without more to say than its base class has no docstring."""
    empty = [
        f"{file}:{node.lineno}"
        for file, tree in modules().items()
        for node in nodes(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if SEE.fullmatch(node.value.value.strip())
    ]
    assert [place for place in empty if not place.startswith(ONLY_SEE)] == []
    assert all(any(place.startswith(part) for place in empty) for part in ONLY_SEE)


VAGUE = {"found", "told", "said", "why", "asked", "give_up"}
"""Names that say how a value came about instead of what it is: a result, a message, a reason, a request."""
VAGUE_KEYS = {"data/overlap.py": "found"}
"""Keys of outputs, which keep their names."""


def chosen_names(file: str) -> Iterator[tuple[str, int]]:
    """(name, line) of every variable, parameter, attribute, function and class that a file names."""
    for node in nodes(modules()[file]):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def test_names_say_what_they_hold() -> None:
    """The field's ordinary words: `result`, `reason`, `request`, `warning`, or the thing itself: `checkpoints`."""
    vague = [
        f"{file}:{line} {name}"
        for file in FILES
        for name, line in chosen_names(file)
        if name.strip("_").lower() in VAGUE and VAGUE_KEYS.get(file) != name
    ]
    assert vague == []


def test_files_and_functions_fit_the_screen() -> None:
    lengths = {file: len((SOURCE / file).read_text().splitlines()) for file in FILES}
    assert {file for file, length in lengths.items() if length > MAX_FILE_LINES} == set(LONG_FILES)
    long = {
        f"{file}:{function.name}"
        for file in FILES
        for function in functions(file)
        if function.end_lineno and function.end_lineno - function.lineno >= MAX_FUNCTION_LINES
    }
    assert long == set(LONG_FUNCTIONS)


def test_functions_have_few_parameters() -> None:
    """Values that travel together are one object."""
    many = {
        f"{file}:{function.name}"
        for file in FILES
        for function in functions(file)
        if len(parameters(function)) > MAX_PARAMETERS
    }
    assert many == set(MANY_PARAMETERS)


def parameters(function: Function) -> list[str]:
    """Names that a caller gives: not `self`, `cls` or an autograd function's `ctx`."""
    taken = function.args
    given = [one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    return [name for name in given if name not in ("self", "cls", "ctx")]


def test_a_class_name_means_one_thing() -> None:
    """A reader who meets a name need not ask which of two classes it is."""
    names = Counter(
        node.name
        for tree in modules().values()
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, times in names.items() if times > 1}
