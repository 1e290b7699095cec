"""Simulates a cluster in virtual time: the gateway's real choice, nodes of both roles, and their links. Pure.

Equal arguments give equal results. Transports and faults are not simulated; hosts and gateways have the times of
`HostTimes`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any

from baton.core.pull_costs import predicted_pull_s
from baton.core.types import DEFAULT_OBJECTIVE, LocalPolicy, Objective, Slo
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.placement import Placement, Route, place
from baton.gateway.fleet.possible_pulls import MUCH_MORE_TOKENS
from baton.gateway.fleet.prediction import prompt_s
from baton.gateway.fleet.route_overheads import RouteOverheads
from baton.gateway.fleet.router import RoutedRequest
from baton.load.goals import Goal
from baton.load.workload import PlannedRequest
from baton.planner.host import HostTimes
from baton.planner.job import PlanJob
from baton.planner.node import SimulatedNode
from baton.planner.node_spec import NodeSpec
from baton.planner.outcome import SimulatedOutcome
from baton.planner.simulated_fleet import SimulatedFleet

Choose = Callable[[Sequence[NodeView], Sequence[NodeView], RoutedRequest], Placement | None]


@dataclass(frozen=True)
class ClusterSpec:
    """A simulated cluster.

    Args:
        policy: the gateway's `--local-policy`.
        also_decodes: whether prefill nodes may serve requests alone, if the gateway chooses so.
        local_tokens: a decode node prefills a prompt itself if its cache lacks at most this many of the prompt's
            tokens.
        link_bytes_per_s, link_latency_s: speed and latency of each prefill node's sends.
        host: times of hosts and gateways.
        report_s: maximum age of a node's report when the gateway chooses.
        events_s: delay until the gateway knows a change of a prefix cache.
        objective: of requests without an SLO.
        smooth_starts: whether gateways hold first tokens of hand-overs (`baton.gateway.fleet.second_token`).
    """

    prefills: int
    decodes: int
    prefill: NodeSpec
    decode: NodeSpec
    policy: LocalPolicy = LocalPolicy.ELASTIC
    also_decodes: bool = True
    local_tokens: int = 0
    link_bytes_per_s: float = 100e9
    link_latency_s: float = 1e-3
    host: HostTimes = HostTimes()  # noqa: RUF009 - frozen
    report_s: float = 0.1
    events_s: float = 0.05
    objective: Objective = DEFAULT_OBJECTIVE
    smooth_starts: bool = True


class Simulation:
    """One run of the simulation.

    Args:
        goal: its bounds are the requests' SLO.
        choose: replaces the gateway's own choice, for comparisons.
        until_failed: stop once too many requests have missed the goal to reach its share.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        goal: Goal,
        planned: Sequence[PlannedRequest],
        *,
        choose: Choose = place,
        until_failed: bool = False,
    ) -> None:
        slo = Slo(goal.ttft_s, goal.gap_s if goal.tpot_s is None else goal.tpot_s)
        prefix_tokens = max((request.prefix_tokens for request in planned), default=0)
        self._spec = spec
        self._goal = goal
        self._slo = slo
        self._choose = choose
        shared = slo, prefix_tokens, spec.host, spec.objective
        decodes = [SimulatedNode(number, spec.decode, *shared) for number in range(spec.decodes)]
        numbers = range(spec.decodes, spec.decodes + spec.prefills)
        prefills = [SimulatedNode(number, spec.prefill, *shared) for number in numbers]
        self.nodes = [*decodes, *prefills]
        self._decodes, self._prefills = decodes, prefills
        self._fleet = SimulatedFleet(
            decodes, prefills, also_decodes=spec.also_decodes, link_bytes_per_s=spec.link_bytes_per_s,
            report_s=spec.report_s, events_s=spec.events_s,
        )  # fmt: skip
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self.jobs = [self._job(request) for request in planned]
        counted = sum(job.counted for job in self.jobs)
        self._may_miss = (1 - goal.share) * counted if until_failed else inf
        self._missed = 0
        self.pulled_tokens = 0
        self.routes: Counter[tuple[Route, bool]] = Counter()  # and whether on a prefill node alone

    def run(self) -> SimulatedOutcome:
        """Runs until all requests are complete, or too many have missed the goal."""
        arrivals = iter(self.jobs)
        job = next(arrivals, None)
        events = self._events
        now_s, busy = 0.0, [0.0, 0.0]
        while (events or job is not None) and self._missed <= self._may_miss:
            arrives_s = inf if job is None else job.arrived_s + self._spec.host.hop_s
            if job is not None and (not events or arrives_s <= events[0][0]):
                now_s = arrives_s
                self._arrive(job, now_s)
                job = next(arrivals, None)
                if job is None:  # utilization counts the time in which requests arrive
                    busy = [self._busy(each, now_s) for each in (self._prefills, self._decodes)]
                continue
            now_s, _, action, arguments = heappop(events)
            action(now_s, *arguments)
        if job is not None:
            busy = [self._busy(each, now_s) for each in (self._prefills, self._decodes)]
        return SimulatedOutcome(self._goal, self.jobs, now_s, *busy)

    # ----

    def _job(self, request: PlannedRequest) -> PlanJob:
        prompt = request.prompt_tokens
        due_s = inf if self._slo.ttft_s is None else request.at_s + self._slo.ttft_s
        # The last id may stand for less than a whole prefix.
        ids = request.prefix_ids[: prompt // request.prefix_tokens] if request.prefix_tokens else ()
        return PlanJob(
            request.at_s, prompt, max(1, request.output_tokens), ids, request.prefix_tokens, request.counted, due_s
        )

    def _at(self, when_s: float, action: Callable[..., None], *arguments: object) -> None:
        self._order += 1
        heappush(self._events, (when_s, self._order, action, arguments))

    def _arrive(self, job: PlanJob, now_s: float) -> None:
        spec = self._spec
        decodes, prefills = self._fleet.views(job, now_s)
        typical = self._fleet.lengths.typical
        wanted = RoutedRequest(
            job.prompt,
            spec.policy,
            slo=self._slo,
            objective=spec.objective,
            overheads=RouteOverheads(spec.host.hop_s + spec.host.remote_s, spec.host.hop_s),
            typical_tokens=typical,
        )
        chosen = self._choose(decodes, prefills, wanted)
        assert chosen is not None, "all simulated nodes take requests"
        self._fleet.lengths.add(job.prompt - chosen.computing.cached_tokens)
        job.route, job.decode = chosen.route, chosen.decode.incarnation
        self.routes[chosen.route, chosen.decode.also_prefills] += 1
        decode = self.nodes[job.decode]
        missing = job.prompt - chosen.decode.cached_tokens
        if chosen.route is Route.REMOTE and missing <= spec.local_tokens:
            job.route = Route.LOCAL
        job.stop = chosen.split_tokens if job.route is Route.SPLIT else job.prompt
        local_s = 0.0
        if job.route is not Route.REMOTE:
            start = job.stop if job.route is Route.SPLIT else chosen.decode.cached_tokens
            local_s = prompt_s(chosen.decode, start, job.prompt)
        self._fleet.sent(job.decode, tokens=missing, computing_s=local_s, decodes=True, now_s=now_s)
        decode.requests += 1
        if job.route is not Route.LOCAL:
            assert chosen.prefill is not None
            job.prefill = chosen.prefill.incarnation
            start = min(chosen.prefill.cached_tokens, job.stop - 1)
            computing_s = prompt_s(chosen.prefill, start, job.stop)
            self._fleet.sent(job.prefill, tokens=job.stop - start, computing_s=computing_s, decodes=False, now_s=now_s)
            self.nodes[job.prefill].requests += 1
        running = [each.running for each in self.nodes]
        job.late_share, job.late_s = spec.host.stall_share, spec.host.late_s(sum(rows for rows, _ in running))
        if wait_s := spec.host.wait_s(running):
            self._at(now_s + wait_s, self._reach, decode, job)
        else:
            self._reach(now_s, decode, job)

    def _reach(self, now_s: float, decode: SimulatedNode, job: PlanJob) -> None:
        """Admits a request that has come from the gateway, or lets it wait for room."""
        if decode.blocked or decode.kv_used + job.prompt + job.output > decode.spec.kv_tokens:
            decode.blocked.append(job)
            self._unblock(decode, now_s)
        else:
            self._admit(decode, job, now_s)

    def _unblock(self, decode: SimulatedNode, now_s: float) -> None:
        while decode.blocked:
            job = decode.blocked[0]
            # A request that is larger than the cache runs alone.
            if decode.kv_used and decode.kv_used + job.prompt + job.output > decode.spec.kv_tokens:
                return
            self._admit(decode, decode.blocked.popleft(), now_s)

    def _admit(self, decode: SimulatedNode, job: PlanJob, now_s: float) -> None:
        """Reserves the request's room on the decode node, and queues its prompt."""
        decode.kv_used += job.prompt + job.output
        job.sent = min(decode.cache.count(job.prefix_ids) * job.prefix_tokens, job.prompt)
        if job.route is Route.LOCAL:
            self._enqueue(now_s, decode, job)
        elif remote_s := self._spec.host.remote_s:
            self._at(now_s + remote_s, self._enqueue, self.nodes[job.prefill], job)
        else:
            self._enqueue(now_s, self.nodes[job.prefill], job)

    def _enqueue(self, now_s: float, node: SimulatedNode, job: PlanJob) -> None:
        """Queues a prompt once what is to be pulled and loaded of it is there."""
        ids, fetch_s = self._to_fetch(node, job)
        if ids:
            self._at(now_s + fetch_s, self._fetched, node, job, ids)
        else:
            self._queue(now_s, node, job)

    def _to_fetch(self, node: SimulatedNode, job: PlanJob) -> tuple[Sequence[int], float]:
        """The beginning of a prompt that a node loads from host memory, with what it pulls to it before, and the time
        of both. Empty if it has that in its cache, or keeps nothing outside of it."""
        spec, ids, piece = node.spec, job.prefix_ids, job.prefix_tokens
        if not spec.host_tokens or not ids:
            return (), 0.0
        cached, kept, pull_s = node.cache.count(ids), node.count_kept(ids), 0.0
        most = max(each.count_kept(ids) for each in self.nodes)
        if (most - kept) * piece >= MUCH_MORE_TOKENS:
            compute_s = spec.costs.prompt_s(kept * piece, most * piece, step_tokens=spec.step_tokens)
            num_bytes = (most - kept) * piece * spec.kv_bytes_per_token
            pull = predicted_pull_s(spec.pull_costs, (most - kept) * piece, num_bytes, compute_s)
            if pull is not None:
                kept, pull_s = most, pull
                self.pulled_tokens += num_bytes // spec.kv_bytes_per_token
        return (ids[:kept], pull_s + (kept - cached) * piece * spec.load_token_s) if kept > cached else ((), 0.0)

    def _fetched(self, now_s: float, node: SimulatedNode, job: PlanJob, ids: Sequence[int]) -> None:
        self._fleet.cache_changed(node.number, node.store(ids), now_s)
        self._queue(now_s, node, job)

    def _queue(self, now_s: float, node: SimulatedNode, job: PlanJob) -> None:
        node.enqueue(job, now_s)
        self._go(node, node.arrival(now_s))

    def _go(self, node: SimulatedNode, end_s: float | None) -> None:
        if end_s is not None:
            self._at(end_s, self._end, node, node.version)

    def _end(self, now_s: float, node: SimulatedNode, version: int) -> None:
        if version != node.version:
            return
        ended, slices = node.end(now_s)
        for job in ended:
            self._complete(node, job, now_s)
        for job, _ in slices:
            if node.number != job.decode:
                self._send(node, job, now_s)
            if job.at >= job.stop:
                self._computed(node, job, now_s)
        # A request that was waiting for room may have started a step already.
        self._go(node, node.arrival(now_s))

    def _send(self, node: SimulatedNode, job: PlanJob, now_s: float) -> None:
        """Sends a chunk's KV over the link, while the next chunk computes; the last chunk's KV is followed by a
        recurrent state."""
        tokens = max(0, job.at - job.sent)
        job.sent += tokens
        num_bytes = tokens * node.spec.kv_bytes_per_token + (node.spec.state_bytes if job.at >= job.stop else 0)
        node.link_free_s = max(node.link_free_s, now_s) + num_bytes / self._spec.link_bytes_per_s

    def _computed(self, node: SimulatedNode, job: PlanJob, now_s: float) -> None:
        """Ends the computation of a prompt, or of its part, on this node."""
        spec, decode = self._spec, self.nodes[job.decode]
        self._store(node, job, now_s)
        whole = job.stop == job.prompt
        if whole:
            job.first_s = now_s
            self._missed += job.counted and now_s > job.due_s
        if node is decode:
            self._received(now_s, job)
            return
        node.requests -= 1
        arrives_s = node.link_free_s + spec.link_latency_s + spec.host.hand_over_s
        if whole:
            if spec.smooth_starts:
                decode.hold_first_token(job)
            self._at(arrives_s, self._received, job)
        else:
            job.stop = job.prompt
            self._at(arrives_s, self._enqueue, decode, job)

    def _received(self, now_s: float, job: PlanJob) -> None:
        """Lets the request decode: the KV of the whole prompt is on the decode node."""
        decode = self.nodes[job.decode]
        if job.route is not Route.LOCAL:
            self._store(decode, job, now_s)
        if job.output == 1:
            job.last_s = job.first_s
            self._complete(decode, job, now_s)
            return
        # A request whose prompt ended here was in the step before, so the next one is launched with it.
        decode.receive(job, now_s if job.route is Route.REMOTE else -inf)
        if job.route is Route.REMOTE:  # else its node is between two steps
            self._go(decode, decode.arrival(now_s))

    def _store(self, node: SimulatedNode, job: PlanJob, now_s: float) -> None:
        """Puts the prompt into the node's prefix cache."""
        if job.prefix_ids:
            self._fleet.cache_changed(node.number, node.store(job.prefix_ids), now_s)

    def _complete(self, decode: SimulatedNode, job: PlanJob, now_s: float) -> None:
        # A late first token is counted already.
        self._missed += job.counted and job.first_s <= job.due_s and not job.meets(self._goal)
        decode.requests -= 1
        decode.kv_used -= job.prompt + job.output
        self._unblock(decode, now_s)

    @staticmethod
    def _busy(nodes: Sequence[SimulatedNode], now_s: float) -> float:
        return sum(node.busy_until(now_s) for node in nodes) / (now_s * len(nodes)) if nodes else 0.0


def simulate(
    spec: ClusterSpec,
    goal: Goal,
    planned: Sequence[PlannedRequest],
    *,
    choose: Choose = place,
    until_failed: bool = False,
) -> SimulatedOutcome:
    """Simulates a load; `Simulation` describes the arguments."""
    return Simulation(spec, goal, planned, choose=choose, until_failed=until_failed).run()
