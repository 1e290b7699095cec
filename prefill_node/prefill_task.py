"""One Prefill call from its ticket to its end: compute, send, hand over; or stop, become quiet, report. Pure.

`call_sends` decides what is sent, and in which jobs.
The call's blocks are freed only when all its segments are sent, or when nothing of its lease is in flight any more.
"""

from dataclasses import replace
from enum import Enum, auto

from baton.core.errors import BatonError, InvalidRequest
from baton.core.token_ids import token_array
from baton.core.types import DEFAULT_OBJECTIVE, NOTHING_LOADED
from baton.engine.events import (
    ChunkComputed,
    LayersComputed,
    PromptScored,
    RequestFailed,
    RequestStarted,
    TokenSampled,
    TokensDrafted,
)
from baton.engine.request import EngineRequest
from baton.kvcache.spec import KVCacheSpec
from baton.node.prompt_logprobs import add_prompt_logprobs
from baton.protos.internal.v1 import decode_pb2, lease_pb2
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.rpc.convert import (
    adapter_from_proto,
    finish_reason_to_proto,
    loaded_to_proto,
    resolved_sampling_from_proto,
    token_to_proto,
)
from baton.rpc.convert_node import check_times, keep_time_from_proto, kept_prefix_from_proto
from baton.rpc.error_detail import to_detail
from kvtransfer.segments import LEASE_KEY_BYTES, LEASE_NUMBER_BITS
from prefill_node.call_sends import CallSends
from prefill_node.commands import Abort, Command, EndCall, Prefetch, Respond, SendToPeer, StopSending, Submit
from prefill_node.events import Aborted, BecameQuiet, Called, EngineRefused, Prefetched, SendFailed, Sent, StopFailed

EngineEvent = (
    RequestStarted | LayersComputed | ChunkComputed | PromptScored | TokensDrafted | TokenSampled | RequestFailed
)
TaskEvent = Prefetched | EngineRefused | EngineEvent | Sent | SendFailed | BecameQuiet | StopFailed | Aborted


class PrefillPhase(Enum):
    """The event that a call waits for."""

    RUNNING = auto()  # for engine steps and its own sends
    STOPPING = auto()  # `BecameQuiet`
    FREEING = auto()  # `Aborted`
    ENDED = auto()


