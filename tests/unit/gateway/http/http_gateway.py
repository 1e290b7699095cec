"""An HTTP server in front of scripted nodes, and connections that a test writes and reads by hand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import baton.security.authenticator as security
from baton.gateway.http.call import Context
from baton.gateway.http.server import HttpServer, bind
from baton.gateway.http.view import View
from baton.gateway.request.connections import Connections
from baton.gateway.serving.serving import Serving
from baton.gateway.text.model import read_served_model
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2
from baton.settings.config import DEMO_MODELS
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import read_settings
from tests.unit.gateway.late import PATIENT
from tests.unit.gateway.scripted_nodes import ScriptedNode, scripted_nodes

BOUND_S = 60
LENGTH = common_pb2.FINISH_REASON_LENGTH


@dataclass
class Answer:
    """One HTTP answer.

    Attributes:
        headers: each header's last value, by its name in lower case.
        all_headers: all headers in order, also those that are given several times.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    all_headers: tuple[tuple[str, str], ...] = ()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert isinstance(error, dict)
        assert set(error) == {"message", "type", "param", "code", "request_id"}
        return error


@dataclass
class Wire:
    """A connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        """Sends a request; an underscore in a header's name is a dash."""
        lines = [f"{method} {path} HTTP/1.1", f"host: {headers.pop('host', 'test')}"]
        if "transfer_encoding" not in headers:
            lines.append(f"content-length: {len(body)}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def head(self) -> Answer:
        """The answer without its body."""
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), BOUND_S)
        status, *lines = raw.decode().rstrip().split("\r\n")
        headers = tuple((name.lower(), value) for name, value in (line.split(": ", 1) for line in lines))
        return Answer(int(status.split()[1]), dict(headers), b"", headers)

    async def answer(self, *, has_body: bool = True) -> Answer:
        answer = await self.head()
        if has_body:
            answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
        return answer

    async def chunk(self) -> bytes:
        """The next chunk of a body that is sent in chunks; empty: the last one."""
        size = await asyncio.wait_for(self.reader.readline(), BOUND_S)
        data = await self.reader.readexactly(int(size, 16) + 2)
        return data[:-2]

    async def chunks(self) -> bytes:
        """The rest of such a body."""
        data = b""
        while chunk := await self.chunk():
            data += chunk
        return data

    async def closed(self) -> bool:
        """Waits until the server has closed the connection."""
        await asyncio.wait_for(self.reader.read(), BOUND_S)
        return self.reader.at_eof()


@dataclass
class HttpGateway:
    """A served gateway."""

    http: HttpServer
    serving: Serving
    decode: ScriptedNode
    context: Context
    _wires: list[Wire] = field(default_factory=list)

    async def connect(self) -> Wire:
        host, port = self.http.address.split(":")
        wire = Wire(*await asyncio.open_connection(host, int(port)))
        self._wires.append(wire)
        return wire

    async def call(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """One request on a connection of its own; `body` is JSON, or bytes as they are."""
        wire = await self.connect()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        wire.send(method, path, data, **headers)
        return await wire.answer(has_body=method != "HEAD")

    async def stream(self, body: dict[str, Any], **headers: str) -> Wire:
        """Begins a streamed completion, which has reached the decode node and has its first token."""
        wire = await self.connect()
        request = {"prompt": list(range(1, 65)), "max_tokens": 10, "stream": True, **body}
        wire.send("POST", "/v1/completions", json.dumps(request).encode(), **headers)
        await self.accept()
        self.decode.send_tokens(step_token(0))
        return wire

    async def accept(self) -> int:
        """The decode node takes the next request; returns its key."""
        submitted = await self.decode.submission()
        self.decode.answers.put_nowait(
            decode_pb2.SessionResponse(accepted=decode_pb2.Accepted(key=submitted.key, why="short"))
        )
        return submitted.key

    async def cancelled(self) -> None:
        """Waits until the decode node is told to end a request."""
        request = await asyncio.wait_for(self.decode.received.get(), BOUND_S)
        assert isinstance(request, decode_pb2.SessionRequest)
        assert request.HasField("cancel")

    def finish(self, index: int, *, key: int = 1) -> None:
        """The decode node sends the last token and forgets the request."""
        self.decode.send_tokens(step_token(index, last=True), key=key)
        self.decode.answers.put_nowait(decode_pb2.SessionResponse(released=decode_pb2.Released(key=key)))

    async def close(self) -> None:
        for wire in self._wires:
            wire.writer.close()


def step_token(index: int, *, last: bool = False) -> decode_pb2.StepToken:
    finish = LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
    return decode_pb2.StepToken(token=common_pb2.Token(token_id=300 + index, index=index), finish_reason=finish)


@asynccontextmanager
async def open_http_gateway(
    *flags: str,
    asks: bool = False,
    template: Path | None = None,
    max_context_tokens: int = 1000,
    **internal: object,
) -> AsyncIterator[HttpGateway]:
    """Opens an HTTP server in front of scripted nodes.

    Args:
        asks: its server asks who comes in, as a gateway's does.
        template: a file with a chat template that replaces the model's.
        max_context_tokens: that of the nodes.
        internal: values that no flag sets.
    """
    model = read_served_model(DEMO_MODELS / "llama", None, template)
    async with scripted_nodes(model.identity) as (prefill, decode):
        for node in (prefill, decode):
            node.status.info.max_context_tokens = max_context_tokens
        nodes = ["--prefill", prefill.address, "--decode", decode.address, "--local-policy", "local"]
        settings = read_settings(GatewaySettings, "gateway", [*nodes, "--http-listen", "127.0.0.1:0", *flags])
        settings = settings.model_copy(update={**PATIENT, **internal})
        async with Connections(settings, model) as connections:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            serving = Serving(settings, model, connections)
            bound = bind(settings.http_listen)
            assert bound is not None
            keys = security.Authenticator(settings) if asks else None
            view = View(settings, serving, connections.fleet, "gateway-1")
            async with view, HttpServer(settings, serving, connections.fleet, view, bound, authenticator=keys) as http:
                context = Context(settings, serving, connections.fleet, view)
                door = HttpGateway(http, serving, decode, context)
                try:
                    yield door
                finally:
                    await door.close()
                    model.close()
