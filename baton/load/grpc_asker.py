"""Sends requests to a Baton gateway over gRPC, with prompts as token ids."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from baton.client.client import AsyncClient
from baton.client.messages import Options
from baton.client.outputs import Finished, Notice
from baton.core.errors import BatonError, Draining, NoNode, Overloaded
from baton.core.types import Slo
from baton.load.answer import AskError, LoadAnswer
from baton.load.prompts import PromptMaker
from baton.load.workload import PlannedRequest

_REFUSALS = (Overloaded, Draining, NoNode)


@dataclass
class GrpcAsker:
    """Streams over several connections, which spread over the workers of a gateway, and over several gateways."""

    clients: list[AsyncClient]
    prompts: PromptMaker
    model: str = ""  # empty: the served model
    slo: Slo | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    _next: int = 0

    @classmethod
    def connect(
        cls,
        addresses: Sequence[str],
        connections: int,
        prompts: PromptMaker,
        model: str,
        slo: Slo | None,
        sampling: dict[str, Any],
        *,
        api_key: str = "",
    ) -> Self:
        clients = []
        for number in range(connections):
            first = number % len(addresses)  # the others are asked if it is lost
            ordered = [*addresses[first:], *addresses[:first]]
            clients.append(AsyncClient(addresses=ordered, api_key=api_key or None, retry_s=0.0))
        return cls(clients, prompts, model, slo, sampling)

    def prepare(self, request: PlannedRequest) -> tuple[PlannedRequest, list[int]]:
        return request, self.prompts.token_ids(request)

    async def ask(self, prepared: tuple[PlannedRequest, list[int]], answer: LoadAnswer) -> None:
        request, token_ids = prepared
        self._next += 1
        client = self.clients[self._next % len(self.clients)]
        sampling = {"max_tokens": request.output_tokens, "ignore_eos": True, **self.sampling}
        options = Options(model=self.model, request_id=self.prompts.contents.request_id(request.index))
        if request.session >= 0:
            options["session_id"] = f"bench-{request.session}"
        if self.slo is not None:
            options["ttft_s"], options["tpot_s"] = self.slo.ttft_s, self.slo.tpot_s
        finished = False
        try:
            async for event in client.generate(token_ids, sampling, **options):
                if isinstance(event, Notice):
                    continue
                if event.tokens:
                    answer.add(len(event.tokens))
                if isinstance(event, Finished):
                    finished = True
                    usage = event.usage
                    answer.usage = {
                        "prompt": usage.prompt_tokens,
                        "cached": usage.cached_tokens,
                        "output": usage.completion_tokens,
                    }
                    answer.receipt = asdict(event.receipt)
        except BatonError as error:
            kind = type(error).__name__
            raise AskError(kind, error.message, refused=isinstance(error, _REFUSALS)) from None
        if not finished:
            raise AskError("BrokenStream", "the stream ended without its last message")

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
