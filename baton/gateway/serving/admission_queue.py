"""The queue in which requests wait for admission: the asyncio shell around `baton.gateway.serving.admission`.

It checks the waiting requests whenever a request arrives or ends, and at short intervals, because nodes report.
"""

import asyncio
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic

from baton.core.types import LocalPolicy
from baton.gateway.core.request import Outputs, Request
from baton.gateway.core.shared_counters import Count, SharedCounters
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.request.connections import Connections
from baton.gateway.request.driver import Write
from baton.gateway.request.machine import RequestMachine
from baton.gateway.request.waiting_for_nodes import WaitingForNodes
from baton.gateway.serving.admission import Admission, AdmissionRefusal
from baton.gateway.serving.admission_pace import AdmissionRequest
from baton.gateway.serving.node_capacity import CapacityReader, ClusterCapacity
from baton.protos.v1 import generation_pb2 as pb
from baton.settings.gateway_config import GatewaySettings

_LOOK_S = 0.02  # between two checks of the queue or of the nodes, since a check of many nodes costs time
_SHED_EACH_S = 5e-5  # per waiting request, between two checks of all of them


@dataclass(eq=False)
class QueuedOutput:
    """One running output, and the progress that was measured last."""

    machine: RequestMachine
    writes: bool = False  # a message waits for the client, so its progress says nothing about the nodes
    client_s: float = 0.0  # how long messages waited for the client since the last `look`
    seen_s: float = 0.0  # when its tokens were last counted
    seen_tokens: int = 0  # its tokens at that time

    async def write(self, write: Write, message: pb.GenerateResponse) -> None:
        began_s, self.writes = monotonic(), True
        try:
            await write(message)
        finally:
            self.writes = False
            self.client_s += monotonic() - began_s

    def look(self, now_s: float) -> tuple[float, int]:
        """Seconds and tokens since the last call; zeros if its client reads too slowly."""
        if self.machine.first_token_at_s is None:
            return 0.0, 0
        tokens, counts = self.machine.new_tokens, bool(self.seen_s) and not self.writes
        progress = max(0.0, now_s - self.seen_s - self.client_s), tokens - self.seen_tokens
        self.seen_s, self.seen_tokens, self.client_s = now_s, tokens, 0.0
        return progress if counts else (0.0, 0)


