"""Target: bytes of a connection to the HTTP server: no HTTP at all, half a request, or several at once."""

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from baton.gateway.http.protocol import LimitedProtocol
from tests.fuzz import mutate
from tests.fuzz.target import AsyncTarget, Case

_ANSWERS_S = 300.0  # wall time, so long that only what hangs takes it
_PIECES = (
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    b"HEAD /health HTTP/1.0\r\n\r\n",
    b'POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 16\r\n\r\n{"prompt": "ab"}',
    b"POST /detokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    b'8\r\n{"tokens\r\n9;x=y\r\n": [5,6]}\r\n0\r\nt: v\r\n\r\n',
    b"POST /tokenize HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}",
    b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\n{}",
    b"OPTIONS * HTTP/1.1\r\nhost: a\r\nx-request-id: id\r\n\r\n",
)
_TOKENS = (
    b"\r\n",
    b"\n",
    b"\r",
    b": ",
    b"0",
    b"ffffffffffffffff",
    b"-1",
    b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: gzip, chunked\r\n",
    b"content-encoding: gzip\r\n",
    b"upgrade: h2c\r\nconnection: upgrade\r\n",
    b"host: b\r\n",
    b"\0",
    b"\xff",
    b"HTTP/9.9",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"x" * 70_000,
    b"a: b\r\n" * 200,
    b"%00%zz",
    b"http://a:b@c/",
    b"/../..",
    b"?a=b#c",
    b" ",
    b"\t",
    b"CONNECT a:1 ",
)


def make(random: Random) -> Case:
    """What comes in each piece of the stream."""
    stream = bytearray(b"".join(random.choice(_PIECES) for _ in range(random.choice((1, 1, 2, 4)))))
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        place = random.randrange(len(stream) + 1)
        if random.random() < 0.6:
            stream[place : place + random.choice((0, 0, 1, 5))] = random.choice(_TOKENS)
        else:
            stream = bytearray(mutate.data(random, bytes(stream)))
    cuts = sorted(random.randrange(len(stream) + 1) for _ in range(random.choice((0, 0, 1, 3))))
    return tuple(bytes(stream[a:b]) for a, b in zip((0, *cuts), (*cuts, len(stream)), strict=True))


class _Wire(asyncio.Transport):
    """The other end: gathers what the server writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self._closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


def framing_targets(app: Any) -> Mapping[str, AsyncTarget]:
    config = uvicorn.Config(
        app, http=LimitedProtocol, loop="none", ws="none", lifespan="off", log_config=None, access_log=False
    )
    config.load()

    async def http_bytes(case: Case) -> str:
        state = ServerState()
        protocol = LimitedProtocol(config, state, {}, asyncio.get_running_loop())
        wire = _Wire()
        protocol.connection_made(wire)
        for piece in case:
            if not wire.is_closing():
                protocol.data_received(piece)
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(_ANSWERS_S):
                while state.tasks and not _waits_for_more(protocol):
                    await asyncio.wait(state.tasks, timeout=0.05)
        finally:
            wire.close()
            protocol.connection_lost(None)
        if state.tasks:
            await asyncio.wait_for(asyncio.gather(*state.tasks), _ANSWERS_S)
        heads = [bytes(wire.written[place : place + 12]) for place in _places(wire.written)]
        assert not any(head[9:12] == b"500" for head in heads), bytes(wire.written[:500])
        assert not wire.written or heads, bytes(wire.written[:100])
        return " ".join(head[9:].decode() for head in heads[:3]) or "silent"

    return {"http_bytes": AsyncTarget(make, http_bytes)}


def _waits_for_more(protocol: LimitedProtocol) -> bool:
    """The handler waits for the rest of the body, which does not come."""
    cycle = protocol.cycle
    return cycle is not None and cycle.more_body and not cycle.response_complete


def _places(written: bytearray) -> list[int]:
    """Where answers begin."""
    found, place = [], 0
    while (place := written.find(b"HTTP/1.1 ", place)) >= 0:
        found.append(place)
        place += 1
    return found
