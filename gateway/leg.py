"""One request's stay on one decode node: its line there, its prefill call, and one inbox for what both say.

Owns the patience: whoever owes the next word and says nothing for too long is given up. Knows how to wait, not what to
do next; that is `handover`.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from baton.errors import BatonError, DataLoss, DeadlineExceeded, Draining, NoNode, Overloaded, PeerRefused, UnknownLease
from baton.rpc.status import from_detail
from gateway.node import DecodeNode, PrefillNode
from gateway.prefill_call import PrefillCall, PrefillFailed, PrefillSaid
from gateway.session import Said, SessionLost
from protos.baton.v1 import decode_pb2, prefill_pb2

Message = Said | PrefillSaid | PrefillFailed


class LegLost(Exception):
    """This decode node will not finish the request; another one, or the same one anew, can."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class DecodeRefused(Exception):
    """This decode node does not take the request; others may."""

    def __init__(self, error: BatonError) -> None:
        self.error = error
        super().__init__(error)


@dataclass(frozen=True)
class Patience:
    """How long silence is borne, in seconds."""

    prefill_stall_s: float
    decode_stall_s: float
    queue_s: float  # on top, while the decode node may be waiting for room


class Leg:
    """Submits the request when made; `close` ends all of it, wherever it stands."""

    def __init__(self, node: DecodeNode, submission: decode_pb2.SubmitRequest, patience: Patience) -> None:
        self.node = node
        self.call: PrefillCall | None = None
        self.prefill_node: PrefillNode | None = None
        self.lease = 0
        self.admitted = False
        self.ended_by_node = False
        self._patience = patience
        self._answered = False  # else the decode node owes a Reserved or an Accepted
        self._first_token_passed = False  # of the last call, also when that has been dropped since
        self._loop = asyncio.get_running_loop()
        self._messages: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._line = node.session().submit(submission, self._put)

    # ---- what the gateway does

    def prefill(self, node: PrefillNode, request: prefill_pb2.PrefillRequest, *, timeout_s: float) -> None:
        """Calls a prefill node; the call before must have been dropped."""
        assert self.call is None
        self._first_token_passed = False
        self.prefill_node = node
        self.call = node.prefill(request, timeout_s=timeout_s, hear=self._put)

    def drop_call(self) -> None:
        if self.call is not None:
            self.call.close()
        self.call = self.prefill_node = None

    def renew(self, output: list[int]) -> None:
        self._answered = False
        self._line.renew(self.lease, output)

    def prefill_here(self, output: list[int]) -> None:
        self._answered = False
        self._line.prefill_here(self.lease, output)

    def close(self) -> None:
        self.drop_call()
        self._line.close(cancel=not self.ended_by_node)

    # ---- what the nodes say

    async def next(self) -> Message:
        """The next word of either node about what is going on now; words about dropped calls are passed over.

        Raises:
            LegLost: the session broke, or the decode node gave no sign of life for too long.
            DecodeRefused: the decode node has no room or is going away.
            BatonError: the request cannot be served anywhere.
        """
        since = self._loop.time()
        while True:
            while self._messages:
                message = self._messages.popleft()
                if isinstance(message, decode_pb2.StepToken):
                    self.ended_by_node |= bool(message.finish_reason)
                    return message
                if self._concerns_now(message):
                    return self._checked(message)
            if self.ended_by_node and not self.first_token_owed:
                raise LegLost("it released the request unfinished")
            ends_at = self._patience_ends_at(since)
            if self._loop.time() >= ends_at:
                return self._stalled()
            await self._wait(until=ends_at)  # whoever owes may show a sign of life elsewhere: look again then

    def more_tokens(self) -> list[decode_pb2.StepToken]:
        """Tokens that have come already, up to the first other word."""
        tokens = []
        messages = self._messages
        while messages and isinstance(token := messages[0], decode_pb2.StepToken):
            messages.popleft()
            self.ended_by_node |= bool(token.finish_reason)
            tokens.append(token)
        return tokens

    async def until_sent(self, *, timeout_s: float) -> list[prefill_pb2.PrefillEvent]:
        """What the prefill node still says, until everything has been sent or the time is over."""
        ends_at = self._loop.time() + timeout_s
        while self.call is not None and self.call.running and not self.call.sent and self._loop.time() < ends_at:
            await self._wait(until=ends_at)
        return [item.event for item in self._messages if isinstance(item, PrefillSaid) and item.call is self.call]

    @property
    def first_token_owed(self) -> bool:
        """Whether the prefill call will or may still bring the first token."""
        call = self.call
        return call is not None and not self._first_token_passed and (call.running or call.first_token_seen)

    @property
    def first_token_lost(self) -> bool:
        """Whether the decode node goes on behind a first token that will never come."""
        return self.admitted and not self._first_token_passed and not self.first_token_owed

    def _put(self, message: Message) -> None:
        self._messages.append(message)
        self._wake()

    async def _wait(self, *, until: float) -> None:
        """Returns at the next message, or at that time of the loop's clock."""
        self._waiter = self._loop.create_future()
        # NOTE: asyncio.timeout costs several times as much, and this is done for every token.
        timer = self._loop.call_at(until, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _concerns_now(self, message: Message) -> bool:
        match message:
            case PrefillSaid() | PrefillFailed():
                return message.call is self.call
            case decode_pb2.HandOverFailed():
                return message.lease == self.lease and self._answered and not self.admitted
            case decode_pb2.Released():
                # The first token may be the last one, and still on its way from the prefill node.
                self.ended_by_node = True
                return False
        return True

    def _checked(self, message: Message) -> Message:
        match message:
            case SessionLost():
                raise LegLost(message.reason)
            case decode_pb2.Failed():
                self.ended_by_node = True
                raise _failure(from_detail(message.error))
            case decode_pb2.Reserved():
                self._answered = True
                self.lease = message.ticket.lease.number
            case decode_pb2.Accepted():
                self._answered = True
            case PrefillSaid(event=event):
                self._first_token_passed |= event.HasField("first_token")
            case decode_pb2.Admitted():
                self._answered = self.admitted = True
        return message

    # ---- patience

    @property
    def _prefill_node_owes(self) -> bool:
        if self.call is None or not self.call.running or not self._answered:
            return False
        return not self.call.sent and not (self.admitted and self.call.first_token_seen)

    def _patience_ends_at(self, since: float) -> float:
        if self._prefill_node_owes:
            assert self.call is not None
            assert self.prefill_node is not None
            alive_at = self.call.heard_at
            if not self.call.scheduled:  # it is queued there: the node's word is enough
                alive_at = max(alive_at, self.prefill_node.heard_at)
            return alive_at + self._patience.prefill_stall_s
        queue_s = 0.0 if self._answered else self._patience.queue_s
        return max(since, self.node.heard_at) + self._patience.decode_stall_s + queue_s

    def _stalled(self) -> PrefillFailed:
        """Gives up whoever owes the next word.

        Raises:
            LegLost: it is the decode node.
        """
        if self._prefill_node_owes:
            assert self.call is not None
            assert self.prefill_node is not None
            reason = f"no sign of life for {self._patience.prefill_stall_s:g} s"
            self.prefill_node.lose(reason)
            self.call.close()
            return PrefillFailed(self.call, NoNode(reason))
        reason = f"no sign of life for {self._patience.decode_stall_s:g} s"
        self.node.lose(reason)
        raise LegLost(reason)


def _failure(error: BatonError) -> Exception:
    """What the decode node's error means for the request: gone here only, not now, or altogether."""
    if isinstance(error, Overloaded | Draining):
        return DecodeRefused(error)
    # NOTE: our own deadline ends the request here; a node's DeadlineExceeded is about its lease.
    if isinstance(error, DataLoss | UnknownLease | PeerRefused | DeadlineExceeded):
        return LegLost(str(error))
    return error
