"""Adds all services to the gateway's gRPC server."""

from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from baton.gateway.grpc import generation, open_inference, operations, vllm_engine
from baton.gateway.grpc.kv_events import KvEvents
from baton.gateway.grpc.tokenizer_archive import TokenizerArchive
from baton.gateway.http.view import View
from baton.gateway.request.connections import Connections
from baton.gateway.serving.serving import Serving
from baton.protos.inference import open_inference_pb2_grpc
from baton.protos.v1 import generation_pb2_grpc, operations_pb2_grpc
from baton.rpc.server import GrpcServer
from baton.settings.gateway_config import GatewaySettings

SERVICE_NAMES = (
    generation.SERVICE_NAME,
    operations.SERVICE_NAME,
    vllm_engine.SERVICE_NAME,
    open_inference.SERVICE_NAME,
)


def add_services(
    server: GrpcServer, settings: GatewaySettings, serving: Serving, connections: Connections, view: View
) -> None:
    """Adds the services of SERVICE_NAMES to a server that has not started yet."""
    fleet = connections.fleet
    archive = TokenizerArchive(serving.model.directory, settings.chat_template)
    clients = generation.GenerationService(serving, fleet, archive)
    generation_pb2_grpc.add_GenerationServicer_to_server(clients, server.grpc)
    operators = operations.OperationsService(serving, connections, view)
    operations_pb2_grpc.add_OperationsServicer_to_server(operators, server.grpc)
    engine = vllm_engine.VllmEngineService(
        serving,
        fleet,
        archive,
        KvEvents(fleet, connections.clients) if settings.kv_events else None,
        max_requests=settings.max_concurrent_requests,
    )
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server.grpc)
    inference = open_inference.OpenInferenceService(serving, fleet)
    open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(inference, server.grpc)
