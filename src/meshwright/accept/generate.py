"""Step `generate`: the run of step `train` in use."""

import json
from collections.abc import Iterator
from pathlib import Path

from meshwright.accept.check import Check, Place, meshwright
from meshwright.accept.runs import text_of
from meshwright.accept.train import RUN
from meshwright.spec.text import counted

PROMPTS = 32
TOKENS = 24


def checks(place: Place) -> Iterator[Check]:
    """Greedy tokens on the device and on the CPU, of one prompt and of a batch; an evaluation."""
    run_dir = place.work / RUN
    lines = text_of(place).read_text().splitlines()[: PROMPTS if place.on_gpu else 3]
    if not run_dir.is_dir():
        yield Check("the run to use", passed=False, detail=f"step {RUN} has left none; run it first")
        return
    expected = _continued(run_dir, lines, "cpu")
    for prompts in (lines[:1], lines):
        ours = _continued(run_dir, prompts, place.device)
        wrong = sum(a != b for a, b in zip(ours, expected, strict=False))
        name = f"greedy tokens of {counted(len(prompts), 'prompt')}"
        yield Check(name, wrong == 0, f"{wrong} of {len(prompts)} differ from the CPU's")
    yield meshwright("eval", run_dir, "--device", place.device).check("evaluation of the run")


def _continued(run_dir: Path, prompts: list[str], device: str) -> list[str]:
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    settings = ("--temperature", 0, "--max-tokens", TOKENS, "--dtype", "fp32", "--device", device, "--json")
    ended = meshwright("generate", run_dir, *words, *settings)
    if ended.status:
        raise RuntimeError(f"generation on {device}: {ended.output[-1500:]}")
    texts = json.loads(ended.output[ended.output.index("{") :])["texts"]
    return [text["continuation"] for text in texts]
