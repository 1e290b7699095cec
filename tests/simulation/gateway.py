"""A gateway's process: the shell around the real `Fleet` and one real `RequestMachine` for each request."""

import itertools
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from baton.core.errors import BatonError, Cancelled, DeadlineExceeded
from baton.core.sampling import ResolvedSampling
from baton.core.types import LocalPolicy, Slo
from baton.gateway.core import events as e
from baton.gateway.core.request import Request, Rules
from baton.gateway.fleet.fleet import Fleet
from baton.gateway.fleet.node_table import DropSession, FleetCommand
from baton.gateway.fleet.placement import Placement, Route
from baton.gateway.fleet.router import RoutedRequest, usable_decodes
from baton.gateway.request import commands as c
from baton.gateway.request.machine import RequestMachine
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.protos.v1 import node_status_pb2
from tests.simulation.client import ClientCall, Detokenizer
from tests.simulation.clock import Timer
from tests.simulation.faults import DECODES, PREFILLS
from tests.simulation.invariants import violated
from tests.simulation.network import Life, OnEnd, OnMessage, Stream
from tests.simulation.node import MODEL
from tests.simulation.reference import MAX_CONTEXT_TOKENS
from tests.simulation.world import World

STALL_S = 1.0
MAX_ATTEMPTS = 3
_FIRST_STATUS_TIMEOUT_S = 1.0
_PAIR_RETRY_S = 0.1
_ALONE = 0.5  # of the requests that a prefill node could serve alone
_READY = node_status_pb2.PEER_PHASE_READY
_PHASE = node_status_pb2.PeerPhase.Name

Role: TypeAlias = node_status_pb2.Role.ValueType


class _Running:
    """One request, with the attempts and calls that its machine has started and not ended."""

    def __init__(self, call: ClientCall, machine: RequestMachine) -> None:
        self.call = call
        self.machine = machine
        self.timer: Timer | None = None
        self.inbox: list[e.Event] = []
        self.attempts: dict[int, tuple[_Session, int]] = {}  # session and key
        self.prefill_calls: dict[int, Stream] = {}
        self.over = False


class _Session:
    """One stream with one node that decodes."""

    def __init__(self, role: Role, address: str) -> None:
        self.role = role
        self.address = address
        self.stream: Stream | None = None
        self.open = True
        self.keys = itertools.count(1)
        # By key. None: the request has left, and the node's `Released` is still to come.
        self.routes: dict[int, tuple[_Running, int] | None] = {}


class _DrawingFleet(Fleet):
    """Draws where prompts are prefilled: simulated nodes have no costs by which to choose."""

    def __init__(self, world: World) -> None:
        super().__init__(MODEL, MAX_CONTEXT_TOKENS, world.scenario.policy)
        self._world = world

    def place(self, wanted: RoutedRequest, now_s: float) -> Placement | None:
        placement, random = super().place(wanted, now_s), self._world.random
        if wanted.policy is not LocalPolicy.ELASTIC:
            return placement
        alone = usable_decodes([node.decode_view() for node in self.decoding_nodes() if node.also_decodes], wanted)
        if alone and random.random() < _ALONE:
            return Placement(Route.LOCAL, random.choice(alone), None, 0, "it was drawn", None)
        if placement is None or placement.route is not Route.REMOTE:
            return placement
        route = random.choice((Route.REMOTE,) * 5 + (Route.LOCAL,) + (Route.SPLIT,) * 5)
        if route is Route.SPLIT and not wanted.splittable:
            return placement
        # Now and then the decode node is asked for the impossible.
        split = random.randint(1, wanted.num_tokens + 2) if route is Route.SPLIT else 0
        return replace(placement, route=route, split_tokens=split, reason="it was drawn")


