"""One span, as plain values. Pure. Times are seconds of the clock that measured them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.metrics.metric import ProcessRole
from baton.tracing.declared import Attribute

Value = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[Attribute, Value]


@dataclass(frozen=True)
class SpanPlace:
    """The process that did a span's work.

    Attributes:
        name: the node's name; empty: the gateway that exports the span.
    """

    role: ProcessRole = ProcessRole.GATEWAY
    name: str = ""


GATEWAY = SpanPlace()


@dataclass(frozen=True)
class Event:
    at_s: float
    name: str
    attributes: Attributes = field(default_factory=dict)


@dataclass
class Span:
    """One span.

    Attributes:
        span_id, parent_id: 0 is none.
        links: ids of lost attempts in the same trace.
        error: what failed; None: nothing did.
    """

    name: str
    span_id: int
    parent_id: int
    start_s: float
    end_s: float
    place: SpanPlace = GATEWAY
    attributes: dict[Attribute, Value] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    error: str | None = None

    def keep_within(self, start_s: float, end_s: float) -> None:
        """Moves it between these times: a node may report times that cannot be true, even NaN."""
        self.start_s = min(end_s, max(start_s, self.start_s))
        self.end_s = min(end_s, max(self.start_s, self.end_s))
