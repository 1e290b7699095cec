"""A request that has ended leaves no cycle of objects, however it ended: it is freed at once, and not by the collector,
which pauses all streams. The collector is off here, so that a cycle would stay."""

import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from baton.gateway.http.event_stream import EventStream
from baton.gateway.observe.request_record import RequestRecord
from baton.gateway.request.driver import RequestDriver
from baton.gateway.request.machine import RequestMachine
from baton.gateway.text.chat.parsing.collector import Collector
from baton.node import waiting
from tests.unit.gateway.http.http_gateway import BOUND_S, HttpGateway, Wire, open_http_gateway, step_token
from tests.unit.gateway.late import LIMIT_S, let_limit_pass

# The server's request has all that its framework keeps for a request.
_OF_REQUESTS = ("RequestResponseCycle", *(kind.__name__ for kind in (
    RequestDriver, RequestMachine, RequestRecord, EventStream, Collector
)))  # fmt: skip

End = Callable[[HttpGateway, Wire], Awaitable[object]]
LIMITED = {"x_request_timeout_s": str(LIMIT_S)}


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway() as opened:
        gc.collect()
        gc.disable()
        try:
            yield opened
        finally:
            gc.enable()


@pytest.fixture
def left(door: HttpGateway) -> Callable[[], Counter[str]]:
    """Counts objects of requests in memory, by type. Those that other tests of this process have kept do not count."""
    kept = [each for each in gc.get_objects() if type(each).__name__ in _OF_REQUESTS]
    known = set(map(id, kept))  # `kept` keeps these objects, so that no new one gets the id of one of them

    def count() -> Counter[str]:
        names = (type(each).__name__ for each in gc.get_objects() if id(each) not in known)
        return Counter(name for name in names if name in _OF_REQUESTS)

    return count


async def chat(door: HttpGateway, **headers: str) -> Wire:
    """A streamed chat that has begun."""
    wire = await door.connect()
    body = {"messages": [{"role": "user", "content": "Write a file."}], "stream": True, "max_tokens": 8}
    wire.send("POST", "/v1/chat/completions", json.dumps(body).encode(), x_request_id="chat", **headers)
    await door.accept()
    door.decode.send_tokens(step_token(0))
    await wire.head()
    return wire


async def finished(door: HttpGateway, wire: Wire) -> None:
    door.finish(1)
    assert b"data: [DONE]" in await wire.chunks()


async def left_by_its_client(door: HttpGateway, wire: Wire) -> None:
    wire.writer.transport.abort()
    await door.cancelled()


async def aborted(door: HttpGateway, wire: Wire) -> None:
    assert await door.serving.abort(["chat"]) == ["chat"]
    assert b"aborted" in await wire.chunks()


async def late(_: HttpGateway, wire: Wire) -> None:
    assert b"did not finish within" in await wire.chunks()


async def test_objects_of_a_running_request_are_seen(door: HttpGateway, left: Callable[[], Counter[str]]) -> None:
    await chat(door)
    assert set(left()) == set(_OF_REQUESTS)


@pytest.mark.parametrize("end", [finished, left_by_its_client, aborted, late])
async def test_a_request_is_freed_when_it_has_ended(
    door: HttpGateway, end: End, left: Callable[[], Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await chat(door, **(LIMITED if end is late else {}))
    if end is late:
        let_limit_pass(monkeypatch)
    await end(door, wire)
    wire.writer.close()
    assert await waiting.until(lambda: not left(), timeout_s=BOUND_S), left()
