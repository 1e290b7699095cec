"""The client of operators: the command line, tests and tools ask a gateway about its cluster with it.

It returns the wire's messages, which is why `baton` does not offer it to users.
"""

from collections.abc import AsyncIterable

from baton.client.client import AsyncClient
from baton.client.messages import set_text
from baton.protos.v1 import common_pb2, node_pb2
from baton.protos.v1 import generation_pb2 as pb


class OperatorClient(AsyncClient):
    """An `AsyncClient` that also asks what operators ask."""

    async def loads(self) -> pb.GetLoadsResponse:
        """How full each node is."""
        return await self._ask(lambda gateway, left_s: gateway.stub.GetLoads(pb.GetLoadsRequest(), timeout=left_s))

    async def cluster_status(self) -> pb.ClusterStatusResponse:
        """The cluster as the gateway sees it."""
        request = pb.ClusterStatusRequest()
        return await self._ask(lambda gateway, left_s: gateway.stub.ClusterStatus(request, timeout=left_s))

    async def cluster_view(self) -> str:
        """What the gateway's page /ui shows, as JSON."""
        request = pb.ClusterViewRequest()
        answer = await self._ask(lambda gateway, left_s: gateway.stub.ClusterView(request, timeout=left_s))
        return answer.state_json

    async def switch_role(
        self, node: str, role: common_pb2.Role.ValueType, *, grace_s: float | None = None, force: bool = False
    ) -> node_pb2.SwitchRoleResponse:
        """Lets the node of that name or address switch to the role; returns when it has, and the gateway uses it so.

        Args:
            grace_s: how long its running requests may take to finish; None: the node's default.
            force: even if no other node of its present role is left.

        Raises:
            BatonError: why it does not switch.
        """
        request = pb.SwitchNodeRoleRequest(role=role, grace_s=grace_s, force=force)
        set_text(request, node=node)
        # No deadline: the node's running requests may take as long as `grace_s`. No retries: operators see a refusal.
        return await self._gateways.ask(
            lambda gateway, _: _last_progress(gateway.stub.SwitchNodeRole(request)), timeout_s=None, retry_s=0.0
        )


async def _last_progress(responses: AsyncIterable[pb.SwitchNodeRoleResponse]) -> node_pb2.SwitchRoleResponse:
    last = node_pb2.SwitchRoleResponse()
    async for response in responses:
        last = response.progress
    return last
