"""How a single-device model is spread over ranks: one file per strategy, and `apply.py` with their order."""

from meshwright.parallel.apply import apply_parallelism
from meshwright.parallel.materialize import materialize
from meshwright.parallel.mesh import Meshes, build_meshes
from meshwright.parallel.passes import Passes, WholeModel

__all__ = ["Meshes", "Passes", "WholeModel", "apply_parallelism", "build_meshes", "materialize"]
