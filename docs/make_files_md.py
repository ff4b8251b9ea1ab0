"""Writes docs/files.md from the docstrings of the source files: run it after changing one."""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("files.md")
SOURCE = Path(__file__).parents[1] / "src" / "meshwright"

ROOMS = {
    "cli": "Floor 7: the command line",
    "accept": "Between: the product tried on a machine's devices",
    "engines": "Between: other engines",
    "prove": "Floor 6: a layout compared with one process",
    "rehearse": "Floor 6: the whole job on fake ranks",
    "handover": "Between: a trained model handed over to other programs, read back and compared",
    "serve": "Floor 6: a trained model in use",
    "judge": "Floor 6: models' answers compared by a judge model or by people's votes; no torch",
    "trainer": "Floor 5: a run from its recipe to its last checkpoint",
    "launch": "Floor 4: starts, watches and restarts processes",
    "state": "Floor 4: where master weights, gradients and optimizer state live",
    "validate": "Floor 4: the planner against published runs; no torch",
    "callbacks": "Floor 4: the hooks of a run, and the callbacks that ship",
    "tasks": "Floor 4: questions with known answers for a model, ours and lm-evaluation-harness's",
    "parallel": "Floor 3: shards a single-device model",
    "optim": "Floor 3: optimizers, schedules, clipping, loss scaling",
    "finetune": "Floor 3: adds adapters and freezes parameters",
    "checkpoint": "Floor 3: checkpoints, and Hugging Face's files",
    "data": "Floor 3: from text to the batches of a rank, without torch",
    "objectives": "Between: training losses; no rank",
    "derive": "Between: what ranks can split in a model of transformers, derived and proved",
    "models": "Floor 2: the model on one device; no mesh, no rank",
    "planner": "Between: the planner's pages: in a file, in a browser tab, and from a local server; no torch",
    "predict": "Floor 2: predictions of memory, time and cost; no torch",
    "comm": "Floor 1: communication between ranks",
    "imports": "Floor 1: converts other systems' files to recipes; no torch",
    "families": "Floor 1: architectures and published sizes as data; no torch",
    "pages": "Between: pages, and the page of runs; no torch",
    "storage": "Between: files and folders written atomically, locked for one owner at a time; no torch",
    "spec": "Floor 0: the classes that describe a run; no torch",
    ".": "Floor 0: outside the rooms",
    "testing": "Beside: helpers for tests",
}

PARTS = {
    "the core": (
        *("spec", "families", "comm", "models", "derive", "objectives", "parallel", "optim", "finetune", "data"),
        *("checkpoint", "storage", "state", "callbacks", "launch", "trainer", "prove", "."),
    ),
    "the planner": ("predict", "validate", "planner"),
    "other systems": ("imports", "engines"),
    "a model in use": ("serve", "handover", "tasks", "judge"),
    "inspection": ("rehearse", "accept", "pages"),
    "the command line": ("cli",),
    "tools of tests": ("testing",),
}
"""Part of the house -> its rooms."""

BEGIN = """\
# Every file and what it is for

The first sentence of every source file, floor by floor. [ARCHITECTURE.md](../ARCHITECTURE.md) explains the floors and
the parts.
"""


def page() -> str:
    """The text of docs/files.md."""
    return "\n".join([BEGIN, *_sizes(), *(line for room in ROOMS for line in _room(room))])


def _sizes() -> Iterator[str]:
    yield from ("| part | rooms | files | lines |", "|---|---|---|---|")
    for part, rooms in PARTS.items():
        names = ", ".join(f"{room}/" for room in rooms if room != ".")
        yield f"| {part} | {names} | {len(_part_files(part))} | {part_lines(part):,} |"
    yield ""


def part_lines(part: str) -> int:
    """Lines of Python in a part of the house."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in _part_files(part))


def _part_files(part: str) -> list[Path]:
    return [path for room in PARTS[part] for path in _files(room)]


def _files(room: str) -> Iterator[Path]:
    """A room's files; those beside the rooms for "."."""
    return (SOURCE / room).glob("*.py") if room == "." else (SOURCE / room).rglob("*.py")


def _room(room: str) -> Iterator[str]:
    yield f"## {room}/\n\n{ROOMS[room]}.\n"
    for path in sorted(_files(room)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.name != "__init__.py":
            yield f"- `{path.relative_to(SOURCE / room)}`: {_first_sentence(ast.get_docstring(tree) or '')}"
    yield ""


def _first_sentence(docstring: str) -> str:
    """The docstring's first paragraph up to its first full stop, in one line."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".:") + "."


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
