"""Engine `lightning`: the Trainer of PyTorch Lightning."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine


class LightningEngine(TemplateEngine):
    """Lightning's `Trainer`, with its strategies `ddp` and `ModelParallelStrategy` (FSDP2)."""

    name = "lightning"
    about = "the Trainer of PyTorch Lightning"
    packages: ClassVar = {"transformers": "lightning", "pytorch_lightning": "lightning"}
    strategies: ClassVar[Mapping[Strategy, str]] = dict.fromkeys(("ddp", "zero2", "zero3"), "")
