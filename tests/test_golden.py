"""Stored losses of the first steps: they reveal a refactoring that changes the training.

`python tests/test_golden.py` rewrites the file, for an intended change.
"""

import json
from pathlib import Path

import pytest

from meshwright.spec.layout import LayoutSpec
from meshwright.testing.equivalence import build_here, loader_for
from tiny import tiny_run

GOLDEN = Path(__file__).with_name("golden_losses.json")
CASES = {
    **{family: {"family": family} for family in ("gpt2", "llama", "mistral", "qwen2", "qwen3")},
    "llama-tied-muon": {"tied": True, "optimizer": {"name": "muon", "lr": 1e-2}},
    "llama-cosine-clip": {"lr_schedule": {"name": "cosine", "warmup": 2}, "steps": 5, "clip": 0.1},
}


def losses(name: str) -> list[float]:
    """Loss and gradient norm of five steps in float64 on one process."""
    trainer = build_here(tiny_run(LayoutSpec(), **CASES[name]))
    with loader_for(trainer) as loader:
        results = [trainer.train_step(step + 1, loader.microbatches(step)) for step in range(5)]
    return [figure for result in results for figure in (result.loss, result.gnorm)]


@pytest.mark.parametrize("name", CASES)
def test_golden_losses(name: str) -> None:
    """Bit-identical on the machine that wrote them; elsewhere float64 products may be summed in another order."""
    assert losses(name) == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-11)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: losses(name) for name in CASES}, indent=1) + "\n")
