"""Traces on their way to a collector that is there, refuses, is slow, or is gone."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

from baton.gateway.observe.tracing import export
from baton.gateway.observe.tracing.export import Exporter
from baton.metrics.metric import ProcessRole
from baton.metrics.tally import Layout, Tally
from baton.tracing.environment import TraceCollector

DEADLINE_S = 60.0


class Receiver:
    """A collector that keeps what it receives; `refuse`: the status of its next answers, in their order."""

    def __init__(self, *refuse: grpc.StatusCode) -> None:
        self.received: list[bytes] = []
        self.headers: list[dict[str, object]] = []
        self.calls = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self._refuse = list(refuse)
        self._called = asyncio.Condition()

    async def export(
        self, data: bytes, context: grpc.aio.ServicerContext[bytes, service.ExportTraceServiceResponse]
    ) -> service.ExportTraceServiceResponse:
        self.calls += 1
        self.headers.append(dict(context.invocation_metadata() or ()))
        async with self._called:
            self._called.notify_all()
        await self.answers.wait()
        if self._refuse:
            await context.abort(self._refuse.pop(0), "not now")
        self.received.append(data)
        async with self._called:
            self._called.notify_all()
        return service.ExportTraceServiceResponse()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._called:
            await self._called.wait_for(condition)


@asynccontextmanager
async def served(receiver: Receiver) -> AsyncIterator[TraceCollector]:
    handler: grpc.RpcMethodHandler[bytes, service.ExportTraceServiceResponse] = grpc.unary_unary_rpc_method_handler(
        receiver.export, response_serializer=service.ExportTraceServiceResponse.SerializeToString
    )
    name = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield TraceCollector(f"127.0.0.1:{port}", tls=False, headers=(("api-key", "mine"),))
    finally:
        await server.stop(None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for a full batch, short pauses, and calls and an end that may take long."""
    monkeypatch.setattr(export, "_CALL_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(export, "_CLOSE_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr(export, "_BATCH_S", 0.0)
    monkeypatch.setattr(export, "_BACK_OFF_S", 0.01)


def exporter_to(collector: TraceCollector) -> Exporter:
    return Exporter(collector, Tally(Layout(ProcessRole.GATEWAY)))


async def test_traces_are_sent_with_the_headers() -> None:
    receiver = Receiver()
    async with served(receiver) as collector, exporter_to(collector) as exporter:
        exporter.put(b"one")
        await receiver.until(lambda: receiver.received == [b"one"])
    assert receiver.headers[0]["api-key"] == "mine"


async def test_what_is_held_is_sent_at_the_end() -> None:
    receiver = Receiver()
    async with served(receiver) as collector:
        async with exporter_to(collector) as exporter:
            exporter.put(b"one")
            exporter.put(b"two")
        assert b"".join(receiver.received) == b"onetwo"


async def test_what_a_collector_cannot_take_now_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Receiver(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
    with caplog.at_level(logging.INFO, logger="baton"):
        async with served(receiver) as collector, exporter_to(collector) as exporter:
            exporter.put(b"one")
            await receiver.until(lambda: receiver.received == [b"one"])
    assert (receiver.calls, exporter.dropped) == (3, 0)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].endswith("not now")
    assert lines[1] == "traces are exported again; 0 were lost"


async def test_what_a_collector_refuses_is_lost_and_the_next_is_sent() -> None:
    receiver = Receiver(grpc.StatusCode.INVALID_ARGUMENT)
    tally = Tally(Layout(ProcessRole.GATEWAY))
    async with served(receiver) as collector, Exporter(collector, tally) as exporter:
        exporter.put(b"one")
        await receiver.until(lambda: receiver.calls == 1)
        exporter.put(b"two")
        await receiver.until(lambda: receiver.received == [b"two"])
    assert exporter.dropped == 1
    cells = [tally.own()[tally.layout.first("baton_traces_total", (state,))] for state in ("exported", "dropped")]
    assert cells == [1, 1]


async def test_a_slow_collector_costs_traces_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_QUEUE_BYTES_MAX", 10)
    receiver = Receiver()
    receiver.answers.clear()
    async with served(receiver) as collector, exporter_to(collector) as exporter:
        exporter.put(b"one")
        await receiver.until(lambda: receiver.calls == 1)
        for _ in range(5):
            exporter.put(b"two")
        assert exporter.dropped == 3
        receiver.answers.set()
        await receiver.until(lambda: b"".join(receiver.received) == b"onetwotwo")
        exporter.put(b"six")
        await receiver.until(lambda: b"".join(receiver.received) == b"onetwotwosix")
    assert exporter.dropped == 3


async def test_a_batch_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_BATCH_BYTES", 6)
    receiver = Receiver()
    async with served(receiver) as collector, exporter_to(collector) as exporter:
        for _ in range(5):
            exporter.put(b"abc")
    assert receiver.received == [b"abcabc", b"abcabc", b"abc"]


async def test_a_collector_that_never_answers_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export, "_CLOSE_TIMEOUT_S", 0.05)
    receiver = Receiver()
    receiver.answers.clear()
    async with served(receiver) as collector, asyncio.timeout(DEADLINE_S), exporter_to(collector) as exporter:
        exporter.put(b"one")
        await receiver.until(lambda: receiver.calls == 1)
    assert caplog.messages == ["1 trace(s) were not exported before the end"]
