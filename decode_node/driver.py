"""Runs the decode node's machine: delivers events, executes its commands, and keeps its timer."""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Coroutine
from functools import partial
from time import monotonic  # the loop's own clock counts in milliseconds
from typing import Any

from baton.core.errors import BatonError, InternalError
from baton.engine.events import StepEvents
from baton.engine.request import EngineRequest
from baton.node.assembly import Listener, Node
from baton.node.failures import log_arrival, log_failure
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc.error_detail import from_detail
from baton.settings.node_config import DecodeSettings
from decode_node.commands import (
    Abort,
    Admit,
    CloseLease,
    Command,
    EndSession,
    ExtendReserved,
    OpenLease,
    Prefetch,
    PrefillHere,
    Reserve,
    Send,
    SendLeaseEnded,
)
from decode_node.events import (
    Aborted,
    Admitted,
    Closing,
    DrainStarted,
    EngineRefused,
    Event,
    LeaseClosed,
    LeaseFailed,
    LeaseFilled,
    LeaseOpened,
    Prefetched,
    Reserved,
    RoomFreed,
    SegmentRefused,
    StepDone,
    TimePassed,
)
from decode_node.gateway_sessions import GatewaySessions
from decode_node.local_prefill import Streams, local_prefill_reason
from decode_node.machine import DecodeMachine
from decode_node.prefill_peers import PrefillPeers
from decode_node.rules import DecodeRules
from decode_node.tag_numbers import lease_numbers
from kvtransfer import records
from kvtransfer.leases import LeaseTotals

log = logging.getLogger("baton")


