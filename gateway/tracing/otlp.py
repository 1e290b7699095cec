"""Spans as OTLP has them: bytes of an ExportTraceServiceRequest, of which any number may be joined.

OpenTelemetry's own messages are used without its SDK: that keeps each span as an object until a thread encodes it,
which costs several times as much, and holds the interpreter while tokens wait.
"""

from collections.abc import Iterable, Mapping, Sequence

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

import baton
from baton.tracing.span import Attributes, Event, Place, Span, Value

_SCOPE = common_pb2.InstrumentationScope(name="baton", version=baton.__version__)
_KINDS = {True: trace_pb2.Span.SPAN_KIND_SERVER, False: trace_pb2.Span.SPAN_KIND_INTERNAL}
_ERROR = trace_pb2.Status.STATUS_CODE_ERROR
_TEXT_MAX = 1024  # characters of one value
_INT_MAX = 2**63 - 1
_FLAGS = 0x1  # sampled, by whatever rule: it is exported
_REMOTE_KNOWN, _REMOTE = 0x100, 0x200


class Encoder:
    """Encodes traces.

    Args:
        resource: attributes of the process that exports; nodes' spans have the node's name and role in their place.
    """

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._resource = resource
        self._places: dict[Place, resource_pb2.Resource] = {}

    def encode(
        self, trace_id: int, spans: Iterable[Span], *, unix_ns: int, at_s: float, state: str = "", remote: bool = False
    ) -> bytes:
        """The spans of one trace.

        Args:
            unix_ns, at_s: the same moment, as a time of day and on the spans' clock.
            state: the caller's tracestate.
            remote: the first span's parent is another process's.
        """
        offset_ns = unix_ns - round(at_s * 1e9)
        trace = trace_id.to_bytes(16, "big")
        grouped: dict[Place, list[trace_pb2.Span]] = {}
        for index, span in enumerate(spans):
            encoded = _span(span, trace, offset_ns, state, is_root=index == 0, remote=remote and index == 0)
            grouped.setdefault(span.place, []).append(encoded)
        request = trace_service_pb2.ExportTraceServiceRequest(
            resource_spans=[
                trace_pb2.ResourceSpans(
                    resource=self._of(place), scope_spans=[trace_pb2.ScopeSpans(scope=_SCOPE, spans=each)]
                )
                for place, each in grouped.items()
            ]
        )
        return request.SerializeToString()

    def _of(self, place: Place) -> resource_pb2.Resource:
        found = self._places.get(place)
        if found is None:
            attributes = dict(self._resource)
            if place.name:
                attributes |= {"service.name": f"baton-{place.role}", "service.instance.id": place.name}
            if len(self._places) >= 1024:  # nodes come and go
                self._places.clear()
            found = self._places[place] = resource_pb2.Resource(attributes=_attributes(attributes))
        return found


def _span(span: Span, trace: bytes, offset_ns: int, state: str, *, is_root: bool, remote: bool) -> trace_pb2.Span:
    encoded = trace_pb2.Span(
        trace_id=trace,
        span_id=span.span_id.to_bytes(8, "big"),
        parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
        trace_state=state,
        flags=_FLAGS | _REMOTE_KNOWN | (_REMOTE if remote else 0),
        name=span.name[:_TEXT_MAX],
        kind=_KINDS[is_root],
        start_time_unix_nano=offset_ns + round(span.start_s * 1e9),
        end_time_unix_nano=offset_ns + round(span.end_s * 1e9),
        attributes=_attributes(span.attributes),
    )
    if span.events:
        encoded.events.extend(_event(event, offset_ns) for event in span.events)
    if span.links:
        encoded.links.extend(
            trace_pb2.Span.Link(trace_id=trace, span_id=each.to_bytes(8, "big"), flags=_FLAGS) for each in span.links
        )
    if span.error is not None:
        encoded.status.code, encoded.status.message = _ERROR, span.error[:_TEXT_MAX]
    return encoded


def _event(event: Event, offset_ns: int) -> trace_pb2.Span.Event:
    return trace_pb2.Span.Event(
        name=event.name,
        time_unix_nano=offset_ns + round(event.at_s * 1e9),
        attributes=_attributes(event.attributes),
    )


def _attributes(values: Attributes | Mapping[str, str]) -> Sequence[common_pb2.KeyValue]:
    return [common_pb2.KeyValue(key=name, value=_value(value)) for name, value in values.items()]


def _value(value: Value) -> common_pb2.AnyValue:
    match value:
        case bool():
            return common_pb2.AnyValue(bool_value=value)
        case str():
            return common_pb2.AnyValue(string_value=value[:_TEXT_MAX])
        case int():
            return common_pb2.AnyValue(int_value=min(value, _INT_MAX))
        case float():
            return common_pb2.AnyValue(double_value=value)
    return common_pb2.AnyValue(array_value=common_pb2.ArrayValue(values=[_value(each) for each in value]))
