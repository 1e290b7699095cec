"""uvicorn's HTTP/1.1 protocol with limits on headers and times. Malformed requests get an error in OpenAI's shape."""

import asyncio
import math
import select
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton.core.errors import BatonError
from baton.gateway.http.errors import HttpRefusal, openai_error, status_of
from baton.gateway.http.head import check_head

HEADER_BYTES_MAX = 64 << 10
# Longest wait for a request's whole headers on an open connection, and then for each piece of its body.
REQUEST_S = 60.0
# Longest time from a request's headers to the end of its body: 32 MiB at 0.9 Mbit/s. It begins again when an earlier
# request's answer ends, since until then the server does not read.
BODY_S = 300.0
# How often a connection is looked at that is not read, because requests on it wait for answers to earlier ones.
LOOK_S = 1.0


class LimitedProtocol(HttpToolsProtocol):
    """Closes connections whose request takes too long, has too large headers, or is not HTTP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._body_due_s = math.inf
        self._header_bytes = 0
        self._unparsed_bytes = 0
        self._refused = False
        self._timeout: asyncio.TimerHandle | None = None
        self._unanswered: list[RequestResponseCycle] = []
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_more()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()
        if self._look is not None:
            self._look.cancel()
        # NOTE: uvicorn itself ends only the newest request. Those before it would run on for nobody.
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._unanswered.clear()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._in_headers:
            self._stop_waiting()
        if self._timeout is None:
            self._wait_for_more()
        self._unparsed_bytes += len(data)  # `_header_bytes` counts complete headers; this counts endless ones too
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._in_headers and self._unparsed_bytes > HEADER_BYTES_MAX:
            self._refuse_headers()

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes <= HEADER_BYTES_MAX:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._wants_upgrade():
            return
        if self._header_bytes > HEADER_BYTES_MAX:
            self._refuse_headers()
        try:
            check_head(self.parser.get_method(), self.parser.get_http_version(), self.headers)
        except HttpRefusal as error:
            self._refuse(error)
        if self._refused:  # later requests in the same data would wait for bodies that never arrive
            return
        super().on_headers_complete()
        self._in_headers, self._unparsed_bytes = False, 0
        self._body_begins()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        self._unanswered.append(self.cycle)
        if self.pipeline and self._look is None:
            self._look = self.loop.call_later(LOOK_S, self._look_for_end)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self._timeout is None:
            return
        if self._in_headers:
            self._stop_waiting()
            self._wait_for_more()
        else:
            self._body_begins()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._wants_upgrade():
            return
        self._in_headers, self._header_bytes, self._unparsed_bytes = True, 0, 0
        self._body_due_s = math.inf
        self._stop_waiting()
        if not self._refused:
            super().on_message_complete()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(HttpRefusal(400, "invalid_http", "the request is not HTTP"))

    def _wants_upgrade(self) -> bool:
        """Whether the request asks for an upgrade, at which the parser stops. Java's HTTP client asks for HTTP/2 so."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Parses the request again without its upgrade header, which a server may ignore.

        The parser would otherwise skip the body, as on an upgraded connection.
        """
        if self._refused:
            return
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser, self._header_bytes = httptools.HttpRequestParser(self), 0
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # uvicorn's setting
        self._parse(b"\r\n".join((*lines, b"", b"")) + rest)

    def _body_begins(self) -> None:
        self._body_due_s = self.loop.time() + BODY_S
        self._stop_waiting()
        self._wait_for_more()

    def _wait_for_more(self) -> None:
        due_s, why = self.loop.time() + REQUEST_S, f"no whole request within {REQUEST_S:.0f} s"
        if not self._in_headers:
            why = f"no more of the request's body within {REQUEST_S:.0f} s"
        if self._body_due_s < due_s:
            due_s, why = self._body_due_s, f"no whole body within {BODY_S:.0f} s"
        self._timeout = self.loop.call_at(due_s, self._time_out, why)

    def _time_out(self, why: str) -> None:
        self._timeout = None
        if self._refused:
            return
        if self.pipeline or self.flow.read_paused:  # what has not come may wait at the server's own socket
            self._body_due_s = math.inf if self._in_headers else self.loop.time() + BODY_S
            self._wait_for_more()
            return
        self._refuse(HttpRefusal(408, "request_timeout", why))

    def _stop_waiting(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _look_for_end(self) -> None:
        """Ends a connection that the client has closed, while requests wait on it: until their turn nothing is read, so
        nothing else shows it."""
        self._look = None
        if not self.pipeline or self.transport.is_closing():
            return
        connection = select.poll()
        connection.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if connection.poll(0):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(LOOK_S, self._look_for_end)

    def _refuse_headers(self) -> None:
        allowed = (f"up to {HEADER_BYTES_MAX} bytes",)
        self._refuse(HttpRefusal(431, "headers_too_large", "the request's headers are too large", allowed=allowed))

    def _refuse(self, error: BatonError) -> None:
        if self._refused:
            return
        self._refused = True
        cycle = self.cycle  # while headers arrive, this is still the previous request's
        if cycle is not None and (not cycle.response_complete if self._in_headers else cycle.response_started):
            self.transport.close()
            return
        body = orjson.dumps(openai_error(error, ""))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status_of(error)] + head + body)
        self.transport.close()
