"""What the processes of one node tell each other, apart from engine steps. Plain records."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.config import NodeSettings
from kvtransfer.leases import LeaseTotals
from kvtransfer.records import SegmentRefused, TransferCounters


@dataclass(frozen=True)
class Setup:
    """The first message to a rank above 0.

    Attributes:
        program: of the node, for log lines.
        store: a file in which the ranks find each other.
        leader: the process that must outlive this one.
    """

    settings: NodeSettings
    program: str
    rank: int
    store: Path
    leader: int


@dataclass(frozen=True)
class Up:
    """The answer to a `Setup`: the rank is about to meet the others."""


@dataclass(frozen=True)
class Start:
    """Open the KV transfer; the answer comes under that number."""

    number: int
    incarnation: int


@dataclass(frozen=True)
class Call:
    """Call that method of the KV transfer."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    named: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """Nobody waits any more for the call of that number."""

    number: int


@dataclass(frozen=True)
class Close:
    """Close the KV transfer, and end."""


Order = Start | Call | Cancel | Close


@dataclass(frozen=True)
class Answer:
    """What became of a call."""

    number: int
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Beat:
    """A sign of life, once a second: how the rank's transfer stands, and where its thread is stuck if it is."""

    counters: TransferCounters
    stuck: str


Report = Answer | LeaseTotals | SegmentRefused | Beat
