"""A client of one node's Decode service without a gateway: one Session stream, its requests collected by key."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc

from baton.cli.processes import Process
from baton.core.errors import BatonError
from baton.core.sampling import SamplingParams
from baton.node import waiting
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc
from baton.protos.v1 import common_pb2
from baton.rpc.channels import connect
from baton.rpc.convert import sampling_to_proto
from baton.rpc.error_detail import from_detail
from tests.integration.cluster import DEADLINE_S


@dataclass
class Submitted:
    """One request, as far as the node has answered it.

    Attributes:
        kinds: of the node's messages about it, in order; steps are not among them.
    """

    key: int
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.PromptLogprob] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    finished: bool = False
    error: BatonError | None = None

    async def until(self, condition: Callable[[], bool]) -> None:
        assert await waiting.until(condition, timeout_s=DEADLINE_S), self

    async def until_tokens(self, count: int) -> None:
        """Returns when this number of tokens has come; fails once the request has ended without them."""
        await self.until(lambda: len(self.token_ids) >= count or "released" in self.kinds)
        assert len(self.token_ids) >= count, self

    async def released(self) -> None:
        await self.until(lambda: "released" in self.kinds)


class Session:
    """One stream; `session` opens it.

    Attributes:
        ended: by the node.
    """

    def __init__(self) -> None:
        self.ended = False
        self._keys = itertools.count(1)
        self._requests: dict[int, Submitted] = {}
        self._outbox: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        placement: pb.Placement.ValueType = pb.PLACEMENT_LOCAL,
        policy: pb.LocalPolicy.ValueType = pb.LOCAL_POLICY_PREFER,
        max_queue_s: float = DEADLINE_S,
        output: Sequence[int] = (),
        to_prefill_node: bool = False,
    ) -> Submitted:
        key = next(self._keys)
        request = self._requests[key] = Submitted(key)
        submit = pb.SubmitRequest(
            key=key,
            prompt_token_ids=prompt,
            output_token_ids=output,
            sampling=sampling_to_proto(params),
            policy=policy,
            placement=placement,
            prefill_available=True,
            max_queue_s=max_queue_s,
            to_prefill_node=to_prefill_node,
        )
        self.send(pb.SessionRequest(submit=submit))
        return request

    def cancel(self, request: Submitted) -> None:
        self.send(pb.SessionRequest(cancel=pb.CancelRequest(key=request.key)))

    def send(self, message: pb.SessionRequest) -> None:
        self._outbox.put_nowait(message)

    async def requests(self) -> AsyncIterator[pb.SessionRequest]:
        while True:
            yield await self._outbox.get()

    def receive(self, response: pb.SessionResponse) -> None:
        kind = str(response.WhichOneof("message"))
        if kind == "step":
            for token in response.step.tokens:
                request = self._requests[token.key]
                request.token_ids.append(token.token.token_id)
                request.prompt_logprobs.extend(token.prompt_logprobs)
                request.finished = request.finished or token.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
            return
        message = getattr(response, kind)
        request = self._requests[message.key]
        request.kinds.append(kind)
        if kind == "accepted":
            request.cached_tokens = message.cached_tokens
        if kind == "failed":
            request.error = from_detail(message.error)


@asynccontextmanager
async def session(node: Process) -> AsyncIterator[Session]:
    """A session with this node; leaving the block breaks it, as the end of a gateway does."""
    opened = Session()
    async with connect(node.address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Session(opened.requests())

        async def read() -> None:
            with suppress(grpc.aio.AioRpcError):
                async for response in call:
                    opened.receive(response)
            opened.ended = True

        reading = asyncio.create_task(read())
        try:
            yield opened
        finally:
            reading.cancel()
            call.cancel()
            await asyncio.wait([reading])
