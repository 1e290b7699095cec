"""A real prefill node and a scripted decode node in one process, over gRPC and the loopback transport."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from baton.node.assembly import Listener, Node
from baton.node.describe import from_addresses, from_info, from_measure, to_addresses, to_warm_ups
from baton.node.from_settings import load
from baton.node.waiting import until
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc, lease_pb2, prefill_pb2
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import channel_options
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import DecodeSettings, PrefillSettings
from kvtransfer.flows import Flow, RankPair
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.plan import agree, links_between

# Many steps, each of which needs a turn of the event loop: a call still runs when a message about it arrives.
STEP_TOKENS = 2
PROMPT = tuple(range(10, 410))
BLOCK_SIZE = 16

KEY = bytes(range(32))
_COMMON: dict[str, object] = {
    "model": DEMO_MODELS / "llama",
    "device": "cpu",
    "transport": "loopback",
    "num_blocks": 64,
    "block_size": BLOCK_SIZE,
    "segment_mib": 0.25,
}
_CONNECT_TIMEOUT_S = 120.0  # of a busy machine

Requests = AsyncIterator[pb.PairRequest]
Context = grpc.aio.ServicerContext[pb.PairRequest, pb.PairResponse]


def prefill_settings(**values: object) -> PrefillSettings:
    return PrefillSettings.model_validate(
        {
            **_COMMON,
            "max_batch_tokens": STEP_TOKENS,
            "name": "prefill-0",
            "connect_timeout_s": _CONNECT_TIMEOUT_S,
            **values,
        }
    )


def prefill_node(settings: PrefillSettings) -> Node:
    """A node whose events are not delivered yet."""
    return Node(settings, load(settings), role=node_status_pb2.ROLE_PREFILL, address="127.0.0.1:1")


def pause_steps(node: Node) -> Callable[[float], None]:
    """Lets the node's engine start no step. Returns a function that allows so many steps from then on.

    However long gRPC takes to deliver a message about a call, the call is then where the test wants it.
    """
    steps, allowed = node.engine._steps, 0.0
    launch_next = steps._launch_next

    def launch_allowed() -> bool:
        nonlocal allowed
        if allowed < 1 or not launch_next():
            return False
        allowed -= 1
        return True

    def allow(count: float) -> None:
        nonlocal allowed
        allowed = count
        steps.wake()

    steps._launch_next = launch_allowed  # type: ignore[method-assign]
    return allow


@dataclass
class ScriptedDecodeNode(decode_pb2_grpc.DecodeServicer):
    """The decode node's end of Pair streams: shakes hands, then collects what it receives.

    Attributes:
        mismatches: it refuses every hello for these reasons.
        hangs_up: it ends the stream instead of answering a hello.
        is_silent: it never answers a hello.
    """

    node: Node
    mismatches: tuple[node_status_pb2.Mismatch, ...] = ()
    hangs_up: bool = False
    is_silent: bool = False
    received: list[pb.PairRequest] = field(default_factory=list)
    filled: list[LeaseTotals] = field(default_factory=list)
    _outbox: asyncio.Queue[pb.PairResponse | grpc.StatusCode | None] = field(default_factory=asyncio.Queue)
    _streams: int = 0

    async def Pair(  # type: ignore[override]  # noqa: N802  the stubs know generators only
        self, request_iterator: Requests, context: Context
    ) -> None:
        requests = aiter(request_iterator)
        hello = (await anext(requests)).hello
        if self.is_silent:
            await asyncio.Event().wait()
        if self.hangs_up:
            return
        if self.mismatches:
            refused = pb.PairRefused(info=self.node.info, mismatches=self.mismatches)
            await context.write(pb.PairResponse(refused=refused))
            return
        peer = from_info(hello.info)
        agree(self.node.description, peer)
        self._streams += 1
        number = self._streams
        try:
            await self._shake_hands(number, links_between(peer, self.node.description), requests, context)
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(requests))
                while isinstance(response := await self._outbox.get(), pb.PairResponse):
                    await context.write(response)
                reading.cancel()
            if response is not None:
                await context.abort(response, "as the test wants it")
        finally:
            await self.node.transfer.disconnect(number)

    async def _shake_hands(
        self, number: int, links: Mapping[RankPair, tuple[Flow, ...]], requests: Requests, context: Context
    ) -> None:
        transfer = self.node.transfer
        addresses = await transfer.listen(number, links, sends=False)
        accepted = pb.PairAccepted(
            info=self.node.info,
            worker_addresses=from_addresses(addresses),
            sender_number=number,
            message_bytes=transfer.message_bytes,
        )
        await context.write(pb.PairResponse(accepted=accepted))
        await transfer.connect(number, to_addresses((await anext(requests)).linked.worker_addresses), sealed=True)
        await context.write(pb.PairResponse(connected=pb.PairConnected()))
        warmed_up = to_warm_ups((await anext(requests)).warmed_up)
        measure = await transfer.warmed_up(number, warmed_up, timeout_s=60.0)
        await context.write(pb.PairResponse(ready=from_measure(measure)))

    async def _read(self, requests: Requests) -> None:
        async for message in requests:
            self.received.append(message)
        self.hang_up()

    # ---- methods for tests

    @property
    def address(self) -> str:
        return self.node.address

    async def ticket(self, lease: int, num_tokens: int) -> lease_pb2.Ticket:
        """A ticket for a lease that is open."""
        blocks = tuple(range(-(-num_tokens // BLOCK_SIZE)))
        await self.node.transfer.leases.open_lease(LeaseGrant(lease, blocks, 0, num_tokens, num_tokens, key=KEY))
        return lease_pb2.Ticket(
            lease=lease_pb2.Lease(number=lease, incarnation=self.node.incarnation, key=KEY),
            decode_node=self.node.name,
            decode_address=self.address,
            token_stop=num_tokens,
            resume_at=num_tokens,
        )

    async def request(self, lease: int, num_tokens: int = len(PROMPT)) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            prompt_token_ids=PROMPT[:num_tokens], ticket=await self.ticket(lease, num_tokens)
        )

    def end_lease(self, lease: int) -> None:
        self._outbox.put_nowait(pb.PairResponse(lease_ended=pb.LeaseEnded(lease=lease)))

    def hang_up(self, failure: grpc.StatusCode | None = None) -> None:
        """Ends the stream: with that status, or without an error."""
        self._outbox.put_nowait(failure)

    async def message(self, kind: str) -> pb.PairRequest:
        """The first message of that kind, once it has come."""
        found: list[pb.PairRequest] = []

        def has_come() -> bool:
            found.extend(message for message in self.received if message.WhichOneof("message") == kind)
            return bool(found)

        assert await until(has_come, timeout_s=120.0), f"no {kind} among {self.received}"
        return found[0]


@asynccontextmanager
async def decode_node(
    *,
    mismatches: tuple[node_status_pb2.Mismatch, ...] = (),
    hangs_up: bool = False,
    is_silent: bool = False,
    **values: object,
) -> AsyncIterator[ScriptedDecodeNode]:
    settings = DecodeSettings.model_validate({**_COMMON, "name": "decode-0", **values})
    server = grpc.aio.server(options=channel_options())
    port = server.add_insecure_port("127.0.0.1:0")
    node = Node(settings, load(settings), role=node_status_pb2.ROLE_DECODE, address=f"127.0.0.1:{port}")
    scripted = ScriptedDecodeNode(node, mismatches, hangs_up, is_silent)  # type: ignore[abstract]  # no sessions
    node.listen(Listener(on_step=lambda _: None, on_filled=scripted.filled.append, on_refused=lambda _: None))
    decode_pb2_grpc.add_DecodeServicer_to_server(scripted, server)
    async with node:
        await server.start()
        try:
            yield scripted
        finally:
            scripted.hang_up()
            await server.stop(grace=None)
