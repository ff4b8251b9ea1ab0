"""Storage of a rank's training state, and the choice of the `StateStore`."""

from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import Precision
from meshwright.state.files import Home
from meshwright.state.masters import MasterWeights
from meshwright.state.store import Bucket, HostStore, StateStore
from meshwright.state.tiered import TieredHost, TieredMasters, TieredStore
from meshwright.state.tiers import Tier
from meshwright.state.weights import CopiesOnDisk, ShardsOnDisk, WeightsOnDisk

__all__ = ["Bucket", "Home", "HostStore", "MasterWeights", "StateStore", "Tier", "TieredStore", "choose_store"]


def choose_store(layout: LayoutSpec, precision: Precision, *, alone: bool) -> type[StateStore]:
    """The store of a run; `alone`: a single process, without FSDP2. A `TieredStore` needs a `Tier`."""
    host, masters = layout.tiers.parameters == "host", alone and precision.mixed
    if layout.tiers.parameters == "disk":
        return CopiesOnDisk if masters else WeightsOnDisk if alone else ShardsOnDisk
    if layout.tiers.moves_state:
        return TieredHost if host else TieredMasters if masters else TieredStore
    return HostStore if host else MasterWeights if masters else StateStore
