"""Formats the names, roles and versions in a gateway's reports about its nodes."""

from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.rpc.convert import phase_name, role_name
from baton.rpc.revisions import Member, revision_of


def members(cluster: operations_pb2.ClusterStatusResponse) -> list[Member]:
    """Returns the gateway and the nodes that serve requests."""
    members = [Member(cluster.gateway, cluster.package_version)]
    for node in cluster.nodes:
        if node.reachable and not node.detail:
            info = node.status.info
            name, model = node_name(node), info.model
            members.append(Member(name, info.package_version, revision_of(model), model.revision_name))
    return members


def node_name(node: operations_pb2.NodeReport) -> str:
    return node.status.info.name or node.address


def node_role(node: operations_pb2.NodeReport) -> str:
    return role_name(node.status.info.role)


def peer_phase(peer: node_status_pb2.PeerState) -> str:
    return phase_name(peer.phase)
