"""The interface of a role: its services, its part of the node's status, and how it drains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from baton.node.assembly import Node
from baton.protos.v1 import node_status_pb2
from baton.settings.node_config import NodeSettings
from kvtransfer.records import PeerTraffic


class ServedRole(Protocol):
    """One role of one node, from its start to `close`."""

    @property
    def servicers(self) -> Mapping[str, object]:
        """The role's services by name."""

    def fill_status(self, status: node_status_pb2.NodeStatus, traffic: Mapping[int, PeerTraffic]) -> None:
        """Adds peers, leases and refusals to a status.

        Args:
            traffic: of the transfer with each connected peer, now.
        """

    def knows(self, request_id: str) -> bool:
        """Whether this request of the engine belongs to the role."""

    def leases(self) -> Mapping[str, int]:
        """Number of leases by state; empty if the role grants none."""

    @property
    def busy(self) -> bool:
        """Whether requests are still running."""

    def stop_admission(self) -> None:
        """Refuses new requests with `Draining` from now on."""

    async def close(self) -> None:
        """Ends what still runs, with a typed error for each; returns when nothing is held."""


@dataclass(frozen=True)
class RoleKind:
    """A role that a node can have.

    Args:
        settings: class of the role's settings.
        make: makes the role on a node, from settings of that class. The role's drivers call `Node.listen`.
    """

    settings: type[NodeSettings]
    make: Callable[[Node, Any], ServedRole]
