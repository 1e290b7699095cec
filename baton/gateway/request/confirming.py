"""Finds nodes whose status has not changed since requests were sent to them.

Those requests may have ended elsewhere, and the node would seem to have them until its status is repeated.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.watch_pace import WatchPace
from baton.protos.v1 import node_status_pb2

_CONFIRM_S = 1.0

Confirm = Callable[[FleetNode], Coroutine[Any, Any, None]]


async def keep_confirming(fleet: Fleet, pace: WatchPace, confirm: Confirm) -> None:
    """Calls `confirm` for each such node, every second, where statuses are repeated only rarely. Runs until cancelled.

    Args:
        confirm: asks the node for its status.
    """
    waiting: dict[FleetNode, node_status_pb2.NodeStatus] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            await asyncio.sleep(_CONFIRM_S)
            nodes = [node for node in fleet.nodes() if node.unconfirmed and node.reachable]
            for node in nodes:
                if waiting.get(node) is node.status and pace.repeat_s > 2 * _CONFIRM_S:
                    tasks.create_task(confirm(node), name="confirm")
            waiting = {node: node.status for node in nodes}
