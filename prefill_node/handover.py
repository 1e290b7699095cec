"""One request on the prefill node, from its ticket to its last byte: this side of the hand-over, top to bottom.

The KV of a chunk is on its way while the next chunk computes, and where that pays the KV of its first layers while its
later ones do: `HandOver.run` follows the engine and tells the gateway, a second task sends what is computed. Whatever
happens, nothing of the lease is in flight any more and the blocks are free when `run` ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.convert import finish_reason_to_proto, sampling_from_proto, token_to_proto
from baton.errors import BatonError, Cancelled, InternalError, InvalidRequest
from baton.rpc.status import to_detail
from engine.engine import Engine
from engine.events import ChunkComputed, LayersComputed, RequestFailed, RequestStarted, TokenSampled
from engine.request import EngineRequest
from kvtransfer.ranked import RankedTransfer
from kvtransfer.records import SendJob
from kvtransfer.segments import LEASE_BITS, Segment
from prefill_node.pairs import Pair
from prefill_node.unsent import Part, Unsent
from protos.baton.v1 import common_pb2, decode_pb2
from protos.baton.v1 import prefill_pb2 as pb

Event = RequestStarted | LayersComputed | ChunkComputed | TokenSampled | RequestFailed
Tell = Callable[[pb.PrefillEvent], Awaitable[None]]


@dataclass(frozen=True)
class Sent:
    """What has left this node for one lease."""

    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        return sum(segment.payload_bytes for segment in self.segments)


class HandOver:
    """One request: its place in the engine, its blocks, its lease at a decode node.

    Args:
        num_layers: of the model.
        layers_per_group: so many of them go together while a chunk computes; all of them: chunks go whole.
        tell: writes one event to the gateway.
    """

    def __init__(
        self,
        engine: Engine,
        transfer: RankedTransfer,
        pair: Pair,
        request: pb.PrefillRequest,
        engine_id: str,
        tell: Tell,
        *,
        num_layers: int,
        layers_per_group: int,
    ) -> None:
        self.engine = engine
        self.transfer = transfer
        self.pair = pair
        self.ticket = request.ticket
        self.tell = tell
        self.request = EngineRequest(
            request_id=engine_id,
            prompt=tuple(request.prompt_token_ids),
            output=tuple(request.output_token_ids),
            sampling=sampling_from_proto(request.sampling),
            cache_salt=request.cache_salt,
            prefill_only=True,
            layers_per_group=layers_per_group if layers_per_group < num_layers else 0,
            # Whether the first token is also the last one is a matter of the context that it goes on in.
            decode_context_tokens=pair.max_context_tokens,
        )
        self.layer_groups = -(-num_layers // layers_per_group)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._sampled_at = 0.0
        self.unsent = Unsent(num_layers, token_start=self.ticket.token_start, token_stop=self.ticket.token_stop)
        self.block_ids: tuple[int, ...] = ()
        self._to_send = asyncio.Event()
        self._all_computed = False
        self.failure: BatonError | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = False

    def hear(self, event: Event) -> None:
        """What the engine tells of this request."""
        if isinstance(event, TokenSampled):
            self._sampled_at = time.monotonic()
        self._events.put_nowait(event)

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self.run(), name=f"request-{self.request.request_id}")
        return self._task

    def cancel(self, failure: BatonError) -> None:
        """Ends the request for that reason, unless it is ending already; `run` then gives everything back."""
        if self._task is not None and not self._ending:
            self._ending = True
            self.failure = failure
            self._task.cancel()

    @property
    def lease(self) -> int:
        return self.ticket.lease.number

    async def run(self) -> None:
        """Raises:
        BatonError: why the hand-over cannot be completed; the decode node has been told.
        """
        completed = False
        sending = asyncio.create_task(self._send_computed(), name=f"send-{self.request.request_id}")
        try:
            _check_ticket(self.ticket, len(self.request.prompt) + len(self.request.output))
            self.engine.submit(self.request)
            sampled = await self._follow_engine(sending)
            sent = await sending
            self._hand_over(sampled, sampled_ago_s=time.monotonic() - self._sampled_at)
            await self.tell(pb.PrefillEvent(sent=self._sent_event(sent)))
            completed = True
        except BatonError as error:
            self.failure = error
            raise
        finally:
            # NOTE: a cancellation from here on would leave blocks behind; `cancel` looks at this flag.
            self._ending = True
            if not completed:
                await self._stop_sending(sending)
            await self.engine.abort(self.request.request_id)

    async def _follow_engine(self, sending: asyncio.Task[Sent]) -> TokenSampled:
        """Tells the gateway what the engine does, until the first token is there."""
        submitted_at = started_at = time.monotonic()
        while True:
            event = await self._next_event(sending)
            match event:
                case RequestStarted(cached_tokens=cached_tokens, queue_s=queue_s):
                    started_at = submitted_at + queue_s  # told when that step is over
                    scheduled = pb.PrefillScheduled(queue_s=queue_s, cached_tokens=cached_tokens)
                    await self.tell(pb.PrefillEvent(scheduled=scheduled))
                case LayersComputed(token_stop=token_stop, layer_stop=layer_stop, block_ids=block_ids):
                    self._computed(token_stop, block_ids, layer_stop=layer_stop)
                case ChunkComputed(token_stop=token_stop, block_ids=block_ids):
                    self._computed(token_stop, block_ids)
                    progress = pb.PrefillProgress(computed_tokens=token_stop)
                    await self.tell(pb.PrefillEvent(progress=progress))
                case TokenSampled():
                    self._all_computed = True
                    self._to_send.set()
                    await self.tell(pb.PrefillEvent(first_token=_first_token(event, self._sampled_at - started_at)))
                    return event
                case RequestFailed(error=error):
                    raise error

    async def _next_event(self, sending: asyncio.Task[Sent]) -> Event:
        """The engine's next event, or the error that ended the sending."""
        getting = asyncio.create_task(self._events.get())
        try:
            await asyncio.wait({getting, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not getting.done():
                getting.cancel()
        if getting.done() and not getting.cancelled():
            return getting.result()
        sending.result()
        raise Cancelled("the sending of KV ended early")

    def _computed(self, token_stop: int, block_ids: tuple[int, ...], *, layer_stop: int | None = None) -> None:
        self.block_ids = block_ids
        self.unsent.computed(token_stop, layer_stop=layer_stop)
        self._to_send.set()

    async def _send_computed(self) -> Sent:
        """Sends what the decode node lacks, as it is computed; what was computed while a send ran goes in one."""
        segments: list[Segment] = []
        last = False
        while not last:
            await self._to_send.wait()
            self._to_send.clear()
            last = self._all_computed
            for part in self.unsent.take():
                # Every link counts its own segments, from a number that none of them has used.
                first_segment = max((segment.number + 1 for segment in segments), default=0)
                segments += await self.transfer.send(self._job(part, first_segment))
        return Sent(tuple(segments))

    def _job(self, part: Part, first_segment: int) -> SendJob:
        return SendJob(
            peer=self.pair.number,
            sender_number=self.pair.sender_number,
            lease=self.lease,
            incarnation=self.ticket.lease.incarnation,
            first_segment=first_segment,
            token_start=part.token_start,
            token_stop=part.token_stop,
            resume_at=self.ticket.resume_at,
            block_ids=self.block_ids,
            layers=part.layers,
        )

    def _hand_over(self, sampled: TokenSampled, *, sampled_ago_s: float) -> None:
        hand_over = decode_pb2.HandOver(
            lease=self.lease,
            first_token=token_to_proto(sampled.token),
            finish_reason=finish_reason_to_proto(sampled.finish_reason),
            sampled_ago_s=sampled_ago_s,
        )
        self.pair.write(decode_pb2.PairRequest(hand_over=hand_over))

    def _sent_event(self, sent: Sent) -> pb.PrefillSent:
        return pb.PrefillSent(
            tokens_sent=self.ticket.token_stop - self.ticket.token_start,
            bytes_sent=sent.num_bytes,
            segments=len(sent.segments),
            transport=self.pair.state.transport,
            segment_bytes=max((segment.payload_bytes for segment in sent.segments), default=0),
            kv_converted=self.pair.state.kv_converted,
            layer_groups=self.layer_groups,
        )

    async def _stop_sending(self, sending: asyncio.Task[Sent]) -> None:
        """Nothing of this lease is in flight afterwards, and the decode node knows."""
        sending.cancel()
        await asyncio.wait([sending])
        if not sending.cancelled():
            sending.exception()
        await self.transfer.quiet(self.pair.number, self.lease)
        failure = self.failure or InternalError("the prefill node failed")
        self.pair.write(decode_pb2.PairRequest(quiet=decode_pb2.Quiet(lease=self.lease, error=to_detail(failure))))


def _check_ticket(ticket: common_pb2.Ticket, num_tokens: int) -> None:
    if ticket.lease.number >= 1 << LEASE_BITS:
        raise InvalidRequest(
            f"the ticket is for lease {ticket.lease.number}",
            field="ticket.lease.number",
            value=ticket.lease.number,
            allowed=(f"0 to {(1 << LEASE_BITS) - 1}",),
            cure="ask for a new ticket",
        )
    in_order = ticket.token_start <= ticket.resume_at <= ticket.token_stop
    if ticket.token_stop != num_tokens or ticket.token_start >= num_tokens or not in_order:
        said = f"{ticket.token_start}..{ticket.token_stop}"
        raise InvalidRequest(
            f"the ticket asks for tokens {said}, to resume at {ticket.resume_at}, of {num_tokens}",
            field="ticket",
            value=said,
            cure="ask for a new ticket",
        )


def _first_token(event: TokenSampled, prefill_s: float) -> pb.PrefillFirstToken:
    return pb.PrefillFirstToken(
        token=token_to_proto(event.token),
        finish_reason=finish_reason_to_proto(event.finish_reason),
        stop_reason=event.stop_reason,
        prefill_s=prefill_s,
    )
