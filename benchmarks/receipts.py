"""Every family handed over to every program: receipts of dense models, adapters and merged models, in one table.

    python benchmarks/receipts.py --vllm PYTHON          # some minutes on 2 cores

For each family a tiny model with random weights is exported (dense), two steps of LoRA are trained on it (adapter), and
the adapter is merged (merged); each program that can read the result reads it. Needs `pip install -e '.[gguf]'` with
transformers and peft, and the Python of an environment with vLLM.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.hf import HfForm, export_hf
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families import parameter_table, resolve_model
from meshwright.handover.adapters import export_adapter
from meshwright.handover.export import export_gguf, export_trained
from meshwright.handover.receipt import Receipt
from meshwright.models import build_model, initialize, named_tensors
from meshwright.serve.trained import open_trained
from meshwright.spec.model import ModelFields
from meshwright.spec.run import Run
from meshwright.trainer.run import train

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt2")
PROGRAMS = ("meshwright", "transformers", "peft", "vLLM", "llama.cpp")
SIZES: dict[str, Any] = {"hidden": 64, "num_layers": 2, "num_heads": 2, "max_positions": 128, "init_std": 0.2}
"""Heads of 32 are the narrowest that vLLM computes on a CPU."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
TEXT = "".join(f"def add_{n}(x):\n    return x + {n}\n" for n in range(200))


def main() -> int:
    """Export all, print the table, and write it."""
    arguments = parse()
    torch.set_num_threads(1)
    rows, versions = [], dict[str, str]()
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            for kind, receipts in exports(family, Path(folder), arguments.vllm):
                rows.append(row(family, kind, receipts, versions))
                print(rows[-1], flush=True)
    head = [f"| family | what | {' | '.join(PROGRAMS)} |", "|---|---|" + "---|" * len(PROGRAMS)]
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python benchmarks/receipts.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.system()}; everything in fp32",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + f", torch {torch.__version__}",
        "commit": commit(),
    }
    text = [
        "# Receipts of every family",
        "",
        *(f"- {key}: {value}" for key, value in facts.items()),
        "",
        *LEGEND,
        *head,
        *rows,
    ]
    arguments.write.write_text("\n".join(text) + "\n")
    print(f"wrote {arguments.write}")
    return 0


LEGEND = (
    "Cells are the largest differences from the model: of logits (meshwright, transformers, peft) or of",
    "log-probabilities (vLLM, llama.cpp). Adapters are LoRA; llama.cpp is given them merged.",
    "",
)


def exports(family: str, folder: Path, vllm: Path | None) -> Any:
    """(kind, its receipts or what went wrong)."""
    base = folder / "base"
    tokenizer = train_tokenizer([TEXT], 300).with_chat_template(TEMPLATE)
    tokenizer.save(folder / "tokenizer")
    spec = resolve_model(ModelFields(family=family, vocab=300, **sizes_of(family)), base_dir=Path())  # type: ignore[arg-type]
    model = build_model(spec, device="cpu")
    initialize(model, parameter_table(spec), seed=1)
    form = HfForm(tokenizer_dir=folder / "tokenizer", dtype=torch.float32)
    export_hf(named_tensors(model).items(), spec, base, form, prove=False)
    dense = open_trained(base, device="cpu", dtype="fp32")
    yield (
        "dense",
        [
            tried(lambda: export_trained(dense, folder / "hf", dtype="fp32", vllm=vllm)),
            tried(lambda: export_gguf(dense, folder / "dense.gguf", form="f32")),
        ],
    )
    (folder / "text.txt").write_text(TEXT)
    # peft has one adapter for gpt2's queries, keys and values; ours are three.
    train(recipe(base, folder, {"targets": ["wo", "w1", "w2"]} if family == "gpt2" else {}))
    adapted = open_trained(folder / "run", device="cpu", dtype="fp32")
    told = [tried(lambda: export_adapter(adapted, folder / "adapter", vllm=vllm)[1])]
    if isinstance(told[0], str) and "vLLM" in told[0]:  # what the others say without it
        told.append(tried(lambda: export_adapter(adapted, folder / "adapter")[1]))
    yield "adapter", told
    yield (
        "merged",
        [
            tried(lambda: export_trained(adapted, folder / "merged", dtype="fp32", merge=True, vllm=vllm)),
            tried(lambda: export_gguf(adapted, folder / "merged.gguf", form="f32", merge=True)),
        ],
    )


def sizes_of(family: str) -> dict[str, Any]:
    """A tiny model, with shared keys and values where the family has that."""
    if family == "gpt2":
        return SIZES | {"max_positions": 1024}
    return SIZES | {"num_kv_heads": 1} | ({"head_dim": 128} if family == "qwen3" else {})


def recipe(base: Path, folder: Path, more: dict[str, Any]) -> Run:
    """Two steps of LoRA."""
    return Run.model_validate(
        {
            "model": {"name": str(base), "weights": "pretrained"},
            "data": {"sources": [str(folder / "text.txt")], "sequence_length": 64, "cache_dir": str(folder / "cache")},
            "training": {
                "steps": 2,
                "global_batch": 4,
                "precision": "fp32",
                "lr_schedule": {"warmup": 0},
                "optimizer": {"lr": 0.05},
            },
            "finetune": {"method": "lora", "rank": 4, "alpha": 8.0, **more},
            "run_dir": str(folder / "run"),
            "device": "cpu",
        }
    )


def tried(export: Any) -> Receipt | str:
    """The receipt, or the refusal."""
    try:
        return export()
    except ValueError as error:
        return str(error)
    except Exception:
        traceback.print_exc()
        return "failed"


def row(family: str, kind: str, receipts: list[Receipt | str], versions: dict[str, str]) -> str:
    """One line of the table."""
    cells: dict[str, str] = dict.fromkeys(PROGRAMS, "")
    for receipt in receipts:
        if isinstance(receipt, str):
            print(f"{family} {kind}: {receipt}", file=sys.stderr)
            cells["vLLM" if "vLLM" in receipt else "meshwright"] = "refused"
            continue
        for reading in receipt.readings:
            versions[reading.program] = reading.version
            cells[reading.program] = f"{reading.largest_difference:.1e}"
        for note in receipt.notes:
            print(f"{family} {kind}: {note}", file=sys.stderr)
    return f"| {family} | {kind} | {' | '.join(cells.values())} |"


def commit() -> str:
    """The commit of this checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def parse() -> argparse.Namespace:
    """The command line."""
    results = Path(__file__).parent / "results" / f"{datetime.now(UTC).date().isoformat()}-receipts.md"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--vllm", type=Path, help="the Python of an environment that has vLLM")
    parser.add_argument("--write", type=Path, default=results)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
