"""The Open Inference Protocol, version 2, as the service inference.GRPCInferenceService: text in, text out.

Clients of KServe and Triton use it. `ModelInfer` returns a whole output, and `ModelStreamInfer` streams it.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.core.errors import BatonError, InternalError, InvalidRequest
from baton.core.version import __version__
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.grpc.call import GrpcCall, answering
from baton.gateway.grpc.open_inference_messages import (
    INPUTS,
    OUTPUTS,
    VERSION,
    InferenceRequest,
    check_version,
    read_request,
    to_response,
)
from baton.gateway.serving.collected import AnswerCollector
from baton.gateway.serving.serving import Serving
from baton.gateway.serving.validate import check_request_id
from baton.protos.inference import open_inference_pb2 as oip
from baton.protos.inference import open_inference_pb2_grpc
from baton.protos.v1 import generation_pb2 as pb

SERVICE_NAME = "inference.GRPCInferenceService"

Context = grpc.aio.ServicerContext[Any, Any]


class OpenInferenceService(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves the model as one with a text input and a text output."""

    def __init__(self, serving: Serving, fleet: Fleet) -> None:
        self._serving = serving
        self._fleet = fleet

    async def ServerLive(self, request: oip.ServerLiveRequest, context: Context) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Context) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._fleet.serves())

    async def ModelReady(self, request: oip.ModelReadyRequest, context: Context) -> oip.ModelReadyResponse:
        async with answering(context):
            self._serving.check_name(request.name, hide_names=True)
            check_version(request.version)
            return oip.ModelReadyResponse(ready=self._fleet.serves())

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Context) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="baton", version=__version__)

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Context) -> oip.ModelMetadataResponse:
        async with answering(context):
            self._serving.check_name(request.name)
            check_version(request.version)
            response = oip.ModelMetadataResponse(name=self._serving.model.name, versions=[VERSION], platform="baton")
            for name, datatype in INPUTS.items():
                response.inputs.add(name=name, datatype=datatype, shape=[1])
            for name, datatype in OUTPUTS.items():
                response.outputs.add(name=name, datatype=datatype, shape=[1])
            return response

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Context) -> oip.ModelInferResponse:
        async with answering(context) as call:
            asked = read_request(request)
            if asked.stream:
                cure = "call ModelStreamInfer"
                raise InvalidRequest("stream is true", field="stream", value=True, allowed=("false",), cure=cure)
            request.id = asked.message.request_id = await call.begin(request.id)
            return await self._whole(request, asked, call)

    # As in GenerationService.Generate, the type stubs have no handler that writes to its context.
    async def ModelStreamInfer(  # type: ignore[override]
        self, requests: AsyncIterator[oip.ModelInferRequest], context: Context
    ) -> None:
        """Answers requests one after another. A request's error becomes a response, and the stream continues."""
        async with answering(context) as call:
            await call.begin()
            async for request in requests:
                try:
                    await self._answer(request, call, context)
                except BatonError as error:
                    failed = oip.ModelInferResponse(id=request.id, model_name=request.model_name)
                    failed.parameters["triton_final_response"].bool_param = True
                    await context.write(oip.ModelStreamInferResponse(error_message=str(error), infer_response=failed))

    async def _answer(self, request: oip.ModelInferRequest, call: GrpcCall, context: Context) -> None:
        request.id = check_request_id(request.id)  # draws an id if the request has none
        asked = read_request(request)
        if not asked.stream:
            whole = await self._whole(request, asked, call, final=True)
            await context.write(oip.ModelStreamInferResponse(infer_response=whole))
            return
        first = asked.echo

        async def write(message: pb.GenerateResponse) -> None:
            nonlocal first
            text = asked.message.text + message.text if first else message.text
            first = False
            if not (text or message.finish_reason):
                return
            output = pb.Output(text=text, finish_reason=message.finish_reason)
            final = bool(message.finish_reason)
            usage = message.usage if final else None
            name = self._serving.model.name
            response = to_response(request, output, usage, name=name, raw=asked.raw, final=final)
            await context.write(oip.ModelStreamInferResponse(infer_response=response))

        await self._serving.generate(asked.message, write, budget_s=call.budget_s, caller_trace=call.trace)

    async def _whole(
        self, request: oip.ModelInferRequest, asked: InferenceRequest, call: GrpcCall, *, final: bool | None = None
    ) -> oip.ModelInferResponse:
        collector = AnswerCollector()
        await self._serving.generate(asked.message, collector.write, budget_s=call.budget_s, caller_trace=call.trace)
        whole = collector.response()
        if not whole.outputs:
            raise InternalError("the request ended without an output", cure="see the gateway's log")
        output = whole.outputs[0]
        if final is None:
            call.send_receipt(output.receipt)
        if asked.echo:
            output.text = asked.message.text + output.text
        return to_response(request, output, whole.usage, name=self._serving.model.name, raw=asked.raw, final=final)

    # ---- methods that Baton does not implement

    async def RepositoryModelLoad(
        self, request: oip.RepositoryModelLoadRequest, context: Context
    ) -> oip.RepositoryModelLoadResponse:
        async with answering(context) as call:
            await call.unimplemented("a gateway serves the one model that it was started with")

    async def RepositoryModelUnload(
        self, request: oip.RepositoryModelUnloadRequest, context: Context
    ) -> oip.RepositoryModelUnloadResponse:
        async with answering(context) as call:
            await call.unimplemented("a gateway serves the one model that it was started with")
