"""The metrics port answers one kind of request, and no other kind stops it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.core.errors import ConfigError
from baton.metrics import port as metrics_port
from baton.metrics.exposition import CONTENT_TYPE
from baton.metrics.port import MetricsPort
from baton.rpc.sockets import address_of, bind

BOUND_S = 60.0
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes for a request."""
    monkeypatch.setattr(metrics_port, "_TIMEOUT_S", BOUND_S)


@asynccontextmanager
async def opened() -> AsyncIterator[MetricsPort]:
    async def page(names: frozenset[str]) -> bytes:
        return b"".join(f"{name} 1\n".encode() for name in sorted(names or {"a"}))

    async with MetricsPort(bind("127.0.0.1:0", field="metrics_listen"), page) as port:
        yield port


async def ask(port: MetricsPort, question: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer."""
    assert port.url is not None
    host, _, number = port.url.removeprefix("http://").removesuffix("/metrics").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    try:
        writer.write(question)
        writer.write_eof()
        answer = await reader.read()
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


async def test_it_shows_the_page() -> None:
    async with opened() as port:
        head, body = await ask(port, GET)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert f"Content-Type: {CONTENT_TYPE}".encode() in head
        assert body == b"a 1\n"
        assert (await ask(port, GET.replace(b"GET", b"HEAD")))[1] == b""
        assert (await ask(port, GET.replace(b"/metrics", b"/metrics?a=b")))[1] == b"a 1\n"
        assert (await ask(port, GET.replace(b"/metrics", b"/metrics?name[]=b&name%5B%5D=c")))[1] == b"b 1\nc 1\n"
        assert (await ask(port, GET.replace(b"/metrics", b"/metrics?" + b"name[]=b&" * 500)))[1] == b"a 1\n"


async def test_it_has_nothing_else() -> None:
    async with opened() as port:
        assert (await ask(port, GET.replace(b"/metrics", b"/")))[0].startswith(b"HTTP/1.1 404 ")
        head, _ = await ask(port, GET.replace(b"GET", b"POST"))
        assert head.startswith(b"HTTP/1.1 405 ")
        assert b"\r\nAllow: GET, HEAD\r\n" in head
        head, body = await ask(port, b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (head[:13], body) == (b"HTTP/1.1 404 ", b"")


async def test_a_request_has_one_host() -> None:
    async with opened() as port:
        for question in (GET.replace(b"Host: x\r\n", b""), GET.replace(b"Host: x", b"Host: x\r\nhost: y")):
            assert (await ask(port, question))[0].startswith(b"HTTP/1.1 400 ")
        assert (await ask(port, b"GET /metrics HTTP/1.0\r\n\r\n"))[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "question", [b"", b"\x16\x03\x01\x02", b"GET /metrics", b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 100_000]
)
async def test_what_is_no_request_gets_no_answer_and_stops_no_other(question: bytes) -> None:
    async with opened() as port:
        assert (await ask(port, question))[0] == b""
        assert (await ask(port, GET))[1] == b"a 1\n"


async def test_it_ends_with_idle_connections_open() -> None:
    async with asyncio.timeout(BOUND_S):
        async with opened() as port:
            assert port.url is not None
            host, _, number = port.url.removeprefix("http://").removesuffix("/metrics").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(number))
            await ask(port, GET)
        assert await reader.read() == b""
        writer.close()


async def test_off_means_no_port() -> None:
    async def page(names: frozenset[str]) -> bytes:
        return b""

    assert bind("off", field="metrics_listen") is None
    async with MetricsPort(None, page) as port:
        assert port.url is None


def test_a_port_that_is_taken_is_a_wrong_setting() -> None:
    taken = bind("127.0.0.1:0", field="metrics_listen")
    assert taken is not None
    with taken, pytest.raises(ConfigError, match="cannot listen") as raised:
        bind(address_of(taken), field="metrics_listen")
    assert raised.value.field == "metrics_listen"
