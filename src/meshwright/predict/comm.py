"""Collective time: latency and bandwidth, inside nodes and between them.

A ring over N ranks puts (N - 1) / N of the payload on every rank's wire for an all-gather or reduce-scatter, twice that
for an all-reduce (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005). Where a group
spans nodes, its ranks in a node share the node's network, one channel each, so the slower of link and network decides.
"""

from dataclasses import dataclass
from math import log2

from meshwright.predict.constants import Constants
from meshwright.spec.cluster import ClusterSpec


@dataclass(frozen=True)
class CommGroup:
    """Ranks that communicate: how many, and how many of them are within one fast-link domain."""

    ranks: int
    local: int

    @property
    def domains(self) -> int:
        """Nodes (or racks) that the group touches."""
        return -(-self.ranks // max(1, self.local))


def axis_group(cluster: ClusterSpec, degree: int, stride: int) -> CommGroup:
    """The group of an axis of `degree` ranks that are `stride` ranks apart, ranks numbered through the nodes."""
    local = max(1, min(degree, cluster.domain // stride)) if stride < cluster.domain else 1
    return CommGroup(degree, local)


def visited(places: int, draws: float) -> float:
    """Probability that a given one of `places` is among `draws` uniform draws."""
    return 1 - (1 - 1 / places) ** draws


@dataclass(frozen=True)
class Wires:
    """A cluster's links at the rates achieved by collectives."""

    link: float
    """Bytes per second of one rank inside its domain."""
    network: float
    """Bytes per second of one rank between domains."""
    link_s: float
    """Latency inside a domain, in seconds."""
    network_s: float
    """Latency that each doubling of the domains adds."""
    scattered: float
    """Rate of an all-to-all, relative to a ring's."""
    relayed: float
    """Rate of an all-to-all with a relay, relative to a ring's."""

    @classmethod
    def of(cls, cluster: ClusterSpec, constants: Constants) -> "Wires":
        """Measured figures where available, else the datasheet's with the fitted efficiencies."""
        link, network = (cluster.measured.collectives.get(kind) for kind in ("link", "network"))
        return cls(
            link=link.bandwidth_gb_s * 1e9 if link else cluster.link_gb_s * 1e9 * constants.link,
            network=network.bandwidth_gb_s * 1e9 if network else cluster.network_gb_s * 1e9 * constants.network,
            link_s=(link.latency_us if link else constants.link_us) * 1e-6,
            network_s=(network.latency_us if network else constants.network_us) * 1e-6,
            scattered=constants.all_to_all,
            relayed=constants.relay,
        )

    def _seconds(self, group: CommGroup, wire_bytes: float, rounds: float) -> float:
        if group.ranks <= 1 or wire_bytes <= 0:
            return 0.0
        latency, rate = self.link_s, self.link
        if group.domains > 1:
            latency += self.network_s * log2(group.domains)
            rate = min(rate, self.network * group.local)
        return rounds * latency + wire_bytes / rate

    def all_gather(self, group: CommGroup, payload: float) -> float:
        """Seconds until every rank of `group` holds all `payload` bytes; a reduce-scatter takes as long."""
        return self._seconds(group, payload * (group.ranks - 1) / max(1, group.ranks), 1.0)

    def all_reduce(self, group: CommGroup, payload: float) -> float:
        """Seconds until every rank holds the sum of `payload` bytes."""
        return self._seconds(group, 2 * payload * (group.ranks - 1) / max(1, group.ranks), 2.0)

    def all_to_all(self, group: CommGroup, copies: float, payload: float, *, relay: bool) -> float:
        """Seconds until every rank has sent `copies` of each of its tokens, `payload` bytes in all if sent once, to
        uniformly drawn ranks.

        Traffic within the domain takes the fast link; the rest leaves through the rank's own network channel. A relay
        sends a token to a rank, or to another domain, only once, for any number of its copies there.
        """
        if group.ranks <= 1 or payload <= 0:
            return 0.0
        near = payload * copies * (group.local - 1) / group.ranks
        far = payload * copies * (group.ranks - group.local) / group.ranks
        scattered = self.scattered
        if relay:
            domains, scattered = group.domains, self.relayed
            near = payload * (group.ranks - domains) * visited(group.ranks, copies)
            far = payload * (domains - 1) * visited(domains, copies)
        latency = self.link_s + (self.network_s * log2(group.domains) if group.domains > 1 else 0.0)
        return latency + max(near / self.link, far / self.network) / scattered

    def send(self, payload: float, *, far: bool) -> float:
        """Seconds for one message to the neighbouring stage."""
        return (self.network_s + payload / self.network) if far else (self.link_s / 2 + payload / self.link)
