"""The standard health service with `List`, which grpcio's own servicer does not answer."""

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2


class HealthService(health.aio.HealthServicer):
    """The state of each service; the empty name stands for the process."""

    def __init__(self) -> None:
        super().__init__()
        self._statuses: dict[str, Any] = {"": health_pb2.HealthCheckResponse.SERVING}

    async def set(self, service: str, status: Any) -> None:
        self._statuses[service] = status
        await super().set(service, status)

    async def List(  # noqa: N802 (gRPC's name)
        self,
        request: Any,  # noqa: ARG002
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> Any:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]
