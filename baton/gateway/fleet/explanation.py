"""Says why the nodes of a fleet cannot serve a request: what each node lacks, and which pairs were refused. Pure.

Clients read these sentences. They name nodes, fields, values and what to change, and no addresses.
"""

from collections.abc import Iterable, Sequence

from baton.core.errors import shortened
from baton.gateway.fleet.fleet_node import FleetNode, Role
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import role_name

_NAMED_MAX = 8  # nodes and pairs; the others are counted
_VALUE_MAX = 64  # a digest of 256 bits


def explain(nodes: Sequence[FleetNode], lacking: Role | None = None) -> str:
    """Says for each node why it cannot be chosen, and why pairs were refused; lists only the loading nodes while there
    are any.

    Args:
        lacking: the role that has no open node, though requests need one; None: there is none.
    """
    if loading := [node for node in nodes if node.loading]:
        return _first(_explain_node(node) for node in loading)
    refused = _refusals(nodes)
    in_pairs = {node.incarnation for pair in refused for node in pair}
    others = [node for node in nodes if node.incarnation not in in_pairs]
    pairs = [_explain_pair(*pair, peer) for pair, peer in refused.items()]
    reasons = _first([*pairs, *map(_explain_node, others)]) or "no node address is known"
    if lacking is None or not any(node.open for node in nodes):
        return reasons
    return f"no {role_name(lacking)} node serves, and requests need one; {reasons}"


def cure(nodes: Sequence[FleetNode], lacking: Role | None = None) -> str:
    """What to change so that there is a node of the lacking role, or the refused pairs that `explain` names are made;
    empty if it names none.

    The cure of a slow link describes the nodes' machines, so only operators read it: `baton status` has it.
    """
    if any(node.loading for node in nodes):
        return ""
    if lacking is not None and any(node.open for node in nodes) and not any(node.role == lacking for node in nodes):
        wanted = role_name(lacking)
        return f"start a {wanted} node, or make one of several others a {wanted} node: `baton role NAME {wanted}`"
    mismatches = (item for peer in _refusals(nodes).values() for item in peer.mismatches)
    cures = (item.cure for item in mismatches if item.field != "link")
    return "; ".join(dict.fromkeys(filter(None, cures)))


def _refusals(nodes: Sequence[FleetNode]) -> dict[tuple[FleetNode, FleetNode], node_status_pb2.PeerState]:
    """The refused pairs of nodes that are there now, as the prefill node sees them. Those of prefill nodes with a ready
    pair are left out: while two revisions serve, some pairs are refused as they should be."""
    decodes = {node.incarnation: node for node in nodes if node.role == node_status_pb2.ROLE_DECODE and node.open}
    return {
        (node, decodes[incarnation]): peer
        for node in nodes
        if node.role == node_status_pb2.ROLE_PREFILL and node.open and node.ready_peers.isdisjoint(decodes)
        for incarnation, peer in node.peers.items()
        if incarnation in decodes and peer.mismatches
    }


def _explain_pair(prefill: FleetNode, decode: FleetNode, peer: node_status_pb2.PeerState) -> str:
    differ = (
        f"{item.field} is {shortened(item.ours, _VALUE_MAX)} and {shortened(item.theirs, _VALUE_MAX)}"
        for item in peer.mismatches
    )
    return f"{_name(prefill)} and {_name(decode)} cannot work together: {', '.join(differ)}"


def _explain_node(node: FleetNode) -> str:
    name = _name(node)
    if node.loading:
        return f"{name} is {node.detail}"
    if node.detail:
        return f"{name} cannot be used ({node.detail})"
    return f"{name} is draining" if node.status.draining else f"{name} is an available {role_name(node.role)} node"


def _name(node: FleetNode) -> str:
    return node.status.info.name or f"a {role_name(node.role)} node"  # clients see no addresses


def _first(reasons: Iterable[str]) -> str:
    """The first reasons, and the number of the others."""
    listed = list(reasons)
    more = len(listed) - _NAMED_MAX
    return "; ".join([*listed[:_NAMED_MAX], *([f"{more} more nodes or pairs like these"] if more > 0 else [])])
