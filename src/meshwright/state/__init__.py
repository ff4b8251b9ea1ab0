"""Where a rank's training state lives, and the one choice between those places."""

from meshwright.spec.layout import LayoutSpec
from meshwright.spec.precision import Precision
from meshwright.state.host import HostStore
from meshwright.state.masters import MasterWeights
from meshwright.state.store import Bucket, StateStore

__all__ = ["Bucket", "HostStore", "MasterWeights", "StateStore", "choose_store"]


def choose_store(layout: LayoutSpec, precision: Precision, *, alone: bool) -> type[StateStore]:
    """The store of a run; `alone`: one process, whose weights FSDP2 does not keep."""
    if layout.offload == "cpu":
        return HostStore
    return MasterWeights if alone and precision.mixed else StateStore
