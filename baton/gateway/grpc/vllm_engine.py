"""vLLM's engine service, vllm.grpc.engine.VllmEngine, as the package smg-grpc-proto defines it.

With it, a router for vLLM engines, such as smg, can use Baton: the whole cluster looks like one engine.
"""

import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as smg
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from baton.core.version import __version__
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.grpc.call import GrpcCall, answering, check_count, check_ids
from baton.gateway.grpc.kv_events import KvEvents
from baton.gateway.grpc.tokenizer_archive import TokenizerArchive
from baton.gateway.grpc.vllm_messages import to_chunk, to_complete, to_generate
from baton.gateway.serving.collected import AnswerCollector
from baton.gateway.serving.serving import Serving
from baton.protos.v1 import generation_pb2 as pb

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"

Context = grpc.aio.ServicerContext[Any, Any]


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves the cluster as one engine.

    Args:
        kv_events: streams cache changes; None: the service refuses subscriptions.
        max_requests: most requests that may run at once.
    """

    def __init__(
        self,
        serving: Serving,
        fleet: Fleet,
        archive: TokenizerArchive,
        kv_events: KvEvents | None,
        *,
        max_requests: int,
    ) -> None:
        self._serving = serving
        self._fleet = fleet
        self._archive = archive
        self._kv_events = kv_events
        self._max_requests = max_requests
        self._started_at_s = time.monotonic()
        self._last_request_at_s = 0.0  # since the epoch

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        async with answering(context) as call:
            self._last_request_at_s = time.time()
            request.request_id = await call.begin(request.request_id)
            check_count("tokenized.input_ids", request.tokenized.input_ids)
            prompt = list(request.tokenized.input_ids)
            if request.WhichOneof("input") == "text":
                prompt = await self._serving.encode(request.text)
            message = to_generate(request, prompt, self._fleet.max_context_tokens)
            num_prompt_tokens = min(len(prompt), message.truncate_prompt_tokens or len(prompt))
            if request.stream:
                await self._stream(request, message, call, context, num_prompt_tokens)
            else:
                await self._complete(request, message, call, context)

    async def _stream(
        self,
        request: vllm.GenerateRequest,
        message: pb.GenerateRequest,
        call: GrpcCall,
        context: Context,
        prompt_tokens: int,
    ) -> None:
        """Sends each message's tokens, and then each output's end without the tokens, which the client has already."""
        last_token_ids: dict[int, int] = {}
        sampling = request.sampling_params

        async def write(response: pb.GenerateResponse) -> None:
            if response.tokens or response.prompt_logprobs:
                if response.tokens:
                    last_token_ids[response.index] = response.tokens[-1].token_id
                chunk = to_chunk(response, prompt_tokens=prompt_tokens, cached_tokens=0, sampling=sampling)
                await context.write(chunk)
            if response.finish_reason:
                call.note(response)
                end = pb.Output(
                    index=response.index, finish_reason=response.finish_reason, stop_reason=response.stop_reason
                )
                complete = to_complete(
                    end,
                    (),
                    prompt_tokens=prompt_tokens,
                    cached_tokens=response.usage.cached_tokens,
                    sampling=sampling,
                    last_token_id=last_token_ids.get(response.index),
                )
                await context.write(complete)

        await self._serving.generate(message, write, budget_s=call.budget_s, caller_trace=call.trace)

    async def _complete(
        self, request: vllm.GenerateRequest, message: pb.GenerateRequest, call: GrpcCall, context: Context
    ) -> None:
        collector = AnswerCollector()
        await self._serving.generate(message, collector.write, budget_s=call.budget_s, caller_trace=call.trace)
        whole = collector.response()
        call.send_receipt(whole.outputs[0].receipt)
        for output in whole.outputs:
            complete = to_complete(
                output,
                whole.prompt_logprobs,
                prompt_tokens=whole.usage.prompt_tokens,
                cached_tokens=whole.usage.cached_tokens,
                sampling=request.sampling_params,
                last_token_id=output.tokens[-1].token_id if output.tokens else None,
            )
            await context.write(complete)

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        async with answering(context):
            check_ids("request_ids", request.request_ids)
            await self._serving.abort(request.request_ids)
            return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        healthy = self._fleet.serves()
        return vllm.HealthCheckResponse(healthy=healthy, message="ready" if healthy else self._fleet.explain())

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        model = self._serving.model
        max_context_tokens = self._fleet.max_context_tokens
        config = json.loads((model.directory / "config.json").read_bytes())
        return vllm.GetModelInfoResponse(
            model_path=model.name,
            is_generation=True,
            max_context_length=max_context_tokens,
            vocab_size=model.vocab_size,
            served_model_name=model.name,
            model_type=str(config.get("model_type", "")),
            architectures=[str(name) for name in config.get("architectures") or ()],
            eos_token_ids=model.eos_token_ids,
            pad_token_id=config["pad_token_id"] if isinstance(config.get("pad_token_id"), int) else 0,
            bos_token_id=model.bos_token_id or 0,
            max_req_input_len=max_context_tokens - 1,
            default_sampling_params_json=json.dumps(model.default_sampling.set_values()),
        )

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        decode = next((node.status.info for node in self._fleet.decodes.values() if node.reachable), None)
        return vllm.GetServerInfoResponse(
            active_requests=self._serving.running,
            last_receive_timestamp=self._last_request_at_s,
            uptime_seconds=time.monotonic() - self._started_at_s,
            server_type="vllm-grpc",  # how clients recognize the protocol
            data_parallel_size=1,
            kv_cache_dtype=decode.cache_spec.dtype if decode else "",
            block_size=decode.cache_shape.block_size if decode else 0,
            max_num_seqs=self._max_requests,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        now = datetime.now(UTC).isoformat()
        return vllm.GetLoadsResponse(timestamp=now, version=__version__, dp_rank_count=1, loads=[self._load()])

    def _load(self) -> vllm.SchedulerLoad:
        """Sums the decode nodes' loads, because a request occupies their blocks until its end."""
        nodes = [node.status for node in self._fleet.decodes.values() if node.reachable]
        used = sum((each.blocks_total - each.blocks_free) * each.info.cache_shape.block_size for each in nodes)
        total = sum(each.blocks_total * each.info.cache_shape.block_size for each in nodes)
        waiting = sum(node.status.requests_waiting for node in self._fleet.nodes() if node.reachable)
        running = max(0, self._serving.running - waiting)
        return vllm.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=_int32(used),
            max_total_num_tokens=_int32(total),
            token_usage=used / total if total else 0.0,
            max_running_requests=self._max_requests,
            num_waiting_uncached_tokens=_int32(
                sum(node.status.tokens_waiting for node in self._fleet.nodes() if node.reachable)
            ),
        )

    async def GetTokenizer(
        self, request: smg.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[smg.GetTokenizerChunk]:
        async with answering(context):
            archive = await self._archive.get()
            pieces = list(archive.pieces())
            for piece in pieces[:-1]:
                yield smg.GetTokenizerChunk(data=piece)
            yield smg.GetTokenizerChunk(data=pieces[-1], sha256=archive.sha256)

    async def SubscribeKvEvents(
        self, request: smg.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[smg.KvEventBatch]:
        if self._kv_events is None:
            async with answering(context) as call:
                await call.unimplemented(
                    "KV events are off, because they reveal the prompts of all clients; set BATON_KV_EVENTS=true"
                )
        async with answering(context), aclosing(self._kv_events.subscribe(request.start_sequence_number)) as batches:
            async for batch in batches:
                yield batch

    # ---- methods that Baton does not implement

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        async with answering(context) as call:
            await call.unimplemented(
                "this service computes no embeddings; send the texts to the gateway's HTTP port, at /v1/embeddings"
            )

    async def FlushCache(self, request: smg.FlushCacheRequest, context: Context) -> smg.FlushCacheResponse:
        async with answering(context) as call:
            await call.unimplemented("a gateway cannot flush its nodes' prefix caches; use another cache salt instead")

    async def StartProfile(self, request: smg.StartProfileRequest, context: Context) -> smg.ProfileResponse:
        async with answering(context) as call:
            await call.unimplemented("profiles are taken at a node, not at a gateway")

    async def StopProfile(self, request: smg.StopProfileRequest, context: Context) -> smg.ProfileResponse:
        async with answering(context) as call:
            await call.unimplemented("profiles are taken at a node, not at a gateway")


def _int32(count: int) -> int:
    return min(count, 2**31 - 1)
