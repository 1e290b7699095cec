"""Which node may switch its role without leaving the cluster without one. Pure."""

from baton.errors import InvalidRequest, NoNode, Overloaded
from gateway.fleet import Fleet
from gateway.fleet_node import FleetNode, Role
from protos.baton.v1 import common_pb2


def switchable(fleet: Fleet, name: str, role: Role, *, force: bool) -> FleetNode:
    """The node with that name or address.

    Args:
        force: even if no other usable node of its present role is left.

    Raises:
        InvalidRequest: there is no such role, no node of that name or several, or it is the last one of its role.
        NoNode: the node is not reachable.
        Overloaded: another node is switching already.
    """
    if role not in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE):
        raise InvalidRequest(f"no node has role {role}", field="role", value=role, allowed=("prefill", "decode"))
    found = [node for node in fleet.nodes() if name in (node.name, node.address, node.status.info.address)]
    if len(found) != 1:
        what = f"{len(found)} nodes have that name" if found else "no node has that name or address"
        known = tuple(sorted(node.address if found else node.name for node in (found or fleet.nodes())))
        raise InvalidRequest(f"{what}: {name!r}", field="node", value=name, allowed=known, cure="see `baton status`")
    node = found[0]
    if not node.reachable:
        raise NoNode(f"{node.name} is not reachable: {node.detail}", cure="see its log")
    busy = [each.name for each in fleet.nodes() if each is not node and each.reachable and each.status.next_role]
    if busy:
        raise Overloaded(f"{busy[0]} is switching its role", cure="wait until it has", retry_after_s=1.0)
    others = [each for each in fleet.nodes() if each.role == node.role and each is not node and each.open]
    if node.role != role and not others and not force:
        what = "prefill" if node.role == common_pb2.ROLE_PREFILL else "decode"
        raise InvalidRequest(
            f"{node.name} is the last usable {what} node", field="node", value=name,
            cure=f"start another {what} node first, or use --force",
        )  # fmt: skip
    return node
