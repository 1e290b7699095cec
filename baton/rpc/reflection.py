"""Server reflection under both of its names: v1alpha, which grpcio has, and v1, which newer clients call first.

The messages of the two versions are equal on the wire, so one servicer answers both.
"""

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1_ALPHA = "grpc.reflection.v1alpha.ServerReflection"
V1 = "grpc.reflection.v1.ServerReflection"
_V1_FILE = "grpc/reflection/v1/reflection.proto"


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Makes the server describe these services, which its descriptor pool must know, and reflection itself."""
    pool = descriptor_pool.Default()
    _describe_v1(pool)
    servicer = reflection.aio.ReflectionServicer((*services, V1_ALPHA, V1), _Symbols(pool))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": handler}),))


class _Symbols:
    """A descriptor pool that also finds a method's file, which protobuf's own pool does not."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802 (protobuf's name)
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            found = self._pool.FindServiceByName(service)
            if method in found.methods_by_name:
                return found.file
            raise


def _describe_v1(pool: descriptor_pool.DescriptorPool) -> None:
    """Adds v1's file to the pool unless it is there. It is v1alpha's file with the other package name."""
    try:
        pool.FindFileByName(_V1_FILE)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        text = text_format.MessageToString(file).replace("reflection.v1alpha", "reflection.v1")
        file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
        file.name = _V1_FILE
        pool.Add(file)
