"""The client against a gateway, over gRPC."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.core.errors import UnknownModel
from baton.load.probe import probe
from baton.load.records import LoadOutcome
from baton.load.target import Target
from baton.load.worker import LoadJob, LoadSender
from baton.load.workload import PlannedRequest
from baton.protos.v1 import common_pb2, generation_pb2_grpc
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.server import GrpcServer


class Serving(generation_pb2_grpc.GenerationServicer):
    """A gateway with a model and an adapter, which answers with one token and keeps the names it is asked for."""

    def __init__(self) -> None:
        self.models: list[str] = []

    async def ListModels(  # noqa: N802
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        cards = [pb.ModelCard(name=name, vocab_size=500, max_context_tokens=100) for name in ("llama", "adapter")]
        return pb.ListModelsResponse(models=cards)

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        self.models.append(request.model)
        await context.write(
            pb.GenerateResponse(
                tokens=[common_pb2.Token(token_id=1)],
                finish_reason=common_pb2.FINISH_REASON_LENGTH,
                receipt=common_pb2.Receipt(path=common_pb2.PATH_LOCAL),
            )
        )


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[str, Serving]]:
    service = Serving()  # type: ignore[abstract]  # the client calls two methods
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server.grpc)
        await server.start([])
        yield server.address, service


@pytest.mark.parametrize(("model", "measured"), [("", "llama"), ("llama", "llama"), ("adapter", "adapter")])
async def test_requests_name_the_model_that_is_asked_for(model: str, measured: str) -> None:
    async with serving() as (address, service):
        server = await probe(Target.parse(address, model=model))
        assert server.model == measured
        job = LoadJob(server, [PlannedRequest(0, 0.0, 4, 1)], time.monotonic(), 60.0, 60.0)
        done = await LoadSender(job, server.asker(connections=1, slo=None, temperature=None), lambda _: None).run()
        assert [record.outcome for record in done.records] == [LoadOutcome.OK]
        assert service.models == [model]


async def test_a_model_that_is_not_served_is_refused_with_those_that_are() -> None:
    async with serving() as (address, _):
        with pytest.raises(UnknownModel, match="'nope' is not served; allowed: llama, adapter"):
            await probe(Target.parse(address, model="nope"))
