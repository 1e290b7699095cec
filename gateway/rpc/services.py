"""All services of the gateway's gRPC server."""

from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from baton.gateway_config import GatewaySettings
from baton.rpc.server import GrpcServer
from gateway.connections import Connections
from gateway.rpc import generation, open_inference, vllm_engine
from gateway.rpc.kv_events import KvEvents
from gateway.rpc.tokenizer_archive import TokenizerArchive
from gateway.serving import Serving
from gateway.view import View
from protos.baton.v1 import generation_pb2_grpc
from protos.inference import open_inference_pb2_grpc

SERVICE_NAMES = (generation.SERVICE_NAME, vllm_engine.SERVICE_NAME, open_inference.SERVICE_NAME)


def add_services(
    server: GrpcServer, settings: GatewaySettings, serving: Serving, connections: Connections, view: View
) -> None:
    """Adds the services of SERVICE_NAMES to a server that has not been started."""
    fleet = connections.fleet
    archive = TokenizerArchive(serving.model.directory, settings.chat_template)
    own = generation.GenerationService(serving, connections, archive, view)
    generation_pb2_grpc.add_GenerationServicer_to_server(own, server.grpc)
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
