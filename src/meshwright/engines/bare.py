"""Engine `bare`: a plain PyTorch loop, with DistributedDataParallel, ZeroRedundancyOptimizer or FSDP2."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine


class Bare(TemplateEngine):
    """Plain PyTorch with transformers' model."""

    name = "bare"
    about = "a plain PyTorch loop"
    packages: ClassVar = {"transformers": "compare"}
    strategies: ClassVar[Mapping[Strategy, str]] = dict.fromkeys(("ddp", "zero1", "zero2", "zero3", "hybrid"), "")
