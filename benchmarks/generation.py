"""Our generation compared with transformers' `generate` on the same model, prompts and threads: tokens a second.

    python benchmarks/generation.py                 # some minutes on 2 cores

A model of random weights is exported, and transformers reads the export. Both generate the same number of greedy tokens
after the same prompts, in one process, by turns (A B B A A B ...), so that a drift in the machine's speed affects both;
the result is the ratio of the medians, with one thread of seconds on the CPU. The table shows whether both generate the
same tokens. Needs `pip install -e '.[transformers]'`.
"""

import argparse
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

import torch

from meshwright.checkpoint.hf import export_hf
from meshwright.families import parameter_table, resolve_model
from meshwright.models import Decoder, build_model, initialize, named_tensors
from meshwright.models.dtypes import torch_dtype
from meshwright.models.generate import Sampling
from meshwright.models.packed import pack
from meshwright.serve.engine import Engine, Request
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
        "| model | prompts | ours tok/s | transformers tok/s | ours : it (rounds) | same tokens |",
        "|---|---|---|---|---|---|",
    ]
    facts = about(arguments)
    print("\n".join(lines), flush=True)
    for name in arguments.models:
        model, theirs = both(name, torch_dtype(arguments.dtype))
        for batch in arguments.batch:
            lines.append(row(name, model, theirs, batch, arguments))
            print(lines[-1], flush=True)
    if arguments.write:
        facts["load"] += f" before, {load()} after"
        text = ["# Generation side by side", "", *(f"- {key}: {value}" for key, value in facts.items()), "", *lines]
        arguments.write.with_suffix(".md").write_text("\n".join(text) + "\n")
        print(f"wrote {arguments.write.with_suffix('.md')}")
    return 0


def both(name: str, dtype: torch.dtype) -> tuple[Decoder, object]:
    """Our model, packed as the verbs pack it, and transformers' model."""
    from transformers import AutoModelForCausalLM

    spec = resolve_model(ModelFields(family="llama", max_positions=1024, **MODELS[name]), base_dir=Path())  # type: ignore[arg-type]
    model = build_model(spec, device="cpu")
    initialize(model, parameter_table(spec), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        export_hf(
            named_tensors(model).items(),
            spec,
            Path(folder) / "hf",
            tokenizer_dir=None,
            dtype=torch.float32,
            prove=False,
        )
        theirs = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=dtype).eval()
    model.to(dtype)
    pack(model)
    return model.eval(), theirs


def row(name: str, model: Decoder, theirs: object, batch: int, arguments: argparse.Namespace) -> str:
    """One line of the table."""
    drawn = random.Random(0)
    prompts = [[drawn.randrange(5, model.spec.vocab) for _ in range(arguments.prompt)] for _ in range(batch)]
    engine = Engine(model)
    requests = [Request(prompt=p, max_tokens=arguments.tokens, sampling=Sampling(temperature=0)) for p in prompts]

    def ours() -> list[list[int]]:
        return [answer.ids for answer in engine.run(requests)]

    def transformers() -> list[list[int]]:
        found = theirs.generate(  # type: ignore[attr-defined]
            torch.tensor(prompts),
            attention_mask=torch.ones(batch, arguments.prompt, dtype=torch.int64),
            max_new_tokens=arguments.tokens,
            min_new_tokens=arguments.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return found[:, arguments.prompt :].tolist()

    same = ours() == transformers()  # which also warms both up
    ways: list[Callable[[], object]] = [ours, transformers]
    seconds: dict[int, list[float]] = {0: [], 1: []}
    # A machine that does other work as well gives one thread's seconds on the CPU, not those on the wall.
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    for turn in range(arguments.rounds):
        for way in (0, 1) if turn % 2 == 0 else (1, 0):
            start = clock()
            ways[way]()
            seconds[way].append(clock() - start)
    speeds = [batch * arguments.tokens / statistics.median(seconds[way]) for way in (0, 1)]
    ratios = sorted(b / a for a, b in zip(seconds[0], seconds[1], strict=True))
    ratio = f"{speeds[0] / speeds[1]:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    return f"| {name} | {batch} | {speeds[0]:.0f} | {speeds[1]:.0f} | {ratio} | {'yes' if same else 'no'} |"


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
