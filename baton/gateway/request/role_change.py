"""Makes a node switch its role, unless it is the last usable node of its present role."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.core.errors import InvalidRequest, NoNode, Overloaded
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode, Role
from baton.gateway.request.connections import Connections
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import role_name

# Time for this gateway to use the node in its new role; a status comes every 0.1 s, then a connection is opened.
_USED_TIMEOUT_S = 30.0


async def switch_role(
    connections: Connections, name: str, role: Role, *, grace_s: float | None, dwell_s: float = 0.0, force: bool = False
) -> AsyncGenerator[node_status_pb2.RoleSwitchProgress, None]:
    """Switches a node's role; yields its progress and ends when this gateway uses the node in its new role.

    Args:
        grace_s: see SwitchRoleRequest.
        dwell_s: see SwitchRoleRequest.
        force: switch even the last usable node of its present role.

    Raises:
        BatonError: the node does not switch, or is lost.
        NoNode: the node has switched but cannot be reached in its new role.
    """
    fleet = connections.fleet
    node = switchable(fleet, name, role, force=force)
    client = connections.clients()[node.address]
    last = node_status_pb2.RoleSwitchProgress()
    async with aclosing(client.switch_role(role, grace_s=grace_s, dwell_s=dwell_s)) as progress:
        async for last in progress:
            if last.phase != node_status_pb2.SWITCH_PHASE_DONE:
                yield last
    if last.phase != node_status_pb2.SWITCH_PHASE_DONE:
        raise NoNode(f"{node.name} ended the call before it had switched", cure="see its log")
    try:
        async with asyncio.timeout(_USED_TIMEOUT_S):
            await connections.until(lambda: _used(fleet, last.info))
    except TimeoutError:
        what = f"{last.info.name} has switched, but this gateway cannot use it: {fleet.explain()}"
        raise NoNode(what, field="node", value=name, cure="see `baton status`") from None
    yield last


def switchable(fleet: Fleet, name: str, role: Role, *, force: bool) -> FleetNode:
    """Finds the node with that name or address and checks that it may switch. Pure.

    Args:
        force: allow the last usable node of its present role.

    Raises:
        InvalidRequest: the role does not exist, not exactly one node has that name, or it is the last one of its role.
        NoNode: the node is not reachable.
        Overloaded: another node is switching already.
    """
    if role not in (node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE):
        raise InvalidRequest(f"no node has role {role}", field="role", value=role, allowed=("prefill", "decode"))
    found = [node for node in fleet.nodes() if name in (node.name, node.address, node.status.info.address)]
    if len(found) != 1:
        what = f"{len(found)} nodes have that name" if found else "no node has that name or address"
        known = tuple(sorted(node.address if found else node.name for node in (found or fleet.nodes())))
        raise InvalidRequest(f"{what}: {name!r}", field="node", value=name, allowed=known, cure="see `baton status`")
    node = found[0]
    if not node.reachable:
        raise NoNode(f"{node.name} is not reachable: {node.detail}", field="node", value=name, cure="see its log")
    busy = [each.name for each in fleet.nodes() if each is not node and each.reachable and each.status.next_role]
    if busy and node.role != role:
        raise Overloaded(f"{busy[0]} is switching its role", cure="wait until it has finished", retry_after_s=1.0)
    others = [each for each in fleet.nodes() if each.role == node.role and each is not node and each.open]
    if node.role != role and not others and not force:
        what = role_name(node.role)
        raise InvalidRequest(
            f"{node.name} is the last usable {what} node", field="node", value=name,
            cure=f"start another {what} node first, or use --force",
        )  # fmt: skip
    return node


def _used(fleet: Fleet, info: node_status_pb2.NodeInfo) -> bool:
    return any(node.incarnation == info.incarnation and node.open for node in fleet.nodes())
