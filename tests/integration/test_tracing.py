"""One trace per request of real processes, as a collector receives it."""

import json
import os
import urllib.request
from concurrent import futures
from functools import partial

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from baton.gateway.observe.tracing import export
from tests.integration.cluster import DEADLINE_S, machines

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LOCAL = "4bf92f3577b34da6a3ce929d0e0e4736"  # the trace of a prompt that the decode node prefills


def send_all(endpoint: str) -> None:
    """A process that ends drops no trace because it, or the collector, is slow. It samples none on arrival."""
    os.environ.update(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_TRACES_SAMPLER_ARG="0")
    export._CLOSE_TIMEOUT_S = export._CALL_TIMEOUT_S = DEADLINE_S


def send_to(endpoint: str) -> None:
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[tuple[str, trace_pb2.Span]] = []

    def Export(  # noqa: N802
        self, request: service.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> service.ExportTraceServiceResponse:
        for each in request.resource_spans:
            names = {item.key: item.value.string_value for item in each.resource.attributes}
            for scope in each.scope_spans:
                self.received += [(names["service.name"], span) for span in scope.spans]
        return service.ExportTraceServiceResponse()


def test_a_collector_receives_one_whole_trace_through_all_processes() -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with machines() as started:
            prefill, decode = started.nodes(("prefill", {}), ("decode", {}))
            sends = partial(send_all, f"http://127.0.0.1:{port}")
            gateway = started.gateway([prefill], [decode], prepare=sends)
            # A prompt that is cached would be prefilled where it is.
            for trace, flags, prompt in ((TRACE, "00", [5] * 200), (TRACE, "01", [7] * 200), (LOCAL, "01", [9] * 20)):
                body = json.dumps({"model": "llama", "prompt": prompt, "max_tokens": 4}).encode()
                headers = {"content-type": "application/json", "traceparent": f"00-{trace}-{SPAN}-{flags}"}
                with urllib.request.urlopen(urllib.request.Request(f"{gateway.http}/v1/completions", body, headers)):
                    pass
            assert started.end(gateway) == 0  # what is held is sent first
    finally:
        server.stop(None).wait(DEADLINE_S)
    received = [(where, span) for where, span in collector.received if span.trace_id.hex() == TRACE]
    by_name = {span.name: (where, span) for where, span in received}
    root = by_name["text_completion llama"][1]
    assert root.parent_span_id.hex() == SPAN
    assert len([span for _, span in received if span.name == root.name]) == 1
    assert {name: where for name, (where, _) in by_name.items()}.items() >= {
        root.name: "baton-gateway",
        "attempt": "baton-gateway",
        "prefill": "baton-prefill",
        "prefill.chunk": "baton-prefill",
        "kv.send": "baton-prefill",
        "kv.transfer": "baton-decode",
        "decode.admit": "baton-decode",
        "decode": "baton-decode",
    }.items()
    ids = {span.span_id for _, span in received}
    assert all(span.parent_span_id in ids for _, span in received if span is not root)
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for _, span in collector.received)
    here = {span.name: where for where, span in collector.received if span.trace_id.hex() == LOCAL}
    assert here.items() >= {"prefill": "baton-decode", "prefill.chunk": "baton-decode"}.items()
    assert "kv.send" not in here


def test_requests_are_served_without_their_collector() -> None:
    with machines() as started:
        prefill, decode = started.nodes(("prefill", {}), ("decode", {}))
        gateway = started.gateway([prefill], [decode], prepare=partial(send_to, "http://127.0.0.1:1"))
        body = b'{"model": "llama", "prompt": "x", "max_tokens": 4}'
        request = urllib.request.Request(f"{gateway.http}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        assert started.end(gateway) == 0
