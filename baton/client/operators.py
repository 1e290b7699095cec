"""The operators' client, with which the command line, tests and tools query a gateway's cluster.

It returns protobuf messages, so `baton` does not export it.
"""

from collections.abc import AsyncIterable, Iterable

from baton.client.client import AsyncClient
from baton.client.messages import set_text
from baton.core.types import AdapterRef
from baton.protos.v1 import node_status_pb2, operations_pb2

# Longer than a gateway waits for nodes.
_DROP_KV_S = 30.0


class OperatorClient(AsyncClient):
    """An `AsyncClient` with the calls of baton.v1.Operations."""

    async def loads(self) -> operations_pb2.GetLoadsResponse:
        """Returns the load of each node."""
        return await self._ask(
            lambda gateway, left_s: gateway.operations.GetLoads(operations_pb2.GetLoadsRequest(), timeout=left_s)
        )

    async def cluster_status(self) -> operations_pb2.ClusterStatusResponse:
        """Returns the cluster's state as the gateway sees it."""
        request = operations_pb2.ClusterStatusRequest()
        return await self._ask(lambda gateway, left_s: gateway.operations.ClusterStatus(request, timeout=left_s))

    async def cluster_view(self) -> str:
        """Returns what the gateway's page /ui shows, as JSON."""
        request = operations_pb2.ClusterViewRequest()
        answer = await self._ask(lambda gateway, left_s: gateway.operations.ClusterView(request, timeout=left_s))
        return answer.state_json

    async def switch_role(
        self, node: str, role: node_status_pb2.Role.ValueType, *, grace_s: float | None = None, force: bool = False
    ) -> node_status_pb2.RoleSwitchProgress:
        """Switches a node to another role. Returns once the gateway uses the node in that role.

        Args:
            node: name or address.
            grace_s: how long the node's running requests may take to finish; None: the node's default.
            force: switch even the last node of its present role.

        Raises:
            BatonError: the node did not switch; the error says why.
        """
        request = operations_pb2.SwitchNodeRoleRequest(role=role, grace_s=grace_s, force=force)
        set_text(request, node=node)
        # No deadline: the node's running requests may take as long as `grace_s`. No retries: operators see a refusal.
        return await self._gateways.ask(
            lambda gateway, _: _last_progress(gateway.operations.SwitchNodeRole(request)), timeout_s=None, retry_s=0.0
        )

    async def drop_kv(
        self, cache_salt: str, *, client: str = "", adapters: Iterable[AdapterRef] = ()
    ) -> operations_pb2.DropKvResponse:
        """Drops all KV of a cache salt on all nodes. The answer has what each node has dropped, or its error.

        Args:
            cache_salt: as the requests give it; empty: requests without one.
            client: name of the API key, or subject of the token, with which the requests came.
            adapters: besides those that nodes have or have had since their start; each revision is one of its own.

        Raises:
            BatonError: the gateway refuses.
        """
        request = operations_pb2.DropKvRequest(
            adapters=[node_status_pb2.Adapter(name=name, revision=revision) for name, revision in adapters]
        )
        set_text(request, cache_salt=cache_salt, client=client)
        return await self._gateways.ask(
            lambda gateway, _: gateway.operations.DropKv(request, timeout=_DROP_KV_S), timeout_s=None, retry_s=0.0
        )


async def _last_progress(
    responses: AsyncIterable[operations_pb2.SwitchNodeRoleResponse],
) -> node_status_pb2.RoleSwitchProgress:
    last = node_status_pb2.RoleSwitchProgress()
    async for response in responses:
        last = response.progress
    return last
