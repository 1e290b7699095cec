"""Requests to a gateway over its own protocol, collected into plain results."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from baton.cli.processes import Process
from baton.core.errors import BatonError
from baton.core.sampling import SamplingParams
from baton.core.types import Receipt
from baton.node.waiting import until
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.protos.v1.generation_pb2_grpc import GenerationStub
from baton.rpc.channels import connect
from baton.rpc.convert import receipt_from_proto, sampling_to_proto
from baton.rpc.status import from_rpc_error
from tests.integration.cluster import DEADLINE_S


@dataclass
class Result:
    """One request, as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    cached_tokens: int = 0
    receipt: Receipt | None = None
    error: BatonError | None = None

    def add(self, response: pb.GenerateResponse) -> None:
        for token in response.tokens:
            assert token.index == len(self.token_ids), "no token twice, none lost"
            self.token_ids.append(token.token_id)
            if token.HasField("logprob"):
                self.logprobs.append(token.logprob)
        self.text += response.text
        if response.finish_reason:
            self.finish_reason = common_pb2.FinishReason.Name(response.finish_reason)
            self.cached_tokens = response.usage.cached_tokens
            self.receipt = receipt_from_proto(response.receipt)

    @property
    def proof(self) -> Receipt:
        """The receipt, which every finished request has."""
        assert self.receipt is not None
        return self.receipt

    async def until_tokens(self, count: int) -> None:
        """Returns when this number of tokens has been received; fails once the request has ended without them."""

        def over() -> bool:
            return len(self.token_ids) >= count or bool(self.finish_reason) or self.error is not None

        await until(over, timeout_s=DEADLINE_S)
        assert len(self.token_ids) >= count, self


async def generate(
    gateway: Process | str,
    prompt: Sequence[int] | str,
    params: SamplingParams,
    *,
    timeout_s: float = DEADLINE_S,
    channel: grpc.aio.Channel | None = None,
    cache_salt: str = "",
    model: str = "",
    result: Result | None = None,
) -> Result:
    """One request, from first to last message.

    Args:
        gateway: the gateway, or its address.
        result: an empty result to fill while the request runs.

    Raises:
        BatonError: the gateway's error.
    """
    request = pb.GenerateRequest(sampling=sampling_to_proto(params), cache_salt=cache_salt, model=model)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    address = gateway if isinstance(gateway, str) else gateway.address
    own = connect(address) if channel is None else None
    result = Result() if result is None else result
    try:
        async for response in GenerationStub(channel or own).Generate(request, timeout=timeout_s):  # type: ignore[arg-type]
            result.add(response)
    except grpc.aio.AioRpcError as error:
        result.error = from_rpc_error(error)
        raise result.error from error
    finally:
        if own is not None:
            await own.close()
    return result
