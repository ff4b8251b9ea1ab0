"""Our generation compared with transformers' `generate` on the same model, prompts and threads: tokens a second.

    python benchmarks/generation.py                 # some minutes on 2 cores

A model of random weights is exported, and transformers reads the export. Both generate the same number of greedy tokens
after the same prompts, in one process, by turns (A B C C B A ...), so that a drift in the machine's speed affects all;
the result is the ratio of the medians, with one thread of seconds on the CPU. Ours runs with `--compile`, and without
it, with packed weights. The table shows whether all generate the same tokens.

The bound is the most tokens a second of any program that reads weights and KV cache once for each step: a read of as
many bytes, by torch's sum, is timed by turns with the others. What fits the processor's cache is read from there.
Prompts, which take everybody time, are no part of it. Needs `pip install -e '.[transformers]'`.
"""

import argparse
import copy
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.hf import HfForm, export_hf
from meshwright.families import parameter_table, resolve_model
from meshwright.models import Decoder, build_model, initialize, named_tensors
from meshwright.models.compiled import compile_step
from meshwright.models.dtypes import torch_dtype
from meshwright.models.generate import Sampling
from meshwright.models.packed import pack
from meshwright.serve.engine import InferenceEngine, Request
from meshwright.spec.model import ModelFields

HERE = Path(__file__).parent
MODELS = {
    "1M": {"hidden": 128, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "ffn": 256, "vocab": 2048},
    "10M": {"hidden": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "ffn": 768, "vocab": 8192},
    "30M": {"hidden": 384, "num_layers": 12, "num_heads": 6, "num_kv_heads": 2, "ffn": 1024, "vocab": 16384},
    "135M": {"hidden": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "ffn": 1536, "vocab": 49152},
}
"""Shapes of llama; the last one is SmolLM's."""


def main() -> int:
    """Measure, print the table, and write it."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    lines = [
        "| model | prompts | MB a step | bound tok/s | compiled | packed | transformers | compiled : it (rounds) "
        "| packed : it | same tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    facts = about(arguments)
    print("\n".join(lines), flush=True)
    for name in arguments.models:
        models = three(name, torch_dtype(arguments.dtype))
        for batch in arguments.batch:
            lines.append(row(name, models, batch, arguments))
            print(lines[-1], flush=True)
    if arguments.write:
        facts["load"] += f" before, {load()} after"
        text = ["# Generation side by side", "", *(f"- {key}: {value}" for key, value in facts.items()), "", *lines]
        arguments.write.with_suffix(".md").write_text("\n".join(text) + "\n")
        print(f"wrote {arguments.write.with_suffix('.md')}")
    return 0


def three(name: str, dtype: torch.dtype) -> tuple[Decoder, Decoder, Any]:
    """Our model with compiled steps, packed as the verbs pack it otherwise, and transformers' model."""
    from transformers import AutoModelForCausalLM

    spec = resolve_model(ModelFields(family="llama", max_positions=1024, **MODELS[name]), base_dir=Path())  # type: ignore[arg-type]
    model = build_model(spec, device="cpu")
    initialize(model, parameter_table(spec), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        form = HfForm(dtype=torch.float32)
        export_hf(named_tensors(model).items(), spec, Path(folder) / "hf", form, prove=False)
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=dtype).eval()
    model.to(dtype).eval()
    compiled = copy.deepcopy(model)
    pack(model)
    compile_step(compiled, print)
    return compiled, model, theirs


def bytes_of_step(model: Decoder, batch: int, keys: int) -> int:
    """What a step reads: every weight but the embeddings' other rows, and the keys and values of each row."""
    spec = model.spec
    weights = sum(parameter.numel() for parameter in model.parameters())
    if not spec.tied_embeddings:
        weights -= spec.vocab * spec.hidden
    cache = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * keys * batch
    return (weights + cache) * model.like.element_size()


def row(name: str, models: tuple[Decoder, Decoder, Any], batch: int, arguments: argparse.Namespace) -> str:
    """One line of the table."""
    compiled, packed, theirs = models
    drawn = random.Random(0)
    prompts = [[drawn.randrange(5, packed.spec.vocab) for _ in range(arguments.prompt)] for _ in range(batch)]
    requests = [Request(prompt=p, max_tokens=arguments.tokens, sampling=Sampling(temperature=0)) for p in prompts]
    size = bytes_of_step(packed, batch, arguments.prompt + arguments.tokens // 2)
    room = torch.ones(size // 4)

    def ours(model: Decoder) -> list[list[int]]:
        return [answer.ids for answer in InferenceEngine(model).run(requests)]

    def transformers() -> list[list[int]]:
        found = theirs.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(batch, arguments.prompt, dtype=torch.int64),
            max_new_tokens=arguments.tokens,
            min_new_tokens=arguments.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return found[:, arguments.prompt :].tolist()

    def read() -> None:
        for _ in range(arguments.tokens):
            room.sum()

    ways: list[Callable[[], object]] = [lambda: ours(compiled), lambda: ours(packed), transformers, read]
    first = [way() for way in ways]  # which also warms them up
    same = "yes" if first[0] == first[2] and first[1] == first[2] else "no"
    seconds: list[list[float]] = [[] for _ in ways]
    # A machine that does other work as well gives one thread's seconds on the CPU, not those on the wall.
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    for turn in range(arguments.rounds):
        order = range(len(ways))
        for way in order if turn % 2 == 0 else reversed(order):
            start = clock()
            ways[way]()
            seconds[way].append(clock() - start)
    speed = [batch * arguments.tokens / statistics.median(each) for each in seconds]
    ratios = sorted(b / a for a, b in zip(seconds[0], seconds[2], strict=True))
    return (
        f"| {name} | {batch} | {size / 1e6:.1f} | {speed[3]:.0f} | {speed[0]:.0f} | {speed[1]:.0f} | {speed[2]:.0f} "
        f"| {speed[0] / speed[2]:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | {speed[1] / speed[2]:.2f} | {same} |"
    )


def about(arguments: argparse.Namespace) -> dict[str, str]:
    """Where, how and with which versions the figures were measured."""
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":")[1].strip() if names else "unknown CPU"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "command": " ".join(["python benchmarks/generation.py", *sys.argv[1:]]),
        "machine": f"{cpu}, {os.cpu_count()} cores, {platform.system()}; {arguments.threads} threads",
        "load": load(),
        "versions": f"torch {version('torch')}, transformers {version('transformers')}",
        "work": f"{arguments.dtype}, prompts of {arguments.prompt} tokens, {arguments.tokens} greedy tokens each",
        "rounds": str(arguments.rounds),
    }


def load() -> str:
    """The load average over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def parse() -> argparse.Namespace:
    """The command line."""
    results = HERE / "results" / f"{datetime.now(UTC).date().isoformat()}-generation"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    option("--dtype", default="fp32", choices=["fp32", "bf16"])
    option("--batch", nargs="+", type=int, default=[1, 8], help="prompts at a time")
    option("--prompt", type=int, default=32, help="tokens of a prompt")
    option("--tokens", type=int, default=64, help="new tokens of each")
    option("--rounds", type=int, default=7)
    option("--threads", type=int, default=2, help="CPU threads")
    option("--write", type=Path, default=results, help="write PATH.md (default: results/DATE-generation)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
