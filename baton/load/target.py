"""Where load goes: the address of a server as the command line gives it, and what was found out about the server."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from baton.core.errors import InvalidRequest
from baton.core.types import Slo
from baton.load.answer import Asker
from baton.load.grpc_asker import GrpcAsker
from baton.load.http_stream import HttpStreams, Origin
from baton.load.openai_asker import Dialect, OpenAiAsker
from baton.load.prompts import Contents, PromptMaker
from baton.load.several_gateways import SeveralGateways
from baton.security.exposure import is_loopback


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
        """Of `[LABEL=]host:port` for gRPC, or `[LABEL=]http://host:port[/v1]`.

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
                    f"{each!r} is no address", field="target", value=each, cure="give host:port, or http://host:port"
                )
        return cls(address, label, api, api_key, model)

    @property
    def addresses(self) -> Sequence[str]:
        return self.address.split(",")

    def streams(self, address: str = "") -> HttpStreams:
        """To one of its addresses, or the first one.

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
        tokens_max: of prompt and output together; None: the server does not say.
        notes: what the run's reader should know, such as a missing `ignore_eos`.
    """

    target: Target
    model: str
    contents: Contents
    dialect: Dialect = field(default_factory=Dialect)
    tokens_max: int | None = None
    notes: tuple[str, ...] = ()

    def with_seed(self, seed: int) -> Self:
        """With other contents of prompts."""
        return replace(self, contents=replace(self.contents, seed=seed))

    def asker(self, *, connections: int, slo: Slo | None, temperature: float | None) -> Asker:
        """For one client process.

        Args:
            connections: of gRPC; HTTP opens one for each request that runs.
        """
        prompts = PromptMaker(self.contents)
        extra = {} if temperature is None else {"temperature": temperature}
        target = self.target
        if target.api is Api.GRPC:
            return GrpcAsker.connect(target.addresses, connections, prompts, slo, extra, api_key=target.api_key)
        chat = target.api is Api.CHAT
        askers = [
            OpenAiAsker(target.streams(address), prompts, self.model, chat, self.dialect, slo, extra)
            for address in target.addresses
        ]
        return askers[0] if len(askers) == 1 else SeveralGateways(askers)
