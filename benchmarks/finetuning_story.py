"""Fine-tuning from end to end, on one small machine: a base model is trained on the standard library's source, then
taught by every method to answer a function's signature with its docstring.

    python benchmarks/finetuning_story.py FOLDER     about ten minutes on two cores; writes docs/finetuning-story.md

Every model is trained by `meshwright train` in a process of its own, from the recipes below, so that its peak memory is
its own. A folder that holds some of the runs already is continued.
"""

import argparse
import ast
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.data.readers import read_documents
from meshwright.data.sources import find_files
from meshwright.families import finetuned_table
from meshwright.spec.data import DataSpec
from meshwright.spec.recipe import load_spec
from meshwright.spec.run import ResolvedRun
from meshwright.trainer.metrics import read_journal

PAGE = Path(__file__).parents[1] / "docs" / "finetuning-story.md"
TALKS = "docstrings.jsonl"
LONGEST_ANSWER = 200
"""Most characters of an answer."""

BASE: dict[str, Any] = {
    "model": {
        "family": "llama", "hidden": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "max_positions": 128
    },
    "data": {"sources": "stdlib", "tokenizer_vocab": 2048, "sequence_length": 128},
    "training": {
        "steps": 300,
        "global_batch": 8,
        "precision": "fp32",
        "optimizer": {"name": "muon", "lr": 3e-3},
        "lr_schedule": {"name": "wsd", "warmup": 10, "final": 0.05, "decay": 150},
    },
    "device": "cpu",
    "run_dir": "base",
}  # fmt: skip
TUNED: dict[str, Any] = {
    "model": {"name": "base-hf", "weights": "pretrained"},
    "data": {
        "sources": {"path": TALKS, "name": "docstrings"},
        "sequence_length": 128,
        "packing": "best_fit",
        "separate_documents": True,
        "chat": {"template": "plain", "overlong": "drop"},
    },
    "training": {
        "steps": 80,
        "global_batch": 8,
        "precision": "fp32",
        "lr_schedule": {"name": "linear", "warmup": 8, "final": 0.0},
        "evaluation": {"batches": 4},
        "samples": {
            "prompts": [
                "def is_empty(self)",
                "def read_lines(path, encoding='utf-8')",
                "def set_timeout(self, seconds)",
            ],
            "chat": True,
            "max_tokens": 32,
        },
    },
    "device": "cpu",
}
METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "base model": ({"method": "full", "last_layers": 1}, 1e-12),
    "full": ({"method": "full"}, 1e-3),
    "LoRA, rank 16": ({"method": "lora", "rank": 16}, 5e-3),
    "QLoRA, rank 16": ({"method": "qlora", "rank": 16}, 5e-3),
    "IA3": ({"method": "ia3"}, 3e-2),
}
"""Each with its learning rate; the base model makes one step that changes nothing, to be measured."""

Start = Callable[[Path, str], None]
"""(folder, name of the recipe in it) -> None: train it."""


