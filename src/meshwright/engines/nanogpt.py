"""Engine `nanogpt`: karpathy's nanoGPT, from a checkout that the user names."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine
from meshwright.spec.run import ResolvedRun

NORM_EPS, EPS = 1e-5, 1e-8
"""Constants that nanoGPT's code has and no argument changes."""


class NanoGpt(TemplateEngine):
    """nanoGPT's model, optimizer and autocast, on one process or under DDP as its train.py has it."""

    name = "nanogpt"
    about = "nanoGPT"
    packages: ClassVar = {"transformers": "compare"}
    checkout = "https://github.com/karpathy/nanoGPT"
    strategies: ClassVar[Mapping[Strategy, str]] = {"ddp": ""}

    def cannot(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """As `TemplateEngine`; another model than GPT-2, and constants that its code has."""
        found, model, run = dict(super().cannot(resolved)), resolved.model, resolved.run
        if model.family != "gpt2":
            found["model.family"] = "nanoGPT supports only GPT-2"
        if model.norm_eps != NORM_EPS:
            found["model.norm_eps"] = f"nanoGPT's norms use {NORM_EPS:g}"
        if not model.tied_embeddings:
            found["model.tied_embeddings"] = "nanoGPT ties the head to the embedding"
        if model.ffn != 4 * model.hidden:
            found["model.ffn"] = "nanoGPT uses four times model.hidden"
        if run.training.optimizer.eps != EPS:
            found["training.optimizer.eps"] = f"nanoGPT's optimizer uses {EPS:g}"
        return found

    def leaves_out(self, resolved: ResolvedRun) -> Mapping[str, str]:
        """Recomputation."""
        asked = set(resolved.recompute) != {"none"}
        return {"training.recompute": "no recomputation: the same losses, more memory"} if asked else {}
