"""Runs the prefill node's machine: delivers events, and executes its commands on engine, transfer and peers."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine

from baton.core.errors import BatonError, InternalError
from baton.core.logs import enter_request
from baton.engine.request import EngineRequest
from baton.node.assembly import Listener, Node
from baton.node.failures import log_arrival, log_failure
from baton.protos.internal.v1 import lease_pb2
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.rpc.convert import grammar_from_proto
from baton.settings.node_config import PrefillSettings
from kvtransfer.layer_groups import choose_layers_per_group
from kvtransfer.records import SendJob
from prefill_node.commands import Abort, Command, EndCall, Prefetch, Respond, SendKV, SendToPeer, StopSending, Submit
from prefill_node.decode_peer import DecodePeer
from prefill_node.decode_peers import DecodePeers
from prefill_node.events import (
    Aborted,
    BecameQuiet,
    CallCancelled,
    Called,
    EngineRefused,
    Event,
    Prefetched,
    SendFailed,
    Sent,
    StepDone,
    StopFailed,
)
from prefill_node.machine import PrefillMachine, PrefillRules

log = logging.getLogger("baton")

Write = Callable[[pb.PrefillEvent], Awaitable[None]]


class ResponseStream:
    """The responses of one Prefill call on their way to the gateway: `put` any number, then `end` once.

    They are queued, so that a slow gateway delays neither the sending of KV nor other calls.
    """

    def __init__(self) -> None:
        self._unwritten: asyncio.Queue[pb.PrefillEvent | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._error: BatonError | None = None

    def put(self, event: pb.PrefillEvent) -> None:
        self._unwritten.put_nowait(event)

    def end(self, error: BatonError | None) -> None:
        self._error = error
        self._unwritten.put_nowait(None)
        self._ended.set()

    async def ended(self) -> None:
        await self._ended.wait()

    async def write_all(self, write: Write) -> None:
        """Writes every response, at the pace of the gateway. An error at the end drops what is unwritten.

        Raises:
            BatonError: the error that the stream was ended with.
            ExceptionGroup: with what `write` has raised.
        """
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write_all(write))
            await self._ended.wait()
            if self._error is not None:
                writing.cancel()
        if self._error is not None:
            raise self._error

    async def _write_all(self, write: Write) -> None:
        while (event := await self._unwritten.get()) is not None:
            await write(event)


class PrefillDriver:
    """Connects the machine of one prefill node to gateways, decode nodes, the engine and the transfer.

    All methods belong to the event loop's thread.

    Args:
        on_freed: called when a call has released its blocks.

    Attributes:
        peers: the decode nodes that calls send KV to.
    """

    def __init__(self, node: Node, settings: PrefillSettings, *, on_freed: Callable[[], None] = lambda: None) -> None:
        self._engine = node.engine
        self._transfer = node.transfer
        self._spec = node.description.spec
        self._max_chunk_tokens = node.limits.max_batch_tokens
        self._overlap_layers = settings.overlap_layers
        self._machine = PrefillMachine(PrefillRules(node.name, self._spec, prefetches=node.engine.has_tier))
        self.peers = DecodePeers(node, timeout_s=settings.connect_timeout_s, deliver=self.deliver)
        self._on_freed = on_freed
        self._numbers = node.numbers
        self._streams: dict[int, ResponseStream] = {}
        self._request_ids: dict[int, str] = {}  # the clients' ids
        self._sends: dict[int, asyncio.Task[None]] = {}
        # A call's tasks must outlive its handler, which gRPC cancels, so no task group owns them.
        self._tasks: set[asyncio.Task[None]] = set()
        node.listen(Listener(on_step=lambda step: self.deliver(StepDone(step))))

    @property
    def busy(self) -> bool:
        """Whether a call is live, or has responses to write."""
        return self._machine.busy or bool(self._streams)

    def knows(self, request_id: str) -> bool:
        """Whether this request of the engine belongs to a call."""
        return self._machine.knows(request_id)

    async def prefill(self, request: pb.PrefillRequest, write: Write) -> None:
        """Serves one call; returns when everything has been sent and written, and its blocks are free.

        Raises:
            BatonError: why it cannot be served.
        """
        if (refusal := self._machine.refusal()) is not None:
            raise refusal
        if request.sampling.HasField("grammar") and not request.ticket.first_part:
            await self._engine.compile_grammar(grammar_from_proto(request.sampling.grammar))
        peer = await self.peers.for_ticket(request.ticket)
        call = next(self._numbers)
        enter_request(request.request_id)
        log_arrival(request.request_id, str(call))
        self._request_ids[call] = request.request_id
        stream = self._streams[call] = ResponseStream()
        self.deliver(Called(call, request, peer.facts, self._layers_per_group(peer, request.ticket)))
        try:
            await stream.write_all(write)
        finally:
            self.deliver(CallCancelled(call))  # does nothing to a call that has ended
            try:
                await stream.ended()
            finally:
                del self._streams[call], self._request_ids[call]

    def _layers_per_group(self, peer: DecodePeer, ticket: lease_pb2.Ticket) -> int:
        """How many layers of the call's largest chunk are sent together, over that peer's link."""
        if not self._overlap_layers or peer.link is None:
            return self._spec.num_layers
        chunk_tokens = max(0, min(self._max_chunk_tokens, ticket.token_stop - ticket.token_start))
        chunk_bytes = chunk_tokens * self._spec.bytes_per_token
        return choose_layers_per_group(
            peer.link, turn_s=peer.turn_s, chunk_bytes=chunk_bytes, num_layers=self._spec.num_layers
        )

    # ---- events to the machine, and its commands

    def deliver(self, event: Event) -> None:
        """Delivers one event to the machine, and executes its commands."""
        commands = deque(self._machine.handle(event, time.monotonic()))
        while commands:
            answer = self._execute(commands.popleft())
            if answer is not None:
                commands.extend(self._machine.handle(answer, time.monotonic()))

    def _execute(self, command: Command) -> Event | None:
        """Starts a command; returns its answer if that is known at once."""
        match command:
            case Prefetch(call=call, request=request):
                if not self._engine.may_prefetch(request):
                    return Prefetched(call)
                self._spawn(self._prefetch(call, request), name=f"prefetch-{call}")
            case Submit(request=request):
                return self._submit(request)
            case Abort(call=call):
                self._spawn(self._abort(call), name=f"abort-{call}")
            case SendKV(call=call, job=job):
                self._sends[call] = self._spawn(self._send(call, job), name=f"send-{call}")
            case StopSending(call=call, peer=peer, lease=lease):
                self._spawn(self._stop_sending(call, peer, lease), name=f"stop-sending-{call}")
            case SendToPeer(peer=peer, message=message):
                self.peers.send(peer, message)
            case Respond(call=call, event=response):
                if stream := self._streams.get(call):
                    stream.put(response)
            case EndCall(call=call, error=error):
                self._sends.pop(call, None)
                if error is not None:
                    log_failure(error, self._request_ids.get(call, ""), str(call))
                if stream := self._streams.get(call):
                    stream.end(error)
        return None

    def _submit(self, request: EngineRequest) -> EngineRefused | None:
        try:
            self._engine.submit(request)
        except Exception as error:  # noqa: BLE001  the gateway gets it
            return EngineRefused(int(request.request_id), _to_baton_error(error))
        return None

    async def _prefetch(self, call: int, request: EngineRequest) -> None:
        self.deliver(Prefetched(call, await self._engine.prefetch(request)))

    async def _abort(self, call: int) -> None:
        await self._engine.abort(str(call))
        self.deliver(Aborted(call))
        self._on_freed()

    async def _send(self, call: int, job: SendJob) -> None:
        try:
            segments = await self._transfer.send(job)
        except Exception as error:  # noqa: BLE001  the gateway gets it
            self.deliver(SendFailed(call, _to_baton_error(error)))
        else:
            self.deliver(Sent(call, segments))

    async def _stop_sending(self, call: int, peer: int, lease: int) -> None:
        # A job that has not begun yet would begin after the lease has become quiet.
        if sending := self._sends.get(call):
            sending.cancel()
            await asyncio.wait([sending])
        try:
            await self._transfer.quiet(peer, lease)
        except Exception as error:  # noqa: BLE001  the gateway gets it
            self.deliver(StopFailed(call, _to_baton_error(error)))
        else:
            self.deliver(BecameQuiet(call))

    def _spawn(self, work: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _to_baton_error(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    log.error("a prefill call failed", exc_info=error)
    return InternalError(f"the prefill node failed: {type(error).__name__}: {error}", cure="see the node's log")
