"""The decode node's table of requests, leases and gateways: finds for each event the request that it is about."""

import asyncio
import itertools
import logging

from baton.config import DecodeSettings
from baton.errors import BatonError, Draining
from baton.rpc.status import to_detail
from decode_node.handover import Filled, HandOver, Lost, PrefillHere, Renew, handed_over
from decode_node.pairs import Pairs
from decode_node.room import Room
from decode_node.session import Session
from engine.events import StepEvents
from kvtransfer.leases import LeaseTotals
from kvtransfer.records import SegmentRefused
from node.assembly import Listener, Node
from protos.baton.v1 import decode_pb2 as pb
from protos.baton.v1 import node_pb2

log = logging.getLogger("baton")


class DecodeNode:
    """Everything that this process holds for others. All methods run on the event loop and none of them waits long."""

    def __init__(self, node: Node, settings: DecodeSettings) -> None:
        self.settings = settings
        self.engine = node.engine
        self.transfer = node.transfer
        self.name = node.name
        self.address = node.address
        self.incarnation = node.incarnation
        self.room = Room(self.engine.reserve, waiting_max=settings.max_waiting)
        self.pairs = Pairs(node, self)
        self._lease_numbers = itertools.count(1)
        self._session_numbers = itertools.count(1)
        self._by_key: dict[tuple[int, int], HandOver] = {}
        self._by_engine_id: dict[str, HandOver] = {}
        self._by_lease: dict[int, HandOver] = {}
        self._sessions: dict[int, Session] = {}
        self._draining = False
        node.listen(Listener(on_step=self.on_step, on_filled=self.on_filled, on_refused=self.on_refused))

    # ---- from gateways

    def open_session(self, peer: str) -> Session:
        session = Session(next(self._session_numbers), peer)
        self._sessions[session.number] = session
        return session

    def submit(self, session: Session, submit: pb.SubmitRequest) -> None:
        if self._draining:
            error = Draining(f"{self.name} is draining", cure="send the request to another decode node")
            session.send(pb.SessionResponse(failed=pb.Failed(key=submit.key, error=to_detail(error))))
            session.send(pb.SessionResponse(released=pb.Released(key=submit.key)))
            return
        request = HandOver(self, session, submit)
        self._by_key[session.number, submit.key] = request
        self._by_engine_id[request.engine_id] = request
        request.start().add_done_callback(lambda _: self._forget(request))

    def renew(self, session: Session, renew: pb.RenewTicket) -> None:
        if request := self._by_key.get((session.number, renew.key)):
            request.inbox.put_nowait(Renew(renew.failed_lease, tuple(renew.output_token_ids)))

    def prefill_here(self, session: Session, here: pb.PrefillHere) -> None:
        if request := self._by_key.get((session.number, here.key)):
            request.inbox.put_nowait(PrefillHere(here.failed_lease, tuple(here.output_token_ids)))

    def cancel(self, session: Session, key: int) -> None:
        if request := self._by_key.get((session.number, key)):
            request.cancel()

    async def end_session(self, session: Session) -> None:
        """Ends every request of a gateway that is gone; returns when nothing is held for it."""
        self._sessions.pop(session.number, None)
        await self._end([request for request in self._by_key.values() if request.session is session])

    def _forget(self, request: HandOver) -> None:
        self._by_key.pop((request.session.number, request.key), None)
        self._by_engine_id.pop(request.engine_id, None)

    # ---- from prefill nodes

    def on_hand_over(self, message: pb.HandOver) -> None:
        if request := self._by_lease.get(message.lease):
            request.inbox.put_nowait(handed_over(message))

    def on_lost(self, lease: int, error: BatonError) -> None:
        """KV of this lease will not come from where it was expected."""
        if request := self._by_lease.get(lease):
            request.inbox.put_nowait(Lost(lease, error))

    # ---- from the engine and the transfer thread

    def on_step(self, events: StepEvents) -> None:
        for sampled in events.tokens:
            if request := self._by_engine_id.get(sampled.request_id):
                request.on_token(sampled)
        for failed in events.failed:
            if request := self._by_engine_id.get(failed.request_id):
                request.on_failed(failed.error)
        for session in self._sessions.values():
            session.flush_step()

    def on_filled(self, filled: LeaseTotals) -> None:
        if request := self._by_lease.get(filled.number):
            request.inbox.put_nowait(Filled(filled.number, filled))

    def on_refused(self, refused: SegmentRefused) -> None:
        log.warning("segment refused: %s", refused.error)
        self.on_lost(refused.lease, refused.error)

    # ---- leases

    def draw_lease(self, request: HandOver) -> int:
        """A number never used before by this incarnation, under which this request is found."""
        number = next(self._lease_numbers)
        self._by_lease[number] = request
        return number

    def forget_lease(self, number: int) -> None:
        self._by_lease.pop(number, None)

    def tell_lease_ended(self, number: int) -> None:
        """Whoever prefills for this lease may stop."""
        self.pairs.tell_lease_ended(number)

    # ---- the process

    @property
    def busy(self) -> bool:
        return bool(self._by_key)

    def stop_admission(self) -> None:
        self._draining = True

    async def close(self) -> None:
        """Fails what still runs, so that gateways continue it elsewhere, and lets go of every peer."""
        for request in list(self._by_key.values()):
            request.on_failed(
                Draining(f"{self.name} is going away", cure="the gateway continues the request elsewhere")
            )
        await self._end(list(self._by_key.values()))
        for session in list(self._sessions.values()):
            session.close()
        await self.pairs.close()

    async def _end(self, requests: list[HandOver]) -> None:
        tasks = [task for request in requests if (task := request.task) is not None]
        for request in requests:
            request.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def fill_status(self, status: node_pb2.NodeStatus) -> None:
        status.requests_waiting += self.room.waiting
        status.peers.extend(self.pairs.states())
