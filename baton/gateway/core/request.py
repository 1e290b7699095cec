"""One checked request and the rules for it: plain values, the input of the request's machine."""

from dataclasses import dataclass, field

from baton.core.errors import DeadlineExceeded
from baton.core.sampling import ResolvedSampling
from baton.core.types import NO_SLO, AdapterRef, LocalPolicy, Slo
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.protos.v1 import common_pb2


@dataclass(frozen=True)
class OutputEnd:
    """Why an output ended; `stop_reason` is the stop string or stop token id."""

    reason: common_pb2.FinishReason.ValueType
    stop_reason: str


@dataclass(frozen=True)
class Request:
    """One checked request.

    Attributes:
        started_at_s: start of the client's call, on the clock of `now_s`.
        timeout_s: time from the start to the deadline.
        priority: among waiting requests lower values go first.
        slo: what the client expects; absent bounds are the gateway's.
        session_id: with its client's name. Requests of one session go to the same nodes where that costs nothing.
        output: tokens that the client has already; the answer goes on after them.
        revision: of the weights that gave the client a part of the answer: it goes on with these only; empty: any.
        ended: how the output ends with the last of these; None: more tokens are due.
        blocks: names of the prompt's blocks, which all outputs share; None: not needed.
        traceparent: for nodes, which then report the times of their work; empty: nobody wants to know.
        adapter: only nodes that have it may serve the request; None: the base model.
    """

    request_id: str
    prompt: list[int]
    sampling: ResolvedSampling
    cache_salt: str
    started_at_s: float
    timeout_s: float
    priority: int = 0
    slo: Slo = NO_SLO
    session_id: str = ""
    output: tuple[int, ...] = ()
    revision: str = ""
    ended: OutputEnd | None = None
    blocks: PromptBlocks | None = field(default=None, compare=False)
    traceparent: str = ""
    adapter: AdapterRef | None = None

    @property
    def deadline_s(self) -> float:
        return self.started_at_s + self.timeout_s


@dataclass(frozen=True)
class Outputs:
    """How many outputs a request draws, and how many of them, the best ones, its client gets."""

    drawn: int
    returned: int


@dataclass(frozen=True)
class Rules:
    """The gateway's settings that decide about one request; `baton.settings.gateway_config.GatewaySettings` describes
    them."""

    local_policy: LocalPolicy
    max_attempts: int
    max_queue_s: float
    prefill_stall_s: float
    decode_stall_s: float
    failover_wait_s: float
    slo: Slo = NO_SLO
    refuse_late: bool = False


def deadline_exceeded(timeout_s: float, failures: str = "") -> DeadlineExceeded:
    """The error of a request whose time is up; `failures`: what had failed until then."""
    if timeout_s <= 0:
        return DeadlineExceeded("the deadline had passed before the request began", cure="allow it more time")
    why = f" ({failures})" if failures else ""
    return DeadlineExceeded(
        f"the request was not finished within its {timeout_s:.3g} s{why}", cure="allow it more time"
    )