def story(folder: Path, start: Start, *, base: dict[str, Any] = BASE, tuned: dict[str, Any] = TUNED) -> dict[str, Any]:
    """Do everything that is still missing in `folder`; returns {method: its figures and texts}."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TALKS).exists():
        (folder / TALKS).write_text("".join(json.dumps(talk) + "\n" for talk in talks()))
    _train(folder, "base", base, start)
    if not (folder / "base-hf").exists():
        start(folder, "export")
    found = {}
    for method, (finetune, lr) in METHODS.items():
        name = re.sub(r"\W+", "-", method.lower())
        training = tuned["training"] | {"optimizer": {"lr": lr, "weight_decay": 0.0}}
        if method == "base model":
            training |= {"steps": 1, "lr_schedule": {"name": "constant", "warmup": 0}}
        _train(folder, name, tuned | {"training": training, "finetune": finetune, "run_dir": name}, start)
        found[method] = figures(folder / name)
    return found


def talks() -> Iterator[dict[str, Any]]:
    """Conversations: the question is a function's signature, the answer the first paragraph of its docstring."""
    seen = set()
    for document in read_documents(find_files(DataSpec(), Path())):
        try:
            tree = ast.parse(document.text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            signature = f"def {node.name}({ast.unparse(node.args)})"
            if 15 <= len(answer) <= LONGEST_ANSWER and (signature, answer) not in seen:
                seen.add((signature, answer))
                messages = [{"role": "user", "content": signature}, {"role": "assistant", "content": answer}]
                yield {"messages": messages}


def figures(run_dir: Path) -> dict[str, Any]:
    """A run's figures from its own files."""
    resolved = load_spec(run_dir / "resolved.yaml", ResolvedRun)
    table = finetuned_table(resolved.model, resolved.run.finetune)
    records = read_journal(run_dir / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    return {
        "parameters": sum(row.numel for row in table if not row.adapter),
        "trained": sum(row.numel for row in table if row.trained),
        "loss": [record["loss"] for record in records if record["kind"] == "evaluation"][-1],
        "memory": steps[-1]["mem"],
        "step_time": steps[-1]["step_time"],
        "steps": steps[-1]["step"],
        "texts": {r["prompt"]: r["text"] for r in records if r["kind"] == "sample" and r["step"] == steps[-1]["step"]},
    }


def page(found: dict[str, Any], num_talks: int) -> str:
    """The text of docs/finetuning-story.md."""
    parameters = found["full"]["parameters"]
    lines = [
        HEAD.format(
            talks=num_talks, parameters=parameters / 1e6, base_steps=BASE["training"]["steps"],
            steps=TUNED["training"]["steps"], machine=f"{platform.machine()}, Python {platform.python_version()}",
            recipe=yaml.safe_dump(_without_samples(TUNED), sort_keys=False, default_flow_style=None, width=110),
        ),
        "| method | learning rate | trained | share | held-out loss | peak memory | s per step |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for method, (_, lr) in METHODS.items():
        run, before = found[method], method == "base model"
        share = f"{run['trained']:,} | {100 * run['trained'] / parameters:.2f} %"
        cost = f"{run['memory'] / 2**20:.0f} MiB | {run['step_time'] or 0:.2f}"
        told = f"{lr:g} | {share}" if not before else "| |"
        lines.append(f"| {method} | {told} | {run['loss']:.3f} | {'|' if before else cost} |")
    for prompt in TUNED["training"]["samples"]["prompts"]:
        lines += [f"\n**`{prompt}`**\n"]
        lines += [f"- {method}: {_shown(found[method]['texts'][prompt])}" for method in METHODS]
    return "\n".join(lines) + "\n"


HEAD = """\
# Fine-tuning, from end to end

Four ways to fine-tune one small model, compared. A base model of {parameters:.1f} million parameters is trained for
{base_steps} steps on the source of Python's standard library and exported as a Hugging Face directory. Each method then
trains it for {steps} steps on {talks:,} conversations: the user gives a function's signature, the assistant answers
with the first paragraph of its docstring. `benchmarks/finetuning_story.py` runs everything and writes this page; a test
repeats it at small size.

```yaml
{recipe}finetune: {{method: lora, rank: 16}}
```

Before training, `meshwright data show run.yaml` prints conversations as the model will see them, with answers after `|`
and everything else after `.`, and `meshwright data audit run.yaml` proves that only the answers carry loss. After
training, try `meshwright generate runs/tuned --chat --prompt 'def is_empty(self)'`.

## Results

Held-out loss is per token of an answer, in nats. Share is the trained fraction of the base model's parameters. Peak
memory is of the whole process; at this size, Python, PyTorch and (for QLoRA) bitsandbytes take nearly all of it, so it
does not compare the methods. Measured on {machine}, two cores of a CPU.
"""


def _shown(text: str) -> str:
    """A text in one line."""
    return "`" + " ".join(text.replace("`", "'").split())[:150] + "`"


def _without_samples(recipe: dict[str, Any]) -> dict[str, Any]:
    return recipe | {"training": {key: value for key, value in recipe["training"].items() if key != "samples"}}


def _train(folder: Path, name: str, recipe: dict[str, Any], start: Start) -> None:
    journal = read_journal(folder / recipe["run_dir"] / "metrics.jsonl")
    if not any(record["kind"] == "end" for record in journal):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
        start(folder, name)


def by_command(folder: Path, name: str) -> None:
    """In a process of its own."""
    command: Sequence[str] = ["train", f"{name}.yaml"]
    if name == "export":
        command = ["export", "base", "--hf", "base-hf"]
    subprocess.run([sys.executable, "-m", "meshwright", *command], cwd=folder, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the runs are, or will be")
    place = parser.parse_args().folder
    outcome = story(place, by_command)
    PAGE.write_text(page(outcome, len((place / TALKS).read_text().splitlines())), encoding="utf-8")
