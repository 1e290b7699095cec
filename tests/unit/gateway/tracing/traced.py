"""One request's machine, driven by hand, with a tracer whose traces stay here."""

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from baton.core.errors import BatonError
from baton.gateway.core.events import Event
from baton.gateway.observe.tracing.otlp import SpanEncoder
from baton.gateway.observe.tracing.tracer import Ending, Tracer
from baton.gateway.request.commands import Command
from baton.gateway.request.journal import Journal
from baton.metrics.metric import Outcome
from baton.tracing.context import TraceContext
from baton.tracing.sampling import Sampling
from tests.unit.gateway.fleets import request
from tests.unit.gateway.served import Served


class Traces:
    """A tracer, and what it has exported."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.exported: list[bytes] = []
        encoder = SpanEncoder({"service.name": "baton-gateway"})
        self.tracer = Tracer(Sampling(ratio), encoder, "llama", self.exported.append)

    def end(
        self,
        *outputs: "Traced",
        outcome: Outcome = Outcome.FINISHED,
        error: BatonError | None = None,
        after_s: float = 0.0,
        parent: TraceContext | None = None,
    ) -> "Exported":
        """Ends a request with these outputs, `after_s` after their last event; returns its trace."""
        trace = self.tracer.begin("mine", parent, 0.0)
        trace.note_request("", "chat")
        trace.prepared(request(), 0.0)
        trace.admitted(0.0)
        for output in outputs:
            trace.output_ended(output.journal, output.machine, output.now_s)
        self.exported.clear()
        now_s = max((output.now_s for output in outputs), default=0.0) + after_s
        trace.end(Ending(outcome, error, "alice"), now_s)
        return Exported(now_s, b"".join(self.exported))


class Traced(Served):
    """A request with a journal, as its driver writes it."""

    def __init__(self, *, index: int = 0, **how: object) -> None:
        self.journal = Journal(index)
        super().__init__(**how)  # type: ignore[arg-type]

    def handle(self, *events: Event, after_s: float = 0.0) -> list[Command]:
        for event in events:
            self.journal.event(self.now_s + after_s, event)
        commands = super().handle(*events, after_s=after_s)
        for command in commands:
            self.journal.command(self.now_s, command)
        return commands


class Exported:
    """One trace as a collector gets it. Times are seconds of the request's clock."""

    def __init__(self, ended_at_s: float, data: bytes) -> None:
        self.resources = ExportTraceServiceRequest.FromString(data).resource_spans
        self.spans = [span for each in self.resources for scope in each.scope_spans for span in scope.spans]
        self._ended_at_s = ended_at_s

    @property
    def root(self) -> trace_pb2.Span:
        return self.spans[0]

    def named(self, name: str) -> list[trace_pb2.Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> trace_pb2.Span:
        (span,) = self.named(name)
        return span

    def times(self, name: str) -> list[tuple[float, float]]:
        """Start and end of all spans with this name."""
        return [(self._s(span.start_time_unix_nano), self._s(span.end_time_unix_nano)) for span in self.named(name)]

    def service(self, span: trace_pb2.Span) -> tuple[str, str]:
        """The name and the instance of the process whose work it is."""
        for each in self.resources:
            if any(span in scope.spans for scope in each.scope_spans):
                found = attributes(each.resource)
                return str(found["service.name"]), str(found.get("service.instance.id", ""))
        raise AssertionError(span)

    def _s(self, unix_ns: int) -> float:
        return round(self._ended_at_s - (self.root.end_time_unix_nano - unix_ns) / 1e9, 6)


def attributes(of: object) -> dict[str, object]:
    """The attributes of a span, an event or a resource."""
    found: dict[str, object] = {}
    for item in of.attributes:  # type: ignore[attr-defined]
        value = item.value
        kind = value.WhichOneof("value")
        array = [each.string_value for each in value.array_value.values]
        found[item.key] = array if kind == "array_value" else getattr(value, kind)
    return found
