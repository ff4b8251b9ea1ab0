"""The attacked folder: a recipe, its text, token cache and run, an export, adapters, and all results."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from attack.trial import Ended, copy, run
from test_imports_weights import ARGUMENTS, state

FIXTURES = Path(__file__).parents[1] / "fixtures" / "imports"

STEPS, TUNED = 6, 2
"""Steps of the run, and of those that tune it."""
RECIPE: Mapping[str, Any] = {
    "model": {"family": "llama", "weights": "random", "hidden": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2,
              "ffn": 48, "max_positions": 32},
    "data": {"sources": ["text.txt"], "sequence_length": 16, "tokenizer_vocab": 280, "cache_dir": "cache"},
    "training": {"steps": STEPS, "global_batch": 4, "micro_batch": 2, "precision": "fp32", "optimizer": {"lr": 3e-3},
                 "lr_schedule": {"warmup": 0}, "evaluation": {"batches": 0}},
    "checkpoint": {"every": 2, "keep_last": 3},
    "device": "cpu",
    "run_dir": "run",
}  # fmt: skip
"""Three checkpoints in a fraction of a second."""

TRAIN = ("train", "recipe.yaml")
RESUME = (*TRAIN, "--resume", "auto")
START = ("train", "start.yaml")
TAKE = ("import", "ckpt.pt", "--weights", "taken")
FOREIGN = (
    *("axolotl_full.yaml", "factory_lora_dpo.yaml", "foundry_mpt.yaml", "megatron_llama3.sh", "nemo_gpt.yaml"),
    *("nanogpt_gpt2.py", "nanotron_smol.yaml", "titan_8b.toml", "titan_printed.json", "bridge_llama.yaml"),
)
"""Configurations of other systems, in the folder `foreign`."""
GENERATE = ("--prompt", "def", "--max-tokens", "8", "--temperature", "0", "--json")


@dataclass(frozen=True)
class Good:
    """The folder, and the results of its commands without damage."""

    folder: Path
    trained: str
    """The whole run's losses and last weights."""
    started: str
    """The same for the run that starts from the exported adapters."""
    texts: Mapping[str, str]
    """The output of `generate`, by the model's directory in the folder; of `import`, by the file."""
    taken: bytes
    """The weights of another system, as a safetensors file."""


def make_good(folder: Path) -> Good:
    """Train, export and tune in `folder/good`."""
    good = folder / "good"
    good.mkdir()
    (good / "text.txt").write_text("".join(f"def f{i}(x):\n    return x * {i} + {i * i % 97}\n\n" for i in range(30)))
    (good / "recipe.yaml").write_text(yaml.safe_dump(dict(RECIPE), sort_keys=False))
    tune = {"method": "lora", "rank": 2}
    training = {**RECIPE["training"], "steps": TUNED}
    tuning = {**RECIPE, "model": {"name": "hf"}, "training": training, "finetune": tune, "run_dir": "tuned"}
    del (data := dict(tuning["data"]))["tokenizer_vocab"]
    (good / "tune.yaml").write_text(yaml.safe_dump({**tuning, "data": data | {"tokenizer": "hf"}}, sort_keys=False))
    start = {**tuning, "finetune": tune | {"start_from": "adapter"}, "run_dir": "started"}
    (good / "start.yaml").write_text(yaml.safe_dump({**start, "data": data | {"tokenizer": "hf"}}, sort_keys=False))
    for words in (
        (*TRAIN, "checkpoint.asynchronous=false"),  # else a save that is due during another is skipped
        ("export", "run", "--hf", "hf"),
        ("train", "tune.yaml"),
        ("export", "tuned", "--adapter", "adapter"),
        ("train", "start.yaml"),
    ):
        _must(run(words, good))
    trained, started = result_of(good), result_of(good, "started", TUNED)
    shutil.rmtree(good / "started")
    # The run as it was after saving step 4: resuming it trains two steps.
    last = good / "run/checkpoints/step-00000006"
    shutil.rmtree(last)
    (good / "run/checkpoints/latest").write_text("step-00000004\n")
    for name in FOREIGN:
        (good / "foreign").mkdir(exist_ok=True)
        shutil.copy(FIXTURES / name, good / "foreign")
    torch.save({"model_args": ARGUMENTS, "model": state(), "config": {}}, good / "ckpt.pt")
    _must(run(TAKE, good))
    taken = (good / TAKE[-1] / "model.safetensors").read_bytes()
    shutil.rmtree(good / TAKE[-1])
    texts = {model: _must(run(("generate", model, *GENERATE), good)).out for model in ("run", "hf")}
    texts |= {f"foreign/{name}": _must(run(("import", f"foreign/{name}"), good)).out for name in FOREIGN}
    again = copy(good, folder / "again")
    _must(run(RESUME, again))
    assert result_of(again) == trained, "an undamaged run does not resume to the same result"
    return Good(good, trained, started, texts, taken)


def result_of(folder: Path, name: str = "run", last: int = STEPS) -> str:
    """Loss and gradient norm of every step of a run, and the checksums of its last checkpoint's tensors."""
    steps = {}
    try:
        for line in (folder / name / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "step":
                steps[record["step"]] = (record["loss"], record["gnorm"])
        manifest = json.loads((folder / name / f"checkpoints/step-{last:08d}/manifest.json").read_text())
    except (OSError, ValueError, KeyError) as error:
        return f"no result: {error}"
    files = {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".distcp")}
    return json.dumps([sorted(steps.items()), sorted(files.items())])


def _must(ended: Ended) -> Ended:
    assert ended.status == 0, ended.err
    return ended
