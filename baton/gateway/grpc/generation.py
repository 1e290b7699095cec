"""Baton's own service for clients, baton.v1.Generation. Its messages need no translation."""

from collections.abc import AsyncIterator, Awaitable

import grpc

from baton.core.types import AdapterRef, GrammarKind
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.revisions import serving_revisions
from baton.gateway.grpc.call import answering, check_count, check_ids
from baton.gateway.grpc.tokenizer_archive import TokenizerArchive
from baton.gateway.serving.collected import AnswerCollector
from baton.gateway.serving.serving import Serving
from baton.protos.v1 import common_pb2, generation_pb2_grpc
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import sampling_to_proto

SERVICE_NAME = "baton.v1.Generation"


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Serves baton.v1.Generation."""

    def __init__(self, serving: Serving, fleet: Fleet, archive: TokenizerArchive) -> None:
        self._serving = serving
        self._fleet = fleet
        self._archive = archive

    # Writing to the context is the cheapest way per token, but the type stubs have no such handler.
    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        async with answering(context) as call:
            request.request_id = await call.begin(request.request_id)

            def write(message: pb.GenerateResponse) -> Awaitable[None]:
                call.note(message)
                return context.write(message)

            await self._serving.generate(request, write, budget_s=call.budget_s, caller_trace=call.trace)

    async def Complete(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.CompleteResponse]
    ) -> pb.CompleteResponse:
        async with answering(context) as call:
            request.request_id = await call.begin(request.request_id)
            collector = AnswerCollector()
            await self._serving.generate(request, collector.write, budget_s=call.budget_s, caller_trace=call.trace)
            response = collector.response(request.request_id)
            call.send_receipt(response.outputs[0].receipt)
            return response

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        async with answering(context):
            check_ids("request_ids", request.request_ids)
            return pb.AbortResponse(aborted=await self._serving.abort(request.request_ids))

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        async with answering(context):
            self._serving.check_name(request.model)
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            token_ids = await self._serving.encode(request.text, add_special_tokens=special, is_request=True)
            return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        model = self._serving.model
        async with answering(context):
            model.check_name(request.model)
            check_count("token_ids", request.token_ids)
            token_ids = list(request.token_ids)
            model.check_token_ids("token_ids", token_ids)
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            return pb.DetokenizeResponse(text=await self._serving.decode(token_ids, skip_special_tokens=skip))

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        adapters = self._fleet.adapters()
        cards = [self._adapter_card(adapters[name]) for name in sorted(adapters)]
        return pb.ListModelsResponse(models=[self._card(), *cards])

    async def GetModelInfo(
        self,
        request: pb.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse],
    ) -> pb.GetModelInfoResponse:
        model = self._serving.model
        async with answering(context):
            model.check_name(request.model)
            archive = await self._archive.get()
            return pb.GetModelInfoResponse(
                model=self._card(),
                eos_token_ids=model.eos_token_ids,
                bos_token_id=model.bos_token_id,
                default_sampling=sampling_to_proto(model.default_sampling),
                has_chat_template=model.chat.has_template,
                tokenizer_sha256=archive.sha256,
                grammar_kinds=[common_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind],
            )

    async def GetTokenizer(
        self,
        request: pb.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[pb.GetTokenizerRequest, pb.GetTokenizerResponse],
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        async with answering(context):
            self._serving.check_name(request.model)
            archive = await self._archive.get()
            for piece in archive.pieces():
                yield pb.GetTokenizerResponse(chunk=piece)
            yield pb.GetTokenizerResponse(sha256=archive.sha256)

    def _adapter_card(self, adapter: AdapterRef) -> pb.ModelCard:
        card = self._card()
        card.name, card.parent = adapter.name, card.name
        del card.revisions[:]
        card.revisions.add(revision=adapter.revision)
        return card

    def _card(self) -> pb.ModelCard:
        model = self._serving.model
        return pb.ModelCard(
            name=model.name,
            architecture=model.architecture,
            max_context_tokens=self._fleet.max_context_tokens,
            vocab_size=model.vocab_size,
            revisions=serving_revisions(self._fleet.nodes()),
            description=model.description,
        )
