"""What happened in one run, in order of time: plain values, so that a checker can judge them and a person read them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum


class End(StrEnum):
    """How a request ended for its client."""

    FINISHED = "finished"
    CANCELLED = "cancelled"  # by the client itself
    FAILED = "failed"
    HUNG = "hung"  # not at all


@dataclass(frozen=True)
class Asked:
    """A client sends a request.

    Attributes:
        work: the name of what it asks for.
        deadline_s: the time that the client allows; None: any.
        cancel_after: the client cancels after so many tokens; None: never.
    """

    at_s: float
    request: int
    work: str
    deadline_s: float | None = None
    cancel_after: int | None = None


@dataclass(frozen=True)
class Received:
    """New tokens and text of one output of a request."""

    at_s: float
    request: int
    output: int
    indices: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[float, ...] = ()
    finish_reason: str = ""


@dataclass(frozen=True)
class Ended:
    """A request ended.

    Attributes:
        error: the reason of a typed error; "untyped" for any other exception.
        attempts: of the receipt; 0 without one.
    """

    at_s: float
    request: int
    how: End
    error: str = ""
    detail: str = ""
    attempts: int = 0
    path: str = ""


@dataclass(frozen=True)
class FaultBegan:
    at_s: float
    number: int
    kind: str
    target: str
    detail: str = ""


@dataclass(frozen=True)
class FaultEnded:
    """The fault is over: its process serves again, its link forwards again."""

    at_s: float
    number: int


@dataclass(frozen=True)
class DiedAt:
    """A node came to the step at which a fault makes it die."""

    at_s: float
    process: str
    step: str


@dataclass(frozen=True)
class Crashed:
    """A process ended that no fault had ended."""

    at_s: float
    process: str
    code: int
    detail: str = ""


@dataclass(frozen=True)
class Measured:
    """The memory and the open files of one process."""

    at_s: float
    process: str
    pid: int
    rss_mib: float
    files: int


@dataclass(frozen=True)
class NotReleased:
    """After the storm: a node that does not release blocks or requests."""

    at_s: float
    process: str
    what: str


@dataclass(frozen=True)
class PeersLeft:
    """After the storm: a node with a peer that is neither ready nor forgotten."""

    at_s: float
    process: str
    what: str


@dataclass(frozen=True)
class NotServed:
    """Before or after the storm: a gateway that does not serve a work, however often it is asked."""

    at_s: float
    gateway: str
    work: str
    how: str


@dataclass(frozen=True)
class Calm:
    """All faults are over, and all processes serve."""

    at_s: float


@dataclass(frozen=True)
class Over:
    """The run is over."""

    at_s: float


Event = (
    Asked
    | Received
    | Ended
    | FaultBegan
    | FaultEnded
    | DiedAt
    | Crashed
    | Measured
    | NotReleased
    | PeersLeft
    | NotServed
    | Calm
    | Over
)


@dataclass
class History:
    """Events as they happen.

    Attributes:
        now_s: the time since the run's begin.
    """

    events: list[Event] = field(default_factory=list)
    now_s: Callable[[], float] = field(default_factory=lambda: _since_now())

    def add(self, event: Event) -> None:
        self.events.append(event)


def line_of(event: Event) -> str:
    """The event in one line."""
    values = ((each.name, getattr(event, each.name)) for each in fields(event) if each.name != "at_s")
    shown = " ".join(f"{name}={_shown(value)}" for name, value in values if value is not None and value not in ("", ()))
    return f"{event.at_s:9.3f} {type(event).__name__:<10} {shown}"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return repr(str(value)) if isinstance(value, str) else str(value)


def _since_now() -> Callable[[], float]:
    begun_s = time.monotonic()
    return lambda: time.monotonic() - begun_s