class DecodeDriver:
    """Connects the machine of one decode node to gateways, prefill nodes, the engine and the transfer.

    All methods belong to the event loop's thread.

    Args:
        settings: None: this is a prefill node, which decodes only requests whose prompt it computes itself.
    """

    def __init__(self, node: Node, settings: DecodeSettings | None) -> None:
        self.machine = DecodeMachine(
            DecodeRules(
                name=node.name,
                address=node.address,
                incarnation=node.incarnation,
                lease_s=settings.lease_s if settings else 0.0,
                why_local=self._why_local,
                waiting_max=node.settings.max_waiting,
                block_size=node.description.shape.block_size,
                lease_secret=secrets.token_bytes(64),
                gives_leases=settings is not None,
                prefetches=node.engine.has_tier,
            ),
            lease_numbers(),
        )
        self.sessions = GatewaySessions(self.deliver, node.numbers)
        self.peers = PrefillPeers(node, self.deliver)
        self._node_info = node.info
        self._engine = node.engine
        self._transfer = node.transfer
        self._meter = node.meter
        self._counts = node.counts
        self._local_prefill_tokens = settings.local_prefill_tokens if settings else None
        self._max_batch_tokens = node.limits.max_batch_tokens
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s: float | None = None
        # Not a TaskGroup: a call that fails must not cancel the others.
        self._calls: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        if settings is None:
            node.listen(Listener(self._on_step, on_room=self.room_freed))
        else:
            node.listen(
                Listener(self._on_step, on_filled=self._on_filled, on_refused=self._on_refused, on_room=self.room_freed)
            )

    def deliver(self, event: Event) -> None:
        """Delivers an event to the machine, executes its commands, and delivers answers that are known at once."""
        events = deque([event])
        while events:
            for command in self.machine.handle(events.popleft(), monotonic()):
                answer = self._execute(command)
                if answer is not None:
                    events.append(answer)
        self._set_timer()
        if not self.machine.busy:
            self._idle.set()

    def room_freed(self) -> None:
        """Notes that blocks are free which none of this driver's requests held."""
        self.deliver(RoomFreed())

    def stop_admission(self) -> None:
        self.deliver(DrainStarted())

    async def close(self) -> None:
        """Ends all requests and streams; returns when nothing is held any more."""
        self._idle.clear()
        self.deliver(Closing())
        await self._idle.wait()
        self.peers.close()

    def pair_refused(self) -> pb.PairRefused:
        """The refusal by a prefill node of a peer that mistakes it for a decode node."""
        cure = "pair prefill nodes with decode nodes"
        mismatch = node_status_pb2.Mismatch(field="role", ours="prefill", theirs="prefill", cure=cure)
        return pb.PairRefused(info=self._node_info, mismatches=[mismatch])

    def _why_local(self, uncached: int, cached: int) -> str:
        load = self._engine.load()
        streams = Streams(self._meter.costs, load.decode_rows, load.context_tokens, self._max_batch_tokens)
        return local_prefill_reason(self._local_prefill_tokens, uncached, cached, streams=streams)

    # ---- events

    def _on_step(self, events: StepEvents) -> None:
        self.deliver(StepDone(events))

    def _on_filled(self, totals: LeaseTotals) -> None:
        self.deliver(LeaseFilled(totals))

    def _on_refused(self, refused: records.RefusedSegment) -> None:
        log.warning("segment refused: %s", refused.error)
        if refused.lease is not None:
            self.deliver(SegmentRefused(refused.lease, refused.error))

    def _set_timer(self) -> None:
        deadline_s = self.machine.deadline_s
        if deadline_s == self._timer_at_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at_s = None, deadline_s
        if deadline_s is not None:
            self._timer = asyncio.get_running_loop().call_later(deadline_s - monotonic(), self._time_passed)

    def _time_passed(self) -> None:
        self._timer = self._timer_at_s = None
        self.deliver(TimePassed())

    # ---- commands

    def _execute(self, command: Command) -> Event | None:
        """Starts a command; returns its answer if that is known at once."""
        match command:
            case Send(session=session, message=message):
                if message.HasField("failed"):
                    self._log_failure(session, message.failed)
                self.sessions.send(session, message)
            case EndSession(session=session):
                self.sessions.end(session)
            case OpenLease():
                return self._open_lease(command)
            case CloseLease(lease=lease):
                # Nearly every lease is filled: its request then joins the next step without another turn of the loop.
                if (totals := self._transfer.leases.close_filled(lease)) is not None:
                    return self._closed(totals)
                self._start(self._close_lease(lease), name=f"close-lease-{lease}")
            case SendLeaseEnded(lease=lease):
                self.peers.send_lease_ended(lease)
            case Prefetch(request=request):
                if not self._engine.may_prefetch(request):
                    return Prefetched(request.request_id)
                self._start(self._prefetch(request), name=f"prefetch-{request.request_id}")
            case Abort(engine_id=engine_id):
                self._start(self._abort(engine_id), name=f"abort-{engine_id}")
            case Reserve() | ExtendReserved() | Admit() | PrefillHere():
                return self._ask_engine(command)
        return None

    def _ask_engine(self, command: Reserve | ExtendReserved | Admit | PrefillHere) -> Event | None:
        engine_id = command.request.request_id if isinstance(command, Reserve) else command.engine_id
        try:
            match command:
                case Reserve(request=request, arriving_tokens=arriving_tokens):
                    if (task := self.machine.task_of(engine_id)) is not None:
                        log_arrival(task.request_id, engine_id)
                    return Reserved(engine_id, self._engine.reserve(request, arriving_tokens=arriving_tokens))
                case ExtendReserved(output=output):
                    return Reserved(engine_id, self._engine.extend_reserved(engine_id, output))
                case Admit(first=first, drafts=drafts, has_draft=has_draft):
                    return Admitted(engine_id, self._engine.admit(engine_id, first, drafts, has_draft=has_draft))
                case PrefillHere(output=output, received_tokens=received, has_draft=has_draft):
                    self._engine.prefill_here(engine_id, output, received_tokens=received, has_draft=has_draft)
        except Exception as error:  # noqa: BLE001  the request gets an answer after any error
            return EngineRefused(engine_id, _to_baton_error(error, f"request {engine_id}"))
        return None

    def _log_failure(self, session: int, failed: pb.Failed) -> None:
        task = self.machine.task(session, failed.key)
        if task is not None:
            log_failure(from_detail(failed.error), task.request_id, task.engine_id)

    async def _prefetch(self, request: EngineRequest) -> None:
        self.deliver(Prefetched(request.request_id, await self._engine.prefetch(request)))

    async def _abort(self, engine_id: str) -> None:
        await self._engine.abort(engine_id)
        self.deliver(Aborted(engine_id))

    def _open_lease(self, command: OpenLease) -> Event | None:
        lease = command.grant.number
        try:
            opening = self._transfer.leases.open_lease(command.grant)
        except Exception as error:  # noqa: BLE001  the request gets an answer after any error
            return LeaseFailed(lease, _to_baton_error(error, f"lease {lease}"))
        opening.add_done_callback(partial(self._opened, lease))
        return None

    def _opened(self, lease: int, opening: "asyncio.Future[Any]") -> None:
        error = opening.exception()
        self.deliver(
            LeaseOpened(lease) if error is None else LeaseFailed(lease, _to_baton_error(error, f"lease {lease}"))
        )

    async def _close_lease(self, lease: int) -> None:
        try:
            totals = await self._transfer.leases.close_lease(lease)
        except Exception as error:  # noqa: BLE001  the request gets an answer after any error
            self.deliver(LeaseFailed(lease, _to_baton_error(error, f"lease {lease}")))
        else:
            self.deliver(self._closed(totals))

    def _closed(self, totals: LeaseTotals) -> LeaseClosed:
        self._counts.lease_closed(totals)
        return LeaseClosed(totals)

    def _start(self, call: Coroutine[Any, Any, None], *, name: str) -> None:
        task = asyncio.create_task(call, name=name)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


def _to_baton_error(error: BaseException, subject: str) -> BatonError:
    """The error in a form that may be sent. An error of any other type is a defect, and is logged."""
    if isinstance(error, BatonError):
        return error
    log.error("%s failed", subject, exc_info=error)
    return InternalError(f"{type(error).__name__} on the decode node")
