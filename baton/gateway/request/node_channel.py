"""The gateway's gRPC channel to one node, which is replaced while the node does not answer."""

from functools import partial

import grpc

from baton.protos.internal.v1 import decode_pb2_grpc, node_pb2_grpc, prefill_pb2_grpc
from baton.rpc.channels import SHORT_ATTEMPT_S, connect
from baton.security.tls import Dial


class NodeChannel:
    """A channel to one node, and the stubs of its services.

    Args:
        keepalive_s: time without an answer to a ping after which the node is lost.
        dial: credentials of the channel.

    Attributes:
        node, prefill, decode: stubs of the present channel.
        is_used: whether there was a call, which makes the channel connect.
    """

    def __init__(self, address: str, *, keepalive_s: float, dial: Dial | None) -> None:
        # Pings are answered outside of Python, so a node that computes, loads or compiles is not lost.
        self._connect = partial(connect, address, keepalive_s=keepalive_s, dial=dial, attempt_s=SHORT_ATTEMPT_S)
        self._open()

    def _open(self) -> None:
        self._channel = self._connect()
        self.is_used = False
        self.node = node_pb2_grpc.NodeStub(self._channel)
        self.prefill = prefill_pb2_grpc.PrefillStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeStub(self._channel)

    @property
    def is_connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def another(self) -> grpc.aio.Channel:
        """A further channel to the node, for a call that outlives this one. The caller closes it."""
        return self._connect()

    async def replace(self) -> None:
        """Closes the channel and opens another, which connects at its first call. Calls of the old one end."""
        used = self._channel
        self._open()
        await used.close()

    async def close(self) -> None:
        await self._channel.close()
