"""Commands of one request's machine. Plain values; `RequestDriver` executes them in order."""

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.protos.v1 import generation_pb2, node_status_pb2


@dataclass(frozen=True)
class SubmitToDecode:
    """Submit the request on the session with the node that decodes it; the driver fills in the key.

    Args:
        role: role of the node. A prefill node serves the request alone.
        node: name of the node.
    """

    attempt: int
    role: node_status_pb2.Role.ValueType
    address: str
    request: decode_pb2.SubmitRequest
    node: str = ""


@dataclass(frozen=True)
class AskDecode:
    """Send another message about this request on the same session; the driver fills in the key."""

    attempt: int
    message: decode_pb2.RenewTicket | decode_pb2.PrefillHere


@dataclass(frozen=True)
class LeaveDecode:
    """End the attempt. `cancel` is False if the decode node has ended the request itself."""

    attempt: int
    cancel: bool


@dataclass(frozen=True)
class CallPrefill:
    """Call a prefill node with the request's ticket."""

    call: int
    address: str
    request: prefill_pb2.PrefillRequest
    timeout_s: float
    node: str = ""


@dataclass(frozen=True)
class CancelPrefill:
    """End a Prefill call that still runs."""

    call: int


@dataclass(frozen=True)
class LoseNode:
    """Mark a node as lost (`Fleet.lost`) that owes an answer and gave no sign of life for too long."""

    role: node_status_pb2.Role.ValueType
    address: str
    reason: str


@dataclass(frozen=True)
class Respond:
    """Send a message to the client. Messages are sent in order."""

    message: generation_pb2.GenerateResponse


@dataclass(frozen=True)
class Finish:
    """End the request: the last command. `error` is None if the request was served to its end."""

    error: BatonError | None


Command = SubmitToDecode | AskDecode | LeaveDecode | CallPrefill | CancelPrefill | LoseNode | Respond | Finish
