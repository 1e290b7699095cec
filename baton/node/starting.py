"""Runs a node's server before the node serves: it answers health checks, and shows how far the start is.

A bound port without a server accepts connections and answers no ping, so gateways and probes would take the node for
lost. The main thread loads the model, so the event loop runs on another thread meanwhile. Code that keeps the
interpreter's lock for seconds, such as a kernel's compilation, delays answers, but pings are answered without Python.
"""

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.supervisor import Supervisor
from baton.node.role_services import DECODE, PREFILL, RoleServices
from baton.node.service import SERVICE_NAME, NodeService
from baton.protos.internal.v1 import node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import role_name
from baton.rpc.server import GrpcServer
from baton.settings.node_config import NodeSettings


class Starting:
    """The services of a node that is starting.

    Args:
        server: bound, but not started.
        supervisor: knows the present stage.

    Attributes:
        service: the Node service, which receives the node's parts once it serves.
        roles: the services of the roles, which refuse all calls until they get a role.
    """

    def __init__(
        self, settings: NodeSettings, role: node_status_pb2.Role.ValueType, server: GrpcServer, supervisor: Supervisor
    ) -> None:
        name = settings.name or default_name(role, server.address)
        self._info = node_status_pb2.NodeInfo(
            name=name, address=server.address, role=role, topology=settings.topology_labels
        )
        self._server = server
        self._supervisor = supervisor
        self.service = NodeService(self._status)
        self.roles = RoleServices(name)
        node_pb2_grpc.add_NodeServicer_to_server(self.service, server.grpc)
        self.roles.add_to(server.grpc)

    @contextmanager
    def serving(self, runner: asyncio.Runner) -> Iterator[None]:
        """Starts the server, and serves on another thread inside the context. Afterwards the caller may run the loop
        itself. After an exception the server is stopped."""
        runner.run(self._server.start((SERVICE_NAME, PREFILL, DECODE)))
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever, name="starting", daemon=True)
        thread.start()
        failed = True
        try:
            yield
            failed = False
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            if failed:
                runner.run(self._server.stop())

    def _status(self) -> node_status_pb2.NodeStatus:
        stage = self._supervisor.stage
        loading = node_status_pb2.Loading(stage=stage.name, done=stage.done, total=stage.total)
        return node_status_pb2.NodeStatus(info=self._info, loading=loading)


def default_name(role: node_status_pb2.Role.ValueType, address: str) -> str:
    """The name of a node whose settings have none. It is the same after a restart, and hides the address, because
    clients see names in receipts and errors."""
    return f"{role_name(role)}-{hashlib.blake2s(address.encode(), digest_size=3).hexdigest()}"