class AdmissionQueue:
    """The admission queue of one gateway process.

    Attributes:
        waiting_for_nodes: requests that were let through while no node served.
    """

    def __init__(self, settings: GatewaySettings, connections: Connections, counters: SharedCounters) -> None:
        ttft_s = settings.slo.ttft_s
        most, queue_s = settings.max_concurrent_requests, settings.max_queue_s
        self._admission = Admission(most=most, queue_s=queue_s, on_refused=counters.add)
        self._reader = CapacityReader(ttft_s)
        self._policy = settings.local_policy
        self._refuses_late, self._slo_ttft_s = settings.refuse_late, ttft_s if settings.refuse_late else None
        self._connections, self._counters = connections, counters
        self.waiting_for_nodes = WaitingForNodes(connections, self._has_place)
        self._keys = count(1)
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.Handle | None = None
        self._is_later = False  # the timer does not fire in this iteration of the loop
        self._shed_at_s = 0.0
        self._outputs: set[QueuedOutput] = set()
        self._seen: tuple[float, ClusterCapacity] | None = None  # with its time; None: it has changed since

    def enter(self, client: str, outputs: int) -> None:
        """Counts a client's request; `leave` must follow.

        Raises:
            Overloaded: the gateway has too many requests.
        """
        self._end(self._admission.enter(client, outputs, self._counters.total(Count.RUNNING), monotonic()))

    def leave(self, client: str, outputs: int) -> None:
        self._admission.leave(client, outputs)
        if self._waiters:
            self._look_soon()

    def check(self, message: pb.GenerateRequest, outputs: Outputs, client: str, *, deadline_s: float | None) -> None:
        """Refuses a request before its prompt is read, if it would be refused whatever the prompt is.

        Raises:
            Overloaded: it may not even wait.
        """
        if message.output_token_ids:
            return
        sampling, prompt_tokens, now_s = message.sampling, len(message.token_ids.ids), monotonic()
        max_tokens = max(1, min(sampling.max_tokens, self._connections.fleet.max_context_tokens))
        asked = AdmissionRequest(
            key=0,
            client=client,
            prompt_tokens=min(prompt_tokens, message.truncate_prompt_tokens or prompt_tokens),
            output_tokens=max_tokens,
            certain_tokens=max_tokens if sampling.ignore_eos else 0,
            arrived_s=now_s,
            outputs=outputs.drawn,
            priority=message.priority,
            deadline_s=deadline_s,
        )
        self._admission.check_early(asked, self._capacity(now_s), now_s)

    def ask(self, request: Request, outputs: Outputs, client: str, *, has_deadline: bool) -> AdmissionRequest:
        """The request in the terms of admission."""
        sampling = request.sampling
        ttft_s = request.slo.ttft_s if request.slo.ttft_s is not None else self._slo_ttft_s
        return AdmissionRequest(
            key=next(self._keys),
            client=client,
            prompt_tokens=len(request.prompt),
            output_tokens=sampling.max_tokens,
            certain_tokens=sampling.max_tokens if sampling.ignore_eos else sampling.min_tokens,
            arrived_s=request.started_at_s,
            outputs=outputs.drawn,
            priority=request.priority,
            deadline_s=request.deadline_s if has_deadline else None,
            first_due_s=request.started_at_s + ttft_s if self._refuses_late and ttft_s is not None else None,
        )

    def offer(self, asked: AdmissionRequest) -> "asyncio.Future[None] | None":
        """Returns None if the request runs now, else a future that completes at its turn, or fails if it may not run.
        `withdraw` must follow.

        Raises:
            Overloaded: it may not even wait.
        """
        now_s = monotonic()
        if self._admission.offer(asked, self._capacity(now_s), now_s):
            self._seen = None
            return None
        waiter = self._waiters[asked.key] = asyncio.get_running_loop().create_future()
        self._counters.add(Count.WAITING, asked.outputs)
        self._look_soon()
        return waiter

    def withdraw(self, asked: AdmissionRequest) -> None:
        """Removes the request from the queue."""
        if self._waiters.pop(asked.key, None) is not None:
            self._counters.add(Count.WAITING, -asked.outputs)
        self._admission.withdraw(asked.key, monotonic())

    def begins(self, machine: RequestMachine) -> QueuedOutput:
        """Records that an output begins to run."""
        self._outputs.add(output := QueuedOutput(machine))
        return output

    def ran(self, output: QueuedOutput, *, whole: bool, in_time: bool) -> None:
        """Records that an output has ended."""
        now_s, pace, machine = monotonic(), self._admission.pace, output.machine
        capacity, began_s, first_s = self._capacity(now_s), machine.began_at_s, machine.first_token_came_at_s
        self._admission.progressed(*output.look(now_s), capacity, now_s)
        self._outputs.discard(output)
        if first_s is not None:
            pace.ended(machine.new_tokens, machine.max_tokens, whole=whole)
        # A wait for a restarting node says nothing about the speed of the others.
        if began_s is not None and (first_s is not None or not in_time):
            pace.first_token((first_s or now_s) - began_s, machine.prompt_tokens, capacity, now_s)

    def settle(self, asked: AdmissionRequest, tokens: int) -> None:
        """Charges the client for the tokens of its finished request."""
        self._admission.settle(asked, tokens)

    # ----

    def _capacity(self, now_s: float) -> ClusterCapacity:
        is_promised, seen = self.waiting_for_nodes.take_all_places, self._seen
        if seen is None or now_s - seen[0] > _LOOK_S or seen[1].is_promised != is_promised:
            seen = self._seen = now_s, replace(self._look_at_nodes(now_s), is_promised=is_promised)
        if self._admission.measures(now_s):
            progress = [output.look(now_s) for output in self._outputs]
            seconds, tokens = sum(seconds for seconds, _ in progress), sum(tokens for _, tokens in progress)
            self._admission.progressed(seconds, tokens, seen[1], now_s)
        return seen[1]

    def _has_place(self, prompt_tokens: int) -> bool:
        return self._look_at_nodes(monotonic()).has(prompt_tokens, 1, shared=False)

    def _look_at_nodes(self, now_s: float) -> ClusterCapacity:
        fleet = self._connections.fleet
        if not fleet.serves() and not fleet.pairs_under_way():
            return ClusterCapacity()  # placement waits for an expected node, or says what is missing
        broken = fleet.breakers.open(now_s)  # nodes with an open breaker get requests only if there are no others
        prefills = fleet.prefills.values() if self._policy is not LocalPolicy.LOCAL else ()
        elastic = self._policy is LocalPolicy.ELASTIC
        decodes = fleet.decoding_nodes() if elastic else fleet.decodes.values()
        return self._reader.of(_views(decodes, broken, now_s), _views(prefills, broken, now_s), elastic=elastic)

    def _look_soon(self) -> None:
        if self._timer is not None and self._is_later:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer, self._is_later = asyncio.get_running_loop().call_soon(self._look), False

    def _look(self) -> None:
        """Starts the next request, or drops requests that have waited too long."""
        self._timer = None
        now_s, loop = monotonic(), asyncio.get_running_loop()
        capacity = self._capacity(now_s)
        key = self._admission.take(capacity, now_s)
        if key is not None:
            self._seen = None
            waiter = self._waiters.get(key)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            # The next check must see that this request was sent, by its own task or by one that this task starts.
            self._timer, self._is_later = loop.call_soon(loop.call_soon, self._look), False
            return
        refused = []
        if now_s >= self._shed_at_s:
            self._shed_at_s = now_s + max(_LOOK_S, _SHED_EACH_S * self._admission.num_waiting)
            refused = self._admission.shed(capacity, now_s)
        self._end(refused)
        if refused:
            self._look_soon()
        elif self._admission.num_waiting:
            self._timer, self._is_later = loop.call_later(_LOOK_S, self._look), True

    def _end(self, refused: Iterable[AdmissionRefusal]) -> None:
        for each in refused:
            if (waiter := self._waiters.get(each.key)) is not None and not waiter.done():
                waiter.set_exception(each.error)


def _views(nodes: Iterable[FleetNode], broken: Set[int], now_s: float) -> list[NodeView]:
    usable = [node for node in nodes if node.open]
    usable = [node for node in usable if node.incarnation not in broken] or usable
    return [node.view().with_queue(node.queue_s(now_s)) for node in usable]
