"""Encodes spans for OTLP, as bytes of ExportTraceServiceRequests, which may be concatenated.

OpenTelemetry's messages are used without its SDK. The SDK keeps each span as an object until a thread encodes it, which
costs several times as much and holds the interpreter lock while tokens wait.
"""

from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from baton.core.version import __version__
from baton.tracing.span import Attributes, Span, SpanPlace, Value

_SCOPE = common_pb2.InstrumentationScope(name="baton", version=__version__)
_KINDS = {True: trace_pb2.Span.SPAN_KIND_SERVER, False: trace_pb2.Span.SPAN_KIND_INTERNAL}
_ERROR = trace_pb2.Status.STATUS_CODE_ERROR
_TEXT_MAX = 1024  # characters of one value
_INT_MAX = 2**63 - 1
_FLAGS = 0x1  # sampled, which is true of every exported span
_REMOTE_KNOWN, _REMOTE = 0x100, 0x200


class SpanEncoder:
    """Encodes traces.

    Args:
        resource: attributes of the exporting process; spans of nodes have the node's name and role instead.
    """

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._resource = resource
        self._places: dict[SpanPlace, resource_pb2.Resource] = {}

    def encode(
        self, trace_id: int, spans: Iterable[Span], *, unix_ns: int, at_s: float, state: str = "", remote: bool = False
    ) -> bytes:
        """Encodes the spans of one trace.

        Args:
            unix_ns: the present unix time.
            at_s: the same moment on the clock of the spans.
            state: tracestate of the caller.
            remote: whether the parent of the first span belongs to another process.
        """
        offset_ns = unix_ns - round(at_s * 1e9)
        trace = trace_id.to_bytes(16, "big")
        request = trace_service_pb2.ExportTraceServiceRequest()
        grouped: dict[SpanPlace, trace_pb2.ScopeSpans] = {}
        for index, span in enumerate(spans):
            group = grouped.get(span.place)
            if group is None:
                group = grouped[span.place] = self._group(request, span.place)
            _add_span(group, span, trace, offset_ns, state, is_root=index == 0, remote=remote and index == 0)
        return request.SerializeToString()

    def _group(self, request: trace_service_pb2.ExportTraceServiceRequest, place: SpanPlace) -> trace_pb2.ScopeSpans:
        return request.resource_spans.add(resource=self._of(place)).scope_spans.add(scope=_SCOPE)

    def _of(self, place: SpanPlace) -> resource_pb2.Resource:
        found = self._places.get(place)
        if found is None:
            attributes = dict(self._resource)
            if place.name:
                attributes |= {"service.name": f"baton-{place.role}", "service.instance.id": place.name}
            if len(self._places) >= 1024:  # nodes come and go
                self._places.clear()
            found = self._places[place] = resource_pb2.Resource()
            _add_attributes(found, attributes)
        return found


# Messages are created inside their parents: adding a separate message copies it, which takes longer than all other work
# here.


def _add_span(
    group: trace_pb2.ScopeSpans, span: Span, trace: bytes, offset_ns: int, state: str, *, is_root: bool, remote: bool
) -> None:
    added = group.spans.add(
        trace_id=trace,
        span_id=span.span_id.to_bytes(8, "big"),
        parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
        trace_state=state,
        flags=_FLAGS | _REMOTE_KNOWN | (_REMOTE if remote else 0),
        name=span.name[:_TEXT_MAX],
        kind=_KINDS[is_root],
        start_time_unix_nano=offset_ns + round(span.start_s * 1e9),
        end_time_unix_nano=offset_ns + round(span.end_s * 1e9),
    )
    _add_attributes(added, span.attributes)
    for event in span.events:
        _add_attributes(
            added.events.add(name=event.name, time_unix_nano=offset_ns + round(event.at_s * 1e9)), event.attributes
        )
    for each in span.links:
        added.links.add(trace_id=trace, span_id=each.to_bytes(8, "big"), flags=_FLAGS)
    if span.error is not None:
        added.status.code, added.status.message = _ERROR, span.error[:_TEXT_MAX]


def _add_attributes(
    to: trace_pb2.Span | trace_pb2.Span.Event | resource_pb2.Resource, values: Attributes | Mapping[str, str]
) -> None:
    add = to.attributes.add
    for name, value in values.items():
        _set(add(key=name).value, value)


def _set(to: common_pb2.AnyValue, value: Value) -> None:
    match value:
        case bool():
            to.bool_value = value
        case str():
            to.string_value = value[:_TEXT_MAX]
        case int():
            to.int_value = min(value, _INT_MAX)
        case float():
            to.double_value = value
        case _:
            to.array_value.SetInParent()  # it may be empty
            for each in value:
                to.array_value.values.add(string_value=each[:_TEXT_MAX])