class PrefillTask:
    """The state of one call.

    Args:
        prefetches: whether stores outside of the cache may have some of the prompt.

    Raises:
        InvalidRequest: a sampling parameter, a token id or a time is out of its range.
    """

    def __init__(self, called: Called, *, spec: KVCacheSpec, now_s: float, prefetches: bool = False) -> None:
        request = called.request
        check_times(request)
        self.call = called.call
        self.peer = called.peer
        self.ticket = request.ticket
        self.phase = PrefillPhase.RUNNING
        self._prefetches = prefetches
        self._loaded = NOTHING_LOADED
        self._split = request.ticket.first_part  # the decode node computes the rest and draws all tokens
        sampling = resolved_sampling_from_proto(request.sampling)
        self._request = EngineRequest(
            request_id=str(called.call),
            prompt=token_array(request.prompt_token_ids, field="prompt"),
            output=tuple(request.output_token_ids),
            sampling=replace(sampling, grammar=None, prompt_logprobs=None) if self._split else sampling,
            cache_salt=request.cache_salt,
            keep=keep_time_from_proto(request),
            adapter=adapter_from_proto(request.adapter),
            prefill_only=True,
            stop_tokens=self.ticket.token_stop if self._split else None,
            due_s=now_s + request.ttft_budget_s if request.HasField("ttft_budget_s") else None,
            since_s=now_s - request.waited_s,
            waited_s=request.waited_s,
            refuse_late=request.refuse_late,
            ttft_factor=request.ttft_factor or DEFAULT_OBJECTIVE.ttft_factor,
            layers_per_group=called.layers_per_group if called.layers_per_group < spec.num_layers else 0,
            # The first token is also the last one when the decode node's context ends there.
            decode_context_tokens=called.peer.max_context_tokens,
            priority=request.priority,
            kept_elsewhere=kept_prefix_from_proto(request.kept_elsewhere),
        )
        self._called_s = self._started_s = now_s
        self._is_traced = bool(request.traceparent)
        self._sends = CallSends(called, spec=spec, now_s=now_s)
        self._scored: PromptScored | None = None
        self._drafts: tuple[int, ...] = ()  # for the tokens after the first
        self._sampled: TokenSampled | None = None
        self._computed_s: float | None = None  # when the engine finished the call's last computation
        self._handed_over = False
        self._error: BatonError | None = None

    @property
    def lease(self) -> int:
        return self.ticket.lease.number

    def start(self) -> list[Command]:
        """The first commands."""
        try:
            _check_ticket(self.ticket, len(self._request.prompt) + len(self._request.output))
        except InvalidRequest as error:
            return self.fail(error)
        return [Prefetch(self.call, self._request) if self._prefetches else Submit(self._request)]

    def handle(self, event: TaskEvent, now_s: float) -> list[Command]:
        """Handles an event from the engine or the transfer about this call."""
        match self.phase:
            case PrefillPhase.RUNNING:
                return self._run(event, now_s)
            case PrefillPhase.STOPPING:
                return self._stop(event)
            case PrefillPhase.FREEING:
                return self._free(event)
            case PrefillPhase.ENDED:
                return []

    # ---- running: compute, send and respond until everything is sent

    def _run(self, event: TaskEvent, now_s: float) -> list[Command]:
        match event:
            case Prefetched(loaded=loaded):
                self._loaded = loaded
                return [Submit(self._request)]
            case RequestStarted(cached_tokens=cached_tokens, queue_s=queue_s):
                # The engine reports the start when that step is over, so the time of this event is too late.
                self._started_s += queue_s
                loaded = self._loaded.at_most(cached_tokens)
                scheduled = pb.PrefillScheduled(
                    queue_s=queue_s,
                    cached_tokens=cached_tokens,
                    loaded_tokens=loaded.total,
                    loaded=loaded_to_proto(loaded),
                )
                return [self._respond(pb.PrefillEvent(scheduled=scheduled), self._started_s)]
            case LayersComputed():
                return [*self._sends.computed(event, now_s)]
            case ChunkComputed(token_stop=token_stop):
                progress = pb.PrefillProgress(computed_tokens=token_stop)
                responded = self._respond(pb.PrefillEvent(progress=progress), now_s)
                commands: list[Command] = [*self._sends.computed(event, now_s), responded]
                if self._split and token_stop >= self.ticket.token_stop:
                    commands += self._computed(now_s)
                return commands
            case PromptScored():
                self._scored = event
                return []
            case TokensDrafted(tokens=tokens):
                self._drafts = tokens
                return []
            case TokenSampled():
                self._sampled = event
                first_token = _first_token(event, self._scored, prefill_s=now_s - self._started_s)
                self._scored = None
                responded = self._respond(pb.PrefillEvent(first_token=first_token), now_s)
                return [responded, *self._computed(now_s)]
            case Sent(segments=segments):
                self._sends.sent(segments, now_s)
                return [*self._sends.next(now_s)] or self._end_if_sent(now_s)
            case EngineRefused(error=error) | RequestFailed(error=error) | SendFailed(error=error):
                return self.fail(error)
            case _:
                return []

    def _computed(self, now_s: float) -> list[Command]:
        """Hands over, now that nothing more is computed. Segments may still be in flight: the decode node waits for all
        KV in any case, and the end of the last send would be known here only after its arrival there."""
        self._computed_s = now_s
        # A request that ends with its first token needs no KV, and its lease ends with the hand-over.
        is_last = self._sampled is not None and self._sampled.finish_reason is not None
        return [*([] if is_last else [self._hand_over(now_s)]), *self._end_if_sent(now_s)]

    def _hand_over(self, now_s: float) -> SendToPeer:
        assert self._computed_s is not None, "the hand-over has the result of the last computation"
        hand_over = decode_pb2.HandOver(lease=self.lease, sampled_ago_s=now_s - self._computed_s)
        if self._sampled is not None:
            hand_over.first_token.CopyFrom(token_to_proto(self._sampled.token))
            hand_over.finish_reason = finish_reason_to_proto(self._sampled.finish_reason)
            hand_over.guesses.extend(self._drafts)
        self._handed_over = True
        return SendToPeer(self.peer.number, decode_pb2.PairRequest(hand_over=hand_over))

    def _end_if_sent(self, now_s: float) -> list[Command]:
        """Ends the call if all KV is sent: once the last computation is over, an idle sender has sent everything."""
        if self._computed_s is None or self._sends.under_way:
            return []
        commands: list[Command] = [] if self._handed_over else [self._hand_over(now_s)]
        self.phase = PrefillPhase.FREEING
        sent = self._sends.summary(self._computed_s - self._started_s if self._split else None)
        return [*commands, self._respond(pb.PrefillEvent(sent=sent), now_s), Abort(self.call)]

    def _respond(self, event: pb.PrefillEvent, at_s: float) -> Respond:
        if self._is_traced:
            event.at_s = at_s - self._called_s
            event.parts.extend(self._sends.take_parts())
        return Respond(self.call, event)

    # ---- stopping: nothing of the lease may be in flight when the peer gets `Quiet` and the blocks are freed

    def fail(self, error: BatonError) -> list[Command]:
        """Ends a running call for this reason; a call that is ending already keeps its own."""
        if self.phase is not PrefillPhase.RUNNING:
            return []
        self.phase, self._error = PrefillPhase.STOPPING, error
        return [StopSending(self.call, self.peer.number, self.lease)]

    def _stop(self, event: TaskEvent) -> list[Command]:
        match event:
            case BecameQuiet():
                assert self._error is not None, "only `fail` stops a call"
                self.phase = PrefillPhase.FREEING
                quiet = decode_pb2.Quiet(lease=self.lease, error=to_detail(self._error))
                return [SendToPeer(self.peer.number, decode_pb2.PairRequest(quiet=quiet)), Abort(self.call)]
            case StopFailed(error=error):
                # Segments may still be read from the blocks, so the engine keeps the blocks until the process ends.
                self.phase = PrefillPhase.ENDED
                return [EndCall(self.call, error)]
            case _:
                return []

    # ---- freeing: the engine ends the request, then the call ends

    def _free(self, event: TaskEvent) -> list[Command]:
        if not isinstance(event, Aborted):
            return []
        self.phase = PrefillPhase.ENDED
        return [EndCall(self.call, self._error)]


