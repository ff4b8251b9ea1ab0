"""The core and its satellites: what each may use of the other."""

import re
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.trainer.run import train
from test_house import FILES, SOURCE, imports, modules, rooms, trees_are_dropped  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
from make_files_md import PAGE, PARTS, ROOMS, part_lines

CORE = set(PARTS["the core"])
SATELLITES = {room for part, names in PARTS.items() for room in names if part not in ("the core", "tools of tests")}

OPEN = {"spec", "families", "storage", "machine", "devices", "terminal", "torch_internals"}
"""Rooms and files of the core that are public as a whole: what describes a run, and what reads and writes files."""
API = {
    "callbacks": "",
    "checkpoint": "dcp hf hf_proof manifest peft peft_config takeover.convert verify",
    "comm": "objects",
    "data": "audit beginning chat defaults describe fewest_tokens loader mixture overlap packing plugged prepare "
    "readers sources token_file tokenizer tools",
    "finetune": "",
    "launch": "forkserver launcher memory programs signals status supervise",
    "models": "attention batch compiled dtypes foreign from_disk generate head kernel_choice logits loss masks packed "
    "rope",
    "objectives": "",
    "parallel": "data materialize tensor",
    "prove": "difference inputs pairs reference shrink text tolerance verify",
    "trainer": "calibrate corpus device display evaluate folder metrics out_of_memory remedies resolve run "
    "start weights worker",
}
"""Room of the core -> its public modules; the package itself is public too."""
INSIDE = {
    "comm": "collectives staged",
    "models": "attention_kernels blockwise dropout grouped_low_precision low_precision moe norm partial_attention "
    "slots",
    "optim": "adamw bf16 shards",
    "parallel": "error_feedback expert ledger offload pipeline timeline traffic",
    "state": "",
    "trainer": "peaks setup state",
}
"""The same, for the two satellites that look at a run from the inside: `rehearse/` and `accept/`."""
SEAMS = {
    "trainer/resolve.py": "predict",
    "trainer/remedies.py": "predict",
    "trainer/out_of_memory.py": "predict",
    "trainer/origin.py": "predict",
    "trainer/banner.py": "predict",
    "trainer/calibrate.py": "predict",
    "trainer/tasks.py": "tasks",
    "trainer/run.py": "pages",
    "callbacks/memory.py": "pages",
}
"""File of the core -> the satellite that it asks."""


def targets(file: str) -> set[str]:
    """The modules of ours that a file imports, `trainer.run` for `meshwright.trainer.run`; names in them left out."""
    modules_used = set[str]()
    for name, _ in imports(modules()[file]):
        parts = name.split(".")
        if parts[0] == "meshwright":
            inner = parts[1:]
            while inner and not is_module(inner):
                inner = inner[:-1]
            modules_used.add(".".join(inner))
    return modules_used - {""}


def is_module(parts: list[str]) -> bool:
    path = "/".join(parts)
    return f"{path}.py" in FILES or f"{path}/__init__.py" in FILES or any(file.startswith(f"{path}/") for file in FILES)


def room_of(file: str) -> str:
    return file.split("/")[0] if "/" in file else "."


def test_every_room_is_in_one_part_and_on_the_page_of_files() -> None:
    named = [room for names in PARTS.values() for room in names]
    here = {room_of(file) for file in FILES}
    assert sorted(named) == sorted(here)
    assert set(ROOMS) == here


def test_the_picture_of_the_house_has_today_s_sizes() -> None:
    """To 3 %; docs/files.md has the exact ones."""
    picture = (PAGE.parents[1] / "ARCHITECTURE.md").read_text().split("```")[1]
    drawn = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) lines", picture)]
    parts = ["the planner", "other systems", "a model in use", "inspection", "the core"]
    assert drawn == pytest.approx([part_lines(part) for part in parts], rel=0.03)
    named = set(re.findall(r"(\w+)/", picture))
    assert named == {room for part, rooms in PARTS.items() if part != "tools of tests" for room in rooms} - {"."}


class FirstProduct(TorchDispatchMode):
    """Finds the project's own functions around the first matrix product of a training step, from the outside in."""

    frames: tuple[str, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Which product it is, and whether our CPU kernels call it, depends on the processor.
        if not self.frames and re.search("mm|linear|matmul", str(func)):
            frames = [frame for frame in traceback.extract_stack() if f"{SOURCE}/" in frame.filename]
            names = tuple(frame.name for frame in frames)
            self.frames = names if "train_loop" in names else ()
        return func(*args, **(kwargs or {}))


def test_from_train_to_a_matrix_product_there_are_few_frames(tmp_path: Path) -> None:
    """As many as ARCHITECTURE.md lists."""
    (tmp_path / "a.txt").write_text("fish swim in the sea\n" * 99)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "model: {family: llama, hidden: 64, num_layers: 1, num_heads: 2}\n"
        f"data: {{sources: a.txt, sequence_length: 64, tokenizer_vocab: 280, cache_dir: {tmp_path}/cache}}\n"
        f"training: {{steps: 1, global_batch: 4}}\ndevice: cpu\nrun_dir: {tmp_path}/run\n"
    )
    with FirstProduct() as first:
        train(recipe)
    text = (PAGE.parents[1] / "ARCHITECTURE.md").read_text()
    (listed,) = re.findall(r"there are (\d+) frames of this project", text)
    assert first.frames[:3] == ("train", "train_rank", "train_loop")
    assert len(first.frames) <= int(listed)


def test_the_core_asks_satellites_in_few_files() -> None:
    seams = {
        (file, target.split(".")[0])
        for file in FILES
        if room_of(file) in CORE and file not in ("__init__.py", "__main__.py")
        for target in targets(file)
        if target.split(".")[0] in SATELLITES
    }
    assert seams == set(SEAMS.items())


@pytest.mark.parametrize("inside", [False, True])
def test_satellites_use_the_cores_public_modules_alone(inside: bool) -> None:
    """And every public module is used, so the list only holds what satellites need."""
    allowed = {f"{room}.{name}".rstrip(".") for room, names in API.items() for name in ("", *names.split())}
    if inside:
        allowed |= {f"{room}.{name}".rstrip(".") for room, names in INSIDE.items() for name in ("", *names.split())}
    lookers = {"rehearse", "accept"}
    files = rooms(*(lookers if inside else SATELLITES - lookers))
    used = {(file, target) for file in files for target in targets(file) if target.split(".")[0] in CORE - OPEN}
    assert {(file, target) for file, target in used if target not in allowed} == set()
    if not inside:
        modules_used = {target for _, target in used}
        assert {name for name in allowed if "." in name} <= modules_used
