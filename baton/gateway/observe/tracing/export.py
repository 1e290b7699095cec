"""Sends traces to a collector by OTLP over gRPC. A slow or missing collector costs traces, but never a request.

The queue of traces is bounded in bytes; beyond the bound, new traces are dropped and counted. The log has one line when
exports begin to fail and one when they work again.
"""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from baton.metrics.tally import Tally
from baton.rpc.channels import proxy_options
from baton.security.access import client_proxy
from baton.tracing.environment import TraceCollector

log = logging.getLogger("baton")

_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_QUEUE_BYTES_MAX = 16 << 20
_BATCH_BYTES = 1 << 20
_BATCH_S = 0.5  # time for which the first trace of a batch waits for others
_CALL_TIMEOUT_S = 10.0
_BACK_OFF_S, _BACK_OFF_MAX_S = 0.5, 15.0
_CLOSE_TIMEOUT_S = 2.0
_RETRYABLE = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


class Exporter:
    """Sends the traces given to `put`. An async context manager: inside it, traces are sent in the background.

    Args:
        tally: counts exported and dropped traces.

    Attributes:
        dropped: number of dropped traces.
    """

    def __init__(self, collector: TraceCollector, tally: Tally) -> None:
        self._collector = collector
        self._counts = tally.counters("baton_traces_total")
        self._queue: deque[bytes] = deque()
        self._queue_bytes = 0
        self._filled, self._closing = asyncio.Event(), asyncio.Event()
        self.dropped = 0
        self._failing = False

    async def __aenter__(self) -> Self:
        self._channel = _channel(self._collector)
        self._export: Any = self._channel.unary_unary(
            _METHOD, response_deserializer=ExportTraceServiceResponse.FromString
        )
        self._task = asyncio.create_task(self._run(), name="trace-export")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Sends the queued traces, within a short time, and drops the rest."""
        self._closing.set()
        self._filled.set()
        await asyncio.wait([self._task], timeout=_CLOSE_TIMEOUT_S)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if self._queue:
            self._drop(len(self._queue))
            log.warning("%d trace(s) were not exported before the end", len(self._queue))
        await self._channel.close()

    def put(self, data: bytes) -> None:
        """Queues one encoded trace, or drops it if the queue is full."""
        if self._queue_bytes + len(data) > _QUEUE_BYTES_MAX:
            self._drop(1)
            return
        self._queue.append(data)
        self._queue_bytes += len(data)
        self._filled.set()

    async def _run(self) -> None:
        back_off_s = _BACK_OFF_S
        while True:
            await self._filled.wait()
            await self._pause(_BATCH_S)
            while self._queue:
                error = await self._send(self._batch())
                if error is None:
                    back_off_s = _BACK_OFF_S
                    continue
                if self._closing.is_set():
                    return  # `__aexit__` counts the remaining traces as dropped
                await self._pause(back_off_s)
                back_off_s = min(2 * back_off_s, _BACK_OFF_MAX_S)
            if self._closing.is_set():
                return
            self._filled.clear()

    async def _pause(self, seconds: float) -> None:
        """Waits, but ends early when the exporter closes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _batch(self) -> list[bytes]:
        """The first traces of the queue; they stay in it until they are sent."""
        batch: list[bytes] = []
        size = 0
        for data in self._queue:
            if batch and size + len(data) > _BATCH_BYTES:
                break
            batch.append(data)
            size += len(data)
        return batch

    async def _send(self, batch: list[bytes]) -> grpc.aio.AioRpcError | None:
        """Sends a batch. Returns the error if the batch must be retried; drops the batch after any other error."""
        try:
            response = await self._export(
                b"".join(batch), timeout=_CALL_TIMEOUT_S, metadata=self._collector.headers or None
            )
        except grpc.aio.AioRpcError as error:
            if not self._failing:
                self._failing = True
                where, reason = self._collector.target, error.details() or error.code().name
                log.warning("traces are not exported: the collector at %s: %s", where, reason)
            if error.code() in _RETRYABLE:
                return error
            self._drop(len(batch))
        else:
            self._counts["exported"].add(len(batch))
            if rejected := response.partial_success.rejected_spans:
                log.warning("the collector refused %d span(s): %s", rejected, response.partial_success.error_message)
            if self._failing:
                self._failing = False
                log.info("traces are exported again; %d were lost", self.dropped)
        for _ in batch:
            self._queue_bytes -= len(self._queue.popleft())
        return None

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._counts["dropped"].add(count)


def _channel(collector: TraceCollector) -> grpc.aio.Channel:
    # Proxies apply as for clients, because a collector may be outside of the cluster.
    options = [("grpc.max_reconnect_backoff_ms", 5000), *proxy_options(client_proxy(collector.target))]
    if not collector.tls:
        return grpc.aio.insecure_channel(collector.target, options=options)
    roots = None if collector.certificate is None else Path(collector.certificate).read_bytes()
    return grpc.aio.secure_channel(collector.target, grpc.ssl_channel_credentials(roots), options=options)
