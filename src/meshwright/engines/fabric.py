"""Engine `fabric`: a loop of Lightning Fabric."""

from collections.abc import Mapping
from typing import ClassVar

from meshwright.engines.engine import Strategy, TemplateEngine


class FabricEngine(TemplateEngine):
    """Lightning's `Fabric`, with its strategies `ddp` and `ModelParallelStrategy` (FSDP2)."""

    name = "fabric"
    about = "a loop of Lightning Fabric"
    packages: ClassVar = {"transformers": "compare", "lightning_fabric": "compare"}
    strategies: ClassVar[Mapping[Strategy, str]] = dict.fromkeys(("ddp", "zero2", "zero3"), "")
