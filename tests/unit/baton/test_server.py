"""A server passes every call to its service, also in a burst."""

import asyncio

from grpc_health.v1 import health_pb2

from baton.rpc.server import GrpcServer, connect


async def test_every_call_of_a_large_burst_is_answered() -> None:
    async with GrpcServer("127.0.0.1:0", advertise=None) as server, connect(server.address) as channel:
        await server.start([])
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answers = await asyncio.gather(*(check(health_pb2.HealthCheckRequest()) for _ in range(4000)))
    assert {answer.status for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}
