"""Code structure of two trees side by side, as Markdown: `python benchmarks/house.py BEFORE AFTER`.

Each is the root of a checkout (`git worktree add --detach ../before a53d974`). Overrides and private parts of PyTorch
are found by tests/test_house.py, so both trees are measured by today's rules.
"""

import argparse
import ast
import resource
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
from make_files_md import PARTS  # pyright: ignore[reportMissingImports]
from test_house import MAX_PARAMETERS, PRIVATE_BUT_NOT_TORCHS, given_names, overrides, parameters, private_parts

STRATEGIES = {
    "tensor parallelism": ("tp", "tensor_parallel"),
    "context parallelism": ("cp", "context_parallel"),
    "expert parallelism": ("ep", "expert_parallel"),
    "pipelines": ("pp", "pipeline"),
    "ZeRO": ("zero", "zero_stage", "dp_shard"),
    "pipedream": ("pipedream", "asynchronous", "late"),
}
"""Strategy -> the names by which a file is known to know it."""

CORE = set(PARTS["the core"])
"""Rooms whose files say how much of the trainer knows a strategy; planners and exporters know them all."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--starts", type=int, default=7, help="of `meshwright --help`, whose median is told")
    arguments = parser.parse_args()
    for tree in (arguments.before, arguments.after):
        if not (tree / "src").is_dir():
            parser.error(
                f"{tree} has no src/; give the root of a checkout, as from git worktree add --detach {tree} REVISION"
            )
    print("\n".join(table(arguments.before, arguments.after, arguments.starts)))
    return 0


def table(before: Path, after: Path, starts: int) -> Iterator[str]:
    """The rows: figures of the whole, then lines by room."""
    facts = [figures(root / "src" / "meshwright") for root in (before, after)]
    for counted, root in zip(facts, (before, after), strict=True):
        counted["`meshwright --help`, processor seconds"] = f"{start_seconds(root / 'src', starts):.2f}"
    yield "| | before | now |"
    yield "|---|---|---|"
    for name in dict.fromkeys(name for counted in facts for name in counted):
        yield f"| {name} | {' | '.join(str(counted.get(name, '')) for counted in facts)} |"


def figures(source: Path) -> dict[str, int | str]:
    """The counts over a tree."""
    trees = {path.relative_to(source).as_posix(): ast.parse(path.read_text()) for path in source.rglob("*.py")}
    lines = Counter({file: len((source / file).read_text().splitlines()) for file in trees})
    known = {file: set(names(tree)) for file, tree in trees.items()}
    ours = {name for tree in trees.values() for name in given_names(tree)} | PRIVATE_BUT_NOT_TORCHS
    found: dict[str, int | str] = {
        "overrides of what was built elsewhere": sum(len(set(overrides(tree))) for tree in trees.values()),
        "files with private parts of PyTorch": sum(any(private_parts(tree, ours)) for tree in trees.values()),
        f"functions of more than {MAX_PARAMETERS} parameters": sum(
            len(parameters(node)) > MAX_PARAMETERS
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, Function)
        ),
    }
    for strategy, words in STRATEGIES.items():
        files = [file for file, seen in known.items() if seen & set(words)]
        inside = sum(file.split("/")[0] in CORE for file in files)
        found[f"files that know {strategy}: of the core, of all"] = f"{inside}, {len(files)}"
    rooms = Counter()
    for file, count in lines.items():
        rooms[f"{file.split('/')[0]}/" if "/" in file else "beside the rooms"] += count
    found["lines in all"] = sum(lines.values())
    return found | {f"lines of {room}": count for room, count in sorted(rooms.items())}


def names(tree: ast.AST) -> Iterator[str]:
    """Every name, attribute, keyword and short string of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword | ast.arg):
            yield node.arg or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def start_seconds(path: Path, starts: int) -> float:
    """Median processor seconds of `--help`, compiled files at hand."""
    code = f"import sys; sys.path.insert(0, {str(path)!r}); from meshwright.cli.main import main; main(['--help'])"
    taken = []
    for _ in range(starts + 1):
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-P", "-c", code], stdout=subprocess.DEVNULL, check=False)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    sys.exit(main())
