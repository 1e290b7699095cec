"""The target of a load: a server's address from the command line, and what the probe found out about the server."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from baton.core.errors import InvalidRequest
from baton.core.types import Slo
from baton.load.answer import Asker, AskError, LoadAnswer
from baton.load.grpc_asker import GrpcAsker
from baton.load.http_stream import HttpStreams, Origin
from baton.load.openai_asker import Dialect, OpenAiAsker
from baton.load.prompts import Contents, PromptMaker
from baton.load.workload import PlannedRequest
from baton.security.exposure import is_loopback

# Errors of a gateway that is gone, or is about to go.
_LOST = ("NoConnection", "BrokenStream", "503 draining", "draining")


@dataclass
class SeveralGateways:
    """Requests to several gateways in front of the same nodes, which get them in turn.

    A stream whose gateway is lost continues at the next one, with the same tokens and none twice.

    Args:
        askers: one for each gateway, otherwise equal.
    """

    askers: Sequence[OpenAiAsker]
    _next: int = 0

    def prepare(self, request: PlannedRequest) -> tuple[dict[str, Any], Mapping[str, str]]:
        body, headers = self.askers[0].question(request)
        # Drawn tokens follow from the seed, so that another gateway's are the same.
        return {"seed": request.index, **body, "return_token_ids": True}, headers

    async def ask(self, prepared: tuple[dict[str, Any], Mapping[str, str]], answer: LoadAnswer) -> None:
        body, headers = prepared
        token_ids: list[int] = []
        place, lost = self._next, 0
        self._next += 1
        while True:
            asker, known = self.askers[place % len(self.askers)], len(token_ids)
            question = asker.encode(_resumed(body, token_ids), headers)
            try:
                return await asker.ask(question, answer, token_ids)
            except AskError as error:
                lost = 1 if len(token_ids) > known else lost + 1
                if error.kind not in _LOST or lost >= len(self.askers):
                    raise
            place += 1

    async def close(self) -> None:
        for asker in self.askers:
            await asker.close()


class Api(StrEnum):
    GRPC = "grpc"  # Baton's own
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True)
class Target:
    """One server, or several gateways in front of the same nodes: their addresses, with commas between them.

    Args:
        label: its name in tables and plots.
        model: name for requests; "": the server's first one, found by the probe.
    """

    address: str
    label: str
    api: Api
    api_key: str = ""
    model: str = ""

    @classmethod
    def parse(cls, text: str, *, api: Api | None = None, api_key: str = "", model: str = "") -> Self:
        """Parses `[LABEL=]host:port` for gRPC, or `[LABEL=]http://host:port[/v1]`.

        Raises:
            InvalidRequest: it is neither, or has no such API.
        """
        label, address = text.split("=", 1) if re.match(r"[^/:]+=", text) else (text, text)
        is_http = "://" in address
        api = api or (Api.COMPLETIONS if is_http else Api.GRPC)
        if is_http == (api is Api.GRPC):
            allowed = (Api.COMPLETIONS, Api.CHAT) if is_http else (Api.GRPC,)
            raise InvalidRequest(
                f"{address} does not serve {api}", field="api", value=api, allowed=allowed,
                cure="gRPC addresses are host:port, HTTP ones start with http://",
            )  # fmt: skip
        for each in address.split(","):
            if is_http:
                Origin.parse(each)
            elif not re.fullmatch(r"[^\s/]+:\d+|unix:.+", each):
                raise InvalidRequest(
                    f"{each!r} is not an address",
                    field="target",
                    value=each,
                    cure="give host:port, or http://host:port",
                )
        return cls(address, label, api, api_key, model)

    @property
    def addresses(self) -> Sequence[str]:
        return self.address.split(",")

    def streams(self, address: str = "") -> HttpStreams:
        """HTTP streams to one of its addresses, by default the first one.

        Raises:
            InvalidRequest: the key would cross a network unencrypted.
        """
        origin = Origin.parse(address or self.addresses[0])
        if self.api_key and not origin.tls and not is_loopback(origin.host):
            raise InvalidRequest(
                f"the API key would go to {origin.host} unencrypted",
                field="api_key",
                cure="give an https:// address, or no key",
            )
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return HttpStreams(origin, headers)


@dataclass(frozen=True)
class Server:
    """A target that has answered the probe.

    Args:
        tokens_max: most tokens of prompt and output together; None: unknown.
        notes: remarks for the reader of a run, such as a missing `ignore_eos`.
    """

    target: Target
    model: str
    contents: Contents
    dialect: Dialect = field(default_factory=Dialect)
    tokens_max: int | None = None
    notes: tuple[str, ...] = ()

    def with_seed(self, seed: int) -> Self:
        """The server with other contents of prompts."""
        return replace(self, contents=replace(self.contents, seed=seed))

    def asker(self, *, connections: int, slo: Slo | None, temperature: float | None) -> Asker:
        """An asker for one client process.

        Args:
            connections: number of gRPC connections; HTTP opens one for each request that runs.
        """
        prompts = PromptMaker(self.contents)
        extra = {} if temperature is None else {"temperature": temperature}
        target = self.target
        if target.api is Api.GRPC:
            return GrpcAsker.connect(
                target.addresses, connections, prompts, target.model, slo, extra, api_key=target.api_key
            )
        chat = target.api is Api.CHAT
        askers = [
            OpenAiAsker(target.streams(address), prompts, self.model, chat, self.dialect, slo, extra)
            for address in target.addresses
        ]
        return askers[0] if len(askers) == 1 else SeveralGateways(askers)


def _resumed(body: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
    """The body of a request whose client has these tokens already."""
    return {**body, "baton": {**body.get("baton", {}), "output_token_ids": token_ids}} if token_ids else body
