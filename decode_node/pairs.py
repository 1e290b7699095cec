"""The decode node's side of its pairs: who may send KV here, over which endpoint, and how fast it really is.

A pair lives as long as its Pair stream. When that breaks, the peer's endpoint is closed, which cancels what was in
flight, and nothing of the peer is kept but a line for the status.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from baton.errors import BatonError, PeerRefused
from baton.rpc.status import from_detail
from decode_node.sender_numbers import SenderNumbers
from kvtransfer.flows import RankPair
from kvtransfer.plan import PlanRefused, WirePlan, agree, links_between
from kvtransfer.records import LinkMeasure
from node.assembly import Node
from node.describe import (
    describe_conversion,
    describe_measure,
    describe_mismatches,
    from_addresses,
    from_info,
    from_measure,
    to_addresses,
    to_mismatches,
    to_warm_ups,
)
from node.link_floor import below_floor
from protos.baton.v1 import common_pb2
from protos.baton.v1 import decode_pb2 as pb

if TYPE_CHECKING:
    from decode_node.node import DecodeNode

log = logging.getLogger("baton")

_HELLO_TIMEOUT_S = 10.0
_WARM_UP_TIMEOUT_S = 10.0
_LOST_KEPT = 32


class Pairs:
    def __init__(self, node: Node, requests: "DecodeNode") -> None:
        self._node = node
        self._requests = requests
        self._sender_numbers = SenderNumbers()
        self._states: dict[str, common_pb2.PeerState] = {}  # by address: a restarted peer takes its own line over
        self._numbers: dict[str, int] = {}  # by address: the present sender number
        self._outboxes: dict[int, asyncio.Queue[pb.PairResponse | None]] = {}

    async def serve(
        self, incoming: AsyncIterator[pb.PairRequest], write: Callable[[pb.PairResponse], Awaitable[None]]
    ) -> None:
        """Runs one prefill node's Pair stream."""
        hello = await _first(incoming)
        info = hello.info
        state = common_pb2.PeerState(
            name=info.name,
            address=info.address,
            incarnation=info.incarnation,
            phase=common_pb2.PEER_PHASE_CONNECTING,
        )
        self._keep(state)
        try:
            their_node = from_info(info)
            plan = agree(self._node.description, their_node)
        except PlanRefused as refused:
            await write(pb.PairResponse(refused=self._refuse(state, to_mismatches(refused.mismatches))))
            return
        state.kv_converted = plan.conversion
        number = self._sender_numbers.draw(their_node.tensor_parallel_size)
        outbox: asyncio.Queue[pb.PairResponse | None] = asyncio.Queue()
        self._outboxes[number] = outbox
        reader: asyncio.Task[None] | None = None
        try:
            flows = links_between(their_node, self._node.description)
            addresses = await self._node.transfer.listen(number, flows, sends=False)
            await write(pb.PairResponse(accepted=self._accepted(number, addresses, plan)))
            await self._connect(number, incoming)
            await write(pb.PairResponse(connected=pb.PairConnected()))
            measure = await self._measure(number, incoming, state)
            if mismatch := below_floor(self._node, measure):
                await write(pb.PairResponse(refused=self._refuse(state, to_mismatches((mismatch,)))))
                return
            self._ready(number, state, measure)
            await write(pb.PairResponse(ready=from_measure(measure)))
            reader = asyncio.create_task(self._read(incoming, outbox, state), name=f"pair-{number}")
            while (response := await outbox.get()) is not None:
                await write(response)
        except TimeoutError:
            state.detail = f"no warm-up within {_WARM_UP_TIMEOUT_S:g} s"
        finally:
            if reader is not None:
                reader.cancel()
            del self._outboxes[number]
            await self._drop(number, state)
            self._sender_numbers.give_back(number)

    def _accepted(self, number: int, addresses: Mapping[RankPair, bytes], plan: WirePlan) -> pb.PairAccepted:
        return pb.PairAccepted(
            info=self._node.info,
            worker_addresses=from_addresses(addresses),
            sender_number=number,
            wire_version=plan.wire_version,
            message_bytes=self._node.transfer.message_bytes,
            kv_scales=self._node.kv_scales,
        )

    async def _connect(self, number: int, incoming: AsyncIterator[pb.PairRequest]) -> None:
        async with asyncio.timeout(_WARM_UP_TIMEOUT_S):
            message = await anext(aiter(incoming))
        await self._node.transfer.connect(number, to_addresses(message.linked.worker_addresses))

    async def _measure(
        self, number: int, incoming: AsyncIterator[pb.PairRequest], state: common_pb2.PeerState
    ) -> LinkMeasure:
        async with asyncio.timeout(_WARM_UP_TIMEOUT_S):
            message = await anext(aiter(incoming))
            measure = await self._node.transfer.warmed_up(
                number, to_warm_ups(message.warmed_up), timeout_s=_WARM_UP_TIMEOUT_S
            )
        state.transport = measure.transport
        state.gigabytes_per_s = measure.gigabytes_per_s
        state.latency_s = measure.latency_s
        return measure

    def _ready(self, number: int, state: common_pb2.PeerState, measure: LinkMeasure) -> None:
        state.phase = common_pb2.PEER_PHASE_READY
        self._numbers[state.address] = number
        said = describe_measure(measure) + describe_conversion(state.kv_converted)
        log.info("paired with %s over %s", state.name, said)

    def _refuse(self, state: common_pb2.PeerState, mismatches: list[common_pb2.Mismatch]) -> pb.PairRefused:
        state.phase = common_pb2.PEER_PHASE_REFUSED
        state.mismatches.extend(mismatches)
        log.warning("refused %s: %s", state.name, describe_mismatches(mismatches))
        return pb.PairRefused(info=self._node.info, mismatches=mismatches)

    async def _read(
        self,
        incoming: AsyncIterator[pb.PairRequest],
        outbox: asyncio.Queue[pb.PairResponse | None],
        state: common_pb2.PeerState,
    ) -> None:
        try:
            async for message in incoming:
                match message.WhichOneof("message"):
                    case "hand_over":
                        self._requests.on_hand_over(message.hand_over)
                    case "quiet" if message.quiet.HasField("error"):
                        self._requests.on_lost(message.quiet.lease, from_detail(message.quiet.error))
                    case "refused":
                        state.phase = common_pb2.PEER_PHASE_REFUSED
                        state.mismatches.extend(message.refused.mismatches)
                        log.warning("%s refused: %s", state.name, describe_mismatches(list(state.mismatches)))
                        return
        finally:
            outbox.put_nowait(None)

    async def _drop(self, number: int, state: common_pb2.PeerState) -> None:
        if state.phase == common_pb2.PEER_PHASE_READY:
            log.info("lost %s", state.name)
        if state.phase != common_pb2.PEER_PHASE_REFUSED:
            state.phase = common_pb2.PEER_PHASE_LOST
            state.detail = state.detail or "its line broke"
        if self._numbers.get(state.address) == number:
            self.states()  # the last look at what it sent
            del self._numbers[state.address]
        for lease in await self._node.transfer.disconnect(number):
            self._requests.on_lost(lease, BatonError(f"{state.name} is gone"))

    def tell_lease_ended(self, lease: int) -> None:
        for outbox in self._outboxes.values():
            outbox.put_nowait(pb.PairResponse(lease_ended=pb.LeaseEnded(lease=lease)))

    def states(self) -> list[common_pb2.PeerState]:
        """One line for each peer, with what it has sent so far."""
        traffic = self._node.transfer.counters().peers
        for address, state in self._states.items():
            if sent := traffic.get(self._numbers.get(address, 0)):
                state.bytes_total, state.segments_total = sent.bytes_total, sent.segments_total
        return list(self._states.values())

    def _keep(self, state: common_pb2.PeerState) -> None:
        self._states[state.address] = state
        lost = [key for key, old in self._states.items() if old.phase == common_pb2.PEER_PHASE_LOST]
        for key in lost[:-_LOST_KEPT]:
            del self._states[key]
            self._numbers.pop(key, None)

    async def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)


async def _first(incoming: AsyncIterator[pb.PairRequest]) -> pb.PairHello:
    async with asyncio.timeout(_HELLO_TIMEOUT_S):
        message = await anext(aiter(incoming))
    if message.WhichOneof("message") != "hello":
        raise PeerRefused("the first message of a pair is not a hello", cure="use the same version on both nodes")
    return message.hello
