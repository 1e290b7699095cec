"""The Generation service over gRPC: passes calls on, and turns errors into statuses."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.errors import BatonError, InternalError, InvalidRequest
from baton.rpc.status import abort, client_may_leave
from gateway.fleet import Fleet
from gateway.serving import Serving
from protos.baton.v1 import generation_pb2 as pb
from protos.baton.v1 import generation_pb2_grpc

log = logging.getLogger("baton")

SERVICE_NAME = "baton.v1.Generation"


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """The gRPC API of the gateway called `name`."""

    def __init__(self, name: str, serving: Serving, fleet: Fleet) -> None:
        self._name = name
        self._serving = serving
        self._fleet = fleet

    # The stubs' types have no handler that writes to its context, which is the cheapest way per token.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        async with _errors_as_statuses(context):
            await self._serving.generate(request, context.write, budget_s=context.time_remaining())

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        async with _errors_as_statuses(context):
            self._serving.model.check_name(request.model)
            return pb.TokenizeResponse(token_ids=await self._serving.encode(request.text))

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        model = self._serving.model
        async with _errors_as_statuses(context):
            model.check_name(request.model)
            token_ids = list(request.token_ids)
            model.check_token_ids("token_ids", token_ids)
            return pb.DetokenizeResponse(text=await self._serving.decode(token_ids))

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        model = self._serving.model
        card = pb.ModelCard(
            name=model.name,
            architecture=model.architecture,
            max_context_tokens=self._fleet.max_context_tokens,
            vocab_size=model.vocab_size,
        )
        return pb.ListModelsResponse(models=[card])

    async def ClusterStatus(
        self,
        request: pb.ClusterStatusRequest,
        context: grpc.aio.ServicerContext[pb.ClusterStatusRequest, pb.ClusterStatusResponse],
    ) -> pb.ClusterStatusResponse:
        counters = self._serving.counters
        return pb.ClusterStatusResponse(
            gateway=self._name,
            nodes=self._fleet.report(),
            requests_running=self._serving.running,
            requests_finished=counters.finished,
            requests_failed=counters.failed,
            remote_total=counters.remote,
            local_total=counters.local,
        )


@asynccontextmanager
async def _errors_as_statuses(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    with client_may_leave():
        try:
            yield
        except BatonError as error:
            if not isinstance(error, InvalidRequest):
                log.info("a request failed: %s", error)
            await abort(context, error)
        except grpc.aio.InternalError:
            raise
        except Exception as error:
            log.exception("a request failed")
            await abort(context, InternalError(f"{type(error).__name__} in the gateway", cure="see its log"))
