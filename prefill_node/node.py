"""The prefill node's table of requests: finds for each event the request that it is about."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from baton.config import PrefillSettings
from baton.errors import Cancelled, Draining, NoNode
from engine.events import StepEvents
from kvtransfer.layer_groups import choose_layers_per_group
from kvtransfer.leases import LeaseTotals
from kvtransfer.records import SegmentRefused
from node.assembly import Listener, Node
from node.waiting import until
from prefill_node.handover import Event, HandOver
from prefill_node.pairs import Pair, Pairs
from protos.baton.v1 import common_pb2, node_pb2
from protos.baton.v1 import prefill_pb2 as pb


class PrefillNode:
    """Everything that this process holds for others. All methods run on the event loop."""

    def __init__(self, node: Node, settings: PrefillSettings) -> None:
        self.name = node.name
        self._engine = node.engine
        self._transfer = node.transfer
        self._spec = node.description.spec
        self._max_chunk_tokens = node.limits.max_batch_tokens
        self._layer_groups = settings.layer_groups
        self._pairs = Pairs(
            node,
            timeout_s=settings.connect_timeout_s,
            on_lease_ended=self._on_lease_ended,
            on_lost=self._on_lost,
        )
        self._numbers = itertools.count(1)
        self._running: dict[str, HandOver] = {}
        self._draining = False
        node.listen(Listener(on_step=self.on_step, on_filled=_no_lease_here, on_refused=_no_lease_here))

    async def prefill(self, request: pb.PrefillRequest, tell: Callable[[pb.PrefillEvent], Awaitable[None]]) -> None:
        """Serves one request until its last byte has left.

        Raises:
            BatonError: why it cannot be served.
        """
        if self._draining:
            raise Draining(f"{self.name} is draining", cure="send the request to another prefill node")
        pair = await self._pairs.for_ticket(request.ticket)
        hand_over = HandOver(
            self._engine,
            self._transfer,
            pair,
            request,
            str(next(self._numbers)),
            tell,
            num_layers=self._spec.num_layers,
            layers_per_group=self._layers_per_group(pair, request.ticket),
        )
        self._running[hand_over.request.request_id] = hand_over
        task = hand_over.start()
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            hand_over.cancel(Cancelled("the gateway no longer wants it"))
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # most likely that nobody listens any more
            raise
        finally:
            del self._running[hand_over.request.request_id]
        if task.cancelled():
            raise hand_over.failure or Cancelled("the request was cancelled")
        task.result()

    def _layers_per_group(self, pair: Pair, ticket: common_pb2.Ticket) -> int:
        """How the layers of the request's largest chunk leave, over that pair's link."""
        if not self._layer_groups or pair.link is None:
            return self._spec.num_layers
        chunk_tokens = max(0, min(self._max_chunk_tokens, ticket.token_stop - ticket.token_start))
        chunk_bytes = chunk_tokens * self._spec.bytes_per_token
        return choose_layers_per_group(
            pair.link, turn_s=pair.turn_s, chunk_bytes=chunk_bytes, num_layers=self._spec.num_layers
        )

    async def connect(self, decode_address: str) -> common_pb2.PeerState:
        return await self._pairs.connect(decode_address)

    def on_step(self, events: StepEvents) -> None:
        for kind in (events.layers, events.started, events.chunks, events.tokens, events.failed):
            for event in kind:
                self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        if hand_over := self._running.get(event.request_id):
            hand_over.hear(event)

    def _on_lease_ended(self, pair: Pair, lease: int) -> None:
        for hand_over in self._running.values():
            if hand_over.pair is pair and hand_over.lease == lease:
                hand_over.cancel(Cancelled("the decode node took the lease back"))

    def _on_lost(self, pair: Pair) -> None:
        for hand_over in self._running.values():
            if hand_over.pair is pair:
                hand_over.cancel(NoNode(f"{pair.state.name} is gone: {pair.state.detail}"))

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def stop_admission(self) -> None:
        self._draining = True

    async def close(self) -> None:
        """Ends what still runs, with a typed error for each, and lets go of every peer."""
        for hand_over in self._running.values():
            hand_over.cancel(Draining(f"{self.name} is going away", cure="the gateway redoes the prefill elsewhere"))
        await until(lambda: not self._running, timeout_s=5.0)
        await self._pairs.close()

    def fill_status(self, status: node_pb2.NodeStatus) -> None:
        status.peers.extend(self._pairs.states())


def _no_lease_here(event: LeaseTotals | SegmentRefused) -> None:
    raise AssertionError(f"a prefill node gives no leases: {event}")
