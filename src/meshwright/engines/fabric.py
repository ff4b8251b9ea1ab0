"""Engine `fabric`: a loop of Lightning Fabric."""

from typing import ClassVar

from meshwright.engines.lightning import ModelParallel


class FabricEngine(ModelParallel):
    """Lightning's `Fabric`."""

    name = "fabric"
    about = "a loop of Lightning Fabric"
    packages: ClassVar = {"transformers": "compare", "lightning_fabric": "compare"}
