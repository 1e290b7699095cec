"""The client of a gateway, or of several: outputs as typed events, errors as `baton.core.errors`.

async with Client("127.0.0.1:7000") as client:
    async for event in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
        print(event.text, end="")

With `Client(addresses=[...])`, a request whose gateway is lost goes on at the next one, without a token twice.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from baton.client.messages import (
    Options,
    Sampling,
    event_from_message,
    json_text,
    request_message,
    set_text,
    token_ids_message,
)
from baton.client.outputs import Completion, Event, collect
from baton.client.resumption import AnswerProgress, prepare_to_resume
from baton.core.errors import BatonError, DataLoss, DeadlineExceeded, Draining, InvalidRequest, NoNode
from baton.protos.v1 import common_pb2, generation_pb2_grpc, node_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error, last_cause
from baton.security.access import client_proxy, dial_gateway
from baton.security.tls import Dial

Answer = TypeVar("Answer")


DEFAULT_PORT = 7000  # of the gateway in `baton up` and in the images
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"  # for the command line
# Without our details: how gRPC ends a call whose server process is going away.
_BROKEN_STREAM = (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_TIMEOUT_S_MAX = 1e9  # gRPC overflows on longer timeouts and ends the call at once
# While no gateway can be reached, an answer that has begun waits so long, and tries all of them so often.
_RESUME_S, _RESUME_EVERY_S = 10.0, 0.5


class Client:
    """A connection to one gateway, or to one of several in front of the same nodes. It carries any number of requests
    at once.

    Args:
        target: the gateway's address.
        addresses: those of several gateways, instead of `target`. The first one that answers is used; when it is lost
            or drains, requests go on at the next one. One whose answer has begun waits some seconds for a gateway.
        api_key: None: that of BATON_API_KEY, if it is set.
        tls_ca: PEM file with the CA of the gateways' certificates, or "system"; None: BATON_CLIENT_CA, else no TLS.

    Raises:
        ConfigError: the CA cannot be read, or the key would cross a network unencrypted.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        addresses: Sequence[str] = (),
        api_key: str | None = None,
        tls_ca: str | Path | None = None,
    ) -> None:
        targets = tuple(addresses) if target is None else (target, *addresses)
        if not targets:
            raise InvalidRequest("the client has no gateway", field="addresses", cure="give an address")
        self._gateways = [
            _Gateway(each, dial_gateway(each, api_key=api_key, tls_ca=tls_ca)) for each in dict.fromkeys(targets)
        ]
        self._current = 0

    @property
    def target(self) -> str:
        """The gateway that is asked next."""
        return self._gateways[self._current].target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for gateway in self._gateways:
            await gateway.channel.close()

    def generate(
        self, prompt: str | Sequence[int], sampling: Sampling = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """The outputs as they arrive; each ends with `Finished`. Closing the generator or cancelling ends the request.

        Raises:
            BatonError: the request failed, or took longer than `timeout_s`.
        """
        request = request_message(sampling, options)
        if isinstance(prompt, str):
            set_text(request, text=prompt)
        else:
            request.token_ids.CopyFrom(token_ids_message(prompt))
        return self._stream(request, options.get("timeout_s"))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        parallel_tool_calls: bool = True,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event, None]:
        """As `generate`, for a conversation in the shapes of OpenAI's chat completions; events have `chat`.

        Raises:
            BatonError: as in `generate`.
        """
        request = request_message(sampling, options)
        request.chat.messages_json = json_text("messages", list(messages))
        request.chat.tools_json = json_text("tools", list(tools)) if tools else ""
        request.chat.tool_choice_json = json_text("tool_choice", tool_choice)
        request.chat.template_kwargs_json = json_text("template_kwargs", dict(template_kwargs or {}))
        request.chat.continue_final_message = continue_final_message
        request.chat.parallel_tool_calls = parallel_tool_calls
        return self._stream(request, options.get("timeout_s"))

    async def complete(
        self, prompt: str | Sequence[int], sampling: Sampling = None, **options: Unpack[Options]
    ) -> Completion:
        """The whole output at once; of several, the first.

        Raises:
            BatonError: as in `generate`.
        """
        return await collect(self.generate(prompt, sampling, **options))

    async def abort(self, *request_ids: str) -> list[str]:
        """Ends running requests; returns the ids of those that ran. Their callers get `Cancelled`."""
        aborted: set[str] = set()
        lost: list[BatonError] = []
        for gateway in self._gateways:  # requests may run at any of them
            try:
                with _typed_errors(gateway):
                    aborted.update((await gateway.stub.Abort(pb.AbortRequest(request_ids=request_ids))).aborted)
            except _Lost as error:
                lost.append(error.error)
        if len(lost) == len(self._gateways):
            raise lost[0]
        return [request_id for request_id in dict.fromkeys(request_ids) if request_id in aborted]

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
        set_text(request, model=model, text=text)
        answer = await self._ask(lambda stub: stub.Tokenize(request))
        return list(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        request = pb.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
        request.token_ids.extend(token_ids_message(token_ids).ids)
        return (await self._ask(lambda stub: stub.Detokenize(request))).text

    async def list_models(self) -> list[pb.ModelCard]:
        answer = await self._ask(lambda stub: stub.ListModels(pb.ListModelsRequest()))
        return list(answer.models)

    async def model_info(self, model: str = "") -> pb.GetModelInfoResponse:
        """Limits, special tokens, default sampling and more of the served model."""
        return await self._ask(lambda stub: stub.GetModelInfo(pb.GetModelInfoRequest(model=model)))

    async def tokenizer(self, model: str = "") -> bytes:
        """The model's tokenizer files as a zip archive.

        Raises:
            DataLoss: it arrived damaged.
        """
        return await self._ask(lambda stub: _download(stub.GetTokenizer(pb.GetTokenizerRequest(model=model))))

    async def loads(self) -> pb.GetLoadsResponse:
        """How full each node is."""
        return await self._ask(lambda stub: stub.GetLoads(pb.GetLoadsRequest()))

    async def cluster_status(self) -> pb.ClusterStatusResponse:
        """The cluster as the gateway sees it."""
        return await self._ask(lambda stub: stub.ClusterStatus(pb.ClusterStatusRequest()))

    async def cluster_view(self) -> str:
        """What the gateway's page /ui shows, as JSON."""
        return (await self._ask(lambda stub: stub.ClusterView(pb.ClusterViewRequest()))).state_json

    async def switch_role(
        self, node: str, role: common_pb2.Role.ValueType, *, grace_s: float | None = None, force: bool = False
    ) -> node_pb2.SwitchRoleResponse:
        """Lets the node of that name or address switch to the role; returns when it has, and the gateway uses it so.

        Args:
            grace_s: how long its running requests may take to finish; None: the node's default.
            force: even if no other node of its present role is left.

        Raises:
            BatonError: why it does not switch.
        """
        request = pb.SwitchNodeRoleRequest(role=role, grace_s=grace_s, force=force)
        set_text(request, node=node)
        return await self._ask(lambda stub: _last_progress(stub.SwitchNodeRole(request)))

    async def _stream(self, request: pb.GenerateRequest, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        """The request's events, from as many gateways as it takes."""
        several = len(self._gateways) > 1
        if several:
            prepare_to_resume(request)
        deadline_s = None if timeout_s is None else monotonic() + min(timeout_s, _TIMEOUT_S_MAX)
        progress = AnswerProgress(request)
        begun, failures, failing_since_s = False, 0, 0.0  # failures in a row
        while True:
            gateway = self._gateways[self._current]
            left_s = None if deadline_s is None else max(0.0, deadline_s - monotonic())
            call = gateway.stub.Generate(progress.request(), timeout=left_s)
            try:
                with _typed_errors(gateway):
                    async for response in call:
                        passed = progress.take(response) if several else response
                        if passed is not None:
                            begun, failures = True, 0
                            yield event_from_message(passed)
                return
            except _Lost as lost:
                self._leave(gateway)
                failing_since_s = failing_since_s if failures else monotonic()
                failures += 1
                if failures % len(self._gateways) == 0:  # all of them
                    if not (begun and several) or monotonic() > failing_since_s + _RESUME_S:
                        raise lost.error from None
                    await asyncio.sleep(_RESUME_EVERY_S)
            finally:
                call.cancel()

    async def _ask(self, ask: "Callable[[generation_pb2_grpc.GenerationAsyncStub], Awaitable[Answer]]") -> Answer:
        for last in reversed(range(len(self._gateways))):
            gateway = self._gateways[self._current]
            try:
                with _typed_errors(gateway):
                    return await ask(gateway.stub)
            except _Lost as lost:
                if not last:
                    raise lost.error from None
                self._leave(gateway)
        raise AssertionError("the last gateway answers or raises")

    def _leave(self, gateway: "_Gateway") -> None:
        """The next gateway is used from now on, unless another request has left this one already."""
        if self._gateways[self._current] is gateway:
            self._current = (self._current + 1) % len(self._gateways)


class _Gateway:
    """One gateway's address and the channel to it."""

    def __init__(self, target: str, dial: Dial | None) -> None:
        self.target = target
        self.proxy = client_proxy(target)
        self.channel = connect(target, dial=dial, proxy=self.proxy)
        # At run time there is one class of stubs; these annotations know the one of asynchronous channels.
        self.stub: generation_pb2_grpc.GenerationAsyncStub = generation_pb2_grpc.GenerationStub(self.channel)


class _Lost(Exception):
    """The gateway is not there or takes no requests; `error` is what that means if there is no other one."""

    def __init__(self, error: BatonError) -> None:
        super().__init__(str(error))
        self.error = error


async def _last_progress(responses: AsyncIterable[pb.SwitchNodeRoleResponse]) -> node_pb2.SwitchRoleResponse:
    last = node_pb2.SwitchRoleResponse()
    async for response in responses:
        last = response.progress
    return last


async def _download(pieces: AsyncIterable[pb.GetTokenizerResponse]) -> bytes:
    """Raises: DataLoss: the archive arrived damaged."""
    data, sha256 = bytearray(), ""
    async for piece in pieces:
        data += piece.chunk
        sha256 = piece.sha256 or sha256
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataLoss("the tokenizer archive arrived damaged", cure="download it again")
    return bytes(data)


def _unreachable(gateway: _Gateway, cause: str) -> NoNode:
    target, through = gateway.target, ""
    cure = "start a gateway there, or give the address of one that runs; one with TLS wants BATON_CLIENT_CA"
    if gateway.proxy is not None:
        through = f" through the proxy {gateway.proxy}"
        cure = f"name its host in no_proxy to reach it directly, or correct {gateway.proxy.variable}; else {cure}"
    return NoNode(f"cannot reach {target}{through}: {cause}", field="target", value=target, cure=cure)


@contextmanager
def _typed_errors(gateway: _Gateway) -> Iterator[None]:
    """Raises:
    _Lost: another gateway may answer.
    BatonError: instead of any other gRPC status.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        typed, target = from_rpc_error(error), gateway.target
        from_gateway = any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
        if isinstance(typed, Draining):
            raise _Lost(typed) from None
        if from_gateway:
            raise typed from None
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise _Lost(_unreachable(gateway, last_cause(error))) from None
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            cure = "give the address of a gateway, not of a node; an older gateway lacks newer calls"
            raise NoNode(f"{target} is not a gateway", field="target", value=target, cure=cure) from None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlineExceeded("the request did not finish in time", cure="allow more time") from None
        if error.code() in _BROKEN_STREAM:
            raise _Lost(typed) from None
        raise typed from None
