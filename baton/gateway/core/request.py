"""One validated request and the rules for it: plain values, the input of the request's machine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.errors import DeadlineExceeded
from baton.core.kv_entries import KeepTime
from baton.core.sampling import ResolvedSampling
from baton.core.types import DEFAULT_OBJECTIVE, NO_SLO, AdapterRef, LocalPolicy, Objective, Slo
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class OutputEnd:
    """Why an output ended; `stop_reason` is the stop string or stop token id."""

    reason: common_pb2.FinishReason.ValueType
    stop_reason: str


@dataclass(frozen=True)
class Request:
    """One validated request.

    Attributes:
        started_at_s: start of the client's call, on the clock of `now_s`.
        timeout_s: time from the start to the deadline.
        priority: lower values go first among waiting requests.
        slo: the client's bounds; the gateway's apply where a bound is absent.
        keep: how long nodes keep its KV outside of their caches; None: as they like.
        session_id: includes the client's name. Requests of one session go to the same nodes where that costs nothing.
        output: tokens that the client already has; the answer continues after them.
        revision: revision of the weights that computed `output`, the only one that may continue it; empty: any.
        ended: end of an output that is complete with `output`; None: more tokens are due.
        prompt_message: the prompt as the client has sent it, from which messages to nodes copy it at once; None: the
            client has sent a text, or more tokens.
        blocks: block numbers of the prompt, shared by all outputs of the request; None: the machine computes them.
        traceparent: asks nodes to report the times of their work; empty: the request is not traced.
        adapter: adapter that the serving nodes must have; None: the base model.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: ResolvedSampling
    cache_salt: str
    started_at_s: float
    timeout_s: float
    priority: int = 0
    slo: Slo = NO_SLO
    session_id: str = ""
    keep: KeepTime | None = None
    output: tuple[int, ...] = ()
    revision: str = ""
    ended: OutputEnd | None = None
    prompt_message: pb.TokenIds | None = field(default=None, compare=False, repr=False)
    blocks: PromptBlocks | None = field(default=None, compare=False)
    traceparent: str = ""
    adapter: AdapterRef | None = None

    @property
    def deadline_s(self) -> float:
        return self.started_at_s + self.timeout_s


@dataclass(frozen=True)
class Outputs:
    """Number of outputs that a request samples, and number of best ones that its client gets."""

    drawn: int
    returned: int


@dataclass(frozen=True)
class Rules:
    """Gateway settings that apply to one request, documented in `baton.settings.gateway_config.GatewaySettings`."""

    local_policy: LocalPolicy
    max_attempts: int
    max_queue_s: float
    prefill_stall_s: float
    decode_stall_s: float
    failover_wait_s: float
    slo: Slo = NO_SLO
    objective: Objective = DEFAULT_OBJECTIVE
    refuse_late: bool = False


def deadline_exceeded(timeout_s: float, failures: str = "") -> DeadlineExceeded:
    """The error of a request that has reached its deadline; `failures` lists what failed before."""
    if timeout_s <= 0:
        return DeadlineExceeded("the deadline had passed before the request began", cure="allow more time")
    why = f" ({failures})" if failures else ""
    return DeadlineExceeded(f"the request did not finish within its {timeout_s:.3g} s{why}", cure="allow more time")