class _Watch:
    """One Watch stream."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.received = False
        self.over = False


class GatewayProcess:
    """One life of a gateway."""

    def __init__(self, world: World, life: Life) -> None:
        self.world = world
        self.life = life
        self.fleet = _DrawingFleet(world)
        self.running: dict[_Running, None] = {}
        self._rules = Rules(
            world.scenario.policy,
            MAX_ATTEMPTS,
            world.scenario.max_queue_s,
            STALL_S,
            STALL_S,
            world.scenario.failover_wait_s,
        )
        self._sessions: dict[str, _Session] = {}
        self._watches: dict[str, _Watch] = {}
        self._asking: set[tuple[int, int]] = set()  # pairs of incarnations that were requested recently
        for role, addresses in ((node_status_pb2.ROLE_PREFILL, PREFILLS), (node_status_pb2.ROLE_DECODE, DECODES)):
            for address in addresses:
                self.fleet.add(role, address)
                self._watch(role, address)

    # ---- requests

    def start(self, call: ClientCall, *, timeout_s: float, output: tuple[int, ...] = ()) -> None:
        """Begins a request, or goes on after an output that its client has from another gateway."""
        client, now_s = call.client, self.world.clock.now_s
        request = Request(
            request_id=call.name,
            prompt=list(client.prompt),
            sampling=ResolvedSampling(
                max_tokens=client.max_tokens, temperature=0.0, prompt_logprobs=client.prompt_logprobs
            ),
            cache_salt="",
            started_at_s=now_s,
            timeout_s=timeout_s,
            output=output,
            priority=client.priority,
            slo=Slo(client.ttft_s, client.tpot_s),
        )
        running = _Running(call, RequestMachine(request, self._rules, self.fleet, Detokenizer()))
        if output:
            running.machine.resume()
        running.timer = Timer(
            self.world.clock,
            self.life.run,
            lambda: running.machine.deadline_s,
            lambda: self._handle(running, [e.TimePassed()]),
        )
        self.running[running] = None
        self._handle(running, [e.Started()])

    def cancel(self, call: ClientCall) -> None:
        for running in self.running:
            if running.call is call:
                self._put(running, e.ClientCancelled(Cancelled("the client cancelled")))

    def _put(self, running: _Running, event: e.Event) -> None:
        """Delivers events that come close together in one call."""
        running.inbox.append(event)
        if len(running.inbox) == 1:
            soon_s = 0.001 * self.world.random.random() if self.world.random.random() < 0.3 else 0.0
            self.life.after(soon_s, partial(self._drain, running))

    def _drain(self, running: _Running) -> None:
        inbox, running.inbox = running.inbox, []
        if inbox:
            self._handle(running, inbox)

    def _handle(self, running: _Running, events: list[e.Event]) -> None:
        if running.over:
            return
        commands = running.machine.handle(events, self.world.clock.now_s)
        self.world.trace.handled(f"{self.life.address} {running.call.name}", events, commands)
        for command in commands:
            if running.over:
                violated("I5", f"{running.call.name} goes on after its Finish: {command}")
            self._execute(running, command)
        if not running.over:
            if running.machine.deadline_s is None:
                violated("I5", f"{running.call.name} waits without a deadline")
            assert running.timer is not None
            running.timer.arm()

    def _execute(self, running: _Running, command: c.Command) -> None:
        match command:
            case c.SubmitToDecode(attempt, role, address, request):
                self._submit(running, attempt, self._session(role, address), request)
            case c.AskDecode(attempt, message):
                session, key = running.attempts[attempt]
                message.key = key
                if isinstance(message, decode_pb2.RenewTicket):
                    _send(session, decode_pb2.SessionRequest(renew=message))
                else:
                    _send(session, decode_pb2.SessionRequest(here=message))
            case c.LeaveDecode(attempt, cancel):
                session, key = running.attempts.pop(attempt)
                if key in session.routes:
                    session.routes[key] = None
                    if cancel:
                        _send(session, decode_pb2.SessionRequest(cancel=decode_pb2.CancelRequest(key=key)))
            case c.CallPrefill(number, address, call_request, timeout_s):
                self._call_prefill(running, number, address, call_request, timeout_s)
            case c.CancelPrefill(number):
                if stream := running.prefill_calls.pop(number, None):
                    stream.cancel()
            case c.LoseNode(role, address, reason):
                self._lose(role, address, reason)
            case c.Respond(message):
                running.call.receive(message)
            case c.Finish(error):
                self._finish(running, error)

    def _finish(self, running: _Running, error: BatonError | None) -> None:
        running.over = True
        del self.running[running]
        if running.attempts or running.prefill_calls:
            what = f"attempts {sorted(running.attempts)} and calls {sorted(running.prefill_calls)}"
            violated("I5", f"{running.call.name} is over, and leaves {what}")
        running.call.end(error)

    # ---- Prefill calls

    def _call_prefill(
        self, running: _Running, number: int, address: str, request: prefill_pb2.PrefillRequest, timeout_s: float
    ) -> None:
        def replied(event: prefill_pb2.PrefillEvent) -> None:
            self.fleet.message_received(node_status_pb2.ROLE_PREFILL, address, self.world.clock.now_s)
            if number in running.prefill_calls:
                self._put(running, e.PrefillReplied(number, event))

        def ended(error: BatonError | None) -> None:
            if running.prefill_calls.pop(number, None) is not None:
                self._put(running, e.PrefillEnded(number, error))

        def timed_out() -> None:
            if number in running.prefill_calls:
                stream.cancel()
                ended(DeadlineExceeded("the call's time is up"))

        stream = self.world.network.open(self.life, address, "prefill", replied, ended)
        running.prefill_calls[number] = stream
        stream.to_server(request)
        self.life.after(timeout_s, timed_out)

    # ---- sessions

    def _submit(self, running: _Running, attempt: int, session: _Session, request: decode_pb2.SubmitRequest) -> None:
        key = next(session.keys)
        request.key = key
        session.routes[key] = (running, attempt)
        running.attempts[attempt] = (session, key)
        _send(session, decode_pb2.SessionRequest(submit=request))

    def _session(self, role: Role, address: str) -> _Session:
        session = self._sessions.get(address)
        if session is None:
            session = self._sessions[address] = _Session(role, address)
            session.stream = self.world.network.open(
                self.life, address, "session", partial(self._session_message, session), partial(self._broken, session)
            )
        return session

    def _session_message(self, session: _Session, response: decode_pb2.SessionResponse) -> None:
        self.fleet.message_received(session.role, session.address, self.world.clock.now_s)
        kind = response.WhichOneof("message")
        if kind == "step":
            for token in response.step.tokens:
                if route := session.routes.get(token.key):
                    running, attempt = route
                    self._put(running, e.TokensCame(attempt, [token]))
        elif kind is not None:
            message = getattr(response, kind)
            self._route(session, message)
            if kind == "released":
                session.routes.pop(message.key, None)

    def _route(self, session: _Session, message: e.DecodeReply) -> None:
        route = session.routes.get(message.key)
        if route is not None:
            running, attempt = route
            self._put(running, e.DecodeReplied(attempt, message))

    def _broken(self, session: _Session, error: BatonError | None) -> None:
        if session.open:
            reason = "it ended the session" if error is None else str(error)
            # As in the gateway, the node is lost first, and is reachable again with its next status.
            self._lose(session.role, session.address, reason)

    def _drop_session(self, address: str, reason: str) -> None:
        session = self._sessions.pop(address, None)
        if session is None:
            return
        session.open = False
        assert session.stream is not None
        session.stream.cancel()
        routes, session.routes = session.routes, {}
        for route in routes.values():
            if route is not None:
                running, attempt = route
                self._put(running, e.SessionLost(attempt, reason))

    # ---- the fleet

    def _watch(self, role: Role, address: str) -> None:
        watch = self._watches[address] = _Watch()
        watch.stream = self.world.network.open(
            self.life,
            address,
            "watch",
            partial(self._status, watch, role, address),
            partial(self._watch_ended, watch, role, address),
        )
        self.life.after(_FIRST_STATUS_TIMEOUT_S, partial(self._first_status_timeout, watch, role, address))

    def _status(self, watch: _Watch, role: Role, address: str, status: node_status_pb2.NodeStatus) -> None:
        if watch.over:
            return
        watch.received = True
        if self.world.trace.wanted:
            peers = ", ".join(f"{peer.name} {peer.incarnation} {_PHASE(peer.phase)}" for peer in status.peers)
            self.world.trace.note(self.life.address, f"status of {address} {status.info.incarnation}: {peers}")
        self._apply(self.fleet.status_received(role, address, status, self.world.clock.now_s))
        self._fleet_changed()
        self._ask_for_pairs()

    def _first_status_timeout(self, watch: _Watch, role: Role, address: str) -> None:
        if not watch.received and not watch.over:
            self._lose(role, address, "connected, and silent")

    def _watch_ended(self, watch: _Watch, role: Role, address: str, error: BatonError | None) -> None:
        if not watch.over:
            self._lose(role, address, "it ended the stream" if error is None else str(error))

    def _lose(self, role: Role, address: str, reason: str) -> None:
        self._apply(self.fleet.lost(role, address, reason, self.world.clock.now_s))
        watch = self._watches[address]
        if not watch.over:
            watch.over = True
            assert watch.stream is not None
            watch.stream.cancel()
            self.life.after(0.02 + 0.1 * self.world.random.random(), partial(self._watch, role, address))
        self._fleet_changed()

    def _apply(self, commands: list[FleetCommand]) -> None:
        for command in commands:
            if isinstance(command, DropSession):
                self._drop_session(command.address, command.reason)

    def _fleet_changed(self) -> None:
        for running in self.running:
            if running.machine.waits_for_fleet:
                self._put(running, e.FleetChanged())

    def _ask_for_pairs(self) -> None:
        """Asks a prefill node to connect to each decode node that it is not paired with."""
        for prefill, decode in self.fleet.pairs():
            peer = prefill.peers.get(decode.incarnation)
            key = (prefill.incarnation, decode.incarnation)
            if (peer is None or peer.phase != _READY) and key not in self._asking:
                self._asking.add(key)
                self._connect(prefill.address, decode.address)
                self.life.after(_PAIR_RETRY_S, partial(self._ask_again, key))

    def _connect(self, prefill: str, decode: str) -> None:
        def answered(state: node_status_pb2.PeerState) -> None:
            self.world.trace.note(
                self.life.address, f"{prefill} has {decode} {state.incarnation} as {_PHASE(state.phase)}"
            )
            self.fleet.prefills[prefill].take_peer(state)
            self._fleet_changed()

        stream = self.world.network.open(self.life, prefill, "connect", answered, _ignore)
        stream.to_server(prefill_pb2.ConnectRequest(decode_address=decode))

    def _ask_again(self, key: tuple[int, int]) -> None:
        self._asking.discard(key)
        self._ask_for_pairs()

    # ---- the end

    def accept(self, kind: str, stream: Stream) -> tuple[OnMessage, OnEnd]:
        raise AssertionError("clients are not simulated as processes")

    def check(self) -> None:
        """Nothing: its invariants are checked where its machines' commands are executed."""

    def held(self) -> list[str]:
        """Describes the state that is still held for requests."""
        what = [f"{running.call.name} runs" for running in self.running]
        for session in self._sessions.values():
            what += [f"{session.address} has not released key {key}" for key in session.routes]
        return what

    def stale(self, incarnations: dict[str, int]) -> list[str]:
        """Describes its wrong beliefs about nodes.

        Args:
            incarnations: of the live nodes, by address.
        """
        what = [
            f"the status of {node.address} is outdated"
            for node in self.fleet.nodes()
            if not node.reachable or node.incarnation != incarnations[node.address]
        ]
        for prefill, decode in itertools.product(self.fleet.prefills.values(), self.fleet.decodes.values()):
            peer = prefill.peers.get(decode.incarnation)
            if peer is None or peer.phase != _READY:
                what.append(f"{prefill.address} and {decode.address} are not known as paired")
        for prefill in self.fleet.prefills.values():
            ready = {number for number, peer in prefill.peers.items() if peer.phase == _READY}
            gone = sorted(ready.difference(incarnations.values()))
            if gone:
                what.append(f"{prefill.address} counts as paired with {gone}, which are gone")
        return what


def _send(session: _Session, message: decode_pb2.SessionRequest) -> None:
    if session.open and session.stream is not None:
        session.stream.to_server(message)


def _ignore(_: object) -> None:
    """Lets the pair be requested again soon, whatever the answer was."""