def _check_ticket(ticket: lease_pb2.Ticket, num_tokens: int) -> None:
    """Raises InvalidRequest unless the ticket can be for a sequence of that length."""
    if ticket.lease.number >= 1 << LEASE_NUMBER_BITS:
        raise InvalidRequest(
            f"the ticket is for lease {ticket.lease.number}",
            field="ticket.lease.number",
            value=ticket.lease.number,
            allowed=(f"0 to {(1 << LEASE_NUMBER_BITS) - 1}",),
            cure="ask for a new ticket",
        )
    if len(ticket.lease.key) not in (0, LEASE_KEY_BYTES):
        raise InvalidRequest(
            f"the ticket's key has {len(ticket.lease.key)} bytes",
            field="ticket.lease.key",
            value=len(ticket.lease.key),
            allowed=(f"{LEASE_KEY_BYTES} bytes",),
            cure="ask for a new ticket",
        )
    in_order = ticket.token_start <= ticket.resume_at <= ticket.token_stop
    fits = ticket.token_stop < num_tokens if ticket.first_part else ticket.token_stop == num_tokens
    if not fits or ticket.token_start >= ticket.token_stop or not in_order:
        tokens = f"{ticket.token_start}..{ticket.token_stop}"
        raise InvalidRequest(
            f"the ticket is for tokens {tokens}, resumed at {ticket.resume_at}, and the sequence has {num_tokens}",
            field="ticket",
            value=tokens,
            cure="ask for a new ticket",
        )


def _first_token(event: TokenSampled, scored: PromptScored | None, *, prefill_s: float) -> pb.PrefillFirstToken:
    first_token = pb.PrefillFirstToken(
        token=token_to_proto(event.token),
        finish_reason=finish_reason_to_proto(event.finish_reason),
        stop_reason=event.stop_reason,
        prefill_s=prefill_s,
    )
    if scored is not None:
        add_prompt_logprobs(first_token, scored.logprobs)
    return first_token
