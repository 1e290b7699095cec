"""The messages between the processes of one node, apart from engine steps: plain records, one for each verb."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from baton.core.errors import BatonError, ConfigError
from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime, Sources
from baton.security.roles import Role
from baton.settings.node_config import NodeSettings
from kvtransfer.conversion import KVConversion
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.link import LinkSpeed
from kvtransfer.records import EntryLink, LinkMeasure, PullJob, RefusedSegment, SendJob, TransferCounters, WarmUp
from kvtransfer.segments import Segment

T = TypeVar("T")

CHANNELS = ("calls", "steps")  # of each rank above 0


@dataclass(frozen=True)
class Meeting:
    """The place at which the ranks find each other.

    Attributes:
        file: a file that all ranks see and no other group has used; None: they meet at rank 0's store.
        host, port: of rank 0's store.
    """

    file: Path | None
    host: str = ""
    port: int = 0


@dataclass(frozen=True)
class Setup:
    """The first message to a rank above 0.

    Attributes:
        settings: rank 0's settings, which all ranks use.
        program: name of the node's program, for log lines.
    """

    settings: NodeSettings
    program: str
    rank: int
    meeting: Meeting


@dataclass(frozen=True)
class Up:
    """The answer to a `Setup`: the rank is about to meet the others. It is sent again when the rank's runner is
    prepared. If the rank fails, it sends a `baton.node.fault.Fault`."""


# ---- between rank 0 and its gate


@dataclass(frozen=True)
class GateSetup:
    """The first message to the gate.

    Attributes:
        ends: numbers of the inherited sockets, by rank and channel.
    """

    settings: NodeSettings
    program: str
    role: Role
    ends: dict[tuple[int, str], int]


@dataclass(frozen=True)
class Joined:
    """A rank is connected."""

    rank: int
    host: str


@dataclass(frozen=True)
class RankLost:
    """A rank that was connected is gone."""

    rank: int
    host: str
    why: str


@dataclass(frozen=True)
class Failed:
    """The gate cannot open."""

    error: ConfigError


GateReport = Joined | RankLost | Failed


# ---- verbs


class Verb(Generic[T]):
    """A call of a method of `kvtransfer.rank_transfer.RankTransfer`, whose answer is a T. Fields are its arguments."""


@dataclass(frozen=True)
class Listen(Verb[bytes]):
    peer: int


@dataclass(frozen=True)
class RankConnect(Verb[None]):
    peer: int
    address: bytes
    message_bytes: int | None
    group: int | None
    conversion: KVConversion | None
    incarnation: int
    sealed: bool
    has_draft: bool


@dataclass(frozen=True)
class Disconnect(Verb[tuple[int, ...]]):
    peer: int


@dataclass(frozen=True)
class SendWarmUp(Verb[WarmUp]):
    peer: int
    sender_number: int


@dataclass(frozen=True)
class AwaitWarmUp(Verb[LinkMeasure]):
    peer: int
    messages: int
    bytes: int
    timeout_s: float


@dataclass(frozen=True)
class UseLink(Verb[None]):
    peer: int
    link: LinkSpeed


@dataclass(frozen=True)
class RankSend(Verb[tuple[Segment, ...]]):
    job: SendJob


@dataclass(frozen=True)
class Quiet(Verb[None]):
    peer: int
    lease: int


@dataclass(frozen=True)
class RankOpenLease(Verb[None]):
    lease: LeaseGrant


@dataclass(frozen=True)
class RankCloseLease(Verb[LeaseTotals]):
    number: int


@dataclass(frozen=True)
class SaveEntries(Verb[tuple[int, ...]]):
    saves: tuple[EntryBlocks, ...]


@dataclass(frozen=True)
class FindEntries(Verb[int]):
    keys: tuple[EntryKey, ...]


@dataclass(frozen=True)
class FindState(Verb[int]):
    after: tuple[EntryKey, ...]


@dataclass(frozen=True)
class LoadEntries(Verb[Sources]):
    entries: EntryBlocks
    timeout_s: float
    entry_s: float


@dataclass(frozen=True)
class BeginPull(Verb[int]):
    job: PullJob
    links: tuple[EntryLink, ...]


@dataclass(frozen=True)
class EndPull(Verb[int]):
    number: int
    first: int
    timeout_s: float


@dataclass(frozen=True)
class ServePull(Verb[int]):
    link: EntryLink
    job: PullJob


@dataclass(frozen=True)
class KeepEntries(Verb[None]):
    keys: tuple[EntryKey, ...]
    keep: KeepTime
    with_state: bool


@dataclass(frozen=True)
class DropEntries(Verb[None]):
    keys: tuple[EntryKey, ...]


@dataclass(frozen=True)
class DropEntriesOf(Verb[DroppedEntries]):
    roots: frozenset[bytes]


@dataclass(frozen=True)
class Reopen(Verb[None]):
    incarnation: int
    receive_bytes_per_s: float | None


# ---- from rank 0


@dataclass(frozen=True)
class Start:
    """Open the KV transfer. The answer has the same number."""

    number: int
    incarnation: int


@dataclass(frozen=True)
class RankCall:
    """Perform a verb. The answer has the same number."""

    number: int
    verb: Verb[Any]


@dataclass(frozen=True)
class Cancel:
    """The caller of that number no longer wants the result. The answer says when the call has ended."""

    number: int


@dataclass(frozen=True)
class Close:
    """Close the KV transfer, and end."""


# ---- to rank 0


@dataclass(frozen=True)
class RankAnswer:
    """The outcome of a call, or of `Start`."""

    number: int
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Heartbeat:
    """Sent once a second: the rank's counters and, if its transfer thread is stuck, the thread's stack."""

    counters: TransferCounters
    stuck: str


@dataclass(frozen=True)
class LinkFailed:
    """The link to a peer has broken."""

    peer: int
    error: BatonError


Report = RankAnswer | LeaseTotals | RefusedSegment | LinkFailed | Heartbeat
