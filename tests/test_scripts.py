"""Every script of benchmarks/, docs/, examples/ and solo/: `--help` only helps, and a tiny run of it ends well.

Scripts are found in the folders. One without words in `WORDS` is run without any.
"""

import ast
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.launch import forkserver

ROOT = Path(__file__).parents[1]
TESTS = Path(__file__).parent
FOLDERS = ("benchmarks", "docs", "examples", "solo")
PARTS = ("benchmarks/engine/", "docs/site_hook.py", "benchmarks/tuning.py", "benchmarks/workload.py")
"""Modules of other scripts and programs, which nobody starts."""
SCRIPTS = [
    name
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not (name := path.relative_to(ROOT).as_posix()).startswith(PARTS)
]
LIMIT = 240.0
"""Seconds for a script, on a busy machine."""


@dataclass(frozen=True)
class Tiny:
    """The smallest run of a script."""

    words: str = ""
    needs: tuple[str, ...] = ()
    """Packages without which it must say so in one line, and end with a status that is not zero."""
    exhaustive: bool = False
    """Whether it starts so many processes that only `make test-all` runs it."""


SMALL = "--rounds 1 --turn 1 --warm-up 1 --threads 1 --write result"
SOLO = "--steps 1 --width 48 --layers 1 --heads 4 --kv-heads 2 --inner 64 --length 32 --batch 2 --micro-batch 2 --cpu"
WORDS: Mapping[str, Tiny] = {
    "benchmarks/check_parts.py": Tiny("--rounds 1"),
    "benchmarks/checkpoints.py": Tiny("--megabytes 4 --rounds 1"),
    "benchmarks/checks.py": Tiny("--rounds 1 --steps 1", exhaustive=True),
    "benchmarks/cpu_optimizer.py": Tiny("--millions 1 --turns 1", needs=("deepspeed",)),
    "benchmarks/data.py": Tiny("--quick --only packing"),
    "benchmarks/dpo.py": Tiny("--trl .", needs=("trl",)),
    "benchmarks/engines.py": Tiny(f"--vocab 4096 --precision fp32 {SMALL}", exhaustive=True),
    "benchmarks/finetune.py": Tiny(f"--cells lora-packed --precision fp32 {SMALL}", exhaustive=True),
    "benchmarks/fit_planner.py": Tiny("--rounds 1", exhaustive=True),
    "benchmarks/gated_delta.py": Tiny("--tokens 64 --rounds 1"),
    "benchmarks/processor_seconds.py": Tiny("--vocab 4096 --precision fp32 --batch 1 --turns 1 --operations 3"),
    "benchmarks/generation.py": Tiny(
        "--models 1M --batch 1 --tokens 2 --prompt 4 --rounds 1 --threads 1 --write result", exhaustive=True
    ),
    "benchmarks/house.py": Tiny(f"{ROOT} {ROOT} --starts 1", exhaustive=True),
    "benchmarks/memory_limit.py": Tiny("--folder limited --layers 1 --arms memory", exhaustive=True),
    "benchmarks/predicted.py": Tiny("--only '3M single'", exhaustive=True),
    "benchmarks/receipts.py": Tiny("--families llama --write result.md"),
    "benchmarks/serving.py": Tiny("cancel --requests 4 --passes 1"),
    "benchmarks/settings.py": Tiny("--only null --rounds 1 --batch 4", exhaustive=True),
    "benchmarks/silent/deepspeed_stages.py": Tiny(needs=("deepspeed",)),
    "benchmarks/silent/fabric_deepspeed.py": Tiny(needs=("deepspeed",)),
    "benchmarks/silent/lightning_deepspeed.py": Tiny(needs=("deepspeed", "pytorch_lightning")),
    **{f"examples/{name}.py": Tiny(exhaustive=True) for name in ("dataset", "model", "objective", "optimizer")},
    "solo/finetune_qlora.py": Tiny(f"--fresh --package json --rank 2 {SOLO}"),
    "solo/train.py": Tiny(SOLO),
    "solo/train_fsdp.py": Tiny(SOLO),
}


RUN_BY: Mapping[str, str] = {
    "benchmarks/finetuning_story.py": "test_finetuning_story.py",
    "benchmarks/planner_tab.py": "test_planner_site.py",
    "solo/finetune_lora.py": "test_solo_finetune.py",
}
"""Scripts that need more than words, and the tests that run them."""


def run(folder: Path, script: str, words: str) -> tuple[int, str, str]:
    """Status, output and errors of a script in a copy of the repository's scripts."""
    path = os.pathsep.join((str(TESTS), str(ROOT / "src")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-u", "-m", "run_script", script, *shlex.split(words)]
    with (folder / "out").open("w+") as out, (folder / "err").open("w+") as err:
        process = forkserver.start(command, env=environment, cwd=folder, stdout=out.fileno(), stderr=err.fileno())
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return status, (folder / "out").read_text(), (folder / "err").read_text()


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with copies of all scripts: what they write is beside them."""
    folder = tmp_path_factory.mktemp("scripts")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    (folder / "tests").symlink_to(TESTS)
    return folder


def state(folder: Path) -> dict[str, int]:
    """The files of a folder, and when they were written."""
    return {
        str(path): path.stat().st_mtime_ns
        for name in FOLDERS
        for path in (folder / name).rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.slow
@pytest.mark.every(3)
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_a_script_only_helps(copied: Path, script: str) -> None:
    before = state(copied)
    status, out, err = run(copied, script, "--help")
    assert status == 0, err
    assert out.startswith(f"usage: {Path(script).name}")
    assert len(out.splitlines()) > 4, f"{script} says nothing about itself"
    assert state(copied) == before


def case(script: str) -> object:
    """The parameter of a script's test, which may be in a tier of its own."""
    marks = [pytest.mark.exhaustive] if WORDS.get(script, Tiny()).exhaustive else []
    return pytest.param(script, marks=marks, id=script)


RUN = [script for script in SCRIPTS if not script.startswith("docs/") and script not in RUN_BY]
"""`docs/check_pages.py` runs the pages' scripts."""


@pytest.mark.slow
@pytest.mark.parametrize("script", [*map(case, RUN)])
def test_a_tiny_run_of_every_script_ends_well(copied: Path, script: str) -> None:
    tiny = WORDS.get(script, Tiny())
    status, out, err = run(copied, script, tiny.words)
    if missing := [package for package in tiny.needs if importlib.util.find_spec(package) is None]:
        assert status not in (0, 2), out
        assert len(err.splitlines()) == 1, err
        assert f"'{missing[0]}'" in err
        assert "pip install" in err
    else:
        assert status == 0, err
        assert out


@pytest.mark.parametrize("script", [*RUN_BY])
def test_other_scripts_are_run_by_their_own_tests(script: str) -> None:
    assert script in SCRIPTS
    assert f'"{Path(script).name}"' in (TESTS / RUN_BY[script]).read_text()


def test_words_belong_to_scripts() -> None:
    assert WORDS.keys() <= {*RUN}


def test_every_script_helps_before_it_works() -> None:
    """Of a file that only defines things, nobody has to know the words."""
    for script in SCRIPTS:
        tree = ast.parse((ROOT / script).read_text())
        assert ast.get_docstring(tree), script
        assert "ArgumentParser" in (ROOT / script).read_text(), f"{script} does not read its words"
