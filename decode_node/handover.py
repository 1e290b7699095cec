"""One request on the decode node, from its first message to its last: this side of the hand-over, top to bottom.

Every request is one task that runs `HandOver.run`; others only put messages into its inbox or cancel it. Whatever
happens, the task ends with the blocks free and `Released` sent.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.convert import sampling_from_proto, token_from_proto
from baton.errors import BatonError, DeadlineExceeded, InternalError
from baton.rpc.status import to_detail
from baton.types import TokenOutput
from decode_node.session import Session
from engine.events import TokenSampled
from engine.request import EngineRequest, Reservation
from kvtransfer.leases import LeaseGrant, LeaseTotals
from protos.baton.v1 import common_pb2
from protos.baton.v1 import decode_pb2 as pb

if TYPE_CHECKING:
    from decode_node.node import DecodeNode

log = logging.getLogger("baton")


@dataclass(frozen=True)
class HandedOver:
    """The prefill node has sent everything of this lease."""

    lease: int
    first: TokenOutput
    finished: bool
    sampled_ago_s: float


@dataclass(frozen=True)
class Lost:
    """KV of this lease was refused, or its sender is gone."""

    lease: int
    error: BatonError


@dataclass(frozen=True)
class Renew:
    """The gateway wants a new ticket in place of this lease; tokens already given come along."""

    lease: int
    output: tuple[int, ...]


@dataclass(frozen=True)
class PrefillHere:
    """The gateway gives up on prefill nodes for this request."""

    lease: int
    output: tuple[int, ...]


@dataclass(frozen=True)
class Filled:
    """Every byte of this lease lies in its blocks."""

    lease: int
    totals: LeaseTotals


Message = HandedOver | Lost | Renew | PrefillHere | Filled


class HandOver:
    """One request's task and what it holds: blocks, at most one open lease, a place in the batch."""

    def __init__(self, node: "DecodeNode", session: Session, submit: pb.SubmitRequest) -> None:
        self.node = node
        self.session = session
        self.key = submit.key
        self.policy = submit.policy
        self.prefill_available = submit.prefill_available
        self.budget_s = submit.budget_s if submit.HasField("budget_s") else None
        self.queue_s = submit.queue_s if submit.HasField("queue_s") else 0.0
        self.submit = submit
        self.engine_id = f"{session.number}.{submit.key}"
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.lease: int | None = None
        self._closing: asyncio.Future[LeaseTotals] | None = None
        self.decoded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submitted_at = time.monotonic()
        self.prefilling_since: float | None = None
        self.task: asyncio.Task[None] | None = None
        self._ending = False

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self.run(), name=f"request-{self.engine_id}")
        return self.task

    def cancel(self) -> None:
        """Ends the request, unless it is ending already; `run` then gives everything back."""
        if self.task is not None and not self._ending:
            self._ending = True
            self.task.cancel()

    # ---- the request's life

    async def run(self) -> None:
        try:
            async with asyncio.timeout(self.budget_s):
                await self._serve()
        except TimeoutError:
            self._fail(DeadlineExceeded(f"the request's {self.budget_s:g} s are over"))
        except BatonError as error:
            self._fail(error)
        except Exception as error:
            log.exception("request %s", self.submit.request_id)
            self._fail(InternalError(f"{type(error).__name__} on the decode node"))
        finally:
            # NOTE: a cancellation from here on would leave blocks behind; `cancel` looks at this flag.
            self._ending = True
            await self._give_back()

    async def _serve(self) -> None:
        request = EngineRequest(
            request_id=self.engine_id,
            prompt=tuple(self.submit.prompt_token_ids),
            output=tuple(self.submit.output_token_ids),
            sampling=sampling_from_proto(self.submit.sampling),
            cache_salt=self.submit.cache_salt,
        )
        reservation = await self.node.room.reserve(request, queue_s=self.queue_s)
        queue_s = time.monotonic() - self.submitted_at
        num_tokens = len(request.prompt) + len(request.output)
        why_here = self._why_here(num_tokens, reservation)
        if why_here:
            self._prefill_here(request.output, why_here, reservation.cached_tokens, queue_s)
        else:
            await self._receive(request, reservation, queue_s)
        await self.decoded

    def _why_here(self, num_tokens: int, reservation: Reservation) -> str:
        """Why this node should prefill the request itself; empty when a prefill node should."""
        if self.policy == pb.LOCAL_POLICY_STRICT:
            return ""
        if self.policy == pb.LOCAL_POLICY_LOCAL:
            return "the policy is local"
        if not self.prefill_available:
            return "no prefill node is available"
        uncached = num_tokens - reservation.cached_tokens
        threshold = self.node.settings.local_prefill_tokens
        if uncached < threshold:
            return f"{uncached} uncached prompt tokens, under the threshold of {threshold}"
        return ""

    async def _receive(self, request: EngineRequest, reservation: Reservation, queue_s: float) -> None:
        """Leases the blocks to prefill nodes until one of them has filled them, or the gateway gives up on that."""
        prompt = request
        while True:
            token_stop = len(prompt.prompt) + len(prompt.output)
            lease = await self._open_lease(reservation, token_stop)
            self._send_ticket(lease, reservation, token_stop, queue_s)
            decision = await self._decision(lease)
            totals = await self._close_lease()
            match decision:
                case HandedOver(finished=True):
                    self.decoded.set_result(None)
                    return
                case HandedOver(first=first, sampled_ago_s=sampled_ago_s):
                    self.session.send(
                        pb.SessionResponse(
                            admitted=pb.Admitted(
                                key=self.key,
                                transfer_s=sampled_ago_s,
                                bytes_received=totals.bytes,
                                segments=totals.segments,
                            )
                        )
                    )
                    if self.node.engine.admit(self.engine_id, first) is not None:
                        self.decoded.set_result(None)
                    return
                case Renew(output=output):
                    prompt = replace(prompt, output=output)
                    reservation = self.node.engine.extend_reserved(self.engine_id, output)
                case PrefillHere(output=output):
                    why = "no prefill node could do it"
                    self._prefill_here(output, why, reservation.cached_tokens, queue_s)
                    return

    async def _decision(self, lease: int) -> HandedOver | Renew | PrefillHere:
        """What becomes of this lease: handed over and filled, or given up by the gateway.

        Raises:
            DeadlineExceeded: neither came within the lease's time.
        """
        handed_over: HandedOver | None = None
        heard_at = 0.0
        filled = False
        lease_s = self.node.settings.lease_s
        try:
            async with asyncio.timeout(lease_s):
                while handed_over is None or not (filled or handed_over.finished):
                    message = await self.inbox.get()
                    if message.lease != lease:
                        continue  # about a lease that this request gave up
                    match message:
                        case HandedOver():
                            handed_over, heard_at = message, time.monotonic()
                        case Filled():
                            filled = True
                        case Lost(error=error):
                            self._tell_lost(lease, error)
                        case Renew() | PrefillHere():
                            return message
        except TimeoutError:
            raise DeadlineExceeded(f"the prompt's KV did not arrive within the lease's {lease_s:g} s") from None
        waited_s = time.monotonic() - heard_at
        return replace(handed_over, sampled_ago_s=handed_over.sampled_ago_s + waited_s)

    # ---- steps of it

    async def _open_lease(self, reservation: Reservation, token_stop: int) -> int:
        """Returns when every rank takes KV for it. May be cancelled: the lease is open then all the same."""
        number = self.node.draw_lease(self)
        opening = self.node.transfer.open_lease(
            LeaseGrant(
                number=number,
                block_ids=reservation.block_ids,
                token_start=reservation.cached_tokens,
                token_stop=token_stop,
                resume_at=reservation.resume_at,
            )
        )
        self.lease = number
        await opening
        return number

    async def _close_lease(self) -> LeaseTotals:
        """Ends the open lease; afterwards nothing is ever scattered into its blocks.

        May be cancelled, and is then to be called again: the lease is closed once.
        """
        assert self.lease is not None
        if self._closing is None:
            self._closing = asyncio.ensure_future(self.node.transfer.close_lease(self.lease))
        totals = await asyncio.shield(self._closing)
        self.node.forget_lease(self.lease)
        self.lease = self._closing = None
        return totals

    def _send_ticket(self, lease: int, reservation: Reservation, token_stop: int, queue_s: float) -> None:
        ticket = common_pb2.Ticket(
            lease=common_pb2.Lease(
                number=lease, incarnation=self.node.incarnation, remaining_s=self.node.settings.lease_s
            ),
            decode_node=self.node.name,
            decode_address=self.node.address,
            token_start=reservation.cached_tokens,
            token_stop=token_stop,
            resume_at=reservation.resume_at,
        )
        self.session.send(
            pb.SessionResponse(
                reserved=pb.Reserved(
                    key=self.key, ticket=ticket, cached_tokens=reservation.cached_tokens, queue_s=queue_s
                )
            )
        )

    def _prefill_here(self, output: tuple[int, ...], why: str, cached_tokens: int, queue_s: float) -> None:
        accepted = pb.Accepted(key=self.key, why=why, cached_tokens=cached_tokens, queue_s=queue_s)
        self.session.send(pb.SessionResponse(accepted=accepted))
        self.prefilling_since = time.monotonic()
        self.node.engine.prefill_here(self.engine_id, output)

    def _tell_lost(self, lease: int, error: BatonError) -> None:
        lost = pb.HandOverFailed(key=self.key, lease=lease, error=to_detail(error))
        self.session.send(pb.SessionResponse(hand_over_failed=lost))

    def on_token(self, sampled: TokenSampled) -> None:
        """One token of this request, from the engine's step."""
        prefill_s = None
        if self.prefilling_since is not None:
            prefill_s, self.prefilling_since = time.monotonic() - self.prefilling_since, None
        self.session.add_token(self.key, sampled, prefill_s=prefill_s)
        if sampled.finish_reason is not None and not self.decoded.done():
            self.decoded.set_result(None)

    def on_failed(self, error: BatonError) -> None:
        """The engine gave the request up."""
        if not self.decoded.done():
            self.decoded.set_exception(error)

    def _fail(self, error: BatonError) -> None:
        self.session.send(pb.SessionResponse(failed=pb.Failed(key=self.key, error=to_detail(error))))

    async def _give_back(self) -> None:
        if self.lease is not None:
            self.node.tell_lease_ended(self.lease)
            await self._close_lease()
        await self.node.engine.abort(self.engine_id)
        self.decoded.cancel()
        self.node.room.freed()
        self.session.send(pb.SessionResponse(released=pb.Released(key=self.key)))


def handed_over(message: pb.HandOver) -> HandedOver:
    """The prefill node's message as an inbox entry."""
    return HandedOver(
        lease=message.lease,
        first=token_from_proto(message.first_token),
        finished=message.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED,
        sampled_ago_s=message.sampled_ago_s,
    )
