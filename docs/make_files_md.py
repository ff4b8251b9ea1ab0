"""Writes docs/files.md from the docstrings of the source files: run it after changing one (a test notices)."""

import ast
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("files.md")
SOURCE = Path(__file__).parents[1] / "src" / "meshwright"

ROOMS = {
    "cli": "Floor 7: the verbs people type",
    "engines": "Between: other engines beside ours",
    "prove": "Floor 6: a layout against one process",
    "rehearse": "Floor 6: the whole job on fake ranks",
    "serve": "Floor 6: a trained model in use",
    "trainer": "Floor 5: a run from its recipe to its last checkpoint",
    "launch": "Floor 4: processes found, started, watched and restarted",
    "state": "Floor 4: where master weights, gradients and optimizer state live",
    "validate": "Floor 4: the planner against published runs; no torch",
    "callbacks": "Floor 4: the hooks of a run, and the callbacks that ship",
    "parallel": "Floor 3: a single-device model becomes a sharded one",
    "optim": "Floor 3: optimizers, schedules, clipping, loss scaling",
    "finetune": "Floor 3: a model becomes one that is fine-tuned",
    "checkpoint": "Floor 3: what a run leaves on disk, and Hugging Face's files",
    "data": "Floor 3: from text to the batches of a rank, without torch",
    "objectives": "Between: what training minimises; no rank",
    "models": "Floor 2: the model on one device; no mesh, no rank",
    "plan": "Floor 2: what can be known without running; no torch",
    "comm": "Floor 1: what ranks send one another",
    "imports": "Floor 1: files of other systems that become recipes; no torch",
    "families": "Floor 1: architectures and published sizes as data; no torch",
    "spec": "Floor 0: what a run is; no torch",
    ".": "Floor 0: beside the rooms",
    "testing": "Beside: what tests need",
}

BEGIN = """\
# Every file and what it is for

The first sentence of every source file, floor by floor. [ARCHITECTURE.md](../ARCHITECTURE.md) explains the floors.
"""


def page() -> str:
    """The text of docs/files.md."""
    return "\n".join([BEGIN, *(line for room in ROOMS for line in _room(room))])


def _room(room: str) -> Iterator[str]:
    yield f"## {room}/\n\n{ROOMS[room]}.\n"
    for path in sorted((SOURCE / room).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.name != "__init__.py":
            yield f"- `{path.name}`: {_first_sentence(ast.get_docstring(tree) or '')}"
    yield ""


def _first_sentence(docstring: str) -> str:
    """The docstring's first paragraph up to its first full stop, in one line."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".:") + "."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
