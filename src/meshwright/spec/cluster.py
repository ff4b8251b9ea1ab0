"""Clusters: devices, their links, and their short names."""

import re

from pydantic import Field, model_validator

from meshwright.spec.base import Spec
from meshwright.spec.errors import UserError
from meshwright.spec.precision import BF16, Precision

HOST_GB = 1024.0
"""Default host memory of a server node, 10**9 bytes."""


class CollectiveCost(Spec):
    """A measured collective over one kind of link: seconds = latency + bytes on the wire / bandwidth."""

    latency_us: float = Field(ge=0)
    """Time of the smallest message over two ranks."""
    bandwidth_gb_s: float = Field(gt=0)
    """Bus bandwidth that large messages reach, 10**9 bytes per second and rank."""


class Measured(Spec):
    """Measurements of the machine itself by `meshwright plan calibrate`, in place of the datasheet's figures."""

    matmul_tflops: dict[str, float] = Field(default_factory=dict)
    """Precision -> rate of a large square matrix product, 10**12 FLOP/s."""
    matmul_half_us: dict[str, float] = Field(default_factory=dict)
    """Precision -> fixed time of a product, in addition to its arithmetic."""
    memory_gb_s: float | None = None
    """Rate at which a large tensor is read and written."""
    attention_tflops: float | None = None
    """Rate of causal attention, forward and backward, in the first measured precision; masked scores do not count."""
    host_us: float | None = None
    """Time the host needs to issue one operator."""
    collectives: dict[str, CollectiveCost] = Field(default_factory=dict)
    """`link` inside a node, `network` between nodes."""


class ClusterSpec(Spec):
    """A cluster of equal devices in equal nodes. Rates are the datasheet's; the planner derives the achieved rates."""

    name: str
    """Name in reports."""
    device: str
    """Row of the hardware table, or a name of your own."""
    devices: int = Field(ge=1)
    """Number of devices in the cluster, one rank each."""
    per_node: int = Field(ge=1)
    """Number of devices in a node."""
    domain: int = Field(ge=1)
    """Number of devices joined by the fast link: a node, or an NVL72 rack."""
    memory_gb: float = Field(gt=0)
    """Memory of one device, 10**9 bytes."""
    memory_gb_s: float = Field(gt=0)
    """Memory bandwidth of one device, 10**9 bytes per second."""
    tflops: dict[str, float]
    """Precision -> rate of dense matrix products, 10**12 FLOP/s."""
    achievable_tflops: dict[str, float] = Field(default_factory=dict)
    """Precision -> rate that the best matrix shape reaches, 10**12 FLOP/s; default 0.75 of `tflops`."""
    link_gb_s: float = Field(gt=0)
    """Bandwidth of the fast link, one way and per device, 10**9 bytes per second."""
    network_gb_s: float = Field(gt=0)
    """Bandwidth between nodes, one way and per device, 10**9 bytes per second."""
    host_memory_gb: float = Field(default=HOST_GB, gt=0)
    """Host memory of a node, 10**9 bytes, for offloading."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Price of one device for an hour."""
    currency: str = "in your currency"
    """Currency of the price, printed after it; list prices of named devices are in US dollars."""
    measured: Measured = Measured()
    """Filled in by `meshwright plan calibrate`."""
    source: str = ""
    """Source of the figures."""

    @model_validator(mode="after")
    def _rates(self) -> "ClusterSpec":
        if not self.tflops.get(BF16.name):
            raise ValueError(f"tflops has no {BF16}: give at least the rate of products in it")
        for precision, rate in self.achievable_tflops.items():
            peak = self.tflops.get(precision)
            if peak and not 0.01 * peak < rate <= peak:
                raise ValueError(
                    f"achievable_tflops: {precision}: {rate:g} of {peak:g} TFLOP/s; give the rate, not a fraction"
                )
        return self

    def peak(self, precision: Precision) -> float:
        """Datasheet rate of a job's matrix products, 10**12 FLOP/s; the rate of bf16 if theirs is unknown."""
        return self.tflops.get(precision.products) or self.tflops[BF16.name]


NAME = re.compile(
    r"(?:(?P<devices>\d{1,99})\s*x\s*)?(?P<device>(?=\d*[a-z]|\d{4})[a-z0-9][a-z0-9 .-]*?)"
    r"(?:@(?P<rate>\d{1,99}(?:\.\d{1,99})?)(?P<unit>gb/s|gbps)(?P<each>/gpu)?)?",
    re.IGNORECASE,
)


class ClusterName(Spec):
    """The parts of a short name, such as `64xa100-80g@400Gb/s`."""

    devices: int = 1
    device: str
    """With its memory and form if the name has them: `a100-80g`."""
    node_gb_s: float | None = None
    """Network bandwidth of a node, one way, 10**9 bytes per second."""
    gpu_gb_s: float | None = None
    """Network bandwidth of one GPU, if the name says `/gpu`."""


def parse_cluster_name(text: str) -> ClusterName:
    """Parse `[COUNTx]DEVICE[@RATE]`; RATE is a node's network in Gb/s (bits) or GB/s (bytes).

    DEVICE is a name as people write it, with its form and memory in any order: `a100-sxm-80gb`, `rtx 4090`, `5090`.

    Raises `UserError` with examples for any other text.
    """
    match = NAME.fullmatch(text.strip())
    if match is None and (rate := re.fullmatch(r"(.*@\d+(?:\.\d+)?)(/gpu)?", text.strip())):
        example = f"{rate[1]}Gb/s{rate[2] or ''}"
        raise UserError(f"cluster {text!r}: the rate needs a unit, Gb/s (bits) or GB/s (bytes), as in {example}")
    if match is None or int(match["devices"] or 1) == 0:
        raise UserError(
            f"cluster {text!r} is not a name such as 8xh100 or 64xa100-80g@400Gb/s (a node's network in Gb/s or "
            "GB/s, or a GPU's with /gpu), nor a file, nor 'local'"
        )
    rate = None
    if match["rate"]:
        if float(match["rate"]) == 0:
            raise UserError(f"cluster {text!r}: the rate must be above 0, as in 64xa100-80g@400Gb/s")
        rate = float(match["rate"]) / (1 if match["unit"] in ("GB/s", "GB/S") else 8)
    return ClusterName(
        devices=int(match["devices"] or 1),
        device=match["device"].lower().strip(),
        node_gb_s=None if match["each"] else rate,
        gpu_gb_s=rate if match["each"] else None,
    )
